"""Makespans of the uniform families as formulas (sympy, imported only by those who ask for formulas).

A program is a chain of steps. Step p starts when step p - 1 is done *and* the transfer that was posted at step p - m has arrived;
transfers of a link flow one after the other. So the makespan is the longest path through a grid of three kinds of edges:

    a step of compute        advances by 1, takes t_c (+ overheads)
    a transfer               advances by m, takes latency + t_b (+ overheads)
    the next on the wire     advances by 1 beside a transfer, takes t_b

over N m - 1 advances. The time of a path is linear in how many transfers it takes, so the longest takes none, one, or N - 1.
With contention compute and transfer stretch each other, which is a formula for m = 1.

In an all-gather of results the N - 1 messages of a slice start together, and a port never rests while there are some: the
makespan is the time at which a message can start, and then all that are left, for the message that makes this largest.

    sympy.pprint(closed_form(Kind.ALL_GATHER, "ring").makespan)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
from sympy import And, Eq, Expr, Integer, Max, Or, Piecewise, S, Symbol

from .ir import Kind
from .machine import Machine
from .network import Uniform
from .simulate import RegionCost


def _positive(name: str) -> Symbol:
    return Symbol(name, positive=True)


N, m = Symbol("N", integer=True, positive=True), Symbol("m", integer=True, positive=True)
t_c = _positive("t_c")  # compute of one slice
latency = Symbol("t_l", nonnegative=True)  # of a message
t_b = _positive("t_b")  # bytes of one slice on the wire, and the gap after them
t_o = Symbol("t_o", nonnegative=True)  # post of a step
t_a = Symbol("t_a", nonnegative=True)  # add of a received sum
c = Symbol("c", positive=True)  # compute is slower by this while a transfer is in flight
d = Symbol("d", positive=True)  # a transfer is slower by this while an end computes

# The same for a region that may be cut: t_c = T / m + e, t_b = B / m + g.
T, e, B, g = _positive("T"), Symbol("e", nonnegative=True), _positive("B"), Symbol("g", nonnegative=True)


# Kinds whose last transfers have no compute to hide under.
EXPOSED = (Kind.ALL_REDUCE, Kind.ALL_GATHER_OUT)


@dataclass(frozen=True)
class ClosedForm:
    """`makespan` is exact where `valid` holds. `hidden`: communication adds nothing but its overheads."""

    makespan: Expr
    valid: Any
    hidden: Any


def evaluate(formula: Any, values: Mapping[Symbol, float]) -> float:
    """The number that a formula has (or, for a condition, whether it holds: 1 or 0)."""
    # Compiled once: substituting floats in nested maxima is a thousand times slower.
    arguments = tuple(sorted(values, key=str))
    return float(_compiled(formula, arguments)(*(values[symbol] for symbol in arguments)))


@lru_cache(maxsize=128)
def _compiled(formula: Any, arguments: tuple[Symbol, ...]) -> Callable[..., float]:
    return cast("Callable[..., float]", sympy.lambdify(arguments, formula, modules="math"))


def simplified(formula: Expr, values: Mapping[Symbol, float]) -> Expr:
    """The formula without the terms that are 0 for these values, and for N > 1 without the case N = 1."""
    zeros = {symbol: 0 for symbol, value in values.items() if value == 0}
    if isinstance(formula, Piecewise) and values[N] > 1:
        formula = formula.args[-1][0]
    return formula.subs(zeros)


@lru_cache(maxsize=32)
def closed_form(kind: Kind, family: str) -> ClosedForm | None:
    """The formula of a family without contention, or None where there is none."""
    # Posts and transfers of a direct schedule are spaced by a step at least: while a transfer fits into one, no two share a port.
    apart = Or(Eq(m, 1), t_b <= t_c + t_o)
    add = t_a if kind.reduces else Integer(0)
    if kind is Kind.ALL_REDUCE:
        return _all_reduce(family)
    if kind is Kind.ALL_GATHER_OUT:
        return _gather_out(family)
    if kind is Kind.CHAIN:
        return None
    if family == "ring" and not kind.is_all_to_all:
        return ClosedForm(_chain(add), S.true, _hidden(add))
    if family == "direct":
        return ClosedForm(_chain(add), apart, _hidden(add))
    return None


def _paths(add: Expr) -> tuple[Expr, list[Expr]]:
    """The path along compute alone, and those that take one transfer or N - 1 of them."""
    steps = N * m - 1
    overhead = t_o + add
    along_compute = N * m * t_c + (N - 1) * m * overhead
    with_transfers = [
        t_c + count * (overhead + latency + t_b) + (steps - count * m) * Max(t_c + overhead, t_b)
        for count in (Integer(1), N - 1)
    ]
    return along_compute, with_transfers


def _chain(add: Expr) -> Expr:
    """A ring, or a schedule that looks like one to every port."""
    along_compute, with_transfers = _paths(add)
    return Piecewise((m * t_c, Eq(N, 1)), (Max(along_compute, *with_transfers), True))


def _hidden(add: Expr) -> Any:
    along_compute, with_transfers = _paths(add)
    return And(*(path <= along_compute for path in with_transfers))


def _all_reduce(family: str) -> ClosedForm | None:
    """While both transfers of a step fit under its compute, only the last part's way back is exposed."""
    fits = And(latency + 2 * t_b <= t_c, Eq(t_o, 0))
    ways_back = {"ring": (N - 1) * (latency + t_b), "direct": latency + (N - 1) * t_b}
    if family not in ways_back:
        return None
    exposed = Piecewise((Integer(0), Eq(N, 1)), (ways_back[family], True))
    return ClosedForm(N * m * t_c + (N - 1) * m * t_a + exposed, fits, S.false)


def _messages_left() -> list[Expr]:
    """When a message can start, with all that follow it: the first of the first slice, the first and last of the last.

    This is linear in the numbers of the slice and of the message. Where posts are slower than messages, which makes the last of
    the first slice later than its first, the last of all is later still.
    """
    return [
        slice_ * t_c
        + ((slice_ - 1) * (N - 1) + message) * t_o
        + latency
        + ((m - slice_ + 1) * (N - 1) - message + 1) * t_b
        for slice_, message in ((Integer(1), Integer(1)), (m, Integer(1)), (m, N - 1))
    ]


def _gather_out(family: str) -> ClosedForm | None:
    """The transfers of the last slice are exposed by nature."""
    if family != "direct":
        return None
    return ClosedForm(Piecewise((m * t_c, Eq(N, 1)), (Max(*_messages_left()), True)), S.true, S.false)


def contended_makespan(kind: Kind) -> Expr:
    """A ring or direct schedule of one slice a rank (m = 1) with contention `c` and `d`; not where a tail is exposed."""
    assert kind not in EXPOSED
    under_compute = latency + d * t_b  # a transfer all of which runs under compute
    together = Piecewise(
        (t_c + under_compute * (1 - 1 / c), under_compute <= c * t_c),
        (latency + t_b, c * t_c <= latency),
        (c * t_c + t_b - (c * t_c - latency) / d, True),
    )
    return t_c + (N - 1) * (t_o + together + (t_a if kind.reduces else 0))


def _straight_paths(add: Expr) -> list[Expr]:
    """The paths of `_paths`, without the maxima in them."""
    overhead, steps = t_o + add, N * m - 1
    paths = [N * m * t_c + (N - 1) * m * overhead]
    for count in (Integer(1), N - 1):
        for step in (t_c + overhead, t_b):
            paths.append(t_c + count * (overhead + latency + t_b) + (steps - count * m) * step)
    return paths


@lru_cache(maxsize=8)
def slice_curves(kind: Kind) -> tuple[tuple[Expr, Expr, Expr], ...]:
    """The makespan of a region that may be cut as the largest of curves `p / m + q + r m`, each given as (p, q, r).

    t_c = T / m + e and t_b = B / m + g. No p and no r is negative, so the makespan is convex in m: it has one valley.
    """
    curves = []
    for path in (
        _messages_left() if kind is Kind.ALL_GATHER_OUT else _straight_paths(t_a if kind.reduces else Integer(0))
    ):
        polynomial = sympy.Poly(sympy.expand(path.subs({t_c: T / m + e, t_b: B / m + g}) * m), m)
        p, q, r = (polynomial.coeff_monomial(m**power) for power in range(3))
        curves.append((p, q, r))
    return tuple(curves)


def best_slices(kind: Kind, values: Mapping[Symbol, float]) -> float:
    """The best number of slices a rank, as a real number of at least 1, for values of N, T, e, B, g and overheads.

    The bottom of the valley is the bottom sqrt(p / r) of one curve, or where two of them meet; infinity where nothing stops
    finer slices from gaining.
    """
    curves = [tuple(evaluate(part, values) for part in curve) for curve in slice_curves(kind)]

    def makespan(count: float) -> float:
        return max(p / count + q + r * count for p, q, r in curves)

    bottoms = [math.sqrt(p / r) if r else math.inf if p else 1.0 for p, _, r in curves]
    for i, (p1, q1, r1) in enumerate(curves):
        for p2, q2, r2 in curves[:i]:
            bottoms += _positive_roots(r1 - r2, q1 - q2, p1 - p2)
    candidates = sorted(max(1.0, bottom) for bottom in bottoms)
    return min(candidates, key=lambda count: makespan(min(count, 1e9)))


def _positive_roots(a: float, b: float, c_: float) -> list[float]:
    """Where a x^2 + b x + c = 0, x > 0."""
    if a == 0:
        roots = [-c_ / b] if b else []
    else:
        under = b * b - 4 * a * c_
        roots = [(-b + sign * math.sqrt(under)) / (2 * a) for sign in (1, -1)] if under >= 0 else []
    return [root for root in roots if root > 0]


def values_for(
    kind: Kind, machine: Machine, ranks: int, slices_per_rank: int, cost: RegionCost
) -> dict[Symbol, float] | None:
    """The numbers for a region on a machine, or None where the machine is not uniform, or the formulas do not fit it."""
    network = machine.network
    if not isinstance(network, Uniform) or not machine.is_uniform:
        return None
    port = network.port_GBps or network.bandwidth_GBps
    if kind is Kind.ALL_GATHER_OUT and port > network.bandwidth_GBps:
        return None  # several links at once are then faster than one after the other
    wire_GBps = min(network.bandwidth_GBps, port if network.full_duplex else port / 2)
    alone_GBps = min(network.bandwidth_GBps, port)
    scale = machine.scale(0)
    return {
        N: ranks,
        m: slices_per_rank,
        t_c: cost.compute_us * scale,
        latency: network.latency_us,
        t_b: cost.slice_bytes / (wire_GBps * 1e3) + machine.gap_us * alone_GBps / wire_GBps,
        t_o: machine.post_us,
        t_a: cost.add_us * scale if kind.reduces else 0.0,
        c: machine.compute_slowdown,
        d: machine.transfer_slowdown,
    }
