#!/usr/bin/env python3
"""A tiny GPT of the real megatron-core: forward, backward, optimizer; on CPU and gloo, or on CUDA and NCCL.

    torchrun --nproc-per-node 2 megatron_gpt.py --device cpu
    torchrun --nproc-per-node 2 megatron_gpt.py --device cuda --dtype bf16 --sp --ddp
    torchrun --nproc-per-node 4 megatron_gpt.py --device cuda --tp 2 --ddp --overlap --dist-opt
    ... --patch safecomm                safecomm.patch() before megatron is imported
    ... --patch safecomm --patch-late   after it
    ... --way --sp --ddp --way --moe 4  one training after the other in the same processes, each with its own options;
                                        what stands before the first --way holds for all of them

Needs torch, megatron-core, packaging, numpy; neither apex nor TransformerEngine, and no CUDA for --device cpu.
Rank 0 prints one line of JSON for each training: losses, gradient norms, a hash of every rank's weights, memory. Run it
with and without --patch, and compare the lines.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore")


def E(k, d):
    return os.environ.get("MTS_" + k.upper().replace("-", "_"), d)


def args_(argv):
    p = argparse.ArgumentParser()
    p.add_argument("--device", default=E("device", "cpu"), choices=["cpu", "cuda"])
    p.add_argument("--dtype", default=E("dtype", "fp32"), choices=["fp32", "bf16"])
    p.add_argument("--tp", type=int, default=int(E("tp", "2")))
    p.add_argument("--pp", type=int, default=int(E("pp", "1")))
    p.add_argument("--cp", type=int, default=1)
    p.add_argument("--sp", action="store_true", default=bool(int(E("sp", "0"))), help="sequence parallel")
    p.add_argument(
        "--ddp", action="store_true", default=bool(int(E("ddp", "0"))), help="Megatron DDP + Megatron optimizer"
    )
    p.add_argument("--overlap", action="store_true", default=bool(int(E("overlap", "0"))))
    p.add_argument("--dist-opt", action="store_true", default=bool(int(E("dist_opt", "0"))))
    p.add_argument("--moe", type=int, default=int(E("moe", "0")), help="number of experts (0 = dense)")
    p.add_argument("--ep", type=int, default=int(E("ep", "1")))
    p.add_argument(
        "--combined",
        action="store_true",
        default=bool(int(E("combined", "0"))),
        help="combined 1F1B: the experts' all-to-all beside another microbatch's compute; bf16 only",
    )
    p.add_argument(
        "--graph", action="store_true", default=bool(int(E("graph", "0"))), help="full-iteration CUDA graph (cuda only)"
    )
    p.add_argument("--steps", type=int, default=int(E("steps", "4")))
    p.add_argument("--micro", type=int, default=2, help="microbatches a step")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--hidden", type=int, default=int(E("hidden", "64")))
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--seq", type=int, default=int(E("seq", "32")))
    p.add_argument(
        "--compare", type=int, default=0, metavar="S", help="for S seconds, time steps patched and not, in turns"
    )
    p.add_argument("--no-control", dest="control", action="store_false", help="see --compare")
    p.add_argument(
        "--after", default="", metavar="FILE", help="touch no GPU before this file is there: others are being timed"
    )
    p.add_argument("--vocab", type=int, default=128)
    p.add_argument("--mbs", type=int, default=2)
    p.add_argument("--patch", default=E("patch", ""), help="module whose patch() is called")
    p.add_argument("--patch-late", action="store_true", default=bool(int(E("patch_late", "0"))))
    p.add_argument(
        "--count", action="store_true", default=bool(int(E("count", "0"))), help="count torch.distributed calls"
    )
    a = p.parse_args(argv)
    if a.dist_opt:
        a.ddp = True
    return a


def ways_():
    parts = [[]]
    for argument in sys.argv[1:]:
        if argument == "--way":
            parts.append([])
        else:
            parts[-1].append(argument)
    return [args_(parts[0] + part) for part in parts[1:] or [[]]]


WAYS = ways_()
A = WAYS[0]  # the one that is being trained; --device, --patch and --count are the same in all
import torch
import torch.distributed as dist


# ---- CPU shim: every place where megatron-core hard-codes CUDA on the paths used here -----------------
# No TorchFunctionMode on purpose: torch >= 2.13 collectives look for one and call themselves again through it.
def cpu_shim():
    import functools

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # device=torch.cuda.current_device() everywhere
    torch.cuda.synchronize = lambda *a, **k: None  # parallel_state, p2p_communication
    torch.cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    torch.cuda.manual_seed = lambda s: torch.default_generator.manual_seed(s)
    torch.Tensor.cuda = lambda self, *a, **k: self  # language_module, data, rope_utils

    class S:  # streams and events (DDP, MoE all-to-all)
        def __init__(self, *a, **k):
            pass

        def __getattr__(self, n):
            return lambda *a, **k: S()

        def __enter__(self):
            return self

        def __exit__(self, *a):
            return False

    torch.cuda.Stream = torch.cuda.Event = S
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *a, **k: _S0
    _S0 = S()
    torch.cuda.stream = lambda s: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *a, **k: None

    def literal(f):  # factory calls with the literal device="cuda"
        @functools.wraps(f)
        def w(*a, **k):
            if str(k.get("device", "")).startswith("cuda"):
                k["device"] = cpu
            return f(*a, **k)

        return w

    for n in "tensor zeros ones empty full arange rand randn zeros_like ones_like empty_like".split():
        setattr(torch, n, literal(getattr(torch, n)))

    ty = torch.Tensor.type  # optimizer, clip_grads: type() == "torch.cuda.FloatTensor"

    def type_(self, *a, **k):
        r = ty(self, *a, **k)
        return r.replace("torch.", "torch.cuda.") if isinstance(r, str) and not r.startswith("torch.cuda") else r

    torch.Tensor.type = type_


if A.device == "cpu":
    cpu_shim()

CALLS = {}


def count_calls():
    """Counts Python-level calls, at torch.distributed AND torch.distributed.distributed_c10d."""
    import functools
    import torch.distributed.distributed_c10d as c10d

    for n in (
        "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
        "all_to_all_single all_to_all broadcast reduce isend irecv send recv batch_isend_irecv "
        "_coalescing_manager all_gather_object barrier"
    ).split():
        f = getattr(dist, n)

        def mk(f, n):
            @functools.wraps(f)
            def w(*a, **k):
                key = n + ("[async]" if k.get("async_op") or k.get("async_ops") else "")
                CALLS[key] = CALLS.get(key, 0) + 1
                return f(*a, **k)

            return w

        w = mk(f, n)
        setattr(dist, n, w)
        setattr(c10d, n, w)


def apply_patch():
    if A.patch:
        m = importlib.import_module(A.patch)
        m.patch()


if A.count:
    count_calls()
if not A.patch_late:
    apply_patch()

from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as mrandom
from megatron.core.transformer import TransformerConfig
import megatron.core

if A.patch_late:
    apply_patch()

# torch_norm.py asserts "sequence parallel not supported by torch LayerNorm" (no apex, no TE)
if any(a.sp for a in WAYS):
    from megatron.core.transformer import torch_norm

    _new = torch_norm.WrappedTorchNorm.__new__

    def _sp_norm(cls, config, *a, **k):
        if not A.sp:
            return _new(cls, config, *a, **k)
        config.sequence_parallel = False
        try:
            m = _new(cls, config, *a, **k)
        finally:
            config.sequence_parallel = True
        for p in m.parameters():
            p.sequence_parallel = True  # what TE/apex norms set: grads all-reduced over TP
        return m

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(_sp_norm)


# megatron-core 0.16 without TE: NameError in moe_utils.RouterGatingLinearFunction.forward
if any(a.moe for a in WAYS):
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if A.device == "cpu":  # split sizes become numpy only if is_cuda; all_to_all_single refuses tensors there
        from megatron.core.transformer.moe import token_dispatcher as td

        td.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
            t.numpy() if as_numpy and torch.is_tensor(t) else t
        )


def seed_everything(seed):
    torch.manual_seed(seed)
    if A.device == "cuda":
        kw = dict(use_cudagraphable_rng=True) if A.graph else {}
        tensor_parallel.model_parallel_cuda_manual_seed(seed, **kw)
    else:  # CPU: CudaRNGStatesTracker.fork() needs torch.cuda.default_generators
        mrandom.initialize_rng_tracker()
        t = mrandom.get_cuda_rng_tracker()
        t.fork = lambda *a, **k: contextlib.nullcontext()
        t._is_initialized = True


def build(dev, dtype):
    cfg = TransformerConfig(
        num_layers=A.layers,
        hidden_size=A.hidden,
        num_attention_heads=A.heads,
        ffn_hidden_size=4 * A.hidden,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=A.tp,
        pipeline_model_parallel_size=A.pp,
        context_parallel_size=A.cp,
        expert_model_parallel_size=A.ep,
        sequence_parallel=A.sp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,  # needs apex / TE
        masked_softmax_fusion=False,  # needs the fused CUDA kernels
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deterministic_mode=False,
        num_moe_experts=A.moe or None,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        add_bias_linear=not A.moe,
        overlap_moe_expert_parallel_comm=A.combined,
    )
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=A.moe or None, moe_grouped_gemm=False),
        vocab_size=A.vocab,
        max_sequence_length=A.seq,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    ).to(dev)
    return cfg, model.bfloat16() if dtype == torch.bfloat16 else model


def await_turn():
    """Wait until nobody else is being timed. Importing torch and Megatron takes longer than the timing."""
    while A.after and not os.path.exists(A.after):
        time.sleep(0.02)


def in_turns(step, kinds, of_kind, block):
    """For ``A.compare`` seconds, call ``block(kind)`` after three steps, within ``of_kind(kind)``; return the turns.

    ``block`` takes five steps. In each turn every kind has one, and another kind is the first each time. Without the
    garbage collector, whose passes come in phase with the turns.
    """
    import gc

    start = time.perf_counter()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    turn_s = len(kinds) * 2 * (time.perf_counter() - start)
    turns = [max(2, int(A.compare / turn_s))]
    dist.broadcast_object_list(turns)  # every rank is to make as many
    gc.collect()
    gc.disable()
    for turn in range(turns[0]):
        first = turn % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            with of_kind(kind):
                for _ in range(3):
                    step()
                torch.cuda.synchronize()
                dist.barrier()
                block(kind)
    gc.enable()
    return turns[0]


def compare(step):
    """Time of a step patched over that of one unpatched: blocks of steps in turns, in this process.

    "avoid" is the same where ``record_stream`` is called, and avoided. "control" is the figure of one more kind of
    blocks, unpatched too: how far from 1 nothing at all comes out. ``--no-control`` leaves it out.
    """
    import safecomm

    kinds = ("unpatched", "patched") + ("avoid",) * A.combined + ("unpatched again",) * A.control
    times = {kind: [] for kind in kinds}

    def of_kind(kind):
        if kind in ("patched", "avoid"):
            return safecomm.patched(avoid_record_streams=kind == "avoid")
        return contextlib.nullcontext()

    def block(kind):
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        times[kind].append(time.perf_counter() - start)

    turns = in_turns(step, kinds, of_kind, block)

    def ratio(kind):
        pairs = zip(times[kind], times["unpatched"], strict=True)
        return round(statistics.median(one / other for one, other in pairs), 4)

    step_ms = round(statistics.median(times["unpatched"]) / 5e-3, 3)
    found = {"ratio": "patched", "avoid": "avoid", "control": "unpatched again"}
    found = {key: ratio(kind) for key, kind in found.items() if kind in kinds}
    return {**found, "step_ms": step_ms, "turns": turns}


def train():
    dev = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if A.device == "cuda" else torch.device("cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[A.dtype]
    rank, world = dist.get_rank(), dist.get_world_size()
    ps.initialize_model_parallel(
        tensor_model_parallel_size=A.tp,
        pipeline_model_parallel_size=A.pp,
        context_parallel_size=A.cp,
        expert_model_parallel_size=A.ep,
    )
    seed_everything(1234)
    cfg, model = build(dev, dtype)

    if A.ddp:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        dcfg = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=A.overlap,
            use_distributed_optimizer=A.dist_opt,
            overlap_param_gather=A.overlap and A.dist_opt,
            bucket_size=20000 if A.overlap else None,
        )
        model = DistributedDataParallel(cfg, dcfg, model)
        cfg.finalize_model_grads_func = finalize_model_grads
        if A.overlap:
            cfg.no_sync_func = model.no_sync
            cfg.grad_sync_func = None
        opt = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                bf16=A.dtype == "bf16",
                params_dtype=dtype,
                use_distributed_optimizer=A.dist_opt,
                clip_grad=1.0,
                overlap_param_gather=A.overlap and A.dist_opt,
            ),
            [model],
        )
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    dp = ps.get_data_parallel_rank()
    g = torch.Generator().manual_seed(7 + dp)

    def batches():
        while True:
            t = torch.randint(0, A.vocab, (A.mbs, A.seq + 1), generator=g)
            yield dict(tokens=t[:, :-1].contiguous().to(dev), labels=t[:, 1:].contiguous().to(dev))

    pos = torch.arange(A.seq, device=dev).unsqueeze(0).expand(A.mbs, -1).contiguous()
    mask = torch.triu(torch.ones(1, 1, A.seq, A.seq, dtype=torch.bool, device=dev), 1)

    def loss_func(out):
        l = out.float().mean()
        return l, {"lm loss": l.detach().clone()}

    def forward_step(it, m, return_schedule_plan=False):
        b = next(it)
        run = m.build_schedule_plan if return_schedule_plan else m
        return run(b["tokens"], pos, mask, labels=b["labels"]), loss_func

    fb = get_forward_backward_func()
    if A.graph:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        fb = FullCudaGraphWrapper(fb, cuda_graph_warmup_steps=2)
    it = batches()
    losses, norms, t0 = [], [], time.time()

    def step():
        if A.ddp:
            model.zero_grad_buffer()
        opt.zero_grad()
        r = fb(
            forward_step_func=forward_step,
            data_iterator=it,
            model=[model],
            num_microbatches=A.micro,
            seq_length=A.seq,
            micro_batch_size=A.mbs,
            decoder_seq_length=A.seq,
            forward_only=False,
        )
        if A.ddp:
            _, gn, _ = opt.step()
            norms.append(float(gn) if gn is not None else None)
        else:
            if A.sp:  # without Megatron's finalize_model_grads: sum the sequence-parallel grads over TP
                for p in model.parameters():
                    if getattr(p, "sequence_parallel", False) and p.grad is not None:
                        dist.all_reduce(p.grad, group=ps.get_tensor_model_parallel_group())
            opt.step()
        return r

    for i in range(A.steps):
        if A.device == "cuda" and i == A.steps // 2:  # steady state: second half only
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        r = step()
        if r:
            losses.append(sum(float(x["lm loss"]) for x in r) / len(r))

    ratio = compare(step) if A.compare else None
    core = model.module if A.ddp else model
    h = hashlib.sha256()
    for n, p in sorted(core.named_parameters()):
        h.update(n.encode())
        h.update(p.detach().float().cpu().numpy().tobytes())
    out = [None] * world
    info = dict(hash=h.hexdigest()[:16], losses=losses)
    dist.all_gather_object(out, info)
    mem = {}
    if A.device == "cuda":
        torch.cuda.synchronize()
        st = torch.cuda.memory_stats()
        mem = dict(
            peak_alloc_kib=torch.cuda.max_memory_allocated() >> 10,
            peak_active_kib=st["active_bytes.all.peak"] >> 10,
            peak_reserved_kib=torch.cuda.max_memory_reserved() >> 10,
            end_alloc_kib=torch.cuda.memory_allocated() >> 10,
            segments=st["segment.all.current"],
            inactive_split_kib=st["inactive_split_bytes.all.peak"] >> 10,
            num_ooms=st["num_ooms"],
            retries=st["num_alloc_retries"],
        )
    if rank == 0:
        ok = all(torch.isfinite(torch.tensor(o["losses"])).all() for o in out if o["losses"])
        last = [o["losses"] for o in out if o["losses"]]
        tp_agree = A.pp > 1 or last[0] == last[min(A.tp, len(last)) - 1]
        print(
            json.dumps(
                dict(
                    ok=bool(ok and tp_agree and (last[0][-1] < last[0][0] + 0.5)),
                    mcore=megatron.core.__version__,
                    torch=torch.__version__,
                    device=A.device,
                    dtype=A.dtype,
                    world=world,
                    tp=A.tp,
                    pp=A.pp,
                    sp=A.sp,
                    ddp=A.ddp,
                    overlap=A.overlap,
                    dist_opt=A.dist_opt,
                    moe=A.moe,
                    combined=A.combined,
                    graph=A.graph,
                    patch=A.patch,
                    late=A.patch_late,
                    losses=last[0],
                    grad_norms=norms,
                    hashes=[o["hash"] for o in out],
                    calls=CALLS,
                    compare=ratio,
                    mem=mem,
                    secs=round(time.time() - t0, 2),
                )
            ),
            flush=True,
        )
    dist.barrier()
    ps.destroy_model_parallel()


if __name__ == "__main__":
    await_turn()
    if A.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.backends.cuda.matmul.allow_tf32 = False
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("nccl" if A.device == "cuda" else "gloo")
    for way in WAYS:
        A = way
        train()
    dist.destroy_process_group()
