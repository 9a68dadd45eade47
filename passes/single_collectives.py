"""Every collective as one op of one tensor, before sites are looked for.

    coalesced     op_coalesced([a, b, ...])  ->  op(a), op(b), ...
                  afterwards those that were left alone are coalesced again: all of them, and the graph is as it was
    repeated      two equal collectives of the same tensor  ->  the first one, read by all
                  also pads in front of them, and what is done with both results in the same way, as the blocks of a gather
                  along another dim
    waits         of one collective, or of what was awaited already  ->  the first one

What remains of them in the records: a coalesced collective has one record if it stays whole, and one a part if not; a
repeated one has the verdict of the first.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..records import Record
from .aliases import is_returned, is_view
from .rules import aten
from .sites import WAIT, is_collective

c10d = torch.ops._c10d_functional

SINGLE_OF: dict[Any, Any] = {
    c10d.all_gather_into_tensor_coalesced.default: c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default: c10d.reduce_scatter_tensor.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce.default,
}
_BLOCK_OPS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
    aten.slice.Tensor,
    aten.cat.default,
)


@dataclass(frozen=True)
class Coalesced:
    """A coalesced collective that its parts stand in for. `items` are the name and meta of each result that was read."""

    name: str
    target: torch._ops.OpOverload
    args: tuple[Any, ...]  # behind the list of tensors
    meta: dict[str, Any]
    items: Mapping[int, tuple[str, dict[str, Any]]]
    parts: tuple[Node, ...]


class SingleCollectives:
    """Brings the collectives of a graph to single ones; `finish` takes back what nobody made use of.

    The graph is valid before and after each. Where it is not `enabled`, nothing is touched.
    """

    def __init__(self, graph: Graph, enabled: bool = True) -> None:
        self.graph = graph
        nodes = list(graph.nodes) if enabled else []
        self.coalesced = [c for node in nodes if (c := self._split(node)) is not None]
        for node in [node for node in graph.nodes if is_collective(node)] if enabled else ():
            self._wait_once(node)
        self._pad_once(n for n in nodes if n.target not in SINGLE_OF and is_collective(n))
        self.repeated = self._merge(n for n in nodes if n.target not in SINGLE_OF and is_collective(n))

    def finish(self, records: Mapping[str, Record]) -> tuple[list[Record], dict[str, bool]]:
        """The records of the collectives as they were written, and by name which of these are gone from the graph.

        `records` are those of the single collectives, by name.
        """
        found = dict(records)
        gone = {name: record.rewritten for name, record in records.items()}
        for name, (op_name, first) in self.repeated.items():
            reason = f"the same as {first}, whose result is read instead: {found[first].reason}"
            found[name] = replace(found[first], collective=f"{op_name} ({name})", reason=reason)
            gone[name] = True
        for c in self.coalesced:
            left = [part for part in c.parts if not found[part.name].rewritten]
            joined = (len(left) > 1 or len(left) == len(c.parts)) and self._join(c, left)
            gone[c.name] = not joined
            if joined:
                for part in left:
                    del gone[part.name]
            if joined and len(left) == len(c.parts):
                found[c.name] = _record_of_all(c, [found.pop(part.name) for part in left])
        return list(found.values()), gone

    # --- coalesced --------------------------------------------------------------------------------------------------

    def _split(self, node: Node) -> Coalesced | None:
        target = SINGLE_OF.get(node.target)
        if target is None or any(user.target is not operator.getitem for user in node.users):
            return None
        sources = node.args[0]
        assert isinstance(sources, list)
        assert isinstance(node.target, torch._ops.OpOverload)
        parts: list[Node] = []
        for index, source in enumerate(sources):
            with self.graph.inserting_before(node):
                name = f"{node.name}_part{index}"
                part = self.graph.create_node("call_function", target, (source, *node.args[1:]), name=name)
            part.meta.update({**node.meta, "val": node.meta["val"][index]})
            parts.append(part)
        items = {}
        for user in list(node.users):
            number = user.args[1]
            assert isinstance(number, int)
            items[number] = user.name, user.meta
            user.replace_all_uses_with(parts[number], propagate_meta=False)
            self.graph.erase_node(user)
        self.graph.erase_node(node)
        return Coalesced(node.name, node.target, node.args[1:], node.meta, items, tuple(parts))

    def _join(self, c: Coalesced, left: list[Node]) -> bool:
        """Coalesce the parts that are left again, where they still stand together."""
        first, sources = min(left), [part.args[0] for part in left]
        if any(isinstance(source, Node) and not source < first for source in sources):
            return False
        with self.graph.inserting_before(first):
            node = self.graph.call_function(c.target, (sources, *c.args))
            node.meta.update({**c.meta, "val": [part.meta["val"] for part in left]})
            items = [self.graph.call_function(operator.getitem, (node, number)) for number in range(len(left))]
        for item, part in zip(items, left, strict=True):
            name, meta = c.items.get(c.parts.index(part), (part.name, part.meta))
            part.replace_all_uses_with(item, propagate_meta=False)
            self.graph.erase_node(part)
            item.meta.update(meta)
            item.name = name
        node.name = c.name
        return True

    # --- waits ------------------------------------------------------------------------------------------------------

    def _wait_once(self, node: Node) -> None:
        waits = sorted(user for user in node.users if user.target is WAIT)
        others = waits[1:]
        for wait in waits:
            others += [user for user in wait.users if user.target is WAIT]
        for other in others:
            other.replace_all_uses_with(waits[0], propagate_meta=False)
            self.graph.erase_node(other)
        if others:
            self._wait_once(node)

    # --- repeated ---------------------------------------------------------------------------------------------------

    def _pad_once(self, collectives: Iterable[Node]) -> None:
        """Let equal pads in front of collectives be one: only ranks with a short shard have them, and ranks decide alike."""
        first: dict[Hashable, Node] = {}
        for node in collectives:
            pad = node.args[0]
            if isinstance(pad, Node) and pad.target is aten.constant_pad_nd.default:
                kept = first.setdefault(_call_of(pad), pad)
                if kept < pad:
                    node.replace_input_with(pad, kept)
                    if not pad.users:
                        self.graph.erase_node(pad)

    def _merge(self, collectives: Iterable[Node]) -> dict[str, tuple[str, str]]:
        """Repeated collective by name -> its op, and the name of the first one."""
        first: dict[Hashable, Node] = {}
        merged: dict[str, tuple[str, str]] = {}
        for node in collectives:
            kept = first.setdefault(_call_of(node), node)
            if kept is node or any(len(n.users) != 1 or next(iter(n.users)).target is not WAIT for n in (kept, node)):
                continue
            assert isinstance(node.target, torch._ops.OpOverload)
            (wait,), (kept_wait,) = node.users, kept.users
            if is_returned(wait) and is_returned(kept_wait):
                continue  # to a caller they are two tensors
            if wait < kept_wait:
                wait.prepend(kept_wait)
            wait.replace_all_uses_with(kept_wait, propagate_meta=False)
            self.graph.erase_node(wait)
            self.graph.erase_node(node)
            merged[node.name] = node.target._opname, kept.name
        for kept in first.values():  # also where torch has merged collectives, but not what is done with them
            for wait in kept.users:
                self._merge_blocks(wait)
        return merged

    def _merge_blocks(self, source: Node) -> None:
        """Let equal blocks of a tensor, and equal cats of these, be one."""
        seen: dict[Hashable, Node] = {}
        for user in sorted(user for user in source.users if user.target in _BLOCK_OPS):
            kept = seen.setdefault(_call_of(user), user)
            one_memory = is_view(user, of_reshapes=False) or not (is_returned(user) and is_returned(kept))
            if kept is not user and one_memory:
                user.replace_all_uses_with(kept, propagate_meta=False)
                self.graph.erase_node(user)
        for kept in seen.values():
            self._merge_blocks(kept)


def _call_of(node: Node) -> Hashable:
    """Equal for nodes that compute the same."""

    return node.target, _tuples(node.args), _tuples(sorted(node.kwargs.items()))


def _tuples(value: Any) -> Hashable:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


def _record_of_all(c: Coalesced, parts: list[Record]) -> Record:
    reasons = "; ".join(dict.fromkeys(record.reason for record in parts))
    return replace(
        parts[0], collective=f"{c.target._opname} ({c.name})", reason=f"none of its {len(parts)} tensors: {reasons}"
    )
