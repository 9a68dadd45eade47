"""The pass as a whole: one record a collective, graph kinds, cache keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import fo_compiler
from fo_compiler.errors import OptionError
from fo_compiler.options import Options
from fo_compiler.passes.order import is_pinned, pin_order
from fo_compiler.passes.overlap_pass import FlashOverlapPass, graph_kind, overlap
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter
from tests.passes.helpers import rewritten, tensors


def two_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = reduce_scatter(torch.relu(all_gather(x, 0, 2) @ w) @ v, 0, 2)
    return all_reduce(h)


SHAPES = ((4, 6), (6, 8), (8, 6))


def test_each_collective_has_one_record_in_graph_order() -> None:
    gm = capture(two_layers, tensors(*SHAPES))
    with fo_compiler.record() as report:
        overlap(gm.graph, Options(rewrite="always"), LocalWorld(2).transport(0))
    assert [(r.collective.partition(" ")[0], r.rewritten) for r in report.records] == [
        ("all_gather_into_tensor", True),
        ("reduce_scatter_tensor", True),
        ("all_reduce", False),
    ]
    assert all(r.reason and r.group_size == 2 for r in report.records)


def test_never_leaves_the_graph_as_it_was_and_says_so() -> None:
    gm = capture(two_layers, tensors(*SHAPES))
    before = [node.target for node in gm.graph.nodes]
    records = overlap(gm.graph, Options(rewrite="never"), LocalWorld(2).transport(0), pin=False).records
    assert [node.target for node in gm.graph.nodes if node.target is not ops.announce] == before
    assert {r.reason for r in records[:2]} == {"option rewrite='never'"}


def test_a_graph_without_collectives_is_not_touched() -> None:
    gm = capture(lambda x: x @ x, tensors((4, 4)))
    before = str(gm.graph)
    assert overlap(gm.graph, Options(), LocalWorld(2).transport(0)).records == ()
    assert str(gm.graph) == before


def test_the_records_travel_in_the_graph() -> None:
    gm = capture(two_layers, tensors(*SHAPES))
    published = overlap(gm.graph, Options(rewrite="always"), LocalWorld(2).transport(0))
    (announce,) = gm.graph.find_nodes(op="call_function", target=ops.announce)
    assert fo_compiler.records.GraphRecords.from_payload(announce.args[1]) == published


def test_graph_kinds_follow_the_names_that_aot_autograd_gives() -> None:
    for names, kind in (
        (["arg0_1"], "inference"),
        (["primals_1"], "forward"),
        (["primals_1", "tangents_1"], "backward"),
    ):
        graph = torch.fx.Graph()
        for name in names:
            graph.placeholder(name)
        assert graph_kind(graph) == kind


def test_pinned_nodes_form_one_chain_in_graph_order() -> None:
    gm = rewritten(capture(two_layers, tensors(*SHAPES)), 2)
    order = [node.name for node in gm.graph.nodes if is_pinned(node)]
    pin_order(gm.graph)
    gm.graph.lint()
    chain = [node for node in gm.graph.nodes if node.name in order]
    assert [node.name for node in chain] == order, "names and order are kept"
    for before, node in pairwise(chain):
        assert before in node.all_input_nodes


def test_the_cache_key_changes_with_options_and_not_otherwise() -> None:
    assert FlashOverlapPass(Options()).uuid() == FlashOverlapPass(Options()).uuid()
    keys = {
        FlashOverlapPass(options).uuid()
        for options in (Options(), Options(rewrite="always"), Options(schedule="ring"), Options(machine="h100-nvlink"))
    }
    assert len(keys) == 4


def test_options_of_the_pass_may_be_a_dict() -> None:
    assert FlashOverlapPass({"rewrite": "never"}).options == Options(rewrite="never")
    with pytest.raises(OptionError, match="rewrit"):
        FlashOverlapPass({"rewrit": "never"})


def test_a_compile_with_dumps_is_never_served_from_the_cache(tmp_path) -> None:
    options = Options(dump_dir=str(tmp_path))
    assert FlashOverlapPass(options).uuid() != FlashOverlapPass(options).uuid()


def test_passes_that_run_before_ours_are_part_of_the_key() -> None:
    class Other:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> bytes:
            return self.key

    one, other = (FlashOverlapPass(Options(), before=(Other(key),)).uuid() for key in (b"1", b"2"))
    assert one != other
