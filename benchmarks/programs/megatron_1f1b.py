"""megatron-core's GPT in two pipeline stages, by 1F1B; or, with the argument "combined", its MoE by combined 1F1B.

The latter runs the experts' all-to-all of one microbatch beside the compute of another. The model, and what Megatron
needs without TransformerEngine or GPUs, are ``tests/frameworks/megatron_gpt.py``'s.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
combined = sys.argv[1:] == ["combined"]
layers, hidden, seq, heads, vocab = (3 if combined else 8, 1024, 512, 16, 8192) if cuda else (2, 64, 32, 4, 128)
SCRIPT = Path(__file__).resolve().parents[2] / "tests" / "frameworks" / "megatron_gpt.py"
sys.argv = [str(SCRIPT), "--device", "cuda" if cuda else "cpu", "--dtype", "bf16", "--tp", "1", "--mbs", "2"]
sys.argv += ["--moe", "4", "--ep", "2", "--combined"] if combined else ["--pp", "2"]
sys.argv += ["--layers", str(layers), "--hidden", str(hidden), "--seq", str(seq), "--heads", str(heads)]
sys.argv += ["--vocab", str(vocab)]
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
spec = importlib.util.spec_from_file_location("megatron_gpt", SCRIPT)
gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
gpt.ps.initialize_model_parallel(pipeline_model_parallel_size=gpt.A.pp, expert_model_parallel_size=gpt.A.ep)
gpt.seed_everything(1)
config, model = gpt.build(device, torch.bfloat16)
model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
config.finalize_model_grads_func = finalize_model_grads
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16), [model])

positions = torch.arange(seq, device=device).expand(2, -1).contiguous()
mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).triu(1)


def forward(batches, part, return_schedule_plan=False):
    tokens = next(batches)
    run = part.build_schedule_plan if return_schedule_plan else part
    loss = lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})  # noqa: E731
    return run(tokens, positions, mask, labels=tokens.roll(-1, 1)), loss


batches = iter(lambda: torch.randint(0, vocab, (2, seq), device=device), None)
for _ in range(14):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    schedule = gpt.get_forward_backward_func()
    losses = schedule(
        forward_step_func=forward,
        data_iterator=batches,
        model=[model],
        num_microbatches=8,
        seq_length=seq,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()
print("losses", [float(part["loss"]) for part in losses])
dist.destroy_process_group()
