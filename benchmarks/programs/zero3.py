"""DeepSpeed's ZeRO 3 over a stack of MLPs: parameters are prefetched and gradients reduced on streams of its own."""

import os

import deepspeed
import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
width, layers, batch = (1536, 8, 1024) if cuda else (32, 3, 4)
numel = 4 * width * width  # of a weight
config = {
    "train_micro_batch_size_per_gpu": batch,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": numel,
        "stage3_prefetch_bucket_size": 2 * numel,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 6 * numel,
    },
}

torch.manual_seed(1)
model = torch.nn.Sequential(
    *(
        torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        for _ in range(layers)
    )
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config=config,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
)

torch.manual_seed(7 + dist.get_rank())
for _ in range(14):
    x = torch.randn(batch, width, device=device, dtype=torch.bfloat16)
    loss = (engine(x) - x).float().square().mean()
    engine.backward(loss)
    engine.step()
print("loss", loss.item())
dist.destroy_process_group()
