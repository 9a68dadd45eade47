"""The pass: every collective of a post-grad graph, to its record and, where it pays, to a rewritten region.

site -> region -> schedule -> rewrite,  one collective after the other;  then order, then a check

Collectives whose results are added are merged first, and an all-reduce may be split in two, each half a region of its own.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx import Graph, Node

from ..dump import GraphDump
from ..errors import OptionError, RewriteError
from ..options import LIBRARY, Options
from ..records import GraphRecords, Record, format_table, publish
from ..runtime import ops
from ..runtime.transport import current_transport
from ..schedule import Kind, Schedule, verify
from ..torch_adapter import group_members, inductor_pass_class, orders_mutation, trace_artifact
from .chains import find_chain
from .decide import Decision, decide, doubt_us, machine_of
from .edit import Edit
from .graph_verifier import signature, verify_graph
from .merge_sums import merge_sums
from .order import pin_order
from .predict import Prediction, predict
from .races import check_plan
from .regions import Region, first_matmuls
from .rewrite import rewrite_region
from .rules import registered
from .separability import NotSeparable, shape_of, tensor_of
from .single_collectives import SingleCollectives
from .sites import Groups, LeftAlone, Site, group_name_of, is_collective, site_of
from .sizes import drop_unused_sizes, sizes_from_inputs
from .slice_matmuls import use_slice_matmuls
from .sliced_all_reduce import SlicedAllReduce, rewrite_in_slices, slice_all_reduce
from .split_all_reduce import split_all_reduce, wanted_matmuls
from .streams import assign_streams, has_streams, plan_of
from .transports import COPY_ENGINE, choose_transport, with_copy_engine
from .whole_regions import KINDS, use_whole_region

_SHORT = {
    Kind.ALL_GATHER: "ag",
    Kind.REDUCE_SCATTER: "rs",
    Kind.ALL_REDUCE: "ar",
    Kind.ALL_TO_ALL: "aa",
    Kind.ALL_TO_ALL_OUT: "aa",
    Kind.ALL_GATHER_OUT: "ag",
    Kind.CHAIN: "chain",
}


@dataclass(frozen=True)
class Rewritten:
    """One region that was rewritten: for the dumps."""

    tag: str
    region: Region
    schedule: Schedule | None  # None where the library's own collective runs on slices
    prediction: Prediction | None = None


class FlashOverlapPass(inductor_pass_class()):  # type: ignore[misc]
    """Inductor pass that does all of this package's work on a graph.

    Use it alone as `torch.compile(model, options={"post_grad_custom_post_pass": FlashOverlapPass()})`; the backend
    `flashoverlap` uses it too. `before` are custom passes that run first. Raises OptionError.
    """

    def __init__(
        self, options: Options | Mapping[str, Any] | None = None, before: tuple[Callable[[Graph], None], ...] = ()
    ) -> None:
        self.options = options if isinstance(options, Options) else Options.create(options)
        self.before = before

    def __call__(self, graph: Graph) -> None:
        for other in self.before:
            other(graph)
        overlap(graph, self.options, current_transport())

    def uuid(self) -> bytes:
        """What the compile cache tells two passes apart by: all that the rewritten graph depends on."""
        parts = [
            _source_digest(),
            torch.__version__,
            platform.python_version(),
            repr(self.options),
            *(machine_of(self.options, device).digest() for device in ("cpu", "cuda")),
            repr(sorted(group_members().items())),
            repr(_global_rank()),
            repr(sorted(registered.items())),
            *(repr(uuid()) for other in self.before if (uuid := getattr(other, "uuid", None))),
        ]
        if self.options.dump_dir is not None:
            parts.append(_fresh_token())  # dumps are written by the pass: a cached graph would have none
        return hashlib.sha256("\0".join(parts).encode()).digest()


def overlap(graph: Graph, options: Options, groups: Groups, pin: bool = True) -> GraphRecords:
    """Rewrite `graph` in place, and publish a record for each of its collectives.

    `pin` fixes the order of launch for a compiler; an interpreter runs the nodes as they stand, and needs none of it.
    """
    if not any(map(is_collective, graph.nodes)):
        return GraphRecords(())
    which = graph_kind(graph)
    outputs_before, digest = signature(graph), _graph_digest(graph)
    dump = GraphDump.open(options.dump_dir, which, _global_rank(), graph)
    sizes_from_inputs(graph)
    singles = SingleCollectives(graph, enabled=options.rewrite != "never")
    collectives = {node.name: node for node in graph.nodes if is_collective(node)}
    rewriter = _Rewriter(graph, which, collectives, options, groups)
    for name, node in collectives.items():
        if name not in rewriter.records:  # it may have gone together with an earlier one
            rewriter.handle(node)
    records, gone = singles.finish({name: rewriter.records[name] for name in collectives})
    done = rewriter.done
    drop_unused_sizes(graph)
    published = GraphRecords(tuple(records), options.agreement, digest)
    _announce(graph, published)
    verify_graph(graph, outputs_before, gone)
    streams = has_streams(graph)
    if options.slice_matmul in ("library", "triton") or (streams and options.compute_streams > 1):
        if pin and not orders_mutation():
            raise OptionError(
                f"options slice_matmul and compute_streams=2 need torch 2.13 or newer, found {torch.__version__}: an older "
                "Inductor cannot keep an op that only writes in its place. Leave them at their defaults."
            )
        use_slice_matmuls(graph, "triton" if options.slice_matmul == "triton" else "library")
    if streams:
        assign_streams(graph, options.compute_streams, rewriter.transports)
        graph.lint()
        check_plan(plan_of(graph))
    if dump is not None:
        regions = [(r.tag, r.schedule, r.region.site.rank, r.prediction) for r in done if r.schedule is not None]
        dump.finish(graph, regions, published)
    if pin:
        _keep_slices_long(done)
        pin_order(graph, everything=bool(done))
    trace_artifact(f"fo_compiler_{which}_records", lambda: format_table(published.records))
    publish(published)
    return published


def _keep_slices_long(done: Sequence[Rewritten]) -> None:
    """Guard that slices of symbolic, unequal sizes have two rows or more, as in the first call.

    The graph is right for shorter ones, too. But Inductor asks of each slice whether it has no row, or one, and guards on
    each answer, also with a remainder by a size that may be 0. This guard stands before these: a shorter length is
    compiled anew, in fewer slices. As a plain bound of the size it would not: torch checks bounds last.
    """
    for region in (rewritten.region for rewritten in done):
        size, slices = tensor_of(region.site.value).shape[region.site.dim], region.slices
        if isinstance(size, torch.SymInt) and not region.slicing.are_equal and not size - size % slices >= 2 * slices:
            raise RewriteError(f"{size} rows are too few for {slices} slices: this is a bug")


def _graph_digest(graph: Graph) -> str:
    """Tells a graph from any other one, whatever its nodes are called."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def line(node: Node) -> str:
        args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        value = node.meta.get("val")  # of other things than tensors the text may hold an address of this process
        tensor = f"{value.dtype}{list(value.shape)}{list(value.stride())}" if isinstance(value, torch.Tensor) else ""
        return f"{node.op} {node.target if node.op != 'placeholder' else ''} {args} {tensor}"

    return hashlib.sha256("\n".join(map(line, graph.nodes)).encode()).hexdigest()[:16]


def matmuls_next_to(collectives: list[Node], groups: Groups) -> dict[Node, set[Node]]:
    """The matmuls that are the first on their way from or to a collective, and those collectives."""
    near: dict[Node, set[Node]] = {}
    for node in collectives:
        site = site_of(node, groups)
        if isinstance(site, LeftAlone):
            continue
        try:
            for matmul in first_matmuls(site):
                near.setdefault(matmul, set()).add(node)
        except NotSeparable:
            continue
    return near


def graph_kind(graph: Graph) -> str:
    """`forward`, `backward` or `inference`, by the names that AOTAutograd gives the inputs."""
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in names) else "inference"


class _Rewriter:
    """Takes the collectives of one graph, one after the other, to their records."""

    def __init__(
        self, graph: Graph, which: str, collectives: dict[str, Node], options: Options, groups: Groups
    ) -> None:
        self.graph = graph
        self.which = which
        self.options = options
        self.groups = groups
        self.records: dict[str, Record] = {}  # by the collective's name
        self.done: list[Rewritten] = []
        self.transports: dict[str, str] = {}  # by the region's tag
        self.collectives = collectives
        asked = [] if options.rewrite == "never" else list(collectives.values())
        self.near = matmuls_next_to(asked, groups)
        self.wanted = wanted_matmuls(asked, options, groups)

    def handle(self, node: Node) -> None:
        """One collective: its record, and its region or regions where it is rewritten."""
        site = site_of(node, self.groups)
        if isinstance(site, LeftAlone):
            self._leave_alone(node, site, site.reason)
        elif self.options.rewrite == "never":
            self._leave_alone(node, site, "option rewrite='never'")
        elif not self._rewrite_merged(site):
            reason = self._rewrite(site, [node])
            if reason is not None:
                self._leave_alone(node, site, reason)

    def _rewrite_merged(self, site: Site) -> bool:
        """Together with those whose results are added to its own, where there are any."""
        merged = merge_sums(self.graph, site, self.groups)
        if merged is None:
            return False
        if self._rewrite(merged.site, merged.collectives, (merged.edit,)) is None:
            return True
        merged.edit.undo()
        return False

    def _rewrite(self, site: Site, collectives: Sequence[Node], edits: tuple[Edit, ...] = ()) -> str | None:
        """Rewrite a site, which stands for `collectives` after `edits`. Returns the reason where it is left alone."""
        reserved = frozenset(matmul for matmul, owners in self.near.items() if not owners <= set(collectives))
        decision: Decision | None = None
        try:
            decision = decide(site, self.options, reserved)
            reason = decision.reason + _note(collectives)
        except NotSeparable as refusal:
            reason = str(refusal)
        parts = [] if decision is None or decision.schedule is None else [(decision.region, decision.schedule)]
        if site.kind is Kind.ALL_GATHER:
            later = [node for name, node in self.collectives.items() if name not in self.records]
            chain = find_chain(self.graph, site, decision, later, self.options, self.groups, reserved)
            if chain is not None:
                parts, edits = [(chain.region, chain.schedule)], chain.edits
                collectives, reason = (*collectives, *chain.scatters), chain.reason + _note(chain.scatters)
        if site.kind is Kind.ALL_REDUCE:
            least_us = -inf if decision is None else decision.saved_us
            sliced = slice_all_reduce(site, self.options, reserved)
            if sliced is not None and self.options.schedule == LIBRARY:
                least_us = inf
            elif sliced is not None and sliced.saved_us > least_us - doubt_us(decision, self.options):
                least_us = max(least_us, sliced.saved_us)
            else:
                sliced = None
            halves = split_all_reduce(self.graph, site, least_us, self.options, self.groups, reserved, self.wanted)
            if halves is None and sliced is not None:
                self._rewrite_in_slices(sliced, collectives, edits)
                return None
            if halves is not None:
                parts, edits = halves.parts, (*edits, halves.edit)
                reason = halves.reason + _note(collectives)
        if not parts:
            return reason
        matmuls = tuple(node.name for region, _ in parts for node in region.matmuls)
        ways = [choose_transport(region, schedule, self.options) for region, schedule in parts]
        reason = "; ".join(dict.fromkeys(part for part in (reason, *(why for _, why in ways)) if part))
        described = " + ".join(
            schedule.describe() + (", copy engine" if way == COPY_ENGINE else "")
            for (_, schedule), (way, _) in zip(parts, ways, strict=True)
        )
        for node in collectives:
            self._record(node, parts[0][0].site, True, reason, described, matmuls)
        for edit in edits:
            edit.keep()
        named = [(f"{_SHORT[r.site.kind]}{n}", r, s) for n, (r, s) in enumerate(parts, start=len(self.done))]
        dumps = self.options.dump_dir is not None
        self.done += [Rewritten(*each, predict(*each[1:], self.options) if dumps else None) for each in named]
        self.transports.update({tag: way for (tag, *_), (way, _) in zip(named, ways, strict=True)})
        for tag, region, schedule in reversed(named):  # the gather half reads what the scatter half makes
            _verify_once(schedule)
            rewrite_region(self.graph, region, schedule, tag, self.which)
        for (tag, region, schedule), (way, _) in zip(named, ways, strict=True):
            self._use_one_kernel(tag, region, schedule, way, collectives)
        return None

    def _rewrite_in_slices(self, sliced: SlicedAllReduce, collectives: Sequence[Node], edits: tuple[Edit, ...]) -> None:
        matmuls = tuple(node.name for node in sliced.region.matmuls)
        for node in collectives:
            self._record(node, sliced.region.site, True, sliced.reason + _note(collectives), sliced.describe(), matmuls)
        for edit in edits:
            edit.keep()
        tag = f"ar{len(self.done)}"
        self.done.append(Rewritten(tag, sliced.region, None))
        rewrite_in_slices(self.graph, sliced, tag, self.which)

    def _use_one_kernel(
        self, tag: str, region: Region, schedule: Schedule, way: str, collectives: Sequence[Node]
    ) -> None:
        """Make a region one op, where the option lets it; the records say so, or why not."""
        if self.options.slice_matmul != "whole" or region.site.kind not in KINDS or way != COPY_ENGINE:
            return
        value = tensor_of(region.site.value)
        machine = with_copy_engine(machine_of(self.options, value.device.type), value.nbytes / schedule.slices)
        forced = self.options.rewrite == "always"
        _, why = use_whole_region(self.graph, tag, schedule, machine, way, forced)
        for node in collectives:
            record = self.records[node.name]
            self.records[node.name] = replace(record, reason=f"{record.reason}; {why}")

    def _leave_alone(self, node: Node, site: Site | LeftAlone, reason: str) -> None:
        self._record(node, site, False, reason)

    def _record(
        self,
        node: Node,
        site: Site | LeftAlone,
        rewritten: bool,
        reason: str,
        schedule: str | None = None,
        matmuls: tuple[str, ...] = (),
    ) -> None:
        assert isinstance(node.target, torch._ops.OpOverload)
        name, tensor = f"{node.target._opname} ({node.name})", _describe(site) if isinstance(site, Site) else ""
        group = group_name_of(node) or ""
        self.records[node.name] = Record(
            self.which, name, site.ranks, rewritten, schedule, matmuls, reason, group, tensor
        )


def _note(collectives: Sequence[Node]) -> str:
    """For the record of several collectives that became one."""
    names = ", ".join(node.name for node in collectives)
    return f"; one for {names}, whose results are added" if len(collectives) > 1 else ""


_verify_once = lru_cache(maxsize=1024)(verify)  # the layers of a model share their schedules


def _describe(site: Site) -> str:
    dtype = str(tensor_of(site.value).dtype).removeprefix("torch.")
    return f"{dtype}{list(shape_of(site.value))} along dim {site.dim}"


def _announce(graph: Graph, published: GraphRecords) -> None:
    """Let the graph carry its records, in an op that runs before its first transfer or collective.

    The op stands by itself. It must not hand a tensor on: an alias of what a collective sends is one more name for
    memory that Inductor may let the collective write to.
    """
    ops.call_directly()
    tensors = (node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    anchor = next(tensors)
    with graph.inserting_after(anchor if anchor.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]):
        node = graph.create_node("call_function", ops.announce, (anchor, published.to_payload()), name="fo_records")
    node.meta["val"] = ops.announce(anchor.meta["val"], "")


def _global_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Digest of every source file of this package: another version never gets our cached code."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    roots = [Path(ops.__file__).resolve().parent.parent, Path(__file__).resolve().parent, package / "codegen"]
    for path in sorted({path for root in roots for path in root.rglob("*.py")}):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _fresh_token() -> str:
    import secrets

    return secrets.token_hex(8)
