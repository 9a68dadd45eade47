"""The pass: every collective of a post-grad graph, to its record and, where it pays, to a rewritten region.

site -> region -> schedule -> rewrite,  one collective after the other;  then order, then a check
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx
from torch.fx import Graph, Node

from ..dump import GraphDump
from ..options import Options
from ..records import GraphRecords, Record, format_table, publish
from ..runtime import ops
from ..runtime.transport import current_transport
from ..schedule import Kind, Schedule, verify
from ..torch_adapter import group_members, inductor_pass_class, trace_artifact
from .decide import decide, machine_of
from .graph_verifier import signature, verify_graph
from .order import pin_order
from .races import check_plan
from .regions import Region, plan_region
from .rewrite import rewrite_region
from .rules import registered
from .separability import NotSeparable, shape_of, tensor_of
from .sites import Groups, LeftAlone, Site, group_name_of, is_collective, site_of
from .slice_matmuls import use_slice_matmuls
from .streams import assign_streams, has_streams, plan_of

_SHORT = {
    Kind.ALL_GATHER: "ag",
    Kind.REDUCE_SCATTER: "rs",
    Kind.ALL_REDUCE: "ar",
    Kind.ALL_TO_ALL: "aa",
    Kind.ALL_TO_ALL_OUT: "aa",
}


@dataclass(frozen=True)
class Rewritten:
    """One region that was rewritten: for the dumps."""

    tag: str
    region: Region
    schedule: Schedule


class FlashOverlapPass(inductor_pass_class()):  # type: ignore[misc]
    """Inductor pass that does all of this package's work on a graph.

    Use it alone as `torch.compile(model, options={"post_grad_custom_post_pass": FlashOverlapPass()})`; the backend
    `flashoverlap` uses it too. `before` are custom passes that run first.
    """

    def __init__(self, options: Options | None = None, before: tuple[Callable[[Graph], None], ...] = ()) -> None:
        self.options = options or Options.create()
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
    collectives = [node for node in graph.nodes if is_collective(node)]
    if not collectives:
        return GraphRecords(())
    which = graph_kind(graph)
    outputs_before, digest = signature(graph), _graph_digest(graph)
    dump = GraphDump.open(options.dump_dir, which, _global_rank(), graph)
    near = matmuls_next_to(collectives, groups) if options.depth != 1 and options.rewrite != "never" else {}
    records: list[Record] = []
    done: list[Rewritten] = []
    taken_out: dict[str, bool] = {}
    for node in collectives:
        reserved = frozenset(matmul for matmul, owners in near.items() if owners != {node})
        record, rewritten = _handle(graph, node, which, options, groups, len(done), reserved)
        records.append(record)
        taken_out[node.name] = rewritten is not None
        if rewritten is not None:
            done.append(rewritten)
    published = GraphRecords(tuple(records), options.agreement, digest)
    _announce(graph, published)
    verify_graph(graph, outputs_before, taken_out)
    if has_streams(graph):
        if options.compute_streams > 1:
            use_slice_matmuls(graph)
        assign_streams(graph, options.compute_streams)
        graph.lint()
        check_plan(plan_of(graph))
    if dump is not None:
        dump.finish(graph, [(r.tag, r.schedule, r.region.site.rank) for r in done], published)
    if pin:
        pin_order(graph, everything=bool(done))
    trace_artifact(f"fo_compiler_{which}_records", lambda: format_table(published.records))
    publish(published)
    return published


def _graph_digest(graph: Graph) -> str:
    """Tells a graph from any other one, whatever its nodes are called."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def line(node: Node) -> str:
        args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        return f"{node.op} {node.target if node.op != 'placeholder' else ''} {args} {node.meta.get('val')}"

    return hashlib.sha256("\n".join(map(line, graph.nodes)).encode()).hexdigest()[:16]


def matmuls_next_to(collectives: list[Node], groups: Groups) -> dict[Node, set[Node]]:
    """The matmuls that are the first on their way from or to a collective, and those collectives."""
    near: dict[Node, set[Node]] = {}
    for node in collectives:
        site = site_of(node, groups)
        if isinstance(site, LeftAlone):
            continue
        try:
            for matmul in plan_region(site, 1).matmuls:
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


def _handle(
    graph: Graph,
    node: Node,
    which: str,
    options: Options,
    groups: Groups,
    number: int,
    reserved: frozenset[Node],
) -> tuple[Record, Rewritten | None]:
    """One collective: its record, and the region if it was rewritten."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name, group = f"{node.target._opname} ({node.name})", group_name_of(node) or ""
    site = site_of(node, groups)

    def left_alone(reason: str) -> tuple[Record, None]:
        tensor = _describe(site) if isinstance(site, Site) else ""
        return Record(which, name, site.ranks, False, None, (), reason, group, tensor), None

    if isinstance(site, LeftAlone):
        return left_alone(site.reason)
    if options.rewrite == "never":
        return left_alone("option rewrite='never'")
    try:
        decision = decide(site, options, reserved)
    except NotSeparable as refusal:
        return left_alone(str(refusal))
    region, schedule = decision.region, decision.schedule
    if schedule is None:
        return left_alone(decision.reason)
    _verify_once(schedule)
    tag = f"{_SHORT[region.site.kind]}{number}"
    matmuls = tuple(node.name for node in region.matmuls)
    site = region.site
    tensor = _describe(site)
    rewrite_region(graph, region, schedule, tag)
    described = schedule.describe()
    record = Record(which, name, site.ranks, True, described, matmuls, decision.reason, group, tensor)
    return record, Rewritten(tag, region, schedule)


_verify_once = lru_cache(maxsize=1024)(verify)  # the layers of a model share their schedules


def _describe(site: Site) -> str:
    dtype = str(tensor_of(site.value).dtype).removeprefix("torch.")
    return f"{dtype}{list(shape_of(site.value))} along dim {site.dim}"


def _announce(graph: Graph, published: GraphRecords) -> None:
    """Let the graph carry its records, in an op that runs before its first transfer or collective.

    The op stands by itself. It must not hand a tensor on: an alias of what a collective sends is one more name for
    memory that Inductor may let the collective write to.
    """
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
