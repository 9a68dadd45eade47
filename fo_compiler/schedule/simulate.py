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
So they do on a two-level machine where the schedule treats all nodes alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ScheduleError
from .engine import Engine, Op, OpCode, Span
from .ir import Action, Add, Compute, Post, Program, Schedule, Send, Wait
from .machine import Machine
from .network import Fabric, Network, TwoLevel, Uniform


@dataclass(frozen=True)
class RegionCost:
    """What one slice costs: `compute_us` on a rank of scale 1, `slice_bytes` on the wire, `add_us` for an `Add`.

    `pieces_us` is the compute of 1, 2, ... slices in one piece, as many as there is a number for, and `add_pieces_us` is
    likewise; beyond, they take as long as one by one.
    """

    compute_us: float
    slice_bytes: float
    add_us: float = 0.0
    pieces_us: tuple[float, ...] = ()
    add_pieces_us: tuple[float, ...] = ()

    def compute_of(self, count: int) -> float:
        return self.pieces_us[count - 1] if count <= len(self.pieces_us) else count * self.compute_us

    def add_of(self, count: int) -> float:
        return self.add_pieces_us[count - 1] if count <= len(self.add_pieces_us) else count * self.add_us

    def least(self) -> RegionCost:
        """The cost of one slice as a part of the piece in which it costs least: what no schedule is below."""
        compute_us = min((us / n for n, us in enumerate(self.pieces_us, 1)), default=self.compute_us)
        add_us = min((us / n for n, us in enumerate(self.add_pieces_us, 1)), default=self.add_us)
        return RegionCost(min(compute_us, self.compute_us), self.slice_bytes, min(add_us, self.add_us))


@dataclass(frozen=True)
class Simulation:
    """The time of a schedule. `spans` is empty unless they were asked for."""

    makespan_us: float
    finish_us: tuple[float, ...] = field(repr=False)  # by rank
    compute_us: tuple[float, ...] = field(repr=False)  # by rank: its compute slices alone, without any communication
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
    if relative is not None and not spans and _is_symmetric(schedule, relative, machine):
        scale = machine.scale(0)
        ops = _operations(schedule, relative, 0, machine, cost, scale, one_rank=True)
        engine = Engine([ops], _one_rank_fabric(machine.network, ranks), machine, one_rank=True)
        engine.run()
        compute = (_compute_us(relative, cost, scale),) * ranks
        return Simulation(engine.finish[0], (engine.finish[0],) * ranks, compute)
    programs = [relative if relative is not None else schedule.program(rank) for rank in range(ranks)]
    scales = [machine.scale(rank) for rank in range(ranks)]
    engine = Engine(
        [_operations(schedule, programs[r], r, machine, cost, scales[r], named=spans) for r in range(ranks)],
        machine.fabric(ranks),
        machine,
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
    return sum(cost.compute_of(action.count) for action in program if isinstance(action, Compute)) * scale


def _is_symmetric(schedule: Schedule, relative: Program, machine: Machine) -> bool:
    """Whether all ranks do the same at the same time.

    The machine has to look the same from everywhere, and each transfer to have both its ends in one `Post`: what rank 0
    sends there, its mirror rank sends here.
    """
    if len(set(machine.compute_scale)) > 1:
        return False
    network = machine.network
    if isinstance(network, TwoLevel) and schedule.ranks > network.ranks_per_node:
        if schedule.ranks_per_node != network.ranks_per_node or schedule.ranks % network.ranks_per_node:
            return False
    elif not machine.is_uniform:
        return False
    posts = [action for action in relative if isinstance(action, Post)]
    return all(p.send and p.recv and schedule.shifted_rank(p.send.peer, p.recv.peer) == 0 for p in posts)


def _operations(
    schedule: Schedule,
    program: Program,
    rank: int,
    machine: Machine,
    cost: RegionCost,
    scale: float,
    *,
    one_rank: bool = False,
    named: bool = False,
) -> list[Op]:
    """The program of `rank` as what takes time, `named` for spans. `program` is the relative one of a uniform schedule."""
    ranks = schedule.ranks
    shift = rank if schedule.is_uniform else 0

    def name(of: Send | Compute | Add) -> str:
        return schedule.slice_name(schedule.shifted_slice(of.slice, shift), count=of.count) if named else ""

    def ops(action: Action) -> list[Op]:
        match action:
            case Compute():
                return [(OpCode.BUSY, cost.compute_of(action.count) * scale, f"compute {name(action)}", 0)]
            case Add():
                add_us = cost.add_of(action.count) * scale
                return [(OpCode.BUSY, add_us, f"add {name(action)}", 0)] if add_us else []
            case Wait(step):
                return [(OpCode.WAIT, 0.0, "", step)]
            case Post(step, send, recv):
                held_up: list[Op] = [(OpCode.BUSY, machine.post_us, "post", 0)] if machine.post_us else []
                if one_rank:
                    assert send is not None
                    return [
                        *held_up,
                        (OpCode.SEND, send.count * cost.slice_bytes, "", step, send.peer),
                        (OpCode.RECV, 0.0, "", step, send.peer),
                    ]
                if send is not None:
                    link = rank * ranks + schedule.shifted_rank(send.peer, shift)
                    held_up.append((OpCode.SEND, send.count * cost.slice_bytes, name(send), step, link))
                if recv is not None:
                    link = schedule.shifted_rank(recv.peer, shift) * ranks + rank
                    held_up.append((OpCode.RECV, 0.0, "", step, link))
                return held_up
            case _:
                return []

    return [op for action in program for op in ops(action)]


def _one_rank_fabric(network: Network, ranks: int) -> Fabric:
    """Links from rank 0 to each other rank. What leaves rank 0 stands also for what arrives there."""
    if isinstance(network, Uniform):
        return Fabric(
            ranks,
            (network.latency_us,) * ranks,
            (network.bandwidth_GBps,) * ranks,
            (_one_port(0, network),) * ranks,
            (network.port_GBps or network.bandwidth_GBps,),
        )
    assert isinstance(network, TwoLevel)
    k, inside, across = network.ranks_per_node, network.inside, network.across
    if ranks <= k:
        return _one_rank_fabric(inside, ranks)
    # A shared adapter carries what rank 0 sends across once for each rank of its node.
    adapter = network.adapter_GBps or across.port_GBps or across.bandwidth_GBps
    adapter_port = _one_port(1, across) * (k if network.adapter_GBps else 1)
    return Fabric(
        ranks,
        tuple((inside if rank < k else across).latency_us for rank in range(ranks)),
        tuple((inside if rank < k else across).bandwidth_GBps for rank in range(ranks)),
        tuple(_one_port(0, inside) if rank < k else adapter_port for rank in range(ranks)),
        (inside.port_GBps or inside.bandwidth_GBps, adapter),
    )


def _one_port(port: int, network: Uniform) -> tuple[int, ...]:
    """On half duplex what arrives takes the same port again."""
    return (port,) if network.full_duplex else (port, port)
