"""Whether a region is rewritten, and by which schedule: its cost in numbers, handed to the scheduler.

The scheduler (`fo_compiler.schedule.choose`) knows machines and schedules and no graph; this module tells it how long
the region's matmuls take on a slice and how many bytes a slice has. Equal graphs and options give equal decisions on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, prod
from typing import TypeAlias

import torch
from torch.fx import Node

from ..errors import MachineError
from ..options import Options
from ..schedule import FAMILIES, Kind, Schedule, build
from ..schedule.choose import Choice, choose, slices_to_try
from ..schedule.choose import Region as RegionNumbers
from ..schedule.machine import Machine
from ..schedule.presets import default_machine, find_machine
from ..schedule.taper import TAPERED, TAPERED_DIRECT, UNITS
from ..schedule.transform import OWN_ALONE
from ..torch_adapter import has_float32_products
from .attention import ROWS, product_sizes
from .regions import (
    NoMatmul,
    Region,
    leads_from_matmul,
    most_slices,
    plan_chain,
    plan_region,
    rank_share,
    slices_of,
    ways_of,
)
from .rules import ATTENTIONS, FIRST_FACTOR
from .separability import SIXTEEN_BIT, NotSeparable, example_shape, shape_of, tensor_of, tensor_operands
from .sites import Site
from .sizes import SizeNodes, UnknownSize

# Rows in the first call of a slice of symbolic size, where nobody asks for more slices. Lengths of less than two rows a slice are
# compiled anew, so there is room for shorter ones; and thinner slices hardly pay.
LONG_ROWS = 16
DEEPEST = 4  # matmuls that a region may have one behind the other: out of attention's two, and beyond


@dataclass(frozen=True)
class Product:
    """A matmul of a region, uncut: [batch, m, k] @ [batch, k, n]; `cut` names the dim that the slices divide.

    `sum_bytes` is the size of the sum over slices where a kernel of its own adds to it.
    """

    batch: int
    m: int
    k: int
    n: int
    cut: str
    sum_bytes: int = 0

    def share_us(self, machine: Machine, dtype: str, share: Fraction) -> float:
        """Time of the matmul on a share of the whole."""
        sizes = {"batch": self.batch, "m": self.m, "k": self.k, "n": self.n}
        sizes[self.cut] = ceil(sizes[self.cut] * share)
        # A batched matmul fills the machine like one with as many rows.
        matmul_us = machine.matmul_us(sizes["batch"] * sizes["m"], sizes["k"], sizes["n"], dtype)
        return matmul_us + (machine.add_us(self.sum_bytes) if self.sum_bytes and share < 1 else 0.0)


Products: TypeAlias = tuple[tuple[Product, str], ...]
WHOLE = Fraction(1)


@dataclass(frozen=True)
class Decision:
    """What to do with a site. `schedule` is None where it is left alone; `reason` has the predicted times.

    `choice` has the times as numbers, also of the schedule that is not used; None where there is no prediction.
    """

    region: Region
    schedule: Schedule | None
    reason: str
    choice: Choice | None = None

    @property
    def best(self) -> Schedule | None:
        """The best schedule, whether it pays or not."""
        return self.schedule if self.choice is None else self.choice.schedule

    @property
    def saved_us(self) -> float:
        """What the best schedule takes off the plain time; below 0 where it is slower."""
        if self.choice is None or self.choice.best is None:
            return 0.0
        return self.choice.plain_us - self.choice.best.predicted_us


def doubt_us(decision: Decision | None, options: Options) -> float:
    """How much more a region has to save than the library's own sums do: those are measured whole, not put together of steps."""
    if decision is None or decision.choice is None:
        return 0.0
    site = decision.region.site
    machine = machine_of(options, tensor_of(site.value).device.type)
    return machine.least_gain(options.margin, site.ranks, site.kind) * decision.choice.plain_us


def machine_of(options: Options, device_type: str) -> Machine:
    """The machine that predictions are made for. Raises MachineError for an unknown name or a broken file."""
    return find_machine(options.machine) if options.machine is not None else default_machine(device_type)


def decide(site: Site, options: Options, reserved: frozenset[Node] = frozenset()) -> Decision:
    """Plan the region of a site and choose how deep it is, and its schedule.

    Deeper regions have more to hide the transfer under, and pay for it with thinner matmuls: the one that saves most time
    is taken. They leave `reserved` matmuls, those next to other collectives, to these. So it is with sums over slices that
    have to be added in float32: they cost more memory traffic than the matmul alone, which a slow transfer hides. And so it is
    with the matmuls that read what is gathered, and those that make it. Raises NotSeparable, with the reasons, where no matmul
    can be computed slice by slice.
    """
    found: list[Decision] = []
    refusals: dict[Kind, NotSeparable] = {}
    for way in ways_of(site):
        if found and way.kind is Kind.ALL_GATHER_OUT and not leads_from_matmul(way.value):
            continue  # it would be refused, and nobody would read why
        wide = way.kind.arrives_first and has_float32_products(tensor_of(way.value).device)
        for wide_sums in (False, True) if wide else (False,):
            try:
                found.append(_decide_depth(way, options, reserved, wide_sums))
            except NotSeparable as refusal:
                refusals.setdefault(way.kind, refusal)
    if not found:
        behind, before = refusals[site.kind], refusals.get(Kind.ALL_GATHER_OUT)
        if before is None or not isinstance(behind, NoMatmul):
            raise behind
        raise NotSeparable(f"no matmul reads the gathered tensor, and the one that makes it is not cut: {before}")
    return max(found, key=lambda decision: (decision.best is not None, decision.saved_us))


def _decide_depth(site: Site, options: Options, reserved: frozenset[Node], wide_sums: bool) -> Decision:
    best = deepest = _decide(site, options, options.depth or 1, reserved, wide_sums)
    for depth in range(2, DEEPEST + 1) if options.depth is None else ():
        deeper = _decide(site, options, depth, reserved, wide_sums)
        if len(deeper.region.matmuls) <= len(deepest.region.matmuls):
            break
        deepest = deeper
        if deeper.saved_us > best.saved_us:
            best = deeper
    return best


def decide_chain(gather: Site, scatter: Site, options: Options) -> Decision:
    """As `decide`, for the chain from an all-gather to a reduce-scatter."""
    return _decide_planned(lambda slices_per_rank: plan_chain(gather, scatter, slices_per_rank), options, Kind.CHAIN)


def _decide(site: Site, options: Options, depth: int, reserved: frozenset[Node], wide_sums: bool) -> Decision:
    return _decide_planned(
        lambda slices_per_rank: plan_region(site, slices_per_rank, depth, reserved, wide_sums), options, site.kind
    )


def _decide_planned(plan: Callable[[int], Region], options: Options, kind: Kind) -> Decision:
    fewest = kind.fewest_slices
    region = plan(options.slices_per_rank or fewest)
    _check_sizes(region)
    cut = region.site  # with the dim that it is cut along
    wanted = slices_to_try(cut.kind) if options.slices_per_rank is None else (region.slices_per_rank,)
    most = most_slices(cut, LONG_ROWS if options.slices_per_rank is None else 2)
    numbers = tuple(m for m in wanted if m <= most or slices_of(cut, m).are_rows)
    units = _units(cut, options, most)
    try:
        choice = _predict(region, options, numbers, units)
        while choice.schedule is not None and choice.schedule.slices_per_rank != region.slices_per_rank:
            chosen = choice.schedule.slices_per_rank
            region = plan(chosen)
            if region.slices_per_rank != chosen:  # some view, or kernel, only takes coarser slices, or equal ones
                equal = (m for m in numbers if m < chosen and slices_of(cut, m).are_rows)
                numbers = tuple(sorted({region.slices_per_rank, *equal}))
                choice = _predict(region, options, numbers, None)
    except MachineError as error:
        schedule = None if options.rewrite == "auto" else _unpredicted(cut, options, region.scatter)
        return Decision(plan(fewest), schedule, f"no prediction: {error}")
    reason = choice.reason
    if cut.share is not None:
        reason += f"; shards of {cut.share} rows, and of those that are left on the last ranks"
    elif not region.slicing.are_equal:
        reason += f"; the {region.slicing.rows} rows of a rank in slices that differ by one row"
    example = example_shape(cut.value)
    if example != shape_of(cut.value):
        reason += f"; chosen for the sizes {list(example)} of the first call, and used for all sizes"
    if options.rewrite == "auto":
        return Decision(region, choice.schedule if choice.rewrite else None, reason, choice)
    return Decision(region, choice.schedule, f"rewrite='always'; auto: {reason}", choice)


def _check_sizes(region: Region) -> None:
    """Raises NotSeparable where a size that the rewrite needs does not follow from the inputs of the graph."""
    rows = (size for index in range(region.slices_per_rank) for size in region.slicing.bounds(index, 1))
    sizes = {region.slicing.rows, *rows, *(size for node in region.sliced_tensors() for size in shape_of(node))}
    try:
        SizeNodes(region.site.collective.graph).check(sizes)
    except UnknownSize as error:
        raise NotSeparable(str(error)) from error


def families(site: Site, options: Options, scatter: Site | None = None) -> tuple[str, ...] | None:
    """The schedule families that are allowed for a site, None: all; `scatter` is the other end of a chain, where sums travel."""
    if options.schedule in FAMILIES[site.kind]:
        return (options.schedule,)
    # All partial sums meet in float32 and are rounded once; every family that passes them on rounds at each hop.
    meet = site.kind.reduces and tensor_of((scatter or site).value).dtype in SIXTEEN_BIT
    if options.schedule == TAPERED and site.kind in OWN_ALONE:
        return (TAPERED_DIRECT if meet else TAPERED,)
    return ("direct", TAPERED_DIRECT) if meet else None


def _unpredicted(site: Site, options: Options, scatter: Site | None) -> Schedule:
    """What is used where nothing is known about times, in as few slices as there can be."""
    allowed = _equal(families(site, options, scatter)) or tuple(FAMILIES[site.kind])
    return build(site.kind, allowed[0], site.ranks, site.kind.fewest_slices)


def _equal(allowed: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The families with slices of equal size in the place of those with pieces of any."""
    return allowed and tuple(dict.fromkeys({TAPERED: "ring", TAPERED_DIRECT: "direct"}.get(f, f) for f in allowed))


def _units(site: Site, options: Options, most: int) -> int | None:
    """In how many slices a block is cut whose pieces may be of any size: rows where they can be; None where there are too few."""
    if options.schedule != TAPERED and (options.schedule != "auto" or options.slices_per_rank is not None):
        return None
    most = min(options.slices_per_rank or UNITS, most)
    rows = (units for units in range(most, most // 2, -1) if slices_of(site, units).are_rows)
    return next(rows, most) if most > 1 else None


def _predict(region: Region, options: Options, slices_per_rank: tuple[int, ...], units: int | None) -> Choice:
    site = region.site
    value = tensor_of(site.value)
    machine = machine_of(options, value.device.type)
    in_pieces = cut_in_pieces(region, options)
    units = units if in_pieces else None
    allowed = families(site, options, region.scatter)
    return _choose(
        site.kind,
        machine,
        site.ranks,
        rank_share(site),
        products_of(region),
        slice_bytes_of(region),
        allowed if units is not None else _equal(allowed),
        slices_per_rank,
        _finish_us(region, machine),
        options.margin,
        None if options.max_buffer_mb is None else options.max_buffer_mb * 1e6,
        in_pieces,
        units,
    )


@lru_cache(maxsize=1024)  # the layers of a model ask the same question
def _choose(
    kind: Kind,
    machine: Machine,
    ranks: int,
    share: Fraction,
    products: Products,
    slice_bytes: float,
    allowed: tuple[str, ...] | None,
    slices_per_rank: tuple[int, ...],
    finish_us: float,
    margin: float | None,
    max_buffer_bytes: float | None,
    in_pieces: bool,
    units: int | None,
) -> Choice:
    return choose(
        kind,
        machine,
        ranks,
        numbers_of(machine, share, products, slice_bytes, finish_us),
        families=allowed,
        slices_per_rank=slices_per_rank,
        margin=margin,
        max_buffer_bytes=max_buffer_bytes,
        in_pieces=in_pieces,
        units=units,
    )


def cut_in_pieces(region: Region, options: Options) -> bool:
    """Whether neighbouring slices of a region may be computed in one piece.

    A tensor that is read as [outer, rows] is joined without a copy only where all slices are equal; and the kernel of a whole
    region tells them apart.
    """
    return options.slice_matmul != "whole" and all(cut.outer == 1 for cut in region.cuts.values())


def numbers_of(
    machine: Machine, share: Fraction, products: Products, slice_bytes: float, finish_us: float = 0.0
) -> RegionNumbers:
    """A region in the cost model's terms; `share` is that of a rank."""
    return RegionNumbers(
        compute_us=lambda m: body_us(products, machine, share / m),
        slice_bytes=slice_bytes,
        whole_compute_us=body_us(products, machine, WHOLE),
        finish_us=finish_us,
    )


def first_factor(node: Node) -> Node:
    """The left operand of a matmul, or the query of attention: its dtype is the one that the machine multiplies in."""
    operands = tensor_operands(node)
    return operands[0] if node.target in ATTENTIONS else operands[FIRST_FACTOR.get(node.target, -2)]


def slice_bytes_of(region: Region) -> float:
    """Bytes of one rank's share; in a chain of the larger of what arrives and what leaves."""
    sizes = [size_bytes_of(site.value) for site in region.sites]
    return float(max(sizes) * rank_share(region.site) // 1)


def _finish_us(region: Region, machine: Machine) -> float:
    """Time to put gathered results together that the plain collective does not take: it writes them where they belong."""
    site = region.site
    if site.kind is Kind.ALL_REDUCE:  # the library's sums lie where the matmul wrote
        return copied_us(site.value, machine)
    if site.kind is not Kind.ALL_GATHER_OUT:
        return 0.0
    whole, dim = site.gathered
    # Cut along another dim they are joined along both; and what is not gathered along dim 0 is joined without us, too.
    copies = (1 if site.dim == dim else 2) - (1 if site.glue else 0)
    return copies * copied_us(whole, machine)


def copied_us(node: Node, machine: Machine) -> float:
    """Time to copy a tensor."""
    return machine.copy_us(size_bytes_of(node))


def size_bytes_of(node: Node) -> int:
    """Bytes of a tensor."""
    return prod(example_shape(node)) * tensor_of(node).element_size()


def products_of(region: Region) -> Products:
    """The matmuls of a region, each with the dtype that it multiplies in."""
    return tuple((product_of(region, node), str(tensor_of(first_factor(node)).dtype)) for node in region.matmuls)


def body_us(products: Products, machine: Machine, share: Fraction) -> float:
    """Time of the matmuls on a share of the whole.

    Measured times may say that slices take less than the whole does: the error of a measurement is no gain.
    """
    us = sum(product.share_us(machine, dtype, share) for product, dtype in products)
    return us if share == WHOLE else max(us, body_us(products, machine, WHOLE) * share)


def product_of(region: Region, node: Node) -> Product:
    """The sizes of a matmul of a region, and which of them is cut."""
    cut = region.cuts.get(node)
    if node.target in ATTENTIONS:
        assert cut is not None
        return Product(*product_sizes(node), cut="m" if cut.dim == ROWS else "batch")
    a = first_factor(node)
    shape = example_shape(node)
    sizes = {"m": shape[-2] if len(shape) > 1 else 1, "k": example_shape(a)[-1], "n": shape[-1]}
    batch = prod(shape[:-2])
    if cut is None:
        # Two reads and a write in float32 for each slice. The first has no add, which pays for the wider products.
        wide = tensor_of(node).dtype in SIXTEEN_BIT
        return Product(batch, **sizes, cut="k", sum_bytes=prod(shape) * torch.float32.itemsize if wide else 0)
    where = {len(shape) - 1: "n", len(shape) - 2: "m"}.get(cut.dim, "batch")
    return Product(batch, **sizes, cut=where)
