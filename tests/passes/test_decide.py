"""Decisions: equal on all ranks, with the numbers in the reason, and never against the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.passes.decide import Product, decide, families, product_of
from fo_compiler.passes.predict import predict
from fo_compiler.passes.regions import plan_region
from fo_compiler.passes.sites import Site
from fo_compiler.schedule.machine import Machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured
from fo_compiler.schedule.network import Uniform
from fo_compiler.schedule.taper import TAPERED, TAPERED_DIRECT
from tests.graphs import all_gather, capture, reduce_scatter
from tests.passes.helpers import only_site, sites


def mlp_site(rows: int, k: int, n: int, ranks: int = 8, dtype: torch.dtype = torch.bfloat16) -> Site:
    """all-gather [rows / ranks, k] -> mm [k, n], as fake tensors: nothing is allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.empty(rows // ranks, k, dtype=dtype), torch.empty(k, n, dtype=dtype)
        (site,) = sites(capture(lambda x, w: all_gather(x, 0, ranks) @ w, [x, w]), ranks)
    assert isinstance(site, Site)
    return site


def test_a_region_that_hides_much_is_rewritten_and_says_how_much() -> None:
    decision = decide(mlp_site(8192, 4096, 1792), Options(machine="h100-nvlink"))
    assert decision.schedule is not None
    for number in ("faster", "plain", "bound", "machine h100-nvlink"):
        assert number in decision.reason


def test_a_tiny_region_is_left_alone_with_the_numbers() -> None:
    decision = decide(mlp_site(64, 64, 64), Options(machine="h100-nvlink"))
    assert decision.schedule is None
    assert "left alone" in decision.reason
    assert "plain" in decision.reason


@pytest.mark.parametrize("sizes", [(128, 32, 2048), (32, 512, 128), (128, 256, 128), (512, 128, 512)])
def test_on_one_computer_a_region_that_takes_no_longer_than_a_few_steps_is_left_alone(
    sizes: tuple[int, int, int],
) -> None:
    """Measured on two ranks: 1.2 to 2.1 ms plain, up to three times as long in slices."""
    m, k, n = sizes
    assert decide(mlp_site(m, k, n, 2, torch.float32), Options()).schedule is None


def test_always_rewrites_it_all_the_same_and_says_what_auto_would_do() -> None:
    decision = decide(mlp_site(64, 64, 64), Options(rewrite="always", machine="h100-nvlink"))
    assert decision.schedule is not None
    assert decision.reason.startswith("rewrite='always'; auto: left alone")


def test_a_margin_turns_a_small_gain_down() -> None:
    site = mlp_site(8192, 4096, 1792)
    assert decide(site, Options(machine="h100-nvlink", margin=0.0)).schedule is not None
    assert decide(site, Options(machine="h100-nvlink", margin=0.9)).schedule is None


def test_a_memory_limit_that_nothing_meets_leaves_the_region_alone_and_says_so() -> None:
    decision = decide(mlp_site(8192, 4096, 1792), Options(machine="h100-nvlink", max_buffer_mb=0.001))
    assert decision.schedule is None
    assert "memory limit" in decision.reason


def test_a_forced_schedule_and_number_of_slices_are_used() -> None:
    options = Options(rewrite="always", schedule="direct", slices_per_rank=2)
    schedule = decide(mlp_site(8192, 4096, 1792), options).schedule
    assert schedule is not None
    assert schedule.describe() == "direct x2"


def test_a_16_bit_sum_is_direct_so_that_it_rounds_once() -> None:
    site = only_site(lambda x, w: reduce_scatter(x @ w, 0, 2), 2, (4, 6), (6, 8))
    assert families(site, Options()) is None
    from tests.passes.helpers import tensors

    inputs = tensors((4, 6), (6, 8), dtype=torch.bfloat16)
    (narrow,) = sites(capture(lambda x, w: reduce_scatter(x @ w, 0, 2), inputs), 2)
    assert isinstance(narrow, Site)
    assert families(narrow, Options()) == ("direct", TAPERED_DIRECT)
    assert families(site, Options(schedule="tapered")) == (TAPERED,)
    assert families(narrow, Options(schedule="tapered")) == (TAPERED_DIRECT,)


def test_a_dtype_that_the_machine_has_no_speed_for_is_left_alone_by_auto_and_rewritten_on_demand() -> None:
    site = mlp_site(64, 64, 64, dtype=torch.complex64)
    assert "no prediction" in decide(site, Options()).reason
    assert decide(site, Options()).schedule is None
    assert decide(site, Options(rewrite="always")).schedule is not None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_decide_the_same(rank: int) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return all_gather(x, 0, 3) @ w

    first = decide(only_site(f, 3, (4, 6), (6, 8), rank=0), Options(rewrite="always"))
    other = decide(only_site(f, 3, (4, 6), (6, 8), rank=rank), Options(rewrite="always"))
    assert (first.schedule, first.reason) == (other.schedule, other.reason)


@pytest.mark.parametrize(
    ("function", "shapes", "product"),
    [
        (lambda x, w: all_gather(x, 0, 2) @ w, ((4, 6), (6, 5)), Product(1, 8, 6, 5, "m")),
        (lambda x, w: w @ all_gather(x, 1, 2), ((6, 4), (5, 6)), Product(1, 5, 6, 8, "n")),
        (lambda x, w: all_gather(x, 1, 2) @ w, ((4, 3), (6, 5)), Product(1, 4, 6, 5, "k")),
        (lambda x, w: torch.bmm(all_gather(x, 0, 2), w), ((2, 4, 6), (4, 6, 5)), Product(4, 4, 6, 5, "batch")),
        (
            lambda x, w, b: torch.addmm(b, all_gather(x, 0, 2), w),
            ((4, 6), (6, 5), (5,)),
            Product(1, 8, 6, 5, "m"),
        ),
    ],
)
def test_the_cost_of_a_matmul_is_that_of_the_dim_that_is_cut(function, shapes, product: Product) -> None:
    region = plan_region(only_site(function, 2, *shapes), 1)
    assert product_of(region, region.matmuls[0]) == product


def test_no_more_than_the_communication_is_predicted_to_be_hidden_and_a_dump_shows_that_time(tmp_path: Path) -> None:
    """Measured points that call a slice of 256 rows ten times as fast as an eighth of 2048."""
    points = (MatmulPoint(2048, 512, 512, "bf16", 8000.0), MatmulPoint(256, 512, 512, "bf16", 100.0))
    machine = Machine("measured", "a test", Uniform(1.0, 1.0), Measured(points, 10.0))
    path = tmp_path / "machine.json"
    machine.save(path)
    decision = decide(mlp_site(2048, 512, 512), Options(rewrite="always", machine=str(path)))
    assert decision.choice is not None
    assert 0 < decision.choice.hidden_fraction <= 1 + 1e-9
    assert decision.schedule is not None
    shown = predict(decision.region, decision.schedule, Options(machine=str(path)))
    assert shown is not None
    assert shown.makespan_us == pytest.approx(decision.choice.predicted_us)
