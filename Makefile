# make demo        run the demo, on the GPUs of this machine or on the CPU
# make test        lint, types, and all tests that need no GPU
# make compat      what depends on torch, on each version of it that is tested; COMPAT="2.4.1 newest" for some
# make gpu-test    the tests that need GPUs; results in build/gpu-test.json
# make bench       the benchmarks, on GPUs; results in build/bench.json
# make clean       remove the virtual environment and what tools left behind
#
# Each makes the virtual environment .venv when it is not there, or when pyproject.toml has changed.

PYTHON ?= python3
# What pip is to install as torch on a machine without an NVIDIA GPU: a version that is tested there.
CPU_TORCH ?= torch==2.13.0
# GPUs that gpu-test and bench run on.
N ?= $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# Arguments for the tests of other versions of torch, such as COMPAT="2.8.0 --keep"; COMPAT=--help tells them.
COMPAT ?=
# Arguments for the demo, such as ARGS="--world 4 --json demo.json".
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test compat gpu-test bench clean venv

demo: $(READY)
	$(BIN)/python -m safecomm demo $(ARGS)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Each version has an environment of its own, outside of the tree: some 5 GB, made, used and deleted one after another.
compat: $(READY)
	$(BIN)/python tests/compat.py $(COMPAT)

gpu-test: $(READY)
	@test "$(N)" -ge 2 || { echo "gpu-test needs two GPUs"; exit 2; }
	mkdir -p build
	$(BIN)/python -m torch.distributed.run --nproc-per-node $(N) tests/gpu/run.py --out build/gpu-test.json

bench: $(READY)
	@test "$(N)" -ge 2 || { echo "bench needs two GPUs"; exit 2; }
	mkdir -p build
	$(BIN)/python -m torch.distributed.run --nproc-per-node $(N) benchmarks/host_time.py --out build/bench.json

venv: $(READY)

# With a GPU, a CUDA torch that the system's Python has is used, and otherwise the newest one is installed. Without one,
# plain "torch" would bring several GB of CUDA packages.
$(READY): pyproject.toml
	rm -rf .venv
	@set -e; \
	if command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then \
		if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.version.cuda)' 2>/dev/null; then \
			echo "a GPU, and a Python that has torch for it"; \
			$(PYTHON) -m venv --system-site-packages .venv; torch=; \
		else \
			echo "a GPU: installing torch for it"; \
			$(PYTHON) -m venv .venv; torch=torch; \
		fi; \
	else \
		echo "no GPU: installing $(CPU_TORCH)"; \
		$(PYTHON) -m venv .venv; torch='$(CPU_TORCH)'; \
	fi; \
	[ -z "$$torch" ] || $(BIN)/python -m pip install --quiet "$$torch"; \
	$(BIN)/python -m pip install --quiet --editable '.[test,lint]'
	touch $@

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
