"""Shards that are not equal: how a graph has them, and the tensor without the padding that makes them equal.

DTensor gives each rank C = ceil(S / ranks) rows of S, the last ranks with a row what is left, and those behind them nothing. A
collective takes equal shards, so each is padded to C rows (ranks with C rows need none, so the graphs of the ranks differ):

    gather        shard -> [constant_pad_nd] -> all_gather ... -> padded, of ranks * C rows -> slice(dim, 0, S)
    scatter       whole, of S rows -> split(C, dim) -> the last piece padded, zeros behind it -> cat(dim) -> reduce_scatter
                  whole -> constant_pad_nd -> reduce_scatter, as users write it

Whatever is not exactly this keeps its padding. What stands behind a scatter is not asked: it differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from .blocks import back_through_copies, block_source, block_start, cat_dim
from .rules import aten
from .separability import NotSeparable, Shape, argument, name_of, shape_of


def read_without_padding(gathered: Node, dim: int) -> Node | None:
    """The only reader of what a collective gives, where that keeps the first rows along `dim`."""
    (reader, *others) = gathered.users or (None,)
    if reader is None or others or reader.target is not aten.slice.Tensor or block_source(reader) != (gathered, dim):
        return None
    all_rows, kept = shape_of(gathered)[dim], shape_of(reader)[dim]
    if not isinstance(all_rows, int) or not isinstance(kept, int) or argument(reader, "start") not in (0, None):
        return None
    return reader if kept < all_rows else None


def sizes(padded: Node, dim: int, kept: Node) -> tuple[int, int]:
    """Rows with and without padding; both are numbers where one of the functions here has found them."""
    found = shape_of(padded)[dim], shape_of(kept)[dim]
    assert isinstance(found[0], int)
    assert isinstance(found[1], int)
    return found[0], found[1]


def shard_without_padding(shard: Node, dim: int, rows: int) -> tuple[Node, list[Node]]:
    """The first `rows` rows of a shard where the graph has them, and the pad that nobody else reads; else the shard."""
    source = _padded_at_the_end(shard, dim)
    if source is None or shape_of(source)[dim] != rows:
        return shard, []
    return source, [shard] if len(shard.users) == 1 else []


def made_alike(padded: int, kept: int, ranks: int) -> bool:
    """Whether shards are of one size on all ranks, and padding stands behind those of all ranks: as where a vocabulary has it.

    Else what makes a shard is shorter on some ranks, and predictions for it would be, too: ranks could decide differently.
    """
    return padded // ranks != -(-kept // ranks)


def scattered_without_padding(padded: Node, dim: int, ranks: int) -> tuple[Node, list[Node]] | None:
    """The tensor of which `padded` has the rows along `dim`, with zeros behind them; and the nodes between the two."""
    if not isinstance(shape_of(padded)[dim], int):
        return None
    source = _padded_at_the_end(padded, dim)
    if source is not None:
        return (source, [padded]) if _pads_zeros(padded) else None
    if padded.target is not aten.cat.default or cat_dim(padded) != dim:
        return None
    pieces = padded.args[0]
    assert isinstance(pieces, Sequence)
    whole: Node | None = None
    glue, row = [padded], 0
    for piece in pieces:
        assert isinstance(piece, Node)
        if whole is not None and row == shape_of(whole)[dim] and _is_zeros(piece):
            continue  # what only a piece of zeros reads goes with the dead code
        chain = back_through_copies(piece)
        unpadded = _padded_at_the_end(chain[-1], dim) if _pads_zeros(chain[-1]) else None
        chain += [] if unpadded is None else back_through_copies(unpadded)
        found = block_source(chain[-1])
        if whole is not None and row == shape_of(whole)[dim] and piece.op == "placeholder":
            raise NotSeparable(
                f"{name_of(piece)}, which is scattered behind the rows of {name_of(whole)}, is an input of this graph, and not "
                "known to be the zeros of a rank without a shard: a size that divides by the ranks of the group needs none"
            )
        if found is None or found[1] != dim or found[0] is not (whole or found[0]) or block_start(chain[-1]) != row:
            return None
        whole = found[0]
        glue += chain
        size = shape_of(chain[-1])[dim]
        assert isinstance(size, int)
        row += size
        if unpadded is not None and row != shape_of(whole)[dim]:
            return None  # padded in the middle
    if whole is None or row != shape_of(whole)[dim] or row == shape_of(padded)[dim]:
        return None
    splits = {o for node in glue for o in node.all_input_nodes if whole in o.all_input_nodes}
    return whole, [*glue, *splits]


def end_padding(shape: Shape, dim: int, rows: int) -> list[int]:
    """The argument of a pad that adds so many rows along `dim`, behind the last one."""
    return [*[0] * (2 * (len(shape) - 1 - dim)), 0, rows]


def _padded_at_the_end(node: Node, dim: int) -> Node | None:
    """What a node has padded along `dim`, behind the last row, and nowhere else."""
    if node.target is not aten.constant_pad_nd.default:
        return None
    (source,) = node.all_input_nodes
    amounts = argument(node, "pad")
    rows = shape_of(node)[dim] - shape_of(source)[dim]
    wanted = end_padding(shape_of(node), dim, rows) if isinstance(rows, int) and rows > 0 else None
    return source if list(amounts[: len(wanted or ())]) == wanted and not any(amounts[len(wanted or ()) :]) else None


def _pads_zeros(node: Node) -> bool:
    return node.target is aten.constant_pad_nd.default and bool(argument(node, "value") == 0)


def _is_zeros(node: Node) -> bool:
    """Whether a tensor is all zeros."""
    if node.target is aten.full.default:
        return bool(argument(node, "fill_value") == 0)
    return _pads_zeros(node) and (0 in shape_of(node.all_input_nodes[0]) or _is_zeros(node.all_input_nodes[0]))
