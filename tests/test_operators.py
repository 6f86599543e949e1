"""Functional collectives, DTensor and compiled code reach low_latency(): the kernels on torch's operators.

The engine's kernels run in Triton's interpreter over shared memory, as in ``test_low_latency.py``.
"""

import contextlib
import gc
import types
import warnings
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as funcol
from ranks import on, run_program, signal_to_peers, wait_for_signal
from test_low_latency import GATHER, OPS, SCATTER, SMALL, SharedStaging, of_rank, switched_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import safecomm
from safecomm import _torch
from safecomm.collectives import takers
from safecomm.core import captures
from safecomm.diagnostics.replaced import replaced
from safecomm.peers import limits, low_latency, operators

pytest.importorskip("triton", reason="the kernels are Triton's, which is not installed")

NAMES = ("sum", "avg", "max", "min")  # in the order of OPS
TORCHS = torch.ops._c10d_functional
KERNELS = [name for name in operators._OURS if hasattr(TORCHS, name)]


def tables():
    """What the dispatcher does with each operator."""
    return [torch._C._dispatch_dump_table(f"_c10d_functional::{name}") for name in KERNELS]


# --- results ----------------------------------------------------------------------------------------------------


@on(2, 3, interpreted=True)
def test_functional_collectives_give_what_wrapped_calls_give_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    with switched_on() as low:
        for dtype, count in ((torch.float32, 5), (torch.bfloat16, 1024)):
            given = of_rank(rank, count * world, dtype)
            for op, name in zip(OPS, NAMES, strict=True):
                wrapped = given.clone()
                safecomm.all_reduce(wrapped, op=op)
                before = low.calls
                result = funcol.all_reduce(given, name, stock.group.WORLD)
                assert type(result) is funcol.AsyncCollectiveTensor
                assert torch.equal(result + 0, wrapped)
                tensor = given.clone()
                assert TORCHS.all_reduce_(tensor, name, "0") is tensor
                assert torch.equal(TORCHS.wait_tensor(tensor), wrapped)

                wrapped = torch.empty(count, dtype=dtype)
                getattr(safecomm, SCATTER)(wrapped, given, op=op)
                scattered = TORCHS.reduce_scatter_tensor(given, name, world, "0")
                assert torch.equal(TORCHS.wait_tensor(scattered), wrapped)
                out = torch.empty(count, dtype=dtype)
                assert TORCHS.reduce_scatter_tensor_out(given, name, world, "0", out=out) is out
                assert torch.equal(TORCHS.wait_tensor(out), wrapped)
                assert low.calls == before + 5
            wrapped = torch.empty(count * world * world, dtype=dtype)
            getattr(safecomm, GATHER)(wrapped, given)
            before = low.calls
            assert torch.equal(TORCHS.wait_tensor(TORCHS.all_gather_into_tensor(given, world, "0")), wrapped)
            out = torch.empty_like(wrapped)
            assert TORCHS.all_gather_into_tensor_out(given, world, "0", out=out) is out
            assert torch.equal(TORCHS.wait_tensor(out), wrapped)
            assert low.calls == before + 2
        assert _torch.unwaited() == 0


@on(2, interpreted=True)
def test_coalesced_calls_are_taken_as_a_whole_or_not_at_all():
    rank, world = stock.get_rank(), stock.get_world_size()
    small = [torch.full((count, 2), 1.0 + rank) for count in (2, 4)]
    with switched_on() as low:
        for one in TORCHS.all_reduce_coalesced(small, "sum", "0"):
            assert (TORCHS.wait_tensor(one) == 3).all()
        copies = [one.clone() for one in small]
        assert [id(one) for one in TORCHS.all_reduce_coalesced_(copies, "max", "0")] == [id(one) for one in copies]
        assert all((TORCHS.wait_tensor(one) == 2).all() for one in copies)
        for one, sent in zip(TORCHS.all_gather_into_tensor_coalesced(small, world, "0"), small, strict=True):
            assert torch.equal(TORCHS.wait_tensor(one).unique(), torch.tensor([1.0, 2.0]))
            assert one.shape == (2 * len(sent), 2)
        for one in TORCHS.reduce_scatter_tensor_coalesced(small, "sum", world, "0"):
            assert (TORCHS.wait_tensor(one) == 3).all()
        assert low.calls == 8
        reduced = TORCHS.all_reduce_coalesced([*small, torch.ones(10**5)], "sum", "0")
        assert [TORCHS.wait_tensor(one).unique().tolist() for one in reduced] == [[3.0], [3.0], [2.0]]
        bounds = dict.fromkeys(limits.ASYNCHRONOUS, 16)  # bytes, which the larger of the two exceeds
        with mock.patch.dict(limits.ASYNCHRONOUS, bounds):
            for one in TORCHS.all_reduce_coalesced(small, "sum", "0"):
                assert (TORCHS.wait_tensor(one) == 3).all()
        assert low.calls == 8
        assert _torch.unwaited() == 0


@on(2, interpreted=True)
def test_tensors_that_torch_takes_and_an_engine_cannot_read():
    rank, world = stock.get_rank(), stock.get_world_size()

    class Own(torch.Tensor):
        pass

    base = torch.arange(24.0).view(4, 6) + rank
    kinds = [
        base.t(),
        base[:, ::2],
        base[0, 0],
        torch.nn.Parameter(base.clone()),
        base.clone().as_subclass(Own),
        base.expand(2, 4, 6),
        torch.complex(base, -base).conj().imag,  # a negative view
        base.t() if rank else base.t().contiguous(),  # each rank as it likes
        base.clone().as_subclass(Own) if rank else base.clone(),
    ]
    with switched_on() as low:
        for number, given in enumerate(kinds, 1):
            out = TORCHS.wait_tensor(TORCHS.all_reduce(given, "sum", "0"))
            expected = 2 * torch.Tensor(given.detach().as_subclass(torch.Tensor)) + 1 - 2 * rank
            assert torch.equal(out.as_subclass(torch.Tensor), expected), number
            assert out.is_contiguous()
            assert out.shape == given.shape
            assert low.calls == number
        with torch.inference_mode():
            tensor = torch.ones(4)
            TORCHS.all_reduce_(tensor, "sum", "0")
        assert (TORCHS.wait_tensor(tensor) == 2).all()
        with without_ours():
            sent = [TORCHS.wait_tensor(TORCHS.all_gather_into_tensor(one, world, "0")) for one in (base.t(), base[::2])]
        before = low.calls
        for given, expected in zip((base.t(), base[::2]), sent, strict=True):
            assert torch.equal(TORCHS.wait_tensor(TORCHS.all_gather_into_tensor(given, world, "0")), expected)
            out = torch.empty_like(expected)
            TORCHS.wait_tensor(TORCHS.all_gather_into_tensor_out(given, world, "0", out=out))
            assert torch.equal(out, expected)
        part = TORCHS.wait_tensor(TORCHS.reduce_scatter_tensor(base.t(), "sum", world, "0"))
        assert torch.equal(part, (2 * base.t() + 1 - 2 * rank)[3 * rank : 3 * rank + 3])
        assert low.calls == before + 5
        scalar = torch.tensor(1.0 + rank)
        assert TORCHS.wait_tensor(TORCHS.all_gather_into_tensor(scalar, world, "0")).tolist() == [1.0, 2.0]


@on(2, interpreted=True)
def test_other_calls_are_torch_s_own_s8():
    with switched_on() as low:
        for tensor in (torch.ones(5, dtype=torch.int32), torch.ones(5, dtype=torch.float64), torch.ones(20_000)):
            assert (TORCHS.wait_tensor(TORCHS.all_reduce(tensor, "sum", "0")) == 2).all()
            assert (TORCHS.wait_tensor(TORCHS.all_reduce_(tensor, "sum", "0")) == 2).all()
        assert (TORCHS.wait_tensor(TORCHS.all_reduce(torch.ones(5), "product", "0")) == 1).all()
        assert (TORCHS.wait_tensor(TORCHS.broadcast(torch.ones(5), 0, "0")) == 1).all()
        other = stock.new_group([0, 1])
        assert (funcol.all_reduce(torch.ones(5), "sum", other) + 0 == 2).all()
        assert low.calls == 0
        for operator, arguments in (
            (TORCHS.all_reduce, (torch.ones(5), "nonsense", "0")),
            (TORCHS.all_reduce, (torch.ones(5), "sum", "no such group")),
            (TORCHS.reduce_scatter_tensor, (torch.ones(3), "sum", 2, "0")),
        ):
            errors = []
            for kernels_of_ours in (True, False):
                kinds = (RuntimeError, ValueError, IndexError)
                with contextlib.nullcontext() if kernels_of_ours else without_ours(), pytest.raises(kinds) as error:
                    operator(*arguments)
                errors.append((error.type, str(error.value).partition("\n")[0].rpartition("] ")[2]))
            assert errors[0] == errors[1], errors
        assert low.calls == 0


@contextlib.contextmanager
def without_ours():
    kernels, operators._groups = operators._groups, {}
    try:
        yield
    finally:
        operators._groups = kernels


@on(2, interpreted=True)
def test_a_region_and_buckets_keep_their_order():
    with switched_on() as low:
        tensor = torch.ones(8)
        with safecomm.bucketed():
            safecomm.all_reduce(tensor)
            later = TORCHS.wait_tensor(TORCHS.all_reduce(tensor, "sum", "0"))
        assert (tensor == 2).all()
        assert (later == 4).all()
        before = low.calls
        takers.REGIONS[stock.group.WORLD] = []
        try:
            assert (TORCHS.wait_tensor(TORCHS.all_reduce(torch.ones(8), "sum", "0")) == 2).all()
        finally:
            del takers.REGIONS[stock.group.WORLD]
        assert low.calls == before


@on(2, interpreted=True)
def test_a_tensor_that_both_have_written_to_is_waited_for_twice():
    with switched_on() as low:
        tensor = torch.ones(20_000)
        TORCHS.all_reduce_(tensor, "sum", "0")  # torch's, too large for an engine
        TORCHS.wait_tensor(tensor)
        TORCHS.all_reduce_(tensor, "product", "0")
        TORCHS.all_reduce_(tensor[:100], "sum", "0")
        assert low.calls == 1
        assert _torch.unwaited() == 1
        TORCHS.wait_tensor(tensor)
        assert _torch.unwaited() == 0
    # What is left unwaited is torch's to wait for.
    assert (TORCHS.wait_tensor(tensor) > 0).all()


# --- autograd, DTensor ----------------------------------------------------------------------------------------------


def train(mesh):
    """Return what a step of a tensor-parallel model gives: the loss and all gradients."""
    torch.manual_seed(0)
    first, second = torch.randn(8, 12) / 4, torch.randn(12, 8) / 4
    data = torch.randn(4, 8)
    found = []
    up = distribute_tensor(first, mesh, [Shard(1)]).requires_grad_()
    down = distribute_tensor(second, mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(data, mesh, [Replicate()]).requires_grad_()
    y = (torch.relu(x @ up) @ down).redistribute(placements=[Replicate()])
    y.square().sum().backward()
    found += [y.full_tensor(), up.grad.full_tensor(), down.grad.full_tensor(), x.grad.full_tensor()]
    local = data.clone().requires_grad_()
    whole = funcol.all_gather_tensor_autograd(local, 0, stock.group.WORLD)
    part = funcol.reduce_scatter_tensor_autograd(whole * 3, "sum", 0, stock.group.WORLD)
    (part * part).sum().backward()
    return [*found, part, local.grad]


@on(2, interpreted=True)
def test_gradients_are_those_of_the_program_without():
    mesh = init_device_mesh("cpu", (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the names of torch 2.13
        before = [one.detach().clone() for one in train(mesh)]
        with switched_on() as low:
            after = [one.detach().clone() for one in train(mesh)]
            assert low.calls >= 6
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@on(2, interpreted=True)
def test_versions_and_aliases_are_torch_s():
    found = []
    for way in (contextlib.nullcontext, switched_on):
        with way():
            tensor, view = (whole := torch.ones(4)), whole[1:]
            result = TORCHS.all_reduce_(tensor, "sum", "0")
            waited = TORCHS.wait_tensor(view)
            TORCHS.wait_tensor(tensor)
            out = torch.empty(8)
            given = TORCHS.wait_tensor(TORCHS.all_gather_into_tensor_out(tensor, 2, "0", out=out))
            new = TORCHS.wait_tensor(TORCHS.all_reduce(tensor, "sum", "0"))
            apart = new.data_ptr() != tensor.data_ptr()
            found.append((tensor._version, result is tensor, waited is view, given is out, new._base is None, apart))
    assert found[0] == found[1], found


# --- compiled code ---------------------------------------------------------------------------------------------------


def step(x):
    y = funcol.all_reduce(x * 2, "sum", "0")
    z = x * 3
    stock.all_reduce(z)
    return y + z


@on(2, interpreted=True)
def test_compiled_code_reaches_the_engine_s9():
    rank = stock.get_rank()
    x = torch.full((6,), 1.0 + rank)
    with switched_on() as low:
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            compiled = torch.compile(step, backend=backend, fullgraph=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what inductor imports
                assert (compiled(x) == 15).all()
            before = low.calls
            assert (compiled(x) == 15).all()
            assert low.calls == before + 2
    # What was compiled inside calls torch's own outside.
    assert (compiled(x) == 15).all()
    assert _torch.unwaited() == 0


@on(2, interpreted=True)
def test_ranks_that_compile_and_ranks_that_do_not_make_the_same_calls():
    rank = stock.get_rank()
    x = torch.full((6,), 1.0 + rank)
    run = torch.compile(step, backend="aot_eager") if rank else step
    with switched_on(check=True) as low, safecomm.patched():  # in which dist.all_reduce is safecomm's
        for _ in range(3):
            assert (run(x) == 15).all()
        assert low.calls == 6
        if rank:
            safecomm.all_reduce(torch.ones(4))
        else:
            TORCHS.wait_tensor(TORCHS.all_reduce(torch.ones(4), "sum", "0"))
        assert low.calls == 7


@on(2, interpreted=True)
def test_check_finds_calls_that_differ():
    rank = stock.get_rank()
    with switched_on(check=True), pytest.raises(safecomm.LowLatencyError, match="the ranks differ in call number"):
        TORCHS.all_reduce(torch.ones(4 + rank), "sum", "0")


# --- what is left -----------------------------------------------------------------------------------------------------


@on(2, interpreted=True)
def test_nothing_of_a_dropped_result_is_left_s3():
    with switched_on(), safecomm.patched():
        for _ in range(3):
            result = funcol.all_reduce(torch.ones(4), "sum", stock.group.WORLD)
            storage = weakref.ref(result.elem.untyped_storage())
            del result
            gc.collect()
            assert storage() is None
        assert _torch.unwaited() == 0
        assert safecomm.pending() == []


@on(2, interpreted=True)
def test_torch_s_kernels_are_back_to_the_object_s9():
    before = tables()
    other = stock.new_group([0, 1])
    with switched_on() as first:
        within = tables()
        assert all("registered at /dev/null" in table or table not in before for table in within)
        assert {f"_c10d_functional::{name}" for name in KERNELS} <= set(replaced())
        with switched_on(other) as second:
            assert tables() == within, "they are put in place once"
            for group in (stock.group.WORLD, other):
                assert (funcol.all_reduce(torch.ones(3), "sum", group) + 0 == 2).all()
            assert (first.calls, second.calls) == (1, 1)
        assert tables() == within
        assert (funcol.all_reduce(torch.ones(3), "sum", other) + 0 == 2).all()
        assert first.calls == 1
    assert tables() == before
    assert replaced() == []
    with switched_on(functional=False) as third:
        assert tables() == before
        safecomm.all_reduce(torch.ones(3))
        assert third.calls == 1
    with pytest.raises(ZeroDivisionError), switched_on():
        raise ZeroDivisionError
    low_latency._KEPT.clear()
    assert tables() == before
    assert not operators._groups
    assert (funcol.all_reduce(torch.ones(3), "sum", stock.group.WORLD) + 0 == 2).all()


def test_where_torch_tells_too_little_they_stay_torch_s(monkeypatch):
    assert operators.why_not("CUDA") == operators.why_not("CPU") == ""
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "kernel_of_all_devices", lambda *_: None)
        assert "has another kernel for CUDA" in operators.why_not("CUDA")
    monkeypatch.setattr(_torch, "keeps_attributes", lambda: False)
    assert "no attributes" in operators.why_not("CUDA")


@on(2, interpreted=True)
def test_a_kernel_of_another_library_stays():
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_reduce_", lambda tensor, op, group: tensor.fill_(7), "CPU")
    try:
        before = tables()
        with switched_on() as low:
            assert tables() == before
            assert (TORCHS.all_reduce_(torch.ones(3), "sum", "0") == 7).all()
            safecomm.all_reduce(torch.ones(3))
            assert low.calls == 1
    finally:
        library._destroy()
    with switched_on() as low:
        assert (TORCHS.wait_tensor(TORCHS.all_reduce_(torch.ones(3), "sum", "0")) == 2).all()
        assert low.calls == 1


@on(2, interpreted=True)
def test_a_group_that_opts_out_stays_torch_s_beside_one_that_does_not():
    other = stock.new_group([0, 1])
    with switched_on() as first, switched_on(other, functional=False) as second:
        for group in (stock.group.WORLD, other):
            assert (funcol.all_reduce(torch.ones(3), "sum", group) + 0 == 2).all()
        assert (first.calls, second.calls) == (1, 0)
    with switched_on():
        rank = stock.get_rank()
        with pytest.raises(safecomm.LowLatencyError, match="ask for different things"):
            safecomm.low_latency(other, limits=SMALL, functional=bool(rank)).enable()


@on(2, interpreted=True)
def test_it_is_on_for_every_group_at_its_first_functional_call():
    low_latency.STAGINGS["gloo"] = SharedStaging
    before, limits.DEFAULTS[2] = (
        limits.DEFAULTS[2],
        SMALL,
    )  # the first calls of a ring take the interpreter half a minute
    takers.ENGINES[None] = low_latency._Everywhere(None)
    operators.install(test_it_is_on_for_every_group_at_its_first_functional_call, "CPU")
    try:
        assert (funcol.all_reduce(torch.ones(3), "sum", stock.group.WORLD) + 0 == 2).all()
        engine = takers.ENGINES[stock.group.WORLD]
        assert engine.taken == 1
        engine.leave(timedelta(seconds=10))()
        with switched_on(functional=False) as low:
            assert (funcol.all_reduce(torch.ones(3), "sum", stock.group.WORLD) + 0 == 2).all()
            assert low.calls == 0
    finally:
        operators.remove(test_it_is_on_for_every_group_at_its_first_functional_call, "CPU")
        limits.DEFAULTS[2] = before
        takers.ENGINES.clear()
        low_latency.STAGINGS.pop("gloo", None)
    assert replaced() == []


@on(2, interpreted=True)
def test_a_wait_raises_for_a_late_peer_with_the_line_of_the_program():
    rank = stock.get_rank()
    with switched_on(timeout=timedelta(milliseconds=300)) as low:
        if rank == 0:
            result = TORCHS.all_reduce(torch.ones(5), "sum", "0")
            with pytest.raises(safecomm.PeerTimeoutError, match=r"all_reduce called at .*test_operators.py"):
                TORCHS.wait_tensor(result)
            assert result.isnan().all()
            signal_to_peers("waited")
        else:
            wait_for_signal("waited")
        low._leave(timedelta())()
    low_latency._KEPT.clear()


# --- waits on other streams, and captures: by a device that writes down what it is asked -----------------------------


class Event:
    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append("the host waits")


class Device:
    """Streams that are captured or not, by number."""

    def __init__(self):
        self.log, self.captures, self.now, self.recycled = [], {}, 1, []

    def capture(self, stream):
        return self.captures.get(stream, 0)

    def record_event(self, index, stream):
        return Event(self.log)

    def wait_event(self, index, stream, event):
        self.log.append(f"stream {stream} waits")

    def recycle_event(self, index, event):
        self.recycled.append(event)

    def relaxed_capture_mode(self):
        return contextlib.nullcontext()


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(operators, "LEDGER", types.SimpleNamespace(streams=made))
    monkeypatch.setattr(operators, "_current", lambda index: made.now)
    monkeypatch.setattr(captures, "RECORDING", {})
    return made


class FakeEngine:
    index = 0
    launched_events = False

    def __init__(self):
        self.asked = 0

    def raise_failure(self):
        self.asked += 1


@pytest.mark.parametrize(
    ("launched", "waited", "recording", "expected"),
    [
        ((1, 0), (1, 0), (), []),
        ((1, 0), (2, 0), (), ["stream 2 waits"]),
        ((1, 7), (1, 7), (7,), []),
        ((1, 7), (2, 7), (7,), ["stream 2 waits"]),
        ((1, 7), (2, 0), (7,), ["stream 2 waits"]),  # and joins the capture
        ((1, 7), (2, 0), (), []),  # the graph is complete
        ((1, 7), (2, 8), (8,), []),
        ((1, 7), (2, 8), (7, 8), None),
        ((1, 0), (2, 7), (7,), ["the host waits"]),
    ],
)
def test_a_wait_orders_the_stream_that_waits_s5(device, launched, waited, recording, expected):
    engine, tensor = FakeEngine(), torch.ones(4)
    device.captures = {1: launched[1]}
    operators._mark(engine, tensor)
    assert engine.launched_events
    device.now = waited[0]
    device.captures = {1: launched[1], waited[0]: waited[1]}
    captures.RECORDING.update(dict.fromkeys(recording))
    if expected is None:
        with pytest.raises(safecomm.CaptureBoundaryError, match="another CUDA graph"):
            operators._wait(tensor[1:])
        assert operators._MARK in vars(tensor.untyped_storage()), "it can be waited for where it was launched"
        return
    assert operators._wait(tensor[1:])
    assert device.log == expected
    assert len(device.recycled) == (launched[1] == waited[1] == 0)
    assert engine.asked == 1
    assert not operators._wait(tensor)


def test_of_one_engine_the_last_launch_is_waited_for_and_of_others_each(device):
    first, second, tensor = FakeEngine(), FakeEngine(), torch.ones(4)
    for _ in range(10):
        operators._mark(first, tensor)
        operators._mark(second, tensor)
    assert len(vars(tensor.untyped_storage())[operators._MARK]) == 2
    device.now = 2
    assert operators._wait(tensor)
    assert device.log == ["stream 2 waits"] * 2
    # An engine that is gone has been waited for.
    operators._mark(first, tensor)
    del first
    gc.collect()
    assert operators._wait(tensor)
    assert device.log == ["stream 2 waits"] * 2


def test_by_an_exception_the_wait_stays_while_kernels_may_run():
    program = """
import torch
from safecomm.peers import operators
from safecomm.diagnostics.replaced import replaced
operators.install(operators, "CPU")
assert len(replaced()) > 8
operators.remove(operators, "CPU", complete=False)
assert {name.partition("::")[2] for name in replaced()} <= {"wait_tensor", "wait_tensors"}
assert torch.ops._c10d_functional.wait_tensor(torch.ones(2)).tolist() == [1, 1]
operators.install(operators, "CPU")
operators.remove(operators, "CPU")
assert replaced()
"""
    run_program(program).check()


# --- operators of our own ---------------------------------------------------------------------------------------------

OWN = torch.ops.safecomm


def own_step(x):
    y = OWN.all_reduce(x * 2, "sum", "0")
    z = x * 3
    OWN.all_reduce_(z, "max", "0")
    return y + z


@on(2, interpreted=True)
def test_own_operators_are_operators_to_torch():
    rank = stock.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of names that it calls itself
        for way in (contextlib.nullcontext, switched_on):
            with way():
                for x in (torch.full((4,), 1.0 + rank, requires_grad=True), torch.arange(6.0).view(2, 3).t()):
                    torch.library.opcheck(OWN.all_reduce.default, (x, "sum", "0"))
                torch.library.opcheck(OWN.all_reduce_.default, (torch.full((4,), 1.0 + rank), "sum", "0"))


@on(2, interpreted=True)
def test_own_operators_are_run_by_the_engine_or_by_the_backend_s8():
    rank = stock.get_rank()
    x = torch.full((6,), 1.0 + rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = [torch.compile(own_step, backend=backend, fullgraph=True) for backend in ("aot_eager", "inductor")]
        assert (own_step(x) == 12).all()
        assert all((run(x) == 12).all() for run in compiled)
        with switched_on() as low:
            for number, run in enumerate((own_step, *compiled), 1):
                assert (run(x) == 12).all()
                assert low.calls == 2 * number
            taken = low.calls
            for tensor in (torch.ones(4, dtype=torch.int64), torch.ones(20_000), torch.ones(4, dtype=torch.complex64)):
                assert (OWN.all_reduce(tensor, "sum", "0") == 2).all()
                OWN.all_reduce_(tensor, "sum", "0")
                assert (tensor == 2).all()
            assert low.calls == taken
            view = torch.arange(6.0).view(2, 3).t()
            result = OWN.all_reduce(view, "sum", "0")
            assert torch.equal(result, 2 * view)
            assert result.is_contiguous()
            assert low.calls == taken + 1
            with safecomm.bucketed():
                tensor = torch.ones(3)
                safecomm.all_reduce(tensor)
                assert (OWN.all_reduce(tensor, "sum", "0") == 4).all()
    assert safecomm.pending() == []


@on(2, interpreted=True)
def test_own_operators_have_the_gradient_of_a_sum_or_refuse_it():
    rank = stock.get_rank()
    for way in (contextlib.nullcontext, switched_on):
        with way():
            for op, expected in (("sum", 3.0), ("avg", 1.5)):
                x = torch.ones(3, requires_grad=True)
                try:
                    total = OWN.all_reduce(x, op, "0")
                except (RuntimeError, ValueError):  # gloo has no averages
                    assert op == "avg"
                    continue
                (total * (1.0 + rank)).sum().backward()
                assert x.grad.tolist() == [expected] * 3
            x = torch.ones(3, requires_grad=True)
            with pytest.raises(ValueError, match="max has no gradient"):
                OWN.all_reduce(x, "max", "0").sum().backward()
            with pytest.raises(ValueError, match="has no gradient"):
                OWN.all_reduce_(x * 2, "sum", "0")
            tensor = torch.ones(3)
            saved = (tensor * torch.ones(3, requires_grad=True)).sum()
            OWN.all_reduce_(tensor, "sum", "0")
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.backward()
            with pytest.raises(ValueError, match="is none of sum"):
                OWN.all_reduce(tensor, "nonsense", "0")
    assert safecomm.pending() == []
