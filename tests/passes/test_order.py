"""What is pinned, and what pinning costs: a graph that is left alone compiles to Inductor's own program."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from fo_compiler.passes.order import may_sum_in_place
from fo_compiler.torch_adapter import fake_process_group
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter

x, w = torch.randn(8, 16), torch.randn(16, 4)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "product": lambda x, w: all_reduce(x @ w),
    "product of 3 dims": lambda x, w: all_reduce(x.view(2, 4, 16) @ w),
    "pointwise": lambda x, w: all_reduce(torch.relu(x @ w) + 1),
    "cast": lambda x, w: all_reduce((x @ w).double()),
    "read twice": lambda x, w: (lambda y: (all_reduce(y), y * 2))(x @ w),
    "view read twice": lambda x, w: (lambda y: (all_reduce(y.view(2, 4, 4)), y * 2))(x @ w),
    "an input": lambda x, w: all_reduce(x) @ w,
    "view of an input": lambda x, w: all_reduce(x.view(16, 8)).view(8, 16) @ w,
    "part": lambda x, w: all_reduce((x @ w).split(4)[1]),
    "gather": lambda x, w: all_gather(x, 0, 2) @ w,
    "scatter": lambda x, w: reduce_scatter(x @ w, 0, 2),
    "what was gathered": lambda x, w: all_reduce(all_gather(x, 0, 2)) @ w,
}
IN_PLACE = {"product", "product of 3 dims", "pointwise", "cast"}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("gather", "scatter")])
def test_a_sum_takes_the_memory_of_what_nobody_else_reads(name: str) -> None:
    graph = capture(FUNCTIONS[name], [x, w]).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)
    assert may_sum_in_place(node) == (name in IN_PLACE)


def program(function: Callable[..., object], backend: str) -> list[str]:
    """What the program of `function` does, line by line, but for `announce` and asserts; buffers named by their first use."""
    torch._dynamo.reset()
    options = {"rewrite": "never"} if backend == "flashoverlap" else None
    with fake_process_group(0, 2), torch.no_grad(), fresh_cache():
        compiled = torch.compile(lambda x, w: function(x, w), backend=backend, options=options, dynamic=False)
        _, (code,) = run_and_get_code(compiled, x, w)
    text = code[code.index("def call(") : code.index("runner = ")]
    left_out = re.compile(r"\s*(#|assert_|$)|.*\.announce\.")
    lines = [line for line in text.splitlines() if not left_out.match(line)]
    names: dict[str, str] = {}
    return [re.sub(r"buf\d+", lambda found: names.setdefault(found[0], f"b{len(names)}"), line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gather", "scatter", "product", "product of 3 dims", "read twice", "an input"])
def test_a_graph_that_is_left_alone_compiles_to_the_program_of_inductor(kind: str) -> None:
    assert program(FUNCTIONS[kind], "flashoverlap") == program(FUNCTIONS[kind], "inductor")
