"""Train a small tensor-parallel Llama on English text, with plain Inductor and with `flashoverlap`, and compare.

    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py

Both runs start from the same seed and see the same batches. At the end: what was done with every collective, the
losses and step times of both, and where the dumps lie. Exit status 1 if the losses differ by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig, apply_tensor_parallel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fo_compiler


@dataclass
class Run:
    """One training run."""

    backend: str
    losses: list[float]
    step_ms: list[float]  # without the first two steps, which compile and warm up
    first_step_s: float


def text_batches(steps: int, batch: int, seq_len: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of (input, target) byte tokens [B, S] from the English text of the standard library's help topics."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(data) - seq_len - 1, (batch,), generator=generator).tolist()
        rows = torch.stack([data[start : start + seq_len + 1] for start in starts])
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


def train(
    backend: str,
    config: LlamaConfig,
    batches: list[tuple[Tensor, Tensor]],
    options: dict[str, Any],
    sequence_parallel: bool = True,
) -> Run:
    """Train from the same seed as every other run; returns its losses and times."""
    torch.compiler.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = apply_tensor_parallel(Llama(config), mesh, sequence_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    compiled = torch.compile(model, backend=backend, options=options or None)
    run = Run(backend, [], [], 0.0)
    for step, (tokens, targets) in enumerate(batches):
        dist.barrier()
        start = time.perf_counter()
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        elapsed = time.perf_counter() - start
        if step == 0:
            run.first_step_s = elapsed
        elif step > 1:
            run.step_ms.append(elapsed * 1e3)
        say(f"\r{backend}: step {step + 1}/{len(batches)}, loss {run.losses[-1]:.4f}   ", end="")
    say("")
    return run


def say(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--no-sequence-parallel", action="store_true", help="all-reduces instead")
    parser.add_argument("--schedule", default="auto", help="force a schedule family: ring or direct")
    parser.add_argument("--slices-per-rank", type=int, default=None)
    parser.add_argument(
        "--rewrite", default="always", help="always, auto or never; on loopback auto may leave all alone"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of the losses")
    parser.add_argument("--dump-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--json", type=Path, help="write the same as data")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = replace(LlamaConfig(), n_layers=args.layers)
    batches = text_batches(args.steps, args.batch, args.seq_len)
    say(
        f"{dist.get_world_size()} gloo ranks, {args.layers} layers, {args.steps} steps; "
        "the first step of each run compiles"
    )

    sequence_parallel = not args.no_sequence_parallel
    plain = train("inductor", config, batches, {}, sequence_parallel)
    options: dict[str, Any] = {
        "rewrite": args.rewrite,
        "schedule": args.schedule,
        "slices_per_rank": args.slices_per_rank,
        "dump_dir": str(args.dump_dir),
    }
    with fo_compiler.record() as report:
        ours = train("flashoverlap", config, batches, options, sequence_parallel)

    difference = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, plain.losses, strict=True))
    agrees = difference <= args.tolerance
    say(f"\n{report}")
    say(f"{'':14}{'first loss':>12}{'last loss':>12}{'median step':>14}{'first step':>12}")
    for run in (plain, ours):
        median = statistics.median(run.step_ms) if run.step_ms else float("nan")
        say(f"{run.backend:14}{run.losses[0]:12.6f}{run.losses[-1]:12.6f}{median:11.1f} ms{run.first_step_s:10.1f} s")
    verdict = "equal" if agrees else "DIFFERENT"
    say(f"losses {verdict}: largest relative difference {difference:.1e}, tolerance {args.tolerance:.0e}")
    say(f"dumps: {args.dump_dir}/rank*/ (graphs before and after, drawings, timelines)")
    if args.json and dist.get_rank() == 0:
        data = {
            "ranks": dist.get_world_size(),
            "runs": [asdict(plain), asdict(ours)],
            "largest_relative_difference": difference,
            "tolerance": args.tolerance,
            "records": json.loads(report.to_json()),
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n")
    dist.destroy_process_group()
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
