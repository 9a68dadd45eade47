"""The verifier catches each kind of broken graph."""

from __future__ import annotations

import pytest

from fo_compiler.errors import RewriteError
from fo_compiler.passes.graph_verifier import signature, verify_graph
from fo_compiler.runtime import ops
from tests.graphs import all_gather, capture
from tests.passes.helpers import rewritten, tensors


@pytest.fixture
def gm():
    return rewritten(capture(lambda x, w: all_gather(x, 0, 3) @ w, tensors((2, 4), (4, 6))), 3)


def test_a_rewritten_graph_passes(gm) -> None:
    verify_graph(gm.graph, signature(gm.graph), {"all_gather_into_tensor": True})


def test_changed_outputs_are_caught(gm) -> None:
    before = signature(gm.graph)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (gm.graph.find_nodes(op="placeholder")[0],)
    with pytest.raises(RewriteError, match="changed the graph's outputs"):
        verify_graph(gm.graph, before, {})


def test_a_collective_that_stayed_is_caught(gm) -> None:
    with pytest.raises(RewriteError, match="should not be in the rewritten graph"):
        verify_graph(gm.graph, signature(gm.graph), {next(iter(gm.graph.nodes)).name: True})


def test_a_collective_that_is_gone_but_was_to_stay_is_caught(gm) -> None:
    with pytest.raises(RewriteError, match="should be in the rewritten graph"):
        verify_graph(gm.graph, signature(gm.graph), {"all_gather_into_tensor": False})


def test_a_transfer_without_a_wait_is_caught(gm) -> None:
    wait = gm.graph.find_nodes(op="call_function", target=ops.wait)[0]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    with pytest.raises(RewriteError, match="not by exactly one wait"):
        verify_graph(gm.graph, signature(gm.graph), {})


def test_a_wait_that_does_not_keep_the_sent_tensor_is_caught(gm) -> None:
    wait = gm.graph.find_nodes(op="call_function", target=ops.wait)[0]
    wait.args = (wait.args[0], gm.graph.find_nodes(op="placeholder")[1])
    with pytest.raises(RewriteError, match="alive"):
        verify_graph(gm.graph, signature(gm.graph), {})
