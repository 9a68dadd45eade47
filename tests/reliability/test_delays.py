"""Ranks that are moved against each other by random sleeps on any post, wait and meeting: values never change.

The schedule families and collectives take turns by the seed; a case that fails is printed with its seed, after the same seed
was tried with shorter programs (a smaller case is a better report).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalTransport, LocalWorld, random_delays
from fo_compiler.runtime.transport import use_transport
from fo_compiler.testing import LocalInterpreter, rewrite_for_rank, run_ranks
from tests.graphs import all_gather, all_reduce, all_to_all, capture, reduce_scatter
from tests.recipes import GROUPS

NIGHTLY_SEEDS = int(os.environ.get("FO_DELAY_SEEDS", "5000"))


def block(kind: str, x: Tensor, w: Tensor, ranks: int, group: str) -> Tensor:
    """[ranks * a, b] -> a tensor of the same shape, by one collective around a matmul."""
    match kind:
        case "gather":
            return (all_gather(x, 0, ranks, group) @ w)[: x.shape[0]].tanh()
        case "scatter":
            return all_gather(reduce_scatter(x @ w, 0, ranks, group).tanh(), 0, ranks, group) @ w
        case "reduce":
            return all_reduce(x @ w, group).tanh()
        case "swap":
            return (all_to_all(x, ranks, group) @ w).tanh()
    raise AssertionError(kind)


KINDS = ("gather", "scatter", "reduce", "swap")


def case(seed: int, blocks: int) -> tuple[int, list[str], Options]:
    """Ranks, the blocks (each in one of the groups) and the options of a seed."""
    generator = random.Random(seed)
    ranks = generator.choice([2, 3, 4])
    names = [f"{generator.choice(KINDS)} {generator.choice(list(GROUPS[ranks]))}" for _ in range(blocks)]
    schedule, m = generator.choice(["auto", "ring", "direct", "tapered"]), generator.choice([1, 2, 4])
    return ranks, names, Options(rewrite="always", schedule=schedule, slices_per_rank=m)


def run_delayed(seed: int, blocks: int) -> int:
    """Run the case of a seed with its delays, two steps; raises if a value differs. The number of rewritten regions."""
    ranks, names, options = case(seed, blocks)
    sizes = {name: len(members[0]) for name, members in GROUPS[ranks].items()}

    def function(x: Tensor, w: Tensor) -> Tensor:
        for name in names:
            kind, group = name.split()
            x = block(kind, x, w, sizes[group], group)
        return x

    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(shape, generator=generator).double() for shape in ((24, 3), (3, 3))] for _ in range(ranks)]
    gm = capture(function, inputs[0])
    want = run_ranks(lambda _: gm, inputs, LocalWorld(ranks, GROUPS[ranks]))
    world = LocalWorld(ranks, GROUPS[ranks], timeout_s=30, delay=random_delays(seed, ranks))
    graphs = [rewrite_for_rank(gm, options, world.transport(rank)) for rank in range(ranks)]

    def program(rank: int) -> list[Tensor]:
        return [LocalInterpreter(graphs[rank][0]).run(*inputs[rank]) for _ in range(2)]

    for rank, (first, second) in enumerate(world.run(program)):
        torch.testing.assert_close(first, want[rank], rtol=1e-10, atol=1e-10)
        assert torch.equal(first, second), "run to run bitwise equal"
    assert ops.pending_transfers() == []
    return len([record for record in graphs[0][1].records if record.rewritten])


def check(seed: int, most: int = 4) -> int:
    try:
        return run_delayed(seed, most)
    except Exception:
        for blocks in range(1, most + 1):
            try:
                run_delayed(seed, blocks)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {blocks} blocks: {case(seed, blocks)}: {error}") from error
        raise


@pytest.mark.slow
def test_delays_do_not_change_values() -> None:
    assert sum(check(seed) for seed in range(8)) > 8


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_delayed_schedules(part: int) -> None:
    size = NIGHTLY_SEEDS // 10
    assert sum(check(seed) for seed in range(1000 + part * size, 1000 + (part + 1) * size)) > size


def test_a_value_that_is_read_before_its_wait_is_seen_and_reported_with_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check itself: a transport whose wait returns too early is found out."""
    from fo_compiler.runtime import local

    monkeypatch.setattr(local._LocalTransfer, "wait", lambda self: None)
    with pytest.raises(AssertionError, match=r"seed 5, 1 blocks"):
        check(5)
    ops._pending.clear()


# --- one group from several places of a program ----------------------------------------------------------------------


Graphs = dict[str, torch.fx.GraphModule]


def both_ranks(program: Callable[[LocalTransport, Graphs], object]) -> list[object]:
    """Two ranks and two groups of both; a gather and its backward in each group. Graphs are traced before threads start."""
    world = LocalWorld(2, {"a": [[0, 1]], "b": [[0, 1]]}, timeout_s=20, delay=random_delays(0, 2))

    def gather_in(name: str) -> torch.fx.GraphModule:
        return capture(lambda x, w: all_gather(x, 0, 2, name) @ w, [torch.ones(2, 2), torch.eye(2)])

    captured = {name: gather_in(name) for name in "ab"}
    captured["backward"] = capture(lambda g, w: reduce_scatter(g @ w, 0, 2, "a"), [torch.ones(4, 2), torch.eye(2)])
    ends = [world.transport(rank) for rank in range(2)]
    options = Options(rewrite="always")
    graphs = [{name: rewrite_for_rank(gm, options, end)[0] for name, gm in captured.items()} for end in ends]
    return world.run(lambda rank: program(ends[rank], graphs[rank]))


def gathered(transport: LocalTransport, graph: torch.fx.GraphModule, value: float) -> Tensor:
    with use_transport(transport):
        result: Tensor = LocalInterpreter(graph).run(torch.full((2, 2), value), torch.eye(2))
    return result


def test_graphs_of_different_groups_run_at_the_same_time_from_two_threads() -> None:
    def program(transport: LocalTransport, graphs: Graphs) -> list[list[float]]:
        results: dict[str, list[float]] = {name: [] for name in "ab"}

        def run(name: str, base: float) -> None:
            for step in range(20):
                y = gathered(transport, graphs[name], base + 10 * step + transport.global_rank)
                results[name] += [y[0, 0].item() - base - 10 * step, y[-1, 0].item() - base - 10 * step]

        threads = [threading.Thread(target=run, args=(name, base)) for name, base in (("a", 1000.0), ("b", 5000.0))]
        for thread in threads[:: 1 - 2 * transport.global_rank]:  # started in another order on each rank
            thread.start()
        for thread in threads:
            thread.join()
        return [results["a"], results["b"]]

    assert both_ranks(program) == [[[0.0, 1.0] * 20] * 2] * 2


def test_a_graph_that_runs_inside_itself_gives_right_values() -> None:
    """As where an op of a compiled graph calls compiled code again."""

    def program(transport: LocalTransport, graphs: Graphs) -> list[float]:
        graph = graphs["a"]
        inner: list[float] = []

        class Nested(LocalInterpreter):
            def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
                result = super().call_function(target, args, kwargs)
                if target is ops.exchange:  # in flight, the same graph runs again
                    inner.append(gathered(transport, graph, 100.0 + transport.global_rank)[-1, 0].item())
                return result

        with use_transport(transport):
            y = Nested(graph).run(torch.full((2, 2), float(transport.global_rank)), torch.eye(2))
        return [y[0, 0].item(), y[-1, 0].item(), *inner]

    assert both_ranks(program) == [[0.0, 1.0, 101.0]] * 2


def test_backward_of_two_forwards_in_any_order_gives_the_gradients_of_each() -> None:
    def program(transport: LocalTransport, graphs: Graphs) -> list[float]:
        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: Tensor, scale: float) -> Tensor:
                ctx.scale = scale  # type: ignore[attr-defined]
                with use_transport(transport):
                    return LocalInterpreter(graphs["a"]).run(x * scale, torch.eye(2))

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
                with use_transport(transport):
                    return LocalInterpreter(graphs["backward"]).run(grad, torch.eye(2)) * ctx.scale, None  # type: ignore[attr-defined]

        found = []
        for order in (1, -1):
            xs = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
            ys = [Gather.apply(x, scale) for x, scale in zip(xs, (2.0, 3.0), strict=True)]
            for y in ys[::order]:
                y.sum().backward()
            found += [x.grad[0, 0].item() for x in xs if x.grad is not None]
        return found

    assert both_ranks(program) == [[4.0, 6.0, 4.0, 6.0]] * 2
