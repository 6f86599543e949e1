"""leaks.watch(): what outlives its step is found and named, with what holds it; what may live is not."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import weakref
from typing import ClassVar

import pytest
import torch
from ranks import on
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import safecomm
from safecomm import functional
from safecomm.diagnostics import leaks

HERE = __file__


def line_of(marker):
    """Return the number of the line of this file that ends with the comment ``# marker``."""
    with open(HERE) as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {marker}"))


def one(watched):
    """Return the only leak."""
    assert len(watched.leaks) == 1, str(watched)
    return watched.leaks[0]


def test_it_tells_its_state():
    model = torch.nn.Linear(2, 2)
    with leaks.watch(model, log_leaks=False) as watched:
        kept = [model(torch.ones(1, 2)).sum() for _ in range(3)]
    assert repr(watched) == f"<leaks.watch(): {len(watched.leaks)} leaks in 3 steps>"
    assert kept


# --- a context that keeps what it was given back: Transformer Engine #1935 ------------------------------------------


class Quantized:
    """A tensor in two parts, as quantized tensors are: an object, and the data, which is taken out to be saved."""

    def __init__(self, data):
        self.data = data


def prepare_for_saving(*objects):
    data = [thing.data for thing in objects]
    for thing in objects:
        thing.data = None
    return data, list(objects)


def restore_from_saved(objects, saved):
    for thing, data in zip(objects, saved, strict=True):
        thing.data = data
    return objects


class Fused(torch.autograd.Function):
    """y = 2 x, which keeps x for the backward pass."""

    mended = False

    @staticmethod
    def forward(ctx, x):
        tensors, ctx.tensor_objects = prepare_for_saving(Quantized(x * 1.5))  # made by Fused
        ctx.save_for_backward(*tensors)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        if Fused.mended:
            ctx.tensor_objects = None
        return grad * 2 + 0 * x.data


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: Fused.apply(layer(x)), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("mended", [False, True])
def test_a_context_that_keeps_what_it_restored_is_found_and_named(mended, monkeypatch):
    monkeypatch.setattr(Fused, "mended", mended)
    model = Checkpointed()
    with leaks.watch(model) as watched:
        for _ in range(3):
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
    if mended:
        assert watched.leaks == [], str(watched)
        return
    leak = one(watched)
    assert leak.kind == "autograd context"
    assert leak.count == 3  # the layers of the last step, whose graph the variable keeps
    assert leak.nbytes == 3 * 4 * 8 * 4
    assert leak.steps == (3,)
    assert leak.created == f"{HERE}:{line_of('made by Fused')} in forward"
    chain = " | ".join(leak.chain)
    assert "attribute 'data' of a Quantized" in chain
    assert "attribute 'tensor_objects' of the context of the autograd node FusedBackward" in chain
    assert "local variable 'loss' of test_a_context_that_keeps" in chain
    del loss


# --- the other holders ----------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.kept = []

    def forward(self, x):
        return self.inner(x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(Layer(), torch.nn.ReLU(), Layer())

    def forward(self, x):
        return self.layers(x)


def train(model, steps, after=lambda model, out: None):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        out = model(torch.randn(4, 8))
        after(model, out)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [1, 5])
def test_a_list_in_a_module(steps):
    model = Model()
    with leaks.watch(model) as watched:
        train(model, steps, lambda model, out: model.layers[2].kept.append(out.detach().clone()))
    leak = one(watched)
    assert leak.kind == "module attribute"
    assert leak.count == steps
    assert leak.nbytes == steps * 4 * 8 * 4
    assert leak.steps == tuple(range(1, steps + 1))
    assert f"{HERE}:" in leak.created
    assert leak.chain[0].startswith("item ")
    assert leak.chain[1] == "attribute 'kept' of module layers.2 (Layer)"


def test_a_module_attribute_of_the_only_step():
    """In several steps it would be replaced in each."""
    model = Model()
    with leaks.watch(model) as watched:
        train(model, 1, lambda model, out: setattr(model, "last", out.detach().clone()))
    leak = one(watched)
    assert (leak.kind, leak.count, leak.steps) == ("module attribute", 1, (1,))
    assert leak.chain == ("attribute 'last' of module the model (Model)",)


def hooked(model):
    seen = []

    def hook(module, args, out):
        seen.append(out.detach() * 2)  # made by hook

    model.layers[1].register_forward_hook(hook)


def test_a_closure_that_only_the_hook_has():
    model = Model()
    hooked(model)
    with leaks.watch(model) as watched:
        train(model, 3)
    leak = one(watched)
    assert leak.kind == "closure"
    assert leak.count == 3
    assert leak.created == f"{HERE}:{line_of('made by hook')} in hook"
    assert any(hop.startswith("closure variable 'seen' of function hooked.<locals>.hook") for hop in leak.chain)
    assert leak.chain[-1] == "attribute '_forward_hooks' of module layers.1 (ReLU)"


def test_a_retained_graph():
    model = Model()
    losses = []
    with leaks.watch(model) as watched:
        for _ in range(3):
            loss = model(torch.randn(4, 8)).sum()
            loss.backward(retain_graph=True)
            losses.append(loss)
    assert watched.leaks
    graphs = [leak for leak in watched.leaks if leak.kind == "retained graph"]
    assert graphs
    for leak in graphs:
        assert "saved it as" in leak.chain[0]
        assert "the graph of a tensor of shape ()" in leak.chain
        assert "local variable 'loss" in leak.chain[-1]
    assert {step for leak in graphs for step in leak.steps} == {0, 1, 2, 3}  # 0: the first input
    assert [leak.count for leak in watched.leaks if leak.kind == "list"] == [3]


def test_a_loss_that_is_summed_up_keeps_every_graph():
    model = Model()
    total = 0.0
    with leaks.watch(model) as watched:
        for _ in range(3):
            total = total + model(torch.randn(4, 8)).sum()
    assert {leak.kind for leak in watched.leaks} == {"retained graph"}
    assert all("local variable 'total'" in leak.chain[-1] for leak in watched.leaks)


KEPT = []


def test_a_global_list():
    model = Model()
    with leaks.watch(model) as watched:
        train(model, 3, lambda model, out: KEPT.append(out.detach() + 1))
    leak = one(watched)
    KEPT.clear()
    assert leak.kind == "list"
    assert leak.chain[-1] == "global variable 'KEPT' of module test_leaks"


def test_a_cycle_through_the_graph_that_nothing_refers_to():
    class Cycle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.out = x * 2
            return ctx.out

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    model, outputs = Model(), []
    with leaks.watch(model) as watched:
        for _ in range(3):
            output = Cycle.apply(model(torch.randn(4, 8)))
            outputs.append(StorageWeakRef(output.untyped_storage()))
            output.sum().backward()
        del output
    gc.collect()
    kept = [output for output in outputs if not output.expired()]
    # Whether torch can collect it is torch's affair; if not, it is named.
    assert bool(watched.leaks) is bool(kept)
    for leak in watched.leaks:
        assert leak.kind == "autograd context"
        assert "attribute 'out' of the context of the autograd node CycleBackward" in leak.chain


@on(2)
def test_an_unwaited_work():
    peer = 1 - torch.distributed.get_rank()
    with leaks.watch() as watched:
        buffer = torch.empty(1000)
        safecomm.irecv(buffer, peer)
        del buffer
    leak = one(watched)
    assert leak.kind == "unwaited work"
    assert leak.nbytes == 4000
    assert leak.created.endswith("in test_an_unwaited_work")
    assert leak.chain[0].startswith(f"the unwaited irecv launched at {HERE}:")
    safecomm.send(torch.ones(1000), peer) if peer else None
    if not peer:
        safecomm.drain(wait=True)
        safecomm.send(torch.ones(1000), peer)
    else:
        safecomm.drain(wait=True)
    assert safecomm.pending() == []


@on(2)
def test_what_safecomm_allocates_is_made_at_the_programs_line():
    given = torch.ones(500)  # before, because a thread of gloo's may still have it as the step ends
    with leaks.watch() as watched:
        KEPT.append(functional.all_gather(given))
    KEPT.clear()
    leak = one(watched)
    assert leak.nbytes == 4000
    assert leak.created.endswith("in test_what_safecomm_allocates_is_made_at_the_programs_line")


# --- no false alarms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("zero", [True, False])
def test_a_transformer_that_is_trained_raises_no_alarm(optimizer, zero):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = torch.nn.Sequential(encoder, torch.nn.BatchNorm1d(6))
    arguments = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    optimizer = optimizer(model.parameters(), lr=1e-3, **arguments)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    history = []
    with leaks.watch(model) as watched:
        for _ in range(20):
            batch = {"x": torch.randn(2, 6, 32), "y": torch.randn(2, 6, 32)}
            out = model(batch["x"])
            loss = torch.nn.functional.mse_loss(out, batch["y"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if zero:
                optimizer.zero_grad()
            history.append(loss.item())
    assert watched.steps == 20
    assert watched.leaks == [], str(watched)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_gradients_buffers_and_optimizer_state_are_no_leaks(steps):
    """In so few steps that nothing is taken for a cache."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8, momentum=None))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with leaks.watch(model) as watched:
        for _ in range(steps):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            model[1].running_mean = model[1].running_mean * 0.5
    assert watched.leaks == [], str(watched)


def test_gpt2_raises_no_alarm():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    with leaks.watch(model) as watched:
        for _ in range(20):
            tokens = torch.randint(0, 64, (2, 16))
            out = model(input_ids=tokens, labels=tokens)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert watched.steps == 20
    assert watched.leaks == [], str(watched)


class Output:
    """What a model returns."""

    __slots__ = ("result",)
    before: ClassVar[Output | None]
    """The one before the last; its result is gone."""


def _places_of_outputs():
    """Return where each step's output lay, and what was watched."""
    model, out, places = Model(), Output(), []
    Output.before = Output()
    with leaks.watch(model) as watched:
        for _ in range(6):
            result = model(torch.randn(4, 8)).detach()
            del Output.before
            following = Output()  # which is given the place that has just become free, unless another thread gets it
            out.result = None
            Output.before, out = out, following
            out.result = result
            places.append(id(out))
            del following, result
    return places, watched


def test_an_output_is_not_taken_for_an_earlier_one_that_was_in_its_place():
    for _ in range(20):
        places, watched = _places_of_outputs()
        assert watched.leaks == [], str(watched)
        if places[0] == places[2] == places[4] != places[1] == places[3] == places[5]:
            break
    else:
        pytest.fail("no output came to the place of an earlier one")


def test_what_only_the_first_steps_make_is_a_cache():
    model = Model()

    def cache(model, out):
        if not hasattr(model, "cache"):
            model.cache = out.detach() * 0

    with leaks.watch(model) as watched:
        train(model, 4, cache)
    assert watched.leaks == [], str(watched)


def test_the_owners_keep_what_is_theirs():
    class Average:
        def __init__(self):
            self.sums = {}

        def add(self, model):
            for name, parameter in model.named_parameters():
                self.sums[name] = parameter.detach() * 0.5

    model, average = Model(), Average()
    with leaks.watch(model) as watched:
        train(model, 1, lambda model, out: average.add(model))
    assert watched.leaks
    for owner in (5, "model", None, [model], {}, torch.nn.Linear, model.forward, train):
        with pytest.raises(TypeError, match="expected modules, or objects that keep tensors"):
            leaks.watch(model, owner)
    with pytest.raises(TypeError, match="expected True or False"):
        leaks.watch(model, log_leaks="no")
    with leaks.watch(model, average) as watched:
        train(model, 1, lambda model, out: average.add(model))
    assert watched.leaks == [], str(watched)


def test_a_script_at_module_level(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import torch
            from safecomm import leaks
            model = torch.nn.Linear(8, 8)
            losses = []
            with leaks.watch(model) as watched:
                for _ in range(5):
                    out = model(torch.ones(4, 8))
                    loss = out.sum()
                    loss.backward()
            print(watched)
            with leaks.watch(model) as watched:
                for _ in range(5):
                    loss = model(torch.ones(4, 8)).sum()
                    losses.append(loss.detach().clone())
            print([(leak.kind, leak.count, leak.chain[-1]) for leak in watched.leaks if leak.count == 5])
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == "no leaks"
    assert second == "[('list', 5, \"global variable 'losses' of module __main__\")]"


# --- what it leaves behind --------------------------------------------------------------------------------------------


def test_it_keeps_nothing_alive_and_leaves_the_model_alone():
    model = Model()
    dead = []
    with leaks.watch(model) as watched:
        for _ in range(3):
            out = model(torch.randn(4, 8))
            dead.append(weakref.ref(out))
            assert sum(one() is not None for one in dead) == 1  # also while it watches
            del out
            assert sum(one() is not None for one in dead) == 0
    assert watched.leaks == []
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_after_the_end_it_keeps_nothing_of_what_it_found():
    model = Model()
    with leaks.watch(model) as watched:
        train(model, 3, lambda model, out: model.layers[0].kept.append(out))
    assert watched.leaks
    left = [weakref.ref(out) for out in model.layers[0].kept]
    assert gc.isenabled()
    gc.disable()  # also not in a cycle of its own
    model.layers[0].kept.clear()
    assert [one() for one in left] == [None] * 3
    gc.enable()


def test_variables_of_the_caller_are_untouched():
    everything = locals()
    model = Model()
    with leaks.watch(model):
        train(model, 1)
    assert "everything" in locals()
    assert isinstance(everything, dict)
    assert model is not None


def test_an_exception_passes_and_the_watch_is_over():
    model = Model()
    with pytest.raises(ZeroDivisionError), leaks.watch(model) as watched:
        train(model, 1, lambda model, out: 1 / 0)
    assert watched.leaks == []
    assert not model._forward_pre_hooks


def test_what_is_found_is_logged_and_reads_well(caplog):
    model = Model()
    with caplog.at_level(logging.WARNING, "safecomm"), leaks.watch(model) as watched:
        train(model, 2, lambda model, out: model.layers[2].kept.append(out.detach().clone()))
    (record,) = caplog.records
    lines = record.getMessage().splitlines()
    assert lines[0] == "leaks.watch(): 256 bytes in 2 tensors outlived steps 1 to 2 (module attribute)"
    assert lines[1].startswith(f"  made at {HERE}:")
    assert lines[-1] == "  held by attribute 'kept' of module layers.2 (Layer)"
    assert str(watched) == str(watched.leaks[0])


def test_without_a_dispatch_mode_it_says_so(monkeypatch):
    from safecomm import _torch

    monkeypatch.setattr(_torch, "TorchDispatchMode", None)
    with pytest.raises(safecomm.SafecommError, match="TorchDispatchMode"):
        leaks.watch()


def test_what_watches_is_hidden_from_dynamo_as_soon_as_that_is_imported(monkeypatch):
    import torch._dynamo

    def step(x):
        y = x.relu()
        torch._dynamo.graph_break()
        return y * 2

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.delattr(torch, "_dynamo")
    with leaks.watch():
        torch.ones(2).relu()
        monkeypatch.undo()
        for _ in range(3):
            torch.compile(step, backend="eager")(torch.ones(2))
    assert torch._dynamo.utils.counters["frames"] == {}
