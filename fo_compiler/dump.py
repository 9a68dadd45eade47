"""Dumps of a compile: the graph before and after, each region as a drawing, its schedule as a timeline.

<dump_dir>/rank<r>/<number>_<graph>/
    before.txt  after.txt      one line a node: name, dtype and shape, op and inputs; region, step and stream
    records.txt  records.json  what was done with each collective, and why
    <region>.dot               the rewritten region, for Graphviz
    <region>_timeline.txt      the program of this rank, step by step
    <region>_predicted.json    when the machine model says that each step happens, as a Chrome trace
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from .errors import OptionError
from .records import GraphRecords, format_table
from .schedule import Schedule
from .schedule.picture import chrome_trace
from .schedule.simulate import Simulation
from .schedule.timeline import text_timeline

log = logging.getLogger(__name__)


class GraphDump:
    """The dump of one graph: opened before the rewrite, finished after it."""

    def __init__(self, directory: Path, before: str) -> None:
        self.directory = directory
        self.before = before

    @classmethod
    def open(cls, dump_dir: str | None, which: str, rank: int, graph: Graph) -> GraphDump | None:
        """Make the directory of this graph; None without `dump_dir`. Raises OptionError if it cannot be written."""
        if dump_dir is None:
            return None
        parent = Path(dump_dir) / f"rank{rank}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            number = sum(1 for entry in parent.iterdir() if entry.is_dir())
            while True:
                directory = parent / f"{number:03d}_{which}"
                try:
                    directory.mkdir()
                    break
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise OptionError(
                f"option 'dump_dir': expected a directory that can be written, got {dump_dir!r} ({error.strerror})."
            ) from error
        return cls(directory, graph_text(graph))

    def finish(
        self, graph: Graph, regions: list[tuple[str, Schedule, int, Simulation | None]], records: GraphRecords
    ) -> None:
        """Write all files; `regions` are (tag, schedule, rank in the group, prediction). A full disk is logged, not raised."""
        files = {
            "before.txt": self.before,
            "after.txt": graph_text(graph),
            "records.txt": format_table(records.records),
            "records.json": json.dumps([asdict(record) for record in records.records], indent=2) + "\n",
        }
        for tag, schedule, rank, prediction in regions:
            files[f"{tag}.dot"] = region_dot(graph, tag)
            files[f"{tag}_timeline.txt"] = text_timeline(schedule, rank)
            if prediction is not None:
                files[f"{tag}_predicted.json"] = json.dumps(chrome_trace(schedule, prediction))
        try:
            for name, text in files.items():
                (self.directory / name).write_text(text)
        except OSError as error:
            log.warning("could not write the dump %s: %s", self.directory, error)
            return
        log.info("wrote %s", os.fspath(self.directory))


def graph_text(graph: Graph) -> str:
    """One line a node: name, type, call, and where it belongs in a rewritten region."""
    rows = [(node.name, _type(node), _call(node), _place(node)) for node in graph.nodes]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = []
    for name, type_, call, place in rows:
        line = f"{name:{widths[0]}}  {type_:{widths[1]}}  {call}"
        lines.append(f"{line:<110}  # {place}" if place else line)
    return "\n".join(lines) + "\n"


def _type(node: Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    return "" if value is None else type(value).__name__


def _call(node: Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.op
    target = node.target
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    name = name.removesuffix(".default")
    if name == "fo_compiler.announce":
        return f"{name}({node.args[0]}, <the records of this graph>)"
    shown = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{name if node.op == 'call_function' else node.op}({', '.join(shown)})"


def _argument(value: Any) -> str:
    text = repr(value)  # of a node: its name
    return text if len(text) <= 120 else f"{text[:117]}..."


def _place(node: Node) -> str:
    place = node.meta.get("fo")
    if place is None:
        return ""
    slice_ = "" if place.slice is None else f" slice {place.slice}"
    return f"{place.region} step {place.step}{slice_} on {place.stream}"


def region_dot(graph: Graph, tag: str) -> str:
    """The nodes of one rewritten region for Graphviz: a box a node, coloured by stream, ordered by their data."""
    nodes = [node for node in graph.nodes if getattr(node.meta.get("fo"), "region", None) == tag]
    colours = {"compute": "#cfe2f3", "comm": "#fce5cd"}
    lines = [
        f'digraph "{tag}" {{',
        "  rankdir=TB;",
        '  node [shape=box, style=filled, fontname="monospace"];',
    ]
    for node in nodes:
        place = node.meta["fo"]
        lines.append(
            f'  "{node.name}" [fillcolor="{colours[str(place.stream)]}", label="{node.name}\\n{_type(node)}"];'
        )
    inside = set(nodes)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                lines.append(f'  "{source.name}" [fillcolor="white", style=dashed];')
            lines.append(f'  "{source.name}" -> "{node.name}";')
    return "\n".join([*dict.fromkeys(lines), "}"]) + "\n"
