"""Streams and events of a rewritten graph, for a device that has streams.

    caller's stream   [mm 0][mm 1][wait 0 ][mm 2][wait 1 ] ...        with two streams of compute:
    communication     [transfer 0][transfer 1][transfer 2] ...        [mm 0][mm 2]
                                                                         [mm 1][mm 3]

- Each transfer runs on the communication stream, behind what the caller's stream holds when it is posted: that is the
  time at which the schedule posts it. Its wait makes the caller's stream wait for its event, and the host for nothing.
- With two streams of compute, the matmuls of a region's slices run on the two in turn, so that the last wave of thread
  blocks of one overlaps the first of the next. A region's `fork` says when its inputs are ready; a matmul that reads
  what came later runs behind the caller's stream; a `join` stands before the first reader of what was written.
- A tensor that a side stream uses is an argument of the op that joins it (what is sent: of the wait), so that nobody
  reuses its memory earlier: all memory is the caller's, and what the caller's stream does behind a join is ordered.

Streams and events are arguments of our ops, on every torch version. Inductor of torch 2.13 has user streams of its own:
they are objects that Dynamo puts beside the graph's inputs when it meets them in user code. A pass behind Dynamo has no
such place, a graph from the FX cache would look for objects that nobody made, and 2.11 has none.

The answer of `plan_of` is data; `passes/races.py` checks it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch.fx import Graph, Node

from ..runtime import ops, stream_ops
from ..runtime.streams import CALLER, COMM, COMPUTE, NO_EVENT
from .aliases import is_view
from .races import Launch, Plan
from .rules import RESHAPES
from .separability import tensor_of
from .slice_writer import Place


def has_streams(graph: Graph) -> bool:
    """Whether the transfers of a graph move tensors of a device with streams."""
    return any(
        tensor_of(node).device.type == "cuda" for node in graph.find_nodes(op="call_function", target=ops.exchange)
    )


def assign_streams(graph: Graph, compute_streams: int = 1, transports: Mapping[str, str] | None = None) -> None:
    """Give each transfer, and with two `compute_streams` each `slice_matmul`, its stream and its events.

    `transports` has the transport of a region, by its tag, where it is not c10d.

    On a graph of a device without streams it does nothing.
    """
    if not has_streams(graph):
        return
    events = count(1)
    for exchange in graph.find_nodes(op="call_function", target=ops.exchange):
        event = next(events)
        exchange.kwargs = {**exchange.kwargs, "stream": COMM, "after": [CALLER], "event": event}
        transport = (transports or {}).get(exchange.meta["fo"].region, "c10d")
        if transport != "c10d":
            exchange.kwargs = {**exchange.kwargs, "transport": transport}
        (wait,) = exchange.users
        wait.kwargs = {"after": [event]}
    if compute_streams > 1:
        for matmuls in _by_region(graph).values():
            if len(matmuls) > 1:
                _alternate(graph, matmuls, events)


def _by_region(graph: Graph) -> dict[str, list[Node]]:
    regions: dict[str, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=stream_ops.slice_matmul):
        regions[node.meta["fo"].region].append(node)
    return regions


def _alternate(graph: Graph, matmuls: list[Node], events: Iterator[int]) -> None:
    """Launch the matmuls of a region on two streams in turn, between a fork and a join for each buffer."""
    place: Place = matmuls[0].meta["fo"]
    nodes = list(graph.nodes)
    start = next(node for node in nodes if _is_pinned_in(node, place.region))
    ready = set(nodes[: nodes.index(start)])
    buffers = list(dict.fromkeys(_buffer(node) for node in matmuls))
    for buffer in buffers:
        start.prepend(buffer)
    ready -= set(buffers)  # what reads them comes behind the matmul that writes them
    for node in (operand for matmul in matmuls for operand in _operands(matmul)):
        _hoist(node, start, ready)
    early = dict.fromkeys(operand for node in matmuls for operand in _operands(node) if operand in ready)
    with graph.inserting_before(start):
        fork = graph.create_node("call_function", stream_ops.fork, ([*buffers, *early],), name=f"{place.region}_fork")
    fork.kwargs = {"event": (forked := next(events))}
    fork.meta = {"val": stream_ops.fork([buffers[0].meta["val"]], event=forked), "fo": place}
    turns = list(dict.fromkeys(node.meta["fo"].slice for node in matmuls))
    for node in matmuls:
        late = any(operand not in ready for operand in _operands(node))
        node.kwargs = {
            "stream": COMPUTE[turns.index(node.meta["fo"].slice) % len(COMPUTE)],
            "after": [CALLER if late else forked],
            "event": next(events),
        }
    for buffer in buffers:
        _join(graph, buffer, [node for node in matmuls if _buffer(node) is buffer])


def _is_pinned_in(node: Node, region: str) -> bool:
    place = node.meta.get("fo")
    return isinstance(place, Place) and place.pinned and place.region == region


def _buffer(matmul: Node) -> Node:
    buffer = matmul.args[0]
    assert isinstance(buffer, Node)
    return buffer


def _operands(matmul: Node) -> tuple[Node, Node]:
    _, a, b, *_ = matmul.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    return a, b


def _hoist(node: Node, start: Node, ready: set[Node]) -> bool:
    """Move `node` and what it is made of in front of `start`, where nothing of it waits for the region; says whether."""
    if node in ready:
        return True
    place = node.meta.get("fo")
    if place is None or place.pinned or node.target in (ops.wait, _EMPTY):
        return False
    if not all([_hoist(source, start, ready) for source in node.all_input_nodes]):
        return False
    start.prepend(node)
    ready.add(node)
    return True


def _join(graph: Graph, buffer: Node, writers: list[Node]) -> None:
    """Stand before the first reader of `buffer`, and keep alive till then what its writers read."""
    reader = min(user for user in buffer.users if user.target not in (stream_ops.slice_matmul, stream_ops.fork))
    kept = dict.fromkeys(operand for node in writers for operand in _operands(node))
    last = {node.kwargs["stream"]: node.kwargs["event"] for node in writers}
    place: Place = writers[-1].meta["fo"]
    with graph.inserting_before(reader):
        join = graph.create_node("call_function", stream_ops.join, (buffer, list(kept)), name=f"{place.region}_join")
    join.kwargs = {"after": list(last.values())}
    join.meta = {"val": None, "fo": place}


def plan_of(graph: Graph) -> Plan:
    """The streams of a graph as data: what the nodes' own arguments say, for `races.find_races`."""
    launches = []
    for node in graph.nodes:
        if node.op == "output" or (
            node.op == "call_function" and not is_view(node, of_reshapes=False) and node.target is not _EMPTY
        ):
            launches.append(_launch(node))
    return tuple(launches)


_DEFAULTS: dict[str, Any] = {"stream": CALLER, "after": (), "event": NO_EVENT}


def _launch(node: Node) -> Launch:
    inputs = frozenset(name for source in node.all_input_nodes for name in _memory(source))
    arguments: dict[str, Any] = {**_DEFAULTS, **node.kwargs} if node.target in _OURS else _DEFAULTS
    reads, writes, holds = inputs, frozenset({node.name}), frozenset[str]()
    if node.target in (ops.wait, stream_ops.fork, stream_ops.join):
        reads, writes, holds = holds, holds, inputs
    elif node.target is stream_ops.slice_matmul:
        reads, writes = inputs - _memory(node.args[0]), frozenset({_part(node)})
    elif _is_mutable(node):
        writes = _memory(node.args[0]) if isinstance(node.args[0], Node) else holds
        reads = inputs - writes
    elif node.op == "output":
        writes = holds
    return Launch(node.name, arguments["stream"], tuple(arguments["after"]), arguments["event"], reads, writes, holds)


_OURS = (ops.exchange, ops.wait, stream_ops.fork, stream_ops.join, stream_ops.slice_matmul)


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _memory(node: Any) -> frozenset[str]:
    """The buffers whose memory a node's value may be: a reshape may copy, so it counts as itself and as its input."""
    if node.target is ops.wait or is_view(node, of_reshapes=True):
        source = _memory(node.args[0])
        return source | {node.name} if node.target in RESHAPES else source
    parts = [_part(user) for user in node.users if user.target is stream_ops.slice_matmul and user.args[0] is node]
    return frozenset(parts or {node.name})


def _part(matmul: Node) -> str:
    """The place that a matmul writes to: two of them may write to one buffer at the same time."""
    return f"{_buffer(matmul).name}[{matmul.args[4]}:]"


_EMPTY = torch.ops.aten.empty.memory_format  # memory is taken where it is first used
