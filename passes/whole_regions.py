"""A rewritten all-gather region as one op, where it is nothing but an all-gather and a matmul.

    exchange, mm, wait, exchange, mm, wait, mm, cat    ->    gather_matmul(own, b, order, posts, ...)

The op is one persistent kernel whose tiles wait for the flag of their slice (`runtime/whole_gather.py`). What stays slice by
slice says why: another body than one matmul, slices of other things than rows, symbolic sizes, a dtype without a kernel, or that
the machine model prefers a kernel a slice (`codegen/choice.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from ..codegen.choice import FUSED, Matmul, choose_kernel
from ..errors import MachineError
from ..runtime import ops, whole_gather
from ..schedule import Schedule
from ..schedule.machine import Machine
from .rewrite import Place
from .rules import RESHAPES
from .separability import shape_of, tensor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class WholeGather:
    """What the nodes of a region are, read as arguments of the op."""

    own: list[Node]
    b: Node
    order: list[int]
    posts: list[int]
    group_name: str
    labels: list[str]
    joined: Node
    nodes: list[Node]  # what the op replaces


def use_whole_gather(
    graph: Graph, tag: str, schedule: Schedule, machine: Machine, transport: str, forced: bool
) -> tuple[bool, str]:
    """Make the region `tag` one op where that is possible and predicted to be faster, or `forced`; and why it is or is not.

    The graph is valid before and after. `machine` is with transfers by copy engine, as the op has them.
    """
    found = read_region(graph, tag)
    if isinstance(found, str):
        return False, f"a kernel a slice: {found}"
    slice_ = tensor_of(found.own[0])
    matmul = Matmul(len(found.order) // 2 * slice_.shape[0], slice_.shape[1], shape_of(found.b)[1], str(slice_.dtype))
    try:
        choice = choose_kernel(schedule, machine, [matmul], slice_.nbytes, copy_engine=True)
    except MachineError as error:
        return False, f"a kernel a slice: {error}"
    if choice.fused_us is None or (choice.form != FUSED and not forced):
        return False, choice.reason
    replace_region(graph, found, transport)
    return True, choice.reason if choice.form == FUSED else f"one kernel for the region, as asked for: {choice.reason}"


def read_region(graph: Graph, tag: str) -> WholeGather | str:
    """The region as an all-gather and a matmul, or what else it is."""
    nodes = [node for node in graph.nodes if isinstance(place := node.meta.get("fo"), Place) and place.region == tag]
    exchanges = [node for node in nodes if node.target is ops.exchange]
    waits = {node.args[0]: node for node in nodes if node.target is ops.wait}
    matmuls = [node for node in nodes if node.target is aten.mm.default]
    joins = [node for node in nodes if node.target is aten.cat.default and set(node.args[0]) == set(matmuls)]
    if len(joins) != 1 or not exchanges:
        return "its body is more than one matmul of what is gathered"
    (joined,) = joins
    if len({node.args[1] for node in matmuls}) != 1 or (len(joined.args) > 1 and joined.args[1] % 2 != 0):
        return "the matmul is not cut along its rows"
    pieces, b = list(joined.args[0]), matmuls[0].args[1]
    tensors = [node for matmul in matmuls for node in (matmul, matmul.args[0])]
    sizes = {type(size) for node in (b, *tensors) for size in node.meta["val"].shape}
    if sizes != {int} or len({shape_of(node) for node in pieces}) != 1:
        return "its slices have symbolic or unequal sizes"
    if tensor_of(b).dtype not in whole_gather.DTYPES:
        return f"no kernel for {tensor_of(b).dtype}"
    arriving = set(waits.values())
    sources = {_source(piece.args[0]): index for index, piece in enumerate(pieces)}
    if len(sources) != len(pieces):
        return "a slice is not what was sent or received, in another shape"
    own = [source for source in sources if source not in arriving]
    posts: list[int] = []
    for exchange in exchanges:
        sent, to, source, *_ = exchange.args
        wait = waits.get(exchange)
        sending = sources.get(_source(sent)) if to >= 0 else -1
        receiving = sources.get(wait) if source >= 0 and wait is not None else -1
        if sending is None or receiving is None:
            return "it sends or receives what it does not multiply"
        posts += [sending, to, receiving, source]
    replaced = [
        node for node in nodes if node in {*exchanges, *arriving, *matmuls, joined} or _is_shape_of(node, arriving)
    ]
    inside = set(replaced)
    if any(user not in inside for node in replaced if node is not joined for user in node.users):
        return "something else reads its slices"
    parts = {source: part for part, source in enumerate(own)}
    order = [
        number
        for matmul in matmuls
        for number in (sources[_source(matmul.args[0])], parts.get(_source(matmul.args[0]), -1))
    ]
    operands = {_source(matmul.args[0]): matmul.args[0] for matmul in matmuls}
    labels = [exchange.args[4] for exchange in exchanges]
    return WholeGather([operands[s] for s in own], b, order, posts, exchanges[0].args[3], labels, joined, replaced)


def replace_region(graph: Graph, found: WholeGather, transport: str = "copy_engine") -> Node:
    """Put the op in the place of the nodes of `found`."""
    value, place = tensor_of(found.joined), found.joined.meta["fo"]
    arguments = (found.own, found.b, found.order, found.posts, found.group_name, found.labels)
    with graph.inserting_before(found.joined):
        op = graph.create_node(
            "call_function",
            whole_gather.gather_matmul,
            arguments,
            {"transport": transport},
            name=f"{place.region}_whole",
        )
    op.meta = {**found.joined.meta, "val": value, "fo": replace(place, step=0, slice=None, pinned=True)}
    found.joined.replace_all_uses_with(op, propagate_meta=False)
    for node in reversed(found.nodes):
        graph.erase_node(node)
    return op


def _source(node: Node) -> Node:
    """What a tensor is a shape of."""
    while node.target in RESHAPES:
        node = node.all_input_nodes[0]
    return node


def _is_shape_of(node: Node, arriving: set[Node]) -> bool:
    return node.target in RESHAPES and _source(node) in arriving
