"""What a schedule is timed on: a frozen record of matmul speed, links, overheads and contention.

A machine is data: a preset (`presets.py`), a JSON file that `fo-compiler calibrate` wrote, or a few numbers. Two ranks with equal
machines take equal decisions; `digest` is what they compare.

Units are in the names: microseconds, GB/s (1000 bytes per microsecond), bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import MachineError
from .ir import COLLECTIVES, Kind
from .machine_json import decode, encode
from .matmul import MatmulModel, Roofline, dtype_name
from .network import Fabric, Matrix, Network, Uniform

DEFAULT_MARGIN = 0.05  # of the plain time


@dataclass(frozen=True)
class CollectiveTime:
    """How long the library's own collective takes: `latency_us + slice_bytes / bandwidth_GBps`, fitted to measured times.

    `kind` names the collective ("all_gather", ...), `ranks` the size of the group. `slice_bytes` are those of one rank's
    slice, as everywhere in the scheduler, so that the bandwidth of N - 1 slices on one port is a N - 1st of the port's.
    `margin` is what a rewrite of a region with this collective has to gain at least, where that is more than the machine's.
    """

    kind: str
    ranks: int
    latency_us: float
    bandwidth_GBps: float
    margin: float = 0.0

    def __post_init__(self) -> None:
        kinds = [kind.value for kind in COLLECTIVES if kind.collective is kind]
        if self.kind not in kinds:
            raise MachineError.wrong("kind", f"one of {', '.join(kinds)}", self.kind)
        _check_margin(self.margin)

    def time_us(self, slice_bytes: float) -> float:
        return self.latency_us + slice_bytes / (self.bandwidth_GBps * 1e3)


@dataclass(frozen=True)
class Machine:
    """A group of ranks as the scheduler sees it.

    - `compute_slowdown`: a compute slice takes this many times longer while a transfer of its rank is in flight
      (kernels of NCCL take multiprocessors, sockets take cores; 1 = not at all)
    - `transfer_slowdown`: a transfer takes this many times longer while its sender or receiver computes
    - `post_us`: how long posting one step's transfers holds up the rank's own work
    - `gap_us`: time that a message occupies its link beside its bytes (1 / message rate)
    - `launch_us`: fixed cost of one kernel
    - `compute_scale`: by rank, how much slower than the model its compute is; empty = all 1
    - `margin`: what a prediction has to gain, as a share of the plain time, before it is believed: more where times vary more
    - `collectives`: measured times of the library's collectives; those that are absent are modelled
    """

    name: str
    source: str
    network: Network
    matmul: MatmulModel
    post_us: float = 0.0
    gap_us: float = 0.0
    launch_us: float = 0.0
    compute_slowdown: float = 1.0
    transfer_slowdown: float = 1.0
    compute_scale: tuple[float, ...] = ()
    margin: float = DEFAULT_MARGIN
    collectives: tuple[CollectiveTime, ...] = ()

    def __post_init__(self) -> None:
        for name in ("compute_slowdown", "transfer_slowdown"):
            if getattr(self, name) < 1:
                raise MachineError.wrong(name, "a factor of at least 1", getattr(self, name))
        for name in ("post_us", "gap_us", "launch_us"):
            if getattr(self, name) < 0:
                raise MachineError.wrong(name, "a time of at least 0", getattr(self, name))
        _check_margin(self.margin)
        if any(scale <= 0 for scale in self.compute_scale):
            raise MachineError.wrong("compute_scale", "factors above 0", self.compute_scale)

    @property
    def is_uniform(self) -> bool:
        """All ranks and all pairs alike, so that one rank of a uniform schedule stands for all."""
        return self.network.is_uniform and len(set(self.compute_scale)) <= 1

    @property
    def has_equal_ranks(self) -> bool:
        """Every rank sees the same machine: all ranks compute alike, and all pairs, or all nodes, are alike."""
        return not isinstance(self.network, Matrix) and len(set(self.compute_scale)) <= 1

    def fabric(self, ranks: int) -> Fabric:
        """The links of the first `ranks` ranks. Raises MachineError where the network has another number."""
        return _fabric(self.network, ranks)

    def scale(self, rank: int) -> float:
        """How much slower than the model `rank` computes."""
        if not self.compute_scale:
            return 1.0
        if rank >= len(self.compute_scale):
            raise MachineError.wrong("compute_scale", f"a factor for rank {rank}", f"{len(self.compute_scale)} factors")
        return self.compute_scale[rank]

    def least_gain(self, margin: float | None, ranks: int = 0, *kinds: Kind) -> float:
        """What a prediction has to gain, as a share of the plain time.

        `margin`, or where it is None the machine's, or that of the collectives of `kinds` if one is larger.
        """
        if margin is not None:
            return margin
        names = {collective.value for kind in kinds for collective in kind.collectives}
        found = [measured.margin for measured in self.collectives if measured.ranks == ranks and measured.kind in names]
        return max([self.margin, *found])

    def matmul_us(self, m: int, k: int, n: int, dtype: str = "bf16") -> float:
        """Time of one [M, K] @ [K, N], launch included."""
        return self.matmul.time_us(m, k, n, dtype_name(dtype)) + self.launch_us

    def add_us(self, size_bytes: float) -> float:
        """Time to add a received partial sum of `size_bytes`: two reads and a write, and a kernel launch."""
        return 3 * size_bytes / (self.matmul.memory_GBps * 1e3) + self.launch_us

    def copy_us(self, size_bytes: float) -> float:
        """Time to copy `size_bytes` to another place: a read and a write, and a kernel launch."""
        return 2 * size_bytes / (self.matmul.memory_GBps * 1e3) + self.launch_us

    def collective_us(self, kind: Kind, ranks: int, slice_bytes: float) -> float | None:
        """Measured time of the library's collective, or None where it was not measured for this many ranks."""
        for measured in self.collectives:
            if (measured.kind, measured.ranks) == (kind.collective.value, ranks):
                return measured.time_us(slice_bytes)
        return None

    def digest(self) -> str:
        """Equal for equal machines, in any process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(encode(self), indent=2, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str, where: str = "machine") -> Machine:
        """Raises MachineError that names the field, what was expected and what came."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise MachineError.wrong(where, "JSON", f"text that is none ({error})") from error
        machine = decode(cls, data, where)
        assert isinstance(machine, Machine)
        return machine

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise MachineError.wrong(
                str(path), "a readable machine file", getattr(error, "strerror", None) or str(error)
            ) from error
        return cls.from_json(text, str(path))


def _check_margin(margin: float) -> None:
    if not 0 <= margin < 1:
        raise MachineError.wrong("margin", "a share of at least 0 and below 1", margin)


def simple_machine(
    name: str = "given times",
    *,
    latency_us: float = 0.0,
    bandwidth_GBps: float = 1.0,
    source: str = "numbers given by the caller",
    **fields_: Any,
) -> Machine:
    """A uniform machine of a few numbers, for callers who know their compute times already."""
    fields_.setdefault("network", Uniform(latency_us, bandwidth_GBps))
    fields_.setdefault("matmul", Roofline({"fp32": 1.0}, memory_GBps=1e9, units=1))
    return Machine(name, source, **fields_)


@lru_cache(maxsize=64)
def _fabric(network: Network, ranks: int) -> Fabric:
    return network.fabric(ranks)
