"""What was done with each collective, and why: one record a collective, shown to whoever asks.

A compile publishes the records of a graph. They also travel inside the rewritten graph (the `announce` op), so that a
graph that comes out of a cache, where no pass runs, publishes the same records when it first runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import string
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from urllib.parse import quote, unquote

log = logging.getLogger(__name__)
# What stays as it is in a payload, so that it can be read in a dump.
_PLAIN = "".join(set(string.printable) - set(string.whitespace) - set('"\\%')) + " "


@dataclass(frozen=True)
class Record:
    """What was done with one collective."""

    graph: str
    """`forward`, `backward` or `inference`."""
    collective: str
    """The op and the name of its node, as in `all_gather_into_tensor (all_gather_into_tensor_1)`."""
    group_size: int
    """Ranks in its process group; 0 where the group is not known."""
    rewritten: bool
    schedule: str | None
    """The schedule of the rewritten region, as in `ring` or `direct x2` (two slices a rank)."""
    region: tuple[str, ...]
    """Names of the matmuls that run slice by slice; empty where the collective is left alone."""
    reason: str
    group: str = ""
    """Name of the process group."""
    tensor: str = ""
    """The tensor that all ranks together hold, as in `float32[4, 128] along dim 1`; empty where there is none."""

    def __str__(self) -> str:
        verb = f"rewritten ({self.schedule})" if self.rewritten else "left alone"
        return f"{self.graph}: {self.collective}: {verb}: {self.reason}"


@dataclass(frozen=True)
class GraphRecords:
    """The records of one graph; `key` is a digest of all of it, the same wherever they are published from.

    `agreement` is the option of that name: what happens when the ranks differ. `graph` tells graphs apart whose records are
    the same.
    """

    records: tuple[Record, ...]
    agreement: str = "error"
    graph: str = ""
    key: str = field(default="", init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self._json().encode()).hexdigest()[:16]
        object.__setattr__(self, "key", digest)

    def _json(self) -> str:
        rows = [asdict(record) for record in self.records]
        return json.dumps({"agreement": self.agreement, "graph": self.graph, "records": rows}, separators=(",", ":"))

    def to_payload(self) -> str:
        """A string that a graph can carry: the key, then the records. Inductor's C++ programs do not escape quotes in strings."""
        return f"{self.key} {quote(self._json(), safe=_PLAIN)}"

    @classmethod
    def from_payload(cls, payload: str) -> GraphRecords:
        data = json.loads(unquote(payload.partition(" ")[2]))
        records = tuple(Record(**{**row, "region": tuple(row["region"])}) for row in data["records"])
        return cls(records, data["agreement"], data["graph"])


@dataclass(eq=False)  # an open block is told from another one with equal records
class Report:
    """The records of some compiles, each graph once. Prints as a table."""

    graphs: dict[str, GraphRecords] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        return [record for graph in self.graphs.values() for record in graph.records]

    @property
    def rewritten(self) -> list[Record]:
        return [record for record in self.records if record.rewritten]

    def add(self, graph: GraphRecords) -> None:
        self.graphs.setdefault(graph.key, graph)

    def to_json(self) -> str:
        """The records as a JSON list of objects, whose keys are the fields of `Record`."""
        return json.dumps([asdict(record) for record in self.records], indent=2)

    def __str__(self) -> str:
        return format_table(self.records)


def format_table(records: Sequence[Record], width: int = 150) -> str:
    """The records as a table of at most `width` columns, reasons wrapped; the last line counts them."""
    if not records:
        return "no collectives: nothing was compiled, or the graphs have none\n"
    header = ("graph", "collective", "ranks", "schedule", "matmuls", "why")
    rows = [
        (
            record.graph,
            record.collective.partition(" (")[2].rstrip(")") or record.collective,
            str(record.group_size),
            record.schedule or "left alone",
            ", ".join(record.region) or "-",
            f"{record.reason} [{record.tensor}]" if record.tensor else record.reason,
        )
        for record in records
    ]
    caps = (10, 28, 5, 13, 34)  # no name of a schedule is longer
    widths = [min(cap, max(len(row[column]) for row in (header, *rows))) for column, cap in enumerate(caps)]
    widths.append(max(20, width - sum(widths) - 2 * len(widths)))
    lines: list[str] = []
    for row in (header, tuple("-" * w for w in widths), *rows):
        cells = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, widths, strict=True)]
        for index in range(max(map(len, cells))):
            parts = (cell[index] if index < len(cell) else "" for cell in cells)
            lines.append("  ".join(f"{part:{w}}" for part, w in zip(parts, widths, strict=True)).rstrip())
    done = sum(record.rewritten for record in records)
    lines.append(f"{done} of {len(records)} collectives rewritten")
    return "\n".join(lines) + "\n"


_recorders: list[Report] = []
_published: set[str] = set()


def publish(graph: GraphRecords) -> None:
    """Log the records, once a process, and hand them to every open `record()` block."""
    for report in _recorders:
        report.add(graph)
    if graph.key in _published:
        return
    _published.add(graph.key)
    done = sum(record.rewritten for record in graph.records)
    log.info("%d of %d collectives of a graph rewritten", done, len(graph.records))
    for record in graph.records:
        log.debug("%s", record)


def is_recording() -> bool:
    """Whether a `record()` block is open, in any thread."""
    return bool(_recorders)


def payload_key(payload: str) -> str:
    """The key of the records in a payload, without reading them."""
    return payload[:16]


def publish_payload(payload: str) -> None:
    """Publish the records that a compiled graph carries; does next to nothing when they are known already."""
    key = payload_key(payload)
    if key in _published and all(key in report.graphs for report in _recorders):
        return
    publish(GraphRecords.from_payload(payload))


@contextmanager
def record() -> Iterator[Report]:
    """Collect the records of all that is compiled, or first runs out of a cache, inside the block.

    A graph that is compiled twice appears once. A graph that was compiled before, and runs again inside the block,
    appears too.
    """
    report = Report()
    _recorders.append(report)
    try:
        yield report
    finally:
        _recorders.remove(report)
