"""A rewritten region as one op, where it is nothing but a matmul, and an all-gather before it or a reduce-scatter behind it.

The op is one persistent kernel. Its tiles wait for the flag of their slice (`runtime/whole_gather.py`), or raise it and wait for
what is added (`runtime/whole_scatter.py`). What stays slice by slice says why: another body than one matmul, slices of other
things than rows, symbolic sizes, a dtype without a kernel, or that the model prefers a kernel a slice (`codegen/choice.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from ..codegen.choice import FUSED, choose_kernel
from ..errors import MachineError
from ..schedule import Kind, Schedule
from ..schedule.machine import Machine
from .separability import shape_of
from .slice_writer import Place
from .whole_gather import read_gather
from .whole_nodes import NotWhole, RegionNodes, WholeRegion, Writer, aten
from .whole_scatter import read_scatter

_READERS: dict[Kind, Callable[[RegionNodes], WholeRegion]] = {
    Kind.ALL_GATHER: read_gather,
    Kind.REDUCE_SCATTER: read_scatter,
}
KINDS = frozenset(_READERS)


def use_whole_region(
    graph: Graph, tag: str, schedule: Schedule, machine: Machine, transport: str, forced: bool
) -> tuple[bool, str]:
    """Make the region `tag` one op where that is possible and predicted to be faster, or `forced`; and why it is or is not.

    The graph is valid before and after. `machine` is with transfers by copy engine, as the op has them.
    """
    found = read_region(graph, tag, schedule.kind)
    if isinstance(found, str):
        return False, f"a kernel a slice: {found}"
    try:
        choice = choose_kernel(schedule, machine, [found.matmul], found.slice_bytes, copy_engine=True)
    except MachineError as error:
        return False, f"a kernel a slice: {error}"
    if choice.fused_us is None or (choice.form != FUSED and not forced):
        return False, choice.reason
    replace_region(graph, found, transport)
    return True, choice.reason if choice.form == FUSED else f"one kernel for the region, as asked for: {choice.reason}"


def read_region(graph: Graph, tag: str, kind: Kind) -> WholeRegion | str:
    """The region as a matmul and its collective, or what else it is."""
    nodes = [node for node in graph.nodes if isinstance(place := node.meta.get("fo"), Place) and place.region == tag]
    try:
        return _READERS[kind](RegionNodes(nodes))
    except NotWhole as reason:
        return str(reason)


def replace_region(graph: Graph, found: WholeRegion, transport: str = "copy_engine") -> Node:
    """Put the op in the place of the nodes of `found`."""
    first = min(found.results)
    writer = Writer(graph, first)
    with graph.inserting_before(first):
        arguments = (*found.inputs(writer), found.order, found.posts, found.group_name, found.labels)
        op = writer.emit("whole", found.op, arguments, {"transport": transport}, pinned=True)
        rows = shape_of(op)[0] // len(found.results)
        for part, result in enumerate(found.results):
            value = op
            if len(found.results) > 1:
                value = writer.emit("part", aten.slice.Tensor, (op, 0, part * rows, (part + 1) * rows))
            if shape_of(value) != shape_of(result):
                value = writer.emit("part", aten.reshape.default, (value, list(shape_of(result))))
            result.replace_all_uses_with(value, propagate_meta=False)
    for node in reversed(found.nodes):
        if not node.users:  # the op reads some of what the matmuls read
            graph.erase_node(node)
    return op
