"""Compilers see through (S9): torch's functions are traced, with the same graph, the same breaks and results."""

import warnings

import pytest
import torch
import torch.distributed as stock
from ranks import on

import safecomm

GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"


# Each makes, for one of the two modules, the function that is compiled: the module is a constant to the compiler.


def all_reduce(dist):
    def function(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    return function


def all_reduce_max(dist):
    def function(x):
        y = x * 2
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
        return y + 1

    return function


def all_gather_of_one(dist):
    gather = getattr(dist, GATHER)

    def function(x):
        out = x.new_empty(2 * x.shape[0])
        gather(out, x)
        return out * 2

    return function


def reduce_scatter_of_one(dist):
    scatter = getattr(dist, SCATTER)

    def function(x):
        out = x.new_empty(x.shape[0] // 2)
        scatter(out, x)
        return out * 2

    return function


def all_gather(dist):
    def function(x):
        outs = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(outs, x)
        return outs[0] + outs[1]

    return function


def all_to_all_single(dist):
    def function(x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out * 2

    return function


def reduce_scatter(dist):
    def function(x):
        out = x.new_empty(x.shape[0] // 2)
        dist.reduce_scatter(out, list(x.chunk(2)))
        return out

    return function


def broadcast(dist):
    def function(x):
        y = x * 2
        dist.broadcast(y, 0)
        return y

    return function


def asynchronous(dist):
    def function(x):
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        return y + 1

    return function


def barrier(dist):
    def function(x):
        dist.barrier()
        return x + 1

    return function


def region(dist):
    def function(x):
        y = x * 2
        with dist._coalescing_manager():
            dist.all_reduce(y)
        return y

    return function


def p2p(dist):
    def function(x):
        room, peer = torch.empty_like(x), 1 - dist.get_rank()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, room, peer)]):
            work.wait()
        return room

    return function


FUNCTIONS = [
    all_reduce,
    all_reduce_max,
    all_gather_of_one,
    reduce_scatter_of_one,
    all_gather,
    all_to_all_single,
    reduce_scatter,
    broadcast,
    asynchronous,
    barrier,
    region,
    p2p,
]


def theirs(make):
    """Return the module that has torch's functions: regions are only in distributed_c10d."""
    return stock.distributed_c10d if make is region else stock


def compiled(module, make, backend, fullgraph):
    """Return what compiling and running the function came to: the graphs, and the result or the kind of error."""
    graphs = []

    def record(graph, inputs):
        graphs.append([(node.op, str(node.target)) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    function = make(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own
        try:
            run = torch.compile(function, fullgraph=fullgraph, backend=record)
            result = run(torch.arange(4.0) + stock.get_rank()).tolist()
        except Exception as error:
            return graphs, type(error)
    safecomm.drain()
    return graphs, result


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", FUNCTIONS)
@on(2)
def test_what_compiles_whole_with_torch_s_functions_does_with_ours(make, backend):
    expected = compiled(theirs(make), make, backend, fullgraph=True)
    found = compiled(safecomm, make, backend, fullgraph=True)
    assert found == expected, f"{found}, not {expected}"


@on(2)
def test_the_main_collectives_do_compile_whole():
    # So that the test above does not compare one error with another.
    for make in (all_reduce, all_gather_of_one, reduce_scatter_of_one, all_to_all_single):
        graphs, result = compiled(safecomm, make, "eager", fullgraph=True)
        assert len(graphs) == 1
        assert isinstance(result, list)
        assert any("_c10d_functional" in target or "collective" in target for _, target in graphs[0]), graphs


@pytest.mark.parametrize("make", FUNCTIONS)
@on(2)
def test_the_same_graphs_and_breaks_where_breaks_are_allowed(make):
    expected = compiled(theirs(make), make, "eager", fullgraph=False)
    found = compiled(safecomm, make, "eager", fullgraph=False)
    assert found == expected, f"{found}, not {expected}"


@pytest.mark.parametrize("make", [all_reduce, asynchronous, barrier])
@on(2)
def test_the_same_number_of_graph_breaks(make):
    def breaks(module):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            explained = torch._dynamo.explain(make(module))(torch.arange(4.0))
        return explained.graph_count, explained.graph_break_count

    assert breaks(safecomm) == breaks(stock)


@on(2)
def test_a_function_with_its_own_reference_to_the_wrapper():
    from safecomm import all_reduce as reference

    def function(x):
        y = x * 2
        reference(y)
        return y

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(function, fullgraph=True, backend="eager")(torch.ones(4))
    assert found.tolist() == [4.0] * 4
