"""Matmuls of slices as one op each, which writes its slice into its place of the joined output.

    s0 = mm(x0, w);  s1 = mm(x1, w);  y = cat([s0, s1])

    y = empty();  slice_matmul(y, x0, w, dim 0, start 0);  slice_matmul(y, x1, w, dim 0, start 4)

Inductor does the same to an `mm` under a `cat`, as a call that runs on the caller's stream. The op can be launched on a
stream of compute instead, and can be a kernel of ours. Matmuls with symbolic sizes stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..runtime import stream_ops
from .separability import shape_of, tensor_of
from .slice_writer import Place

aten = torch.ops.aten

_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}


def use_slice_matmuls(graph: Graph, kernel: str = "library") -> None:
    """Turn each `mm` of a rewritten region into a `slice_matmul`, by `library` or `triton`.

    The graph is valid before and after. Matmuls of symbolic sizes stay as they are.
    """
    for node in graph.find_nodes(op="call_function", target=aten.reshape.default):
        if any(_is_slice(user) for user in node.users):
            _copy_once(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        pieces = list(node.args[0])
        dim = node.args[1] % 2 if len(node.args) > 1 else 0
        if "fo" in node.meta and len(set(pieces)) == len(pieces) and all(_writes_in_place(p, node) for p in pieces):
            _join(graph, node, pieces, dim, kernel)
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        if _is_slice(node):
            _join(graph, node, [node], 0, kernel)


def _copy_once(graph: Graph, reshape: Node) -> None:
    """Let a reshape that copies do so in a node of its own.

    Inductor copies for each op that reads such a reshape. What `join` holds has to be the copy that the matmul reads.
    """
    source = reshape.all_input_nodes[0]
    try:
        tensor_of(source).view(shape_of(reshape))
    except (RuntimeError, ValueError):
        with graph.inserting_before(reshape):
            copy = graph.call_function(aten.clone.default, (source,), _CONTIGUOUS)
        copy.meta = {"val": aten.clone.default(tensor_of(source), **_CONTIGUOUS), "fo": reshape.meta["fo"]}
        copy.name = f"{reshape.name}_copy"
        reshape.replace_input_with(source, copy)


def _is_slice(node: Node) -> bool:
    place = node.meta.get("fo")
    return (
        node.target is aten.mm.default
        and isinstance(place, Place)
        and place.slice is not None
        and all(isinstance(size, int) for tensor in (node, *node.all_input_nodes) for size in shape_of(tensor))
        and all(type(size) is int for size in shape_of(node))
        and tensor_of(node).is_contiguous()
    )


def _writes_in_place(piece: Node, joined: Node) -> bool:
    return _is_slice(piece) and list(piece.users) == [joined] and piece.meta["fo"].region == joined.meta["fo"].region


def _join(graph: Graph, whole: Node, pieces: list[Node], dim: int, kernel: str) -> None:
    """Replace `whole`, which is made of `pieces` side by side along `dim`, by a buffer that these are written into."""
    value, order = tensor_of(whole), {node: index for index, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(pieces, key=order.__getitem__)):
        buffer = graph.call_function(
            aten.empty.memory_format,
            (list(value.shape),),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    buffer.meta = {"val": value, "fo": replace(whole.meta["fo"], pinned=False)}
    names = {buffer: whole.name if whole not in pieces else f"{whole.name}_out"}
    start = 0
    for piece in pieces:
        with graph.inserting_before(piece):
            written = graph.call_function(stream_ops.slice_matmul, (buffer, *piece.args, dim, start, kernel))
        written.meta = {**piece.meta, "val": None}
        names[written] = piece.name
        start += shape_of(piece)[dim]
    whole.replace_all_uses_with(buffer, propagate_meta=False)
    for node in dict.fromkeys((whole, *pieces)):
        graph.erase_node(node)
    for node, name in names.items():
        node.name = name
