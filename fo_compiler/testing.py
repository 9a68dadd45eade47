"""Check that a rewrite computes what the plain graph does, in one process: for tests of ours and of yours.

    assert_equivalent(graph_module, inputs_of_each_rank)

runs the graph with its plain collectives and the rewritten graph, each rank a thread, and compares every output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from .errors import RewriteError
from .options import Options
from .passes.overlap_pass import overlap
from .passes.separability import strides_that_matter
from .passes.single_collectives import SINGLE_OF
from .passes.sites import is_collective
from .records import GraphRecords
from .runtime.agreement import decisions
from .runtime.local import LocalTransport, LocalWorld
from .runtime.ops import pending_transfers
from .runtime.transport import current_transport
from .torch_adapter import tree_leaves

c10d = torch.ops._c10d_functional


def _reduce(values: list[Tensor], op: str) -> Tensor:
    # In float64, whatever the dtype: the plain result is the yardstick.
    stacked = torch.stack([v.double() if v.is_floating_point() else v for v in values])
    match op:
        case "sum":
            reduced = stacked.sum(0)
        case "avg":
            reduced = stacked.mean(0)
        case "max":
            reduced = stacked.amax(0)
        case "min":
            reduced = stacked.amin(0)
        case _:
            raise ValueError(f"reduce op {op!r}: not one that the in-process world knows")
    return reduced.to(values[0].dtype)


class LocalInterpreter(fx.Interpreter):
    """Runs an FX graph as one rank of a LocalWorld: plain collectives meet the other threads."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace in ("_c10d_functional", "_dtensor"):
            return self._collective(target, args)
        return super().call_function(target, args, kwargs)

    def _collective(self, target: Any, args: tuple[Any, ...]) -> Any:
        if target in SINGLE_OF:
            return [self._collective(SINGLE_OF[target], (tensor, *args[1:])) for tensor in args[0]]
        transport = current_transport()
        assert isinstance(transport, LocalTransport)
        tensor: Tensor = args[0]
        if target is c10d.wait_tensor.default:
            return tensor
        rank, size = transport.rank_and_size(args[-1])
        values = transport.meet(args[-1], tensor)
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat(values)
        if target is c10d.all_to_all_single.default:
            return torch.cat([v.chunk(size)[rank] for v in values])
        if target is torch.ops._dtensor.shard_dim_alltoall.default:
            gather_dim, shard_dim = args[1], args[2]
            return torch.cat([v.chunk(size, shard_dim)[rank] for v in values], gather_dim)
        if target is c10d.all_reduce.default:
            return _reduce(values, args[1])
        if target is c10d.reduce_scatter_tensor.default:
            block = tensor.shape[0] // size
            return _reduce([v[rank * block : (rank + 1) * block] for v in values], args[1])
        raise ValueError(f"{target}: not a collective that the in-process world knows")


def run_ranks(
    graph_of_rank: Callable[[int], fx.GraphModule], inputs: Sequence[Sequence[Any]], world: LocalWorld
) -> list[Any]:
    """The outputs of each rank's graph on its inputs, all ranks at the same time."""
    return world.run(lambda rank: LocalInterpreter(graph_of_rank(rank)).run(*inputs[rank]))


def rewrite_for_rank(
    gm: fx.GraphModule, options: Options, transport: LocalTransport
) -> tuple[fx.GraphModule, GraphRecords]:
    """A copy of a graph, rewritten as `transport`'s rank would. Raises RewriteError for nodes without fake tensors."""
    for node in gm.graph.nodes:
        if is_collective(node) and "val" not in node.meta:
            raise RewriteError(
                f"{node.name}: expected a fake tensor in meta['val'], got none: capture the graph with "
                "make_fx(function, tracing_mode='fake')(*inputs)."
            )
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    (output,) = gm.graph.find_nodes(op="output")
    graph.output_node().meta.update(output.meta)
    records = overlap(graph, options, transport, pin=False)
    return fx.GraphModule(gm, graph), records


def _prefixed(where: str) -> Callable[[str], str]:
    return lambda message: f"{where}: {message}"


def _in_one_memory(tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Pairs of tensors, by number, that lie in one memory."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return {(a, b) for a, b in combinations(range(len(places)), 2) if places[a] and places[a] == places[b]}


def assert_equivalent(
    gm: fx.GraphModule | Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    options: Options | None = None,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    rtol: float = 1e-12,
    atol: float = 1e-12,
) -> GraphRecords:
    """Raise AssertionError unless the rewritten graph gives every rank what the plain graph gives.

    That is its outputs, what it writes into its inputs, and that outputs which lie in memory of their own still do.

    `inputs[rank]` are the graph's inputs on that rank; they are not changed. `atol` is scaled by the largest value of an
    output; the defaults are for float64. Returns the records of rank 0, so that a test can also ask what was rewritten. Every
    rank must come to the same records. Where graphs differ from rank to rank there is one for each, and the ranks must come
    to the same decisions.
    """
    ranks = len(inputs)
    graphs = [gm] * ranks if isinstance(gm, fx.GraphModule) else gm
    options = options or Options(rewrite="always")

    def new_world() -> LocalWorld:
        return LocalWorld(ranks, groups or {})

    plain_inputs, rewritten_inputs = deepcopy(inputs), deepcopy(inputs)
    plain = run_ranks(graphs.__getitem__, plain_inputs, new_world())
    world = new_world()
    rewritten = [rewrite_for_rank(graphs[rank], options, world.transport(rank)) for rank in range(ranks)]
    one_graph = isinstance(gm, fx.GraphModule)
    decided = {records.key if one_graph else repr(decisions(records.records)) for _, records in rewritten}
    assert len(decided) == 1, f"the ranks decided differently: {[records for _, records in rewritten]}"
    results = run_ranks(lambda rank: rewritten[rank][0], rewritten_inputs, world)
    for rank in range(ranks):
        wanted, found = tree_leaves(plain[rank]), tree_leaves(results[rank])
        shared = _in_one_memory(found) - _in_one_memory(wanted)
        assert not shared, f"outputs of rank {rank} that share their memory, and did not: {sorted(shared)}"
        compared = [(f"output {i} of rank {rank}", *pair) for i, pair in enumerate(zip(wanted, found, strict=True))]
        compared += [
            (f"input {i} of rank {rank}", *((want.float(), got.float()) if want.itemsize == 1 else (want, got)))
            for i, (want, got) in enumerate(zip(plain_inputs[rank], rewritten_inputs[rank], strict=True))
            if isinstance(want, Tensor)
        ]
        for where, want, got in compared:
            largest = want.abs().max().item() if want.numel() and want.is_floating_point() else 1.0
            torch.testing.assert_close(
                got,
                want,
                rtol=rtol,
                atol=atol * max(1.0, largest),
                equal_nan=True,
                msg=_prefixed(where),
            )
            assert strides_that_matter(got) == strides_that_matter(want), (
                f"{where}: strides {got.stride()}, expected {want.stride()}"
            )
    assert not pending_transfers(), pending_transfers()
    return rewritten[0][1]
