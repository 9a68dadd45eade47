"""Which collectives of which kinds of graph are rewritten, beside what the stock pass of the installed torch does.

python benchmarks/coverage.py                 prints the page
python benchmarks/coverage.py --write docs    writes docs/coverage.md

The graphs are those of tests/graph_kinds.py; each has a test that compares its values, on threads, with the plain graph's.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fo_compiler.options import Options
from fo_compiler.passes.sites import is_collective
from fo_compiler.records import Record
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import rewrite_for_rank
from fo_compiler.torch_adapter import fake_process_group, fuse_as_micro_pipeline_does
from tests.graph_kinds import EXCHANGE, GATHER, KINDS, PEERS, REDUCE, SCATTER, GraphKind
from tests.graphs import capture

FORWARD, BACKWARD = "forward", "backward"
OPS = {
    "all_gather_into_tensor": GATHER,
    "all_gather_into_tensor_coalesced": GATHER,
    "reduce_scatter_tensor": SCATTER,
    "reduce_scatter_tensor_coalesced": SCATTER,
    "all_reduce": REDUCE,
    "all_reduce_coalesced": REDUCE,
    "all_to_all_single": EXCHANGE,
    "shard_dim_alltoall": EXCHANGE,
}
COLUMNS = [(op, direction) for op in (GATHER, SCATTER, REDUCE, EXCHANGE) for direction in (FORWARD, BACKWARD)]
WIDTH = 1024  # of the hidden dim: the stock pass takes no narrower shards where the last dim is gathered

# What a table of graphs does not show, and the test that proves it.
ELSEWHERE: tuple[tuple[str, str, str], ...] = (
    (
        "one graph serves all sizes, without a guard",
        "passes/test_symbolic.py",
        "test_one_graph_serves_all_sizes_without_a_guard",
    ),
    ("the same, compiled", "test_backend.py", "test_a_symbolic_graph_is_rewritten_once_and_serves_other_sizes"),
    (
        "slices that differ by a row, every kind",
        "passes/test_unequal_slices.py",
        "test_every_kind_is_cut_as_finely_as_asked",
    ),
    (
        "the same for every length, with one graph",
        "passes/test_unequal_slices.py",
        "test_one_graph_serves_every_length_without_a_guard",
    ),
    (
        "shards that are not equal, padded by DTensor",
        "passes/test_uneven.py",
        "test_sums_of_two_scattered_gradients_travel_once_on_every_rank",
    ),
    ("sizes that do not divide, and none at all", "test_backend.py", "test_an_uneven_or_empty_size_does_not_crash"),
    ("attention along query rows", "passes/test_attention.py", "test_query_rows_leave_slice_by_slice"),
    (
        "an all-reduce in two halves, over layers",
        "passes/test_split_all_reduce.py",
        "test_between_two_layers_each_half_hides_under_matmuls_of_its_own",
    ),
    (
        "two gradients that are added travel once",
        "passes/test_merge_sums.py",
        "test_gradients_of_three_matmuls_travel_once",
    ),
    ("coalesced gradients", "passes/test_single_collectives.py", "test_coalesced_gradients_leave_one_by_one"),
    ("random 8-bit programs", "passes/test_fp8.py", "test_eight_bit_matmuls_near_a_collective_are_unchanged"),
    (
        "random programs with gradients",
        "passes/test_gradient_properties.py",
        "test_gradients_of_a_tensor_parallel_block_are_unchanged",
    ),
    ("collectives of user code", "distributed/test_gloo.py", "test_collectives_of_user_code_are_found"),
    ("every dim on real ranks", "distributed/test_gloo.py", "test_every_gather_and_scatter_dim_of_four_ranks"),
    ("both axes of a mesh on real ranks", "distributed/test_gloo.py", "test_both_axes_of_a_mesh_in_one_graph"),
    (
        "training with sequence parallel",
        "distributed/test_gloo.py",
        "test_the_model_trains_as_under_plain_inductor_for_fifty_steps",
    ),
    ("training with all-reduces", "distributed/test_gloo.py", "test_all_reduces_train_as_under_plain_inductor"),
    ("16-bit sums", "distributed/test_gloo.py", "test_sixteen_bit_results_are_no_less_exact"),
    (
        "transformers: Llama",
        "distributed/test_clients.py",
        "test_llama_of_transformers_with_its_own_tensor_parallel_plan",
    ),
)

HEADER = """\
# Coverage: which collectives of which graphs are rewritten

Written by `python benchmarks/coverage.py --write docs`, with torch {torch}. Do not edit.

Each row is a kind of graph of `tests/graph_kinds.py`, each column a collective in the forward or in the backward half. A cell
reads *rewritten by us / all of them (fused by the stock pass)*. The stock pass is torch's own for tensor parallelism
(`torch._inductor.config._micro_pipeline_tp`), run on the same graph with a hidden size of {width}, as if NCCL and symmetric
memory were there. Ours are counted with `rewrite="always"`: by default a region is only rewritten where it is predicted to pay.

A row is proven by `test_values_and_records[name of the row]` in `tests/test_coverage.py` (C) or `tests/passes/test_peer_forms.py`
(P): it compares every output of the rewritten graph, gradients included, with that of the plain one, on threads.

"""


@dataclass
class Cell:
    """The collectives of one op and direction: how many there are, are rewritten by us, and fused by the stock pass."""

    all: int = 0
    ours: int = 0
    stock: int = 0

    def __str__(self) -> str:
        return f"{self.ours} / {self.all} ({self.stock})" if self.all else ""


@dataclass
class Row:
    """A kind of graph, the records of its collectives, and their cells."""

    kind: GraphKind
    records: tuple[Record, ...]
    cells: dict[tuple[str, str], Cell]

    def __str__(self) -> str:
        proof = "P" if self.kind.row == PEERS else "C"
        return "| " + " | ".join((str(self.kind), *(str(self.cells[column]) for column in COLUMNS), proof)) + " |"


@contextmanager
def fake_world(ranks: int = 2) -> Iterator[None]:
    """A process group, of which some fake kernels ask the size."""
    with fake_process_group(0, ranks):
        import_module("torch.distributed.tensor")  # registers shard_dim_alltoall
        yield


def records_of(kind: GraphKind) -> tuple[Record, ...]:
    world = LocalWorld(kind.ranks, kind.groups)
    return rewrite_for_rank(capture(kind.step, kind.example(8)), Options(rewrite="always"), world.transport(0))[
        1
    ].records


def row_of(kind: GraphKind, records: tuple[Record, ...]) -> Row:
    """What became of each collective by us (`records`) and by the stock pass."""
    inputs = kind.example(WIDTH)
    in_forward = sum(map(is_collective, capture(kind.function, inputs).graph.nodes))
    graph = capture(kind.step, inputs).graph
    collectives = [node.name for node in graph.nodes if is_collective(node)]
    fuse_as_micro_pipeline_does(graph)
    left = {node.name for node in graph.nodes if is_collective(node)}
    cells = {column: Cell() for column in COLUMNS}
    for record in records:
        op, name = re.fullmatch(r"(\w+) \((\w+?)(?:_part\d+)?\)", record.collective).groups()  # type: ignore[union-attr]
        cell = cells[OPS[op], FORWARD if collectives.index(name) < in_forward else BACKWARD]
        cell.all += 1  # each part of a coalesced collective counts
        cell.ours += record.rewritten
        cell.stock += name not in left
    return Row(kind, records, cells)


def page(rows: list[Row]) -> str:
    """docs/coverage.md"""
    total = {column: Cell() for column in COLUMNS}
    for row in rows:
        for column, cell in row.cells.items():
            total[column].all += cell.all
            total[column].ours += cell.ours
            total[column].stock += cell.stock
    lines = [HEADER.format(torch=torch.__version__.split("+")[0], width=WIDTH)]
    lines.append("| graph | " + " | ".join(f"{op}, {direction}" for op, direction in COLUMNS) + " | proof |")
    lines.append("|---" * (2 + len(COLUMNS)) + "|")
    lines += map(str, rows)
    lines.append("| **all** | " + " | ".join(f"**{total[column]}**" for column in COLUMNS) + " | |")
    lines += ["", "## Left alone", "", "| graph | collective | reason |", "|---|---|---|"]
    lines += [
        f"| {row.kind} | {record.collective.partition(' ')[0]} | {record.reason} |"
        for row in rows
        for record in row.records
        if not record.rewritten
    ]
    lines += ["", "## Proven elsewhere", "", "| what | test |", "|---|---|"]
    lines += [f"| {what} | `tests/{path}::{test}` |" for what, path, test in ELSEWHERE]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="DIR", type=Path, help="write coverage.md into this folder")
    args = parser.parse_args()
    with fake_world():
        text = page([row_of(kind, records_of(kind)) for kind in KINDS])
    if args.write is None:
        print(text, end="")
    else:
        (args.write / "coverage.md").write_text(text)


if __name__ == "__main__":
    main()
