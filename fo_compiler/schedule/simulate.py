"""Event-driven time of a schedule on a machine: timeline, makespan, exposed communication.

The model, and why:

- A rank performs its program in order. `Compute` and `Add` take its time, `Post` holds it up for `post_us`, `Wait` blocks it.
- A transfer starts when both ends have posted it. Its latency overlaps other messages'; its bytes then flow.
- Messages of one *link* (ordered pair) flow one after the other, as on a TCP connection or a NCCL stream.
- Links that use one *port* at the same time share its bandwidth equally, as TCP flows and DMA engines do. So transfers
  that are all posted at once all arrive late, which is what sockets show: 123 ms where one step ahead takes 103.
- While a transfer of its rank is in flight, compute runs `compute_slowdown` times slower; while an end computes, bytes
  flow `transfer_slowdown` times slower.

On a uniform machine all ranks of a uniform schedule do the same at the same time: one rank is simulated and stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ScheduleError
from .engine import Engine, Op, OpCode, Span
from .ir import Action, Add, Compute, Post, Program, Schedule, Wait
from .machine import Machine
from .network import Fabric


@dataclass(frozen=True)
class RegionCost:
    """What one slice costs: `compute_us` on a rank of scale 1, `slice_bytes` on the wire, `add_us` for an `Add`."""

    compute_us: float
    slice_bytes: float
    add_us: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """The time of a schedule. `spans` is empty unless they were asked for."""

    makespan_us: float
    finish_us: tuple[float, ...] = field(repr=False)  # by rank
    compute_us: tuple[float, ...] = field(
        repr=False
    )  # by rank: its compute slices alone, without any communication
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def exposed_us(self) -> float:
        """What communication adds to the time of the slowest rank's compute."""
        return self.makespan_us - max(self.compute_us)


def simulate(schedule: Schedule, machine: Machine, cost: RegionCost, *, spans: bool = False) -> Simulation:
    """Time `schedule`. With `spans=True` the result carries every compute slice and transfer (all ranks are simulated).

    Raises ScheduleError when ranks wait for each other for ever, MachineError when the machine has another size.
    """
    ranks = schedule.ranks
    relative = schedule.relative
    if relative is not None and not spans and machine.is_uniform and _is_symmetric(relative, ranks):
        scale = machine.scale(0)
        ops = _operations(schedule, relative, 0, machine, cost, scale, one_rank=True)
        engine = Engine([ops], _one_rank_fabric(machine, ranks), machine, cost.slice_bytes, one_rank=True)
        engine.run()
        compute = (_compute_us(relative, cost, scale),) * ranks
        return Simulation(engine.finish[0], (engine.finish[0],) * ranks, compute)
    programs = [relative if relative is not None else schedule.program(rank) for rank in range(ranks)]
    scales = [machine.scale(rank) for rank in range(ranks)]
    engine = Engine(
        [_operations(schedule, programs[r], r, machine, cost, scales[r]) for r in range(ranks)],
        machine.fabric(ranks),
        machine,
        cost.slice_bytes,
        record=spans,
    )
    stuck = engine.run()
    if stuck is not None:
        raise ScheduleError(
            f"{schedule.kind} schedule {schedule.describe()!r} of {ranks} ranks: rank {stuck}, action "
            f"{schedule.program(stuck)[engine.position[stuck] - 1]}: waits forever"
        )
    compute = tuple(_compute_us(programs[r], cost, scales[r]) for r in range(ranks))
    return Simulation(max(engine.finish), tuple(engine.finish), compute, tuple(engine.spans))


def _compute_us(program: Program, cost: RegionCost, scale: float) -> float:
    return sum(isinstance(action, Compute) for action in program) * cost.compute_us * scale


def _is_symmetric(relative: Program, ranks: int) -> bool:
    """Whether each transfer has both its ends in one `Post`: what rank 0 sends there, its mirror rank sends here."""
    posts = [action for action in relative if isinstance(action, Post)]
    return all(p.send and p.recv and (p.send.peer + p.recv.peer) % ranks == 0 for p in posts)


def _operations(
    schedule: Schedule,
    program: Program,
    rank: int,
    machine: Machine,
    cost: RegionCost,
    scale: float,
    one_rank: bool = False,
) -> list[Op]:
    """The program of `rank` as what takes time. `program` is the relative one where the schedule has one."""
    ranks = schedule.ranks
    shift = rank if schedule.is_uniform else 0
    compute_us, add_us = cost.compute_us * scale, cost.add_us * scale

    def name(slice_: int) -> str:
        return schedule.slice_name(schedule.shifted_slice(slice_, shift))

    def ops(action: Action) -> list[Op]:
        match action:
            case Compute(slice_):
                return [(OpCode.BUSY, compute_us, f"compute {name(slice_)}", 0)]
            case Add(slice_):
                return [(OpCode.BUSY, add_us, f"add {name(slice_)}", 0)] if add_us else []
            case Wait(step):
                return [(OpCode.WAIT, 0.0, "", step)]
            case Post(step, send, recv):
                held_up: list[Op] = [(OpCode.BUSY, machine.post_us, "post", 0)] if machine.post_us else []
                if one_rank:
                    assert send is not None
                    return [
                        *held_up,
                        (OpCode.SEND, 0.0, "", step, send.peer),
                        (OpCode.RECV, 0.0, "", step, send.peer),
                    ]
                if send is not None:
                    link = rank * ranks + (send.peer + shift) % ranks
                    held_up.append((OpCode.SEND, 0.0, name(send.slice), step, link))
                if recv is not None:
                    link = (recv.peer + shift) % ranks * ranks + rank
                    held_up.append((OpCode.RECV, 0.0, name(recv.slice), step, link))
                return held_up
            case _:
                return []

    return [op for action in program for op in ops(action)]


def _one_rank_fabric(machine: Machine, ranks: int) -> Fabric:
    """Links from rank 0 by the distance of their other end. What leaves rank 0 stands also for what arrives there."""
    full = machine.network
    assert full.is_uniform
    # Two ranks are enough to read the numbers of a uniform network.
    pair = machine.fabric(2)
    out, in_ = pair.ports[1]
    half_duplex = pair.ports[1] == pair.ports[2][::-1]
    ports = (0, 0) if half_duplex else (0,)
    return Fabric(
        ranks,
        (pair.latency_us[1],) * ranks,
        (pair.bandwidth_GBps[1],) * ranks,
        (ports,) * ranks,
        (min(pair.port_GBps[out], pair.port_GBps[in_]),),
    )
