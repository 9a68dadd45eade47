"""How far a region grows, what it joins, and the reasons why it stops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fo_compiler.passes.regions import Region, plan_region
from fo_compiler.passes.separability import Cut, NotSeparable, local_shape
from tests.graphs import all_gather, reduce_scatter
from tests.passes.helpers import only_site


def region_of(function, *shapes, ranks: int = 2, m: int = 1) -> Region:
    return plan_region(only_site(function, ranks, *shapes), m)


def names(nodes: list[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def test_all_consumers_of_one_gather_are_one_region() -> None:
    def qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        g = all_gather(x, 1, 2)
        return g @ q, g @ k, g @ v

    region = region_of(qkv, (2, 4, 6), (6, 8), (6, 4), (6, 4))
    assert names(region.matmuls) == ["mm", "mm_1", "mm_2"]
    outputs, _ = region.read_outside()
    assert names(outputs) == ["mm", "mm_1", "mm_2"]


def test_work_behind_the_first_matmuls_stays_outside() -> None:
    region = region_of(lambda x, w, v: F.silu(all_gather(x, 0, 2) @ w) @ v, (4, 6), (6, 8), (8, 3))
    assert names(region.matmuls) == ["mm"]


def test_casts_norms_and_views_before_a_matmul_are_inside() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        g = all_gather(x, 1, 2)
        return (g / g.mean(-1, keepdim=True)).reshape(-1, 6) @ w

    region = region_of(f, (2, 4, 6), (6, 8))
    assert names(region.members) == ["mean", "div", "view", "mm"]


def test_a_consumer_that_needs_the_whole_tensor_reads_it_joined() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        g = all_gather(x, 0, 2)
        return g @ w, torch.cumsum(g, 0)

    region = region_of(f, (4, 6), (6, 8))
    outputs, _ = region.read_outside()
    assert outputs[0] is region.site.value
    assert "cumsum" in " ".join(region.refusals)


def test_a_weight_gradient_beside_an_input_gradient_is_summed_over_slices() -> None:
    def backward(grad: Tensor, weight: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        g = all_gather(grad, 0, 2)
        return g @ weight, g.t() @ saved

    region = region_of(backward, (4, 6), (6, 8), (8, 5))
    assert names(region.matmuls) == ["mm", "mm_1"]
    (summed,) = [node for node in region.members if node not in region.cuts]
    assert summed.name == "mm_1"


def test_an_input_that_depends_on_the_region_keeps_its_reader_outside() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        g = all_gather(x, 0, 2)
        gate = torch.cumsum(g, 0)  # needs all of g
        return (g @ w) * 1 + (g * gate) @ w

    region = region_of(f, (4, 6), (6, 8))
    assert names(region.matmuls) == ["mm"]
    assert "cumsum, which needs the whole gathered tensor first" in " ".join(region.refusals)


def test_both_matmuls_of_a_sum_are_in_the_region_of_its_reduce_scatter() -> None:
    region = region_of(lambda x, w, y, v: reduce_scatter(x @ w + y @ v, 0, 2), (4, 6), (6, 8), (4, 3), (3, 8))
    assert names(region.matmuls) == ["mm", "mm_1"]


def test_a_term_without_a_matmul_is_cut_and_not_computed_slice_by_slice() -> None:
    region = region_of(lambda x, w, r: reduce_scatter(x @ w + torch.tanh(r), 0, 2), (4, 6), (6, 8), (4, 8))
    assert names(region.members) == ["mm", "add"]


def test_a_producer_with_other_readers_is_joined_for_them() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return reduce_scatter(y, 0, 2), y

    region = region_of(f, (4, 6), (6, 8))
    assert names(region.read_outside()[0]) == ["mm"]


def test_a_view_that_is_read_outside_stays_and_reads_the_joined_matmul() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w).reshape(2, 2, 8)
        return reduce_scatter(y, 0, 2), y * 2

    region = region_of(f, (4, 6), (6, 8))
    outputs, kept = region.read_outside()
    assert names(outputs) == ["mm"]
    assert names(sorted(kept)) == ["view"]


def test_a_producer_that_also_leads_to_the_collective_on_an_uncut_path_is_outside() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = x @ w
        return reduce_scatter(y + torch.cumsum(y, 0) @ v, 0, 2)

    region = region_of(f, (4, 6), (6, 8), (8, 8))
    assert names(region.matmuls) == ["mm_1"]
    assert "mm is also read on a path to the collective that is not cut" in " ".join(region.refusals)


def test_a_shard_that_does_not_divide_into_m_slices_is_cut_into_slices_that_differ_by_a_row() -> None:
    region = region_of(lambda x, w: all_gather(x, 0, 2) @ w, (6, 4), (4, 3), m=4)
    assert region.slices_per_rank == 4
    shapes = [local_shape((12, 4), Cut(0), region.slicing, index) for index in range(region.slices)]
    assert [rows for rows, _ in shapes] == [1, 2, 1, 2] * 2


def test_a_slice_has_a_row_at_least() -> None:
    assert region_of(lambda x, w: all_gather(x, 0, 2) @ w, (3, 4), (4, 3), m=8).slices_per_rank == 3


def test_where_unequal_slices_do_not_lead_to_a_matmul_equal_ones_are_taken() -> None:
    """Half a group of 4 rows would be one item of the reshaped tensor."""

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        return all_gather(x, 0, 2).reshape(-1, 16) @ w

    assert region_of(grouped, (24, 4), (16, 3), m=5).slices_per_rank == 3


def test_unequal_slices_are_not_taken_where_equal_ones_reach_more_matmuls() -> None:
    def grouped(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        whole = all_gather(x, 0, 2)
        return whole @ v, whole.reshape(-1, 16) @ w

    region = region_of(grouped, (8, 4), (16, 3), (4, 3), m=3)
    assert region.slices_per_rank == 2
    assert len(region.matmuls) == 2


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda x: all_gather(x, 0, 2) * 2, ((4, 6),), "no matmul reads the gathered tensor or makes it"),
        (lambda x: reduce_scatter(x * 2, 0, 2), ((4, 6),), "an input of the graph|no matmul"),
        (
            lambda x, w: torch.cummax(all_gather(x, 0, 2), 0).values @ w,
            ((4, 6), (6, 3)),
            "no separability rule for aten.cummax",
        ),
        (lambda x, w: torch.cumsum(all_gather(x, 0, 2), 0) @ w, ((4, 6), (6, 3)), "cumsum .* needs this dim whole"),
    ],
)
def test_a_site_without_a_region_says_why(function, shapes, reason: str) -> None:
    with pytest.raises(NotSeparable, match=reason):
        region_of(function, *shapes)
