# make demo        show what it is for: on the GPUs of this machine, or as it was recorded
# make lint        ruff, and what mypy and pyright say of the types
# make test        lint, types, and the tests that need no GPU, with a fifth of the random programs
# make test-all    the same with all of them, and what takes long; SAFECOMM_TESTS_SEED=7 for other programs
# make compat      what depends on torch, on each version of it that is tested; COMPAT="2.4.1 newest" for some
# make coverage    which branches of the core the tests take on a CPU: a table, pages in build/coverage/html, and the
#                  figure in docs/testing.md; too few, or one that is left without a reason, is an error
# make gpu-test    the tests that need GPUs; results in build/gpu-test.json
# make bench       the benchmarks, on GPUs; results in build/bench.json
# make dist        build both wheels, with the C file and pure; install each into an empty environment, and try it there
# make docs        the documentation as a site, in build/site; a broken link is an error
# make clean       remove the virtual environment and what tools left behind
#
# Each makes the virtual environment .venv when it is not there, or when pyproject.toml has changed: torch and the package
# for the demo, and what the tests need besides when they first do.

PYTHON ?= python3
# What pip is to install as torch on a machine without an NVIDIA GPU: a version that is tested there. From PyPI that is a
# build for CUDA, which runs there too and brings several GB; CPU_INDEX may name an index that has one for the CPU.
CPU_TORCH ?= torch==2.13.0
CPU_INDEX ?=
# GPUs that gpu-test and bench run on.
N ?= $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# Arguments for the tests of other versions of torch, such as COMPAT="2.8.0 --keep"; COMPAT=--help tells them.
COMPAT ?=
# Arguments for the demo, such as ARGS="--json demo.json".
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
READY_FOR_TESTS := .venv/.ready-for-tests
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Without bytecode each process of a test would compile torch again, which takes longer than to import it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo lint test test-all coverage compat gpu-test bench dist docs clean venv

demo: $(READY)
	@$(BIN)/safecomm demo $(ARGS)

lint: $(READY_FOR_TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# In the order of tests/conftest.py, which has those files first for whose end nobody is to wait.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

test: lint
	$(BIN)/python -m pytest $(TWO_AT_A_TIME)

test-all: export SAFECOMM_TESTS = all
test-all: test

# The tests of the core, and of what holds memory by it. Without those that break the core on purpose: a branch that only
# a wrong core takes would count as taken.
COVERING := rules ledger front_programs allocation capture_boundaries drain handles holds refcounts sites stream_order \
	streams work record_stream collectives functional errors_and_ends unknown_backends backends wrong_arguments
COVERING_FILES = $(foreach name,$(COVERING),$(wildcard tests/test_$(name)*.py))
NOT_COVERING := programs_find or exceptions_find or a_failing_program

coverage: $(READY_FOR_TESTS)
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest $(TWO_AT_A_TIME) -k "not ($(NOT_COVERING))" $(COVERING_FILES)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet --directory build/coverage/html
	$(BIN)/python -m coverage report --show-missing
	$(BIN)/python -m coverage json --quiet -o build/coverage/coverage.json
	$(BIN)/python tests/coverage_of_core.py build/coverage/coverage.json

# Each version has an environment of its own, outside of the tree: some 5 GB, made, used and deleted one after another.
compat: $(READY_FOR_TESTS)
	$(BIN)/python tests/compat.py $(COMPAT)

gpu-test: $(READY_FOR_TESTS)
	@test "$(N)" -ge 2 || { echo "gpu-test needs two GPUs"; exit 2; }
	mkdir -p build
	$(BIN)/python -m torch.distributed.run --nproc-per-node $(N) tests/gpu/run.py --out build/gpu-test.json

bench: $(READY_FOR_TESTS)
	@test "$(N)" -ge 2 || { echo "bench needs two GPUs"; exit 2; }
	mkdir -p build
	$(BIN)/python -m torch.distributed.run --nproc-per-node $(N) benchmarks/host_time.py --out build/bench.json

# Tried from inside of the empty environment's folder: what is imported there is not the tree.
dist: BIN := build/empty/bin
dist:
	rm -rf build/dist build/empty
	$(PYTHON) -m venv build/empty
	$(PIP) $(if $(CPU_INDEX),--index-url $(CPU_INDEX)) $(CPU_TORCH)
	SAFECOMM_BUILD_C=0 $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist .
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist .
	set -e; for wheel in build/dist/*-py3-none-any.whl build/dist/*-cp310-abi3-*.whl; do \
		$(PIP) --force-reinstall --no-deps $$wheel; cd build/empty; \
		bin/python -W ignore -c 'import safecomm; print(safecomm.__file__)' | grep build/empty; \
		bin/safecomm --version; bin/safecomm demo --device cpu; bin/safecomm doctor; cd ../..; \
	done
	@echo; ls build/dist/*.whl

venv: $(READY_FOR_TESTS)

# With a GPU, a CUDA torch that the system's Python has is used, and otherwise the newest one is installed.
$(READY): pyproject.toml
	@rm -rf .venv
	@set -e; \
	if command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then \
		if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.version.cuda)' 2>/dev/null; then \
			echo "a GPU, and a Python that has torch for it"; \
			$(PYTHON) -m venv --system-site-packages .venv; \
		else \
			echo "a GPU: installing torch for it"; \
			$(PYTHON) -m venv .venv; $(PIP) torch; \
		fi; \
	else \
		echo "no GPU: installing $(CPU_TORCH)"; \
		$(PYTHON) -m venv .venv; $(PIP) $(if $(CPU_INDEX),--index-url $(CPU_INDEX)) $(CPU_TORCH); \
	fi
	@$(PIP) --editable .
	@touch $@

$(READY_FOR_TESTS): $(READY)
	$(PIP) --editable '.[test,lint]'
	touch $@

# Without torch, and so in an environment of its own, of what pyproject.toml has as the extra "docs".
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "the site is build/site/index.html"

.venv-docs/.ready: pyproject.toml
	rm -rf .venv-docs
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	touch $@

clean:
	rm -rf .venv .venv-docs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
