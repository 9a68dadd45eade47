"""A small network of namespaces: one a rank, joined by a bridge a node, each uplink limited.

    with Network(4, Shaping(rate="1gbit")) as network:
        ...                 network.names[rank] is a namespace in which the interface is "e0", the address address(rank)
        network.shape(Shaping(rate="500mbit"))

Needs root, `ip` and `tc`. Nothing outside the namespaces is touched, and they are gone when the block ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType

from fo_compiler.schedule import network as fabrics

INTERFACE = "e0"
# The smallest burst that still takes whole segments of 64 KB from the network stack.
BURST_KB = 128
PAYLOAD = 1448 / 1514  # of a full Ethernet frame, with TCP's timestamps
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Shaping:
    """What leaves a rank: `rate` as tc writes it ("1gbit"); `slow_rank`'s uplink has `slow_factor` of it.

    With `nodes` = 2 the first and the second half of the ranks are a node each, and what leaves a node, from all of its
    ranks together, has `slow_factor` of `rate`.
    """

    rate: str
    slow_rank: int | None = None
    slow_factor: float = 0.5
    nodes: int = 1

    def bits_per_second(self, rank: int) -> float:
        return parse_rate(self.rate) * (self.slow_factor if rank == self.slow_rank else 1.0)

    @property
    def between_nodes(self) -> float:
        """Bits a second that leave a node."""
        return parse_rate(self.rate) * self.slow_factor

    def links(self, ranks: int) -> fabrics.Network:
        """The links as they are limited, for bounds: no latency, and nothing but headers beside the bytes."""
        if self.nodes > 1:
            across = _link(self.between_nodes)
            return fabrics.TwoLevel(ranks // self.nodes, _link(parse_rate(self.rate)), across, across.bandwidth_GBps)
        if self.slow_rank is None:
            return _link(parse_rate(self.rate))
        row = [(_link(self.bits_per_second(rank)).bandwidth_GBps,) * ranks for rank in range(ranks)]
        return fabrics.Matrix(((0.0,) * ranks,) * ranks, tuple(row))

    @property
    def burst_us(self) -> float:
        """What a link that was idle is ahead of its rate."""
        return BURST_KB * 1024 * 8e6 / self.slowest

    @property
    def slowest(self) -> float:
        """Bits a second of the narrowest place."""
        return self.between_nodes if self.nodes > 1 or self.slow_rank is not None else parse_rate(self.rate)


def _link(bits_per_second: float) -> fabrics.Uniform:
    return fabrics.Uniform(0.0, PAYLOAD * bits_per_second / 8e9)


def parse_rate(text: str) -> float:
    """Bits a second of "1gbit", "500mbit" ... Raises ValueError."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        number = text.lower().removesuffix(unit)
        if number != text.lower():
            value = float(number) * factor
            if value > 0:
                return value
    raise ValueError(f"rate: expected a number and kbit, mbit or gbit, as in 500mbit; got {text!r}")


def why_unshaped() -> str | None:
    """Why links cannot be limited here, or None where they can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    probe = f"fo-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this kernel or container allows no network namespaces"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def enter(name: str) -> None:
    """Move this thread, and the threads that it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


# TCP as a cluster has it. With BBR, the default of some virtual machines, runs of one case differed by up to 150 ms. And a
# connection that was idle while its rank computed should not have to find out anew how fast the link is.
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}


class Network:
    """Namespaces for `ranks` ranks. Use as a context manager."""

    def __init__(self, ranks: int, shaping: Shaping) -> None:
        self.ranks = ranks
        self.shaping = shaping
        prefix = f"fo-{os.getpid()}"
        self.switches = [f"{prefix}-switch{node}" for node in range(shaping.nodes)]
        self.names = [f"{prefix}-{rank}" for rank in range(ranks)]

    def __enter__(self) -> Network:
        # A plain kill would leave the namespaces behind: make it an exception, as Ctrl-C is one.
        self._old_handler = signal.signal(signal.SIGTERM, _terminate)
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove()
        signal.signal(signal.SIGTERM, self._old_handler)

    def shape(self, shaping: Shaping) -> None:
        """Change the rates; what is on its way is not lost."""
        self.shaping = shaping
        for rank, name in enumerate(self.names):
            _limit(name, INTERFACE, shaping.bits_per_second(rank))
        if len(self.switches) > 1:
            for switch in self.switches:
                # For all ranks together.
                _limit(switch, "trunk", shaping.between_nodes, queue_ms=2000)

    def disconnect(self, rank: int) -> None:
        """Take down a rank's interface, as if its cable were drawn: what is on its way is lost, nobody is told."""
        _sh(f"ip -n {self.names[rank]} link set {INTERFACE} down")

    def _create(self) -> None:
        for switch in self.switches:
            _sh(f"ip netns add {switch}")
            _sh(f"ip -n {switch} link add bridge type bridge")
            _sh(f"ip -n {switch} link set bridge up")
        if len(self.switches) > 1:
            first, second = self.switches
            _sh(f"ip -n {first} link add trunk type veth peer name trunk netns {second}")
            for switch in self.switches:
                _sh(f"ip -n {switch} link set trunk master bridge up")
        for rank, name in enumerate(self.names):
            switch = self.switches[rank * len(self.switches) // self.ranks]
            _sh(f"ip netns add {name}")
            _sh(f"ip -n {switch} link add p{rank} type veth peer name {INTERFACE} netns {name}")
            _sh(f"ip -n {switch} link set p{rank} master bridge up")
            _sh(f"ip -n {name} addr add {address(rank)}/24 dev {INTERFACE}")
            _sh(f"ip -n {name} link set {INTERFACE} up")
            _sh(f"ip -n {name} link set lo up")
            for setting, value in TCP.items():
                _sh(f"ip netns exec {name} tee /proc/sys/net/ipv4/{setting}", value)
        self.shape(self.shaping)

    def _remove(self) -> None:
        for name in (*self.names, *self.switches):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _limit(namespace: str, interface: str, bits_per_second: float, queue_ms: int = 400) -> None:
    # A queue for what a connection has under way, which is up to 4 MB: what is dropped comes a retransmission later.
    limit = f"tbf rate {int(bits_per_second)}bit burst {BURST_KB}kb latency {queue_ms}ms"
    _sh(f"tc -n {namespace} qdisc replace dev {interface} root {limit}")


def _sh(command: str, stdin: str = "") -> None:
    done = subprocess.run(command.split(), input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def _terminate(number: int, frame: object) -> None:
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)
