"""When each step of a region's schedule happens, by the machine model: what a dump keeps to be compared with a profile."""

from __future__ import annotations

from ..errors import MachineError
from ..options import Options
from ..schedule import Schedule
from ..schedule.machine import Machine
from ..schedule.simulate import Simulation, simulate
from .decide import machine_of, numbers_of, products_of, slice_bytes_of
from .regions import Region, rank_share
from .separability import tensor_of

Prediction = Simulation
LARGEST = 10_000  # slices of all ranks together: to record the spans of more takes seconds


def predict(region: Region, schedule: Schedule, options: Options) -> Prediction | None:
    """The simulated schedule with its spans; None where the machine knows no time for it, or the group is very large.

    Has to be called before the rewrite, which takes the region's nodes apart.
    """
    site, m = region.site, schedule.slices_per_rank
    value = tensor_of(site.value)
    if site.ranks**2 * m > LARGEST:
        return None
    return _simulated(region, schedule, machine_of(options, value.device.type), spans=True)


def predicted_us(region: Region, schedule: Schedule, machine: Machine) -> float | None:
    """The time of a region's schedule on a machine; None where the machine knows none."""
    simulated = _simulated(region, schedule, machine, spans=False)
    return None if simulated is None else simulated.makespan_us


def _simulated(region: Region, schedule: Schedule, machine: Machine, spans: bool) -> Simulation | None:
    site, m = region.site, schedule.slices_per_rank
    try:
        numbers = numbers_of(machine, rank_share(site), products_of(region), slice_bytes_of(region))
        return simulate(schedule, machine, numbers.cost(site.kind, machine, m, in_pieces=True), spans=spans)
    except MachineError:  # the machine has no such matmul, or another number of ranks
        return None
