"""Ways to keep a tensor: those that keep one more in each step are leaks, named and counted; the others are none."""

from __future__ import annotations

import collections
import copy
import functools
import logging.handlers
import queue
import sys
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch

from safecomm.diagnostics import leaks
from safecomm.tools.demo.shown import leak as leak_of_the_demo

STEPS = (2, 3, 5, 6, 12)
"""Where what is told of some ways changes, and many. A watch looks through all of the memory of the process."""
ROWS = 8


class Key:
    """An object that is a key, whose text tells nothing."""

    def __repr__(self):
        raise AssertionError("the text of a key was asked for")


class Node:
    __slots__ = ("following", "tensor")

    def __init__(self, tensor, following):
        self.tensor, self.following = tensor, following


class Registry:
    kept = ()
    last = None


@functools.lru_cache(maxsize=None)  # noqa: UP033
def computed(step, run):
    return run.tensor(step)


@functools.lru_cache(maxsize=2)
def computed_of_late(step, run):
    return run.tensor(step)


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2  # made for the context
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Model(torch.nn.Linear):
    """A module, with what programs put on modules."""

    def __init__(self):
        super().__init__(4, 4)
        self.kept = []
        self.last = None


class Run:
    """A program of some steps: what it keeps, where."""

    def __init__(self, steps):
        self.steps = steps
        self.model = Model()
        self.local = threading.local()
        self.state = {}
        self.logged = logging.handlers.MemoryHandler(1 << 20, flushLevel=logging.CRITICAL + 1)

    def tensor(self, step):
        return torch.full((ROWS, 4), float(step))

    def all_of(self, name, kind=list):
        """Return the collection of a way."""
        return self.state.setdefault(name, kind())

    def run(self, way):
        """Watch the steps, in each of which ``way`` is called, and return what was found."""
        with leaks.watch(self.model, log_leaks=False) as watched:
            for step in range(1, self.steps + 1):
                self.model(torch.ones(2, 4)).sum().backward()
                way(self, step)
        assert watched.steps == self.steps
        return watched


# --- ways that leak: one tensor more in each step -------------------------------------------------------------------


def append_to_a_list(run, step):
    run.all_of("list").append(run.tensor(step))


def put_into_a_dictionary_by_objects(run, step):
    run.all_of("by objects", dict)[Key()] = run.tensor(step)


def put_into_a_dictionary_by_names(run, step):
    run.all_of("by names", dict)["abcdefghijklm"[step]] = run.tensor(step)


def keep_an_exception(run, step):
    def fails():
        unlucky = run.tensor(step)
        raise ValueError(unlucky.shape)

    try:
        fails()
    except ValueError as error:
        run.all_of("errors").append(error)


def register_a_callback(run, step):
    seen = run.tensor(step)
    run.all_of("callbacks").append(lambda: seen)


def keep_a_generator(run, step):
    def numbers():
        drawn = run.tensor(step)
        yield 1
        yield drawn

    generator = numbers()
    next(generator)
    run.all_of("generators").append(generator)


def cache_without_bound(run, step):
    computed(step, run)


def append_to_a_thread_local(run, step):
    run.local.kept = [*getattr(run.local, "kept", ()), run.tensor(step)]


def append_to_a_class(run, step):
    Registry.kept = (*Registry.kept, run.tensor(step))


def link_to_the_last(run, step):
    run.state["head"] = Node(run.tensor(step), run.state.get("head"))


def add_to_a_set(run, step):
    run.all_of("set", set).add(run.tensor(step))


def append_to_a_default(run, step):
    run.all_of("default", lambda: collections.defaultdict(list))[step % 2].append(run.tensor(step))


def keep_an_array(run, step):
    run.all_of("arrays").append(run.tensor(step).numpy()[1:])


def add_up_a_loss(run, step):
    weight = run.model.weight
    run.state["total"] = run.state.get("total", 0) + (run.tensor(step) * weight.sum()).sum()


def keep_losses_with_a_context(run, step):
    loss = Keeping.apply(run.model.weight.sum() * torch.ones(ROWS, 4)).sum()
    loss.backward()
    run.all_of("losses").append(loss)


def log_a_tensor(run, step):
    run.logged.emit(logging.makeLogRecord({"levelno": logging.INFO, "args": (run.tensor(step),)}))


def append_to_a_module(run, step):
    run.model.kept.append(run.tensor(step))


def append_to_a_deque(run, step):
    run.all_of("deque", collections.deque).append(run.tensor(step))


def keep_in_a_weak_dictionary_by_what_lives(run, step):
    key = Key()
    run.all_of("keys").append(key)
    run.all_of("weak", weakref.WeakKeyDictionary)[key] = run.tensor(step)


def nest_tuples(run, step):
    run.state["nested"] = (run.state.get("nested"), run.tensor(step))


def keep_a_coroutine(run, step):
    async def task():
        awaited = run.tensor(step)
        await Pending()
        return awaited

    coroutine = task()
    coroutine.send(None)
    run.all_of("tasks").append(coroutine)


class Pending:
    def __await__(self):
        yield


def put_on_an_attribute_of_its_own(run, step):
    setattr(run.model, f"output_{step}", run.tensor(step))


def keep_an_attribute_of_a_tensor(run, step):
    tensor = torch.zeros(())
    tensor.note = run.tensor(step)
    run.all_of("notes").append(tensor)


@dataclass
class Leaks:
    kind: str
    words: str
    """What the chain says."""
    count: int = 1
    """Tensors of each step."""


LEAKS = {
    append_to_a_list: Leaks("list", "item 0 of a list of {n} | key 'list' of a dict"),
    put_into_a_dictionary_by_objects: Leaks("list", "key of type Key of a dict | key 'by objects' of a dict"),
    put_into_a_dictionary_by_names: Leaks("list", "key 'b' of a dict | key 'by names' of a dict"),
    keep_an_exception: Leaks("exception", "local variable 'unlucky' of fails ("),
    register_a_callback: Leaks("closure", "closure variable 'seen' of function register_a_callback.<locals>.<lambda>"),
    keep_a_generator: Leaks("list", "local variable 'drawn' of numbers ("),
    cache_without_bound: Leaks("list", f"the cache of function {__name__}.computed"),
    append_to_a_thread_local: Leaks("list", "item 0 of a list of {n} | attribute 'kept' of a _local"),
    append_to_a_class: Leaks("list", "item 0 of a tuple of {n} | attribute 'kept' of class Registry"),
    link_to_the_last: Leaks("list", "attribute 'tensor' of a Node | attribute 'following' of a Node"),
    add_to_a_set: Leaks("list", "a set of {n} | key 'set' of a dict"),
    append_to_a_default: Leaks("list", "key 1 of a defaultdict | key 'default' of a dict"),
    keep_an_array: Leaks("list", "a ndarray | item 0 of a list of {n} | key 'arrays' of a dict"),
    add_up_a_loss: Leaks("retained graph", "the graph of a tensor of shape () | key 'total' of a dict"),
    keep_losses_with_a_context: Leaks(
        "autograd context", "attribute 'kept' of the context of the autograd node Keeping"
    ),
    log_a_tensor: Leaks("list", "attribute 'args' of a LogRecord"),
    append_to_a_module: Leaks(
        "module attribute", "item 0 of a list of {n} | attribute 'kept' of module the model (Model)"
    ),
    append_to_a_deque: Leaks("list", "item 0 of a deque of {n} | key 'deque' of a dict"),
    keep_in_a_weak_dictionary_by_what_lives: Leaks("list", "of a dict | attribute 'data' of a WeakKeyDictionary"),
    nest_tuples: Leaks("list", "item 1 of a tuple of 2 | item 0 of a tuple of 2 | key 'nested' of a dict"),
    keep_a_coroutine: Leaks("list", "local variable 'awaited' of task ("),
    put_on_an_attribute_of_its_own: Leaks("module attribute", "attribute 'output_1' of module the model (Model)"),
    keep_an_attribute_of_a_tensor: Leaks("list", "attribute 'note' of a Tensor"),
}


# --- ways that do not: what they have is replaced, bounded, or there since the start --------------------------------


def average(run, step):
    before = run.state.get("average")
    run.state["average"] = run.tensor(step) if before is None else before * 0.5 + run.tensor(step)


def keep_the_last_three(run, step):
    run.all_of("last three", lambda: collections.deque(maxlen=3)).append(run.tensor(step))


def keep_the_best(run, step):
    if step in (1, 2, 5, 6, 11):
        run.state["best"] = {name: value.clone() for name, value in run.model.state_dict().items()}


def replace_a_module_attribute(run, step):
    run.model.last = run.tensor(step)


def swap_two_attributes(run, step):
    run.front, run.back = getattr(run, "back", None), run.tensor(step)


def keep_weakly(run, step):
    tensor = run.tensor(step)
    run.all_of("weak values", weakref.WeakValueDictionary)[step] = tensor


def make_a_cycle(run, step):
    node = [run.tensor(step)]
    node.append(node)


def make_state_in_the_first_step(run, step):
    if "moments" not in run.state:
        run.state["moments"] = [torch.zeros_like(parameter) for parameter in run.model.parameters()]
    for moment in run.state["moments"]:
        moment.mul_(0.9).add_(1)


def replace_a_buffer(run, step):
    if step == 1:
        run.model.register_buffer("buffer", run.tensor(step))
    run.model.buffer = run.tensor(step)


def empty_a_list(run, step):
    run.all_of("emptied").clear()
    run.all_of("emptied").append(run.tensor(step))


def replace_a_closure(run, step):
    last = run.tensor(step)
    run.callback = lambda: last


def replace_a_generator(run, step):
    last = run.tensor(step)
    run.generator = (last for _ in range(2))
    next(run.generator)


def replace_an_exception(run, step):
    unlucky = run.tensor(step)
    try:
        raise ValueError(unlucky.shape)
    except ValueError as error:
        run.error = error


def replace_what_a_thread_has(run, step):
    run.local.last = run.tensor(step)


def replace_a_class_attribute(run, step):
    Registry.last = run.tensor(step)


def replace_an_array(run, step):
    run.array = run.tensor(step).numpy()


def keep_the_last_loss(run, step):
    run.loss = (run.tensor(step) * run.model.weight.sum()).sum()


def keep_the_first_and_the_last(run, step):
    tensor = run.tensor(step)
    run.first, run.newest = getattr(run, "first", tensor), tensor


def return_it(run, step):
    return run.tensor(step)


def keep_moments_by_name(run, step):
    moments = run.all_of("by name", dict)
    for name, parameter in run.model.named_parameters():
        moments[name] = parameter.detach() * 0.5


NONE = {
    average: 2, keep_the_last_three: 2, keep_the_best: 2, replace_a_module_attribute: 2, swap_two_attributes: 2,
    keep_weakly: 2, make_a_cycle: 2, make_state_in_the_first_step: 2, replace_a_buffer: 2, empty_a_list: 2,
    replace_a_closure: 2, replace_a_generator: 2, replace_an_exception: 2, replace_what_a_thread_has: 2,
    replace_a_class_attribute: 2, replace_an_array: 2, keep_the_last_loss: 2, keep_the_first_and_the_last: 2,
    return_it: 2, keep_moments_by_name: 2,
}  # fmt: skip
"""Ways that are no leak, with the fewest steps in which that can be seen."""


def fill_a_ring_of_three(run, step):
    run.all_of("ring", lambda: [None] * 3)[step % 3] = run.tensor(step)


def alternate_in_a_list(run, step):
    run.all_of("pair", lambda: [None] * 2)[step % 2] = run.tensor(step)


def cache_of_late(run, step):
    computed_of_late(step, run)


def fill_a_cache(run, step):
    if step <= 4:
        run.all_of("cache", dict)[step] = run.tensor(step)


def keep_the_best_three(run, step):
    run.state["three"] = sorted([*run.all_of("three"), (step * 7 % 13, run.tensor(step))], key=lambda one: one[0])[:3]


# What can't be told from a leak before it has come to its end: a ring when it has gone round, a cache one step after
# it was full.
NONE |= {
    fill_a_ring_of_three: 4, alternate_in_a_list: 3, cache_of_late: 3, fill_a_cache: 6, keep_the_best_three: 6
}  # fmt: skip


@functools.cache
def found(steps):
    """Return what is found of all ways at once, and of each by its name: the lines of a leak have it."""
    Registry.kept, Registry.last = (), None
    computed.cache_clear()
    computed_of_late.cache_clear()

    def all_ways(run, step):
        for way in (*LEAKS, *NONE):
            way(run, step)

    watched = Run(steps).run(all_ways)
    by_way = {way: [] for way in (*LEAKS, *NONE)}
    for leak in watched.leaks:
        (way,) = [way for way in by_way if any(line.endswith(f" in {way.__name__}") for line in leak.stack)]
        if leak.nbytes > 4 * leak.count:  # the losses themselves are leaks, too
            by_way[way].append(leak)
    return by_way


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("way", LEAKS, ids=lambda way: way.__name__)
def test_a_way_that_leaks(way, steps):
    expected = LEAKS[way]
    (leak,) = found(steps)[way]
    words = " | ".join(leak.chain)
    assert (leak.kind, expected.words.format(n=steps) in words) == (expected.kind, True), words
    assert (leak.count, leak.nbytes) == (steps, steps * ROWS * 4 * 4), str(leak)
    assert leak.steps == tuple(range(1, steps + 1))


@pytest.mark.parametrize(
    ("way", "steps"),
    [pytest.param(way, n, id=f"{way.__name__}-{n}") for way, least in NONE.items() for n in STEPS if n >= least],
)
def test_a_way_that_does_not(way, steps):
    assert found(steps)[way] == []


# --- what takes a watch of its own ------------------------------------------------------------------------------------


def counted(watched):
    """Return the count, the bytes and the first and the last step of each leak."""
    return [(leak.count, leak.nbytes, leak.steps[0], leak.steps[-1]) for leak in watched.leaks]


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_inputs_that_only_the_graphs_of_kept_losses_keep(steps):
    """The newest is in a variable, too, and counts with the others."""
    model, keep = Model(), []
    with leaks.watch(model, log_leaks=False) as watched:
        for _ in range(steps):
            x = torch.ones(2, 4)
            loss = model(x).sum()
            keep.append(loss)
    assert counted(watched) == [(steps, 32 * steps, 0, steps - 1), (steps, 4 * steps, 1, steps)]
    assert [leak.chain[-1].split(" of ")[0] for leak in watched.leaks if steps > 1] == ["local variable 'keep'"] * (
        2 * (steps > 1)
    )


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 12])
def test_one_more_in_each_second_step(steps):
    def way(run, step):
        if step % 2 == 0:
            run.all_of("second").append(run.tensor(step))

    assert counted(Run(steps).run(way)) == ([(steps // 2, 128 * (steps // 2), 2, steps // 2 * 2)] if steps > 4 else [])


@pytest.mark.parametrize("steps", [3, 5, 6, 12])
def test_a_tensor_that_grows(steps):
    history = torch.empty(0, 4)
    model = Model()
    with leaks.watch(model, log_leaks=False) as watched:
        for _ in range(steps):
            history = torch.cat([history, model(torch.ones(2, 4)).detach()])
    assert counted(watched) == ([(1, 32 * steps, steps, steps)] if steps >= 5 else [])


@pytest.mark.parametrize("steps", [2, 12])
def test_deep_copies_of_the_state(steps):
    def snapshot(run, step):
        run.all_of("snapshots").append(copy.deepcopy(run.model.state_dict()))

    def best(run, step):
        run.best = copy.deepcopy(run.model.state_dict())

    assert counted(Run(steps).run(snapshot)) == [(2 * steps, 80 * steps, 1, steps)]
    assert counted(Run(steps).run(best)) == []


@pytest.mark.parametrize("steps", [2, 3])
def test_what_something_nearer_has_too_counts_with_the_others(steps):
    def way(run, step):
        run.newest = run.tensor(step)
        run.oldest = getattr(run, "oldest", run.newest)
        run.all_of("nested", lambda: [[]])[0].append(run.newest)

    assert counted(Run(steps).run(way)) == [(steps, 128 * steps, 1, steps)]


def test_thousands_are_counted_and_named():
    def way(run, step):
        for _ in range(1500):
            run.all_of("many").append(torch.ones(2))

    watched = Run(3).run(way)
    assert counted(watched) == [(4500, 8 * 4500, 1, 3)]
    assert watched.leaks[0].chain[:2] == ("item 0 of a list of 4500", "key 'many' of a dict")


def test_what_another_threads_function_has_is_named():
    queue_in, queue_out = queue.Queue(), queue.Queue()

    def collects():
        collected = []

        def inner():
            while (tensor := queue_in.get()) is not None:
                collected.append(tensor)
                del tensor
                queue_out.put(None)

        inner()

    def way(run, step):
        queue_in.put(run.tensor(step))
        queue_out.get()

    thread = threading.Thread(target=collects)
    thread.start()
    watched = Run(3).run(way)
    queue_in.put(None)
    thread.join()
    assert counted(watched) == [(3, 384, 1, 3)]
    assert "'collected'" in " ".join(watched.leaks[0].chain)


def test_the_demo_names_its_own_line():
    shown = leak_of_the_demo()
    assert shown.ok
    (made,) = [line for line in shown.lines if "made at" in line]
    assert "shown.py:" in made
    assert made.endswith(" in step")


def test_without_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert counted(Run(2).run(append_to_a_list)) == [(2, 256, 1, 2)]
