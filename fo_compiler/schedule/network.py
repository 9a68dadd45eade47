"""Who can send to whom, how fast, and what they share: the network half of a `Machine`.

Three ways to write a network down, one way to read it: every one becomes a `Fabric` for a given number of ranks.

    Uniform    all pairs alike
    TwoLevel   nodes of `ranks_per_node` ranks: fast inside, slower across, the node's adapter perhaps shared
    Matrix     any latency and bandwidth for every ordered pair

A transfer occupies its *link* (the ordered pair of ranks: messages on it keep their order, as on a TCP connection or
a NCCL stream) and its *ports* (the sender's way out, the receiver's way in, a node's adapter), whose bandwidth is
shared equally by the links that use them at that moment.

Units: microseconds and GB/s, where 1 GB/s = 1000 bytes per microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..errors import MachineError

BYTES_PER_US_PER_GBPS = 1000.0


@dataclass(frozen=True)
class Fabric:
    """A network unrolled for `ranks` ranks; `a * ranks + b` indexes the link from rank a to rank b."""

    ranks: int
    latency_us: tuple[float, ...]  # by link
    bandwidth_GBps: tuple[float, ...]  # by link: what one transfer alone can get from the wire
    ports: tuple[tuple[int, ...], ...]  # by link: the ports on its way
    port_GBps: tuple[float, ...]  # by port
    islands: tuple[tuple[int, ...], ...] = ()  # groups of ranks that are close to each other (nodes), if any

    def link(self, source: int, destination: int) -> int:
        return source * self.ranks + destination

    @cached_property
    def alone_GBps(self) -> tuple[float, ...]:
        """By link: bandwidth of a transfer that shares its ports with nobody."""
        return tuple(
            min(wire, *(self.port_GBps[port] for port in ports))
            for wire, ports in zip(self.bandwidth_GBps, self.ports, strict=True)
        )

    def transfer_us(self, source: int, destination: int, size_bytes: float) -> float:
        """Time of one message that is alone on the network."""
        link = self.link(source, destination)
        return self.latency_us[link] + size_bytes / (self.alone_GBps[link] * BYTES_PER_US_PER_GBPS)


@dataclass(frozen=True)
class Uniform:
    """All pairs alike. `port_GBps` 0 means that a rank's port is as fast as one of its links.

    `full_duplex` False lets a rank's incoming and outgoing transfers share one port.
    """

    latency_us: float
    bandwidth_GBps: float
    port_GBps: float = 0.0
    full_duplex: bool = True

    @property
    def is_uniform(self) -> bool:
        return True

    def fabric(self, ranks: int) -> Fabric:
        port = self.port_GBps or self.bandwidth_GBps
        return Fabric(
            ranks,
            (self.latency_us,) * ranks**2,
            (self.bandwidth_GBps,) * ranks**2,
            tuple(_rank_ports(a, b, ranks, self.full_duplex) for a in range(ranks) for b in range(ranks)),
            (port,) * (2 * ranks),
        )


@dataclass(frozen=True)
class TwoLevel:
    """Nodes of `ranks_per_node` ranks, numbered node by node.

    `inside` and `across` describe one pair of ranks on the same node and on two nodes. `adapter_GBps` is what all
    ranks of a node share on the way out, and again on the way in; 0 means that every rank has an adapter of its own
    (as in a machine with one network card a GPU), as fast as `across`.
    """

    ranks_per_node: int
    inside: Uniform
    across: Uniform
    adapter_GBps: float = 0.0

    @property
    def is_uniform(self) -> bool:
        return False

    def fabric(self, ranks: int) -> Fabric:
        k = self.ranks_per_node
        if ranks <= k:
            return self.inside.fabric(ranks)
        if ranks % k:
            raise MachineError.wrong(
                "network.ranks_per_node",
                f"a divisor of the group's {ranks} ranks",
                k,
                "give the group whole nodes",
            )
        # Ports: out and in of each rank for the inside, out and in of each adapter for the outside.
        shared = self.adapter_GBps > 0
        adapters = ranks // k if shared else ranks
        adapter = self.adapter_GBps if shared else self.across.port_GBps or self.across.bandwidth_GBps
        latency, bandwidth, ports = [], [], []
        for a in range(ranks):
            for b in range(ranks):
                near = a // k == b // k
                level = self.inside if near else self.across
                latency.append(level.latency_us)
                bandwidth.append(level.bandwidth_GBps)
                if near:
                    ports.append(_rank_ports(a, b, ranks, level.full_duplex))
                else:
                    out, in_ = _rank_ports(
                        a // k if shared else a, b // k if shared else b, adapters, level.full_duplex
                    )
                    ports.append((2 * ranks + out, 2 * ranks + in_))
        inside_port = self.inside.port_GBps or self.inside.bandwidth_GBps
        return Fabric(
            ranks,
            tuple(latency),
            tuple(bandwidth),
            tuple(ports),
            (inside_port,) * (2 * ranks) + (adapter,) * (2 * adapters),
            tuple(tuple(range(node * k, node * k + k)) for node in range(ranks // k)),
        )


@dataclass(frozen=True)
class Matrix:
    """Any network: `latency_us[a][b]` and `bandwidth_GBps[a][b]` from rank a to rank b (the diagonal is not read).

    `port_GBps[a]` bounds what rank a sends at one time, and what it receives; empty means as fast as its fastest link.
    """

    latency_us: tuple[tuple[float, ...], ...]
    bandwidth_GBps: tuple[tuple[float, ...], ...]
    port_GBps: tuple[float, ...] = ()
    full_duplex: bool = True

    @property
    def is_uniform(self) -> bool:
        return False

    def fabric(self, ranks: int) -> Fabric:
        if ranks != len(self.latency_us):
            raise MachineError.wrong(
                "network", f"links of a group of {ranks} ranks", f"a matrix of {len(self.latency_us)}",
                "calibrate this group, or name a machine that fits",
            )  # fmt: skip
        fastest_out = [
            max((row[b] for b in range(ranks) if b != a), default=1.0) for a, row in enumerate(self.bandwidth_GBps)
        ]
        fastest_in = [
            max((self.bandwidth_GBps[a][b] for a in range(ranks) if b != a), default=1.0) for b in range(ranks)
        ]
        ports = self.port_GBps + self.port_GBps if self.port_GBps else tuple(fastest_out + fastest_in)
        if not self.full_duplex and not self.port_GBps:
            ports = tuple(map(max, zip(fastest_out, fastest_in, strict=True))) * 2
        return Fabric(
            ranks,
            tuple(value for row in self.latency_us for value in row),
            tuple(value for row in self.bandwidth_GBps for value in row),
            tuple(_rank_ports(a, b, ranks, self.full_duplex) for a in range(ranks) for b in range(ranks)),
            ports,
        )

    def __post_init__(self) -> None:
        ranks = len(self.latency_us)
        for name, rows in (("latency_us", self.latency_us), ("bandwidth_GBps", self.bandwidth_GBps)):
            if len(rows) != ranks or any(len(row) != ranks for row in rows):
                raise MachineError.wrong(
                    f"network.{name}",
                    f"{ranks} rows of {ranks} numbers",
                    f"rows of {[len(row) for row in rows]}",
                )
        for a, row in enumerate(self.bandwidth_GBps):
            if any(value <= 0 for b, value in enumerate(row) if b != a):
                raise MachineError.wrong(f"network.bandwidth_GBps[{a}]", "numbers above 0", list(row))
        if self.port_GBps and len(self.port_GBps) != ranks:
            raise MachineError.wrong("network.port_GBps", f"{ranks} numbers or none", f"{len(self.port_GBps)}")


Network = Uniform | TwoLevel | Matrix


def _rank_ports(source: int, destination: int, ranks: int, full_duplex: bool) -> tuple[int, int]:
    """Port `rank` is the way out of a rank, port `ranks + rank` the way in (the same one on half duplex)."""
    return source, destination + (ranks if full_duplex else 0)
