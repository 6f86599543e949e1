"""transformers' tensor parallel serving: a random Llama with tp_plan="auto" generates tokens for a batch of prompts."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import safecomm

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
width, layers, batch, length, new = (2048, 6, 16, 1024, 8) if cuda else (64, 2, 2, 8, 2)
vocabulary = 8192 if cuda else 128
path = Path(tempfile.gettempdir()) / f"llama_{os.environ['MASTER_PORT']}"

if dist.get_rank() == 0:
    torch.manual_seed(0)
    with torch.device(device):  # a CPU would take long for the random numbers
        made = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=width // 64 if cuda else 4,
                num_key_value_heads=width // 256 if cuda else 2,
                vocab_size=vocabulary,
                dtype=torch.bfloat16,
            )
        )
    made.to(torch.bfloat16).save_pretrained(path)
    del made
    if cuda:
        torch.cuda.empty_cache()
dist.barrier()
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, tp_plan="auto").eval()

torch.manual_seed(7)
for _ in range(14):
    prompts = torch.randint(3, vocabulary, (batch, length), device=device)
    with torch.inference_mode():
        tokens = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=new, max_new_tokens=new, do_sample=False
        )
    safecomm.mark_step()
dist.barrier()
shutil.rmtree(path, ignore_errors=True)
print("tokens", int(tokens.sum()))
dist.destroy_process_group()
