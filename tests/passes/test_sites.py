"""Every form of a collective is brought to one record."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fo_compiler.passes.sites import LeftAlone, Site
from fo_compiler.schedule import Kind
from tests.graphs import all_gather, all_reduce, c10d, capture, reduce_scatter
from tests.passes.helpers import aten, only_site, sites, tensors


@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 6), 0), ((2, 6), 1), ((2, 3, 6), 1), ((2, 3, 4, 6), 2), ((2, 3, 4, 6), 3)]
)
def test_an_all_gather_along_any_dim_is_one_site(shape: tuple[int, ...], dim: int) -> None:
    site = only_site(lambda x: all_gather(x, dim, 4) * 2, 4, shape)
    assert (site.kind, site.dim, site.ranks) == (Kind.ALL_GATHER, dim, 4)
    assert site.value.meta["val"].shape[dim] == 4 * shape[dim]
    assert site.shard.op == "placeholder"


@pytest.mark.parametrize(("shape", "dim"), [((8, 6), 0), ((6, 8), 1), ((2, 8, 6), 1), ((2, 3, 4, 8), 3)])
def test_a_reduce_scatter_along_any_dim_is_one_site(shape: tuple[int, ...], dim: int) -> None:
    site = only_site(lambda x: reduce_scatter(x * 2, dim, 4), 4, shape)
    assert (site.kind, site.dim) == (Kind.REDUCE_SCATTER, dim)
    assert site.value.target is aten.mul.Tensor
    assert site.shard.meta["val"].shape[dim] == shape[dim] // 4


def test_a_gathered_list_that_is_copied_and_joined_is_one_site() -> None:
    def user_code(x: Tensor) -> Tensor:
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 3, "0"))
        parts = [aten.copy(torch.empty_like(x), aten.slice(gathered, 0, 2 * i, 2 * i + 2)) for i in range(3)]
        return torch.cat(parts, 1) * 2

    site = only_site(user_code, 3, (2, 5))
    assert (site.dim, site.value.target) == (1, aten.cat.default)


def test_blocks_that_are_also_read_alone_are_known_by_their_rank() -> None:
    def user_code(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.chunk(all_gather(x, 0, 2), 2)
        return torch.cat([first, second], 1), second + 1

    site = only_site(user_code, 2, (2, 5))
    assert site.dim == 1
    assert [(node.name, rank) for node, rank in site.blocks] == [("getitem", 0), ("getitem_1", 1)]


def test_a_gathered_tensor_that_is_also_read_whole_keeps_the_plain_form() -> None:
    def user_code(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = all_gather(x, 0, 2)
        return torch.cat(torch.chunk(whole, 2), 1), whole + 1

    assert only_site(user_code, 2, (2, 5)).dim == 0


def test_blocks_in_another_order_keep_the_plain_form() -> None:
    def user_code(x: Tensor) -> Tensor:
        first, second = torch.chunk(all_gather(x, 0, 2), 2)
        return torch.cat([second, first], 1)

    assert only_site(user_code, 2, (2, 5)).dim == 0


def test_the_mean_of_a_reduce_scatter_is_remembered() -> None:
    assert only_site(lambda x: reduce_scatter(x, 0, 2, op="avg"), 2, (4, 3)).averages


@pytest.mark.parametrize(
    ("function", "ranks", "reason"),
    [
        (lambda x: all_reduce(x, op="max"), 2, "reduce op is 'max'"),
        (lambda x: all_reduce(x), 5, r"no dim of [4, 3] divides by the 5 ranks of the group"),
        (lambda x: c10d.wait_tensor(c10d.broadcast(x, 0, "0")), 2, "broadcast.default is not a kind that is sliced"),
        (lambda x: reduce_scatter(x, 0, 2, op="max"), 2, "reduce op is 'max'"),
        (lambda x: all_gather(x, 0, 1), 1, "one rank"),
        (lambda x: c10d.all_gather_into_tensor(x, 2, "0"), 2, "not awaited exactly once"),
    ],
)
def test_what_is_left_alone_says_why(function, ranks: int, reason: str) -> None:
    (site,) = sites(capture(function, tensors((4, 3))), ranks)
    assert isinstance(site, LeftAlone)
    assert reason in site.reason


def test_peers_are_ranks_of_the_group_of_the_site() -> None:
    from fo_compiler.passes.sites import is_collective, site_of
    from fo_compiler.runtime.local import LocalWorld

    world = LocalWorld(4, {"rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]})
    gm = capture(lambda x: all_gather(x, 0, 2, "columns") * 2, tensors((4, 3)))
    (node,) = [node for node in gm.graph.nodes if is_collective(node)]
    site = site_of(node, world.transport(2))
    assert isinstance(site, Site)
    assert (site.rank, site.ranks, site.group_name) == (1, 2, "columns")
