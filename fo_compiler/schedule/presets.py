"""Machines by name, for planning before anything is measured. Each constant has a unit and a source.

Sources:
 [H100]  NVIDIA H100 Tensor Core GPU data sheet, SXM column, dense figures (half of those "with sparsity")
 [H200]  NVIDIA H200 Tensor Core GPU data sheet
 [A100]  NVIDIA A100 Tensor Core GPU data sheet, SXM 80 GB column
 [PCIe]  PCI-SIG base specifications 4.0 and 5.0: 16 and 32 GT/s a lane, 128b/130b, 16 lanes, each direction
 [IB]    InfiniBand Trade Association roadmap: HDR 200 and NDR 400 Gbit/s on 4 lanes
 [IEEE]  IEEE 802.3: the nominal rate
 [SM]    pytorch issue 179937: an overlapped NCCL collective slows a matmul on H100 by 30 to 40 %
 [own]   a guess of this project, to be replaced by `fo-compiler calibrate`
"""

from __future__ import annotations

import os
from dataclasses import replace

from ..errors import MachineError
from .machine import Machine
from .matmul import Roofline
from .network import Network, TwoLevel, Uniform

WIRE_FRACTION = 0.8  # of the nominal rate that a large message sees [own]

# Peak TFLOPS by dtype (dense), memory GB/s, multiprocessors.
_H100 = Roofline(
    {"fp8": 1979.0, "int8": 1979.0, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67.0, "fp64": 67.0},
    memory_GBps=3350.0,
    units=132,
)  # [H100]
_H200 = replace(_H100, memory_GBps=4800.0)  # [H200]: the compute of an H100 with faster memory
_A100 = Roofline(
    {"int8": 624.0, "bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5},
    memory_GBps=2039.0,
    units=108,
)  # [A100]
# One server core does 16 fp32 fused multiply-adds (2 vector units of 256 bit) at some 3 GHz: 0.1 TFLOPS. [own]
_CPU = Roofline(
    {"fp32": 0.1, "tf32": 0.1, "fp64": 0.05, "bf16": 0.02, "fp16": 0.02, "fp8": 0.01, "int8": 0.1},
    memory_GBps=10.0,
    units=1,
    tile=16,
    ramp_k=16,
)


def _link(nominal_GBps: float, latency_us: float, full_duplex: bool = True) -> Uniform:
    return Uniform(latency_us, nominal_GBps * WIRE_FRACTION, full_duplex=full_duplex)


# Nominal GB/s of one direction of one rank's port; latency of a small message [own].
_NVLINK4 = _link(450.0, 6.0)  # [H100]: 900 GB/s both directions together
_NVLINK3 = _link(300.0, 6.0)  # [A100]: 600 GB/s both directions together
_PCIE4 = _link(31.5, 12.0)  # [PCIe]
_PCIE5 = _link(63.0, 12.0)  # [PCIe]
_HDR = _link(25.0, 12.0)  # [IB]
_NDR = _link(50.0, 12.0)  # [IB]
_ETHERNET = {gigabit: _link(gigabit / 8, 50.0) for gigabit in (1, 10, 25, 100)}  # [IEEE]

# Overheads of a rank: with NCCL a transfer is a kernel that takes multiprocessors [SM], 35 % being the middle;
# a kernel launch that is queued behind another costs some 2 us of idle GPU [own]; posting a send and a receive costs the
# host some 10 us [own], which a small region cannot run ahead of.
_NCCL = {"post_us": 10.0, "gap_us": 2.0, "launch_us": 2.0, "compute_slowdown": 1.35, "transfer_slowdown": 1.05}
# Sockets: to post a step and to wait for it takes 100 us of the host at best, 350 us behind other work (docs/performance.md), and
# copying takes cores from the matmul [own].
_SOCKETS = {
    "post_us": 250.0,
    "gap_us": 10.0,
    "launch_us": 3.0,
    "compute_slowdown": 1.1,
    "transfer_slowdown": 1.1,
}


def _machine(name: str, source: str, network: Network, matmul: Roofline, overheads: dict[str, float]) -> Machine:
    return Machine(name, source, network, matmul, **overheads)  # type: ignore[arg-type]


def _all() -> dict[str, Machine]:
    machines = [
        _machine("h100-nvlink", "[H100] [SM] [own]", _NVLINK4, _H100, _NCCL),
        _machine("h200-nvlink", "[H200] [SM] [own]", _NVLINK4, _H200, _NCCL),
        _machine("a100-nvlink", "[A100] [SM] [own]", _NVLINK3, _A100, _NCCL),
        _machine("h100-pcie5", "[H100] [PCIe] [SM] [own]", _PCIE5, _H100, _NCCL),
        _machine("a100-pcie4", "[A100] [PCIe] [SM] [own]", _PCIE4, _A100, _NCCL),
        _machine("h100-infiniband", "[H100] [IB] [SM] [own]", _NDR, _H100, _NCCL),
        _machine("a100-infiniband", "[A100] [IB] [SM] [own]", _HDR, _A100, _NCCL),
        _machine("h100-nvlink-infiniband", "[H100] [IB] [SM] [own]", TwoLevel(8, _NVLINK4, _NDR), _H100, _NCCL),
        _machine("h200-nvlink-infiniband", "[H200] [IB] [SM] [own]", TwoLevel(8, _NVLINK4, _NDR), _H200, _NCCL),
        _machine("a100-nvlink-infiniband", "[A100] [IB] [SM] [own]", TwoLevel(8, _NVLINK3, _HDR), _A100, _NCCL),
        _machine(
            "h100-nvlink-ethernet-100g", "[H100] [IEEE] [SM] [own]",
            TwoLevel(8, _NVLINK4, _ETHERNET[100], adapter_GBps=12.5 * WIRE_FRACTION), _H100, _NCCL,
        ),
        # All ranks are processes of one computer: a transfer is two copies by the same cores that compute, so while both
        # run each gets half, and nothing is won. The example model on 2 ranks and 2 cores steps 8 to 10 % slower where every
        # region is rewritten (`make demo`), and times differ by 15 % from run to run. Ranks on several computers: name an
        # Ethernet preset, or calibrate.
        _machine(
            "loopback", "[own]", Uniform(60.0, 1.0, full_duplex=False), _CPU,
            _SOCKETS | {"compute_slowdown": 2.0, "transfer_slowdown": 2.0, "margin": 0.15},
        ),
    ]  # fmt: skip
    machines += [
        _machine(f"ethernet-{gigabit}g", "[IEEE] [own]", link, replace(_CPU, units=8), _SOCKETS)
        for gigabit, link in _ETHERNET.items()
    ]
    return {machine.name: machine for machine in machines}


PRESETS = _all()

DEFAULT_PRESET = {"cpu": "loopback", "cuda": "h100-nvlink"}


def find_machine(name_or_path: str) -> Machine:
    """A preset by its name, or a machine file by its path. Raises MachineError with the known names."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if name_or_path.endswith(".json") or os.path.exists(name_or_path):
        return Machine.load(name_or_path)
    raise MachineError.unknown(name_or_path, PRESETS)


def default_machine(device_type: str) -> Machine:
    """What is assumed of a device when nobody said: `loopback` for "cpu", `h100-nvlink` for "cuda" and others."""
    return PRESETS[DEFAULT_PRESET.get(device_type, DEFAULT_PRESET["cuda"])]
