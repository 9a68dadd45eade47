"""What the product itself costs: host time of its ops, and its share of a compile.

python benchmarks/overhead.py                               ops; whole compiles of 2 layers; our pass alone for 2, 8 and 32
python benchmarks/overhead.py --no-ops --layers 8 --pass-layers     the whole compile of 8 layers: minutes

Ops: microseconds of a small message between 2 gloo ranks on loopback, ours against torch's; a loop of many, median. Part of
each figure is the message itself, so the host's part is shown apart: posting, and waiting for what is there already.

Compile: examples/llama.py on the fake process group (4 ranks, tensor parallel), caches off, forward and backward. A whole
compile, and what of it is spent in our pass (with rewrite="always", the most work that it can have). For models whose whole
compile takes too long, the pass alone: torch captures the model and Inductor calls the pass on both graphs as ever, and code
is then generated for nothing but empty results. Nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import save, why
from benchmarks.world import World, undisturbed

SMALL = 256  # floats
RANKS = 4  # of the fake group


def median_us(once: Callable[[], Any], repeats: int = 300) -> float:
    import torch.distributed as dist

    for _ in range(20):
        once()
    times = []
    dist.barrier()
    with undisturbed():
        for _ in range(repeats):
            start = time.perf_counter()
            once()
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure_ops() -> dict[str, float]:
    """Microseconds of each way to move a small message on this rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    from benchmarks.regions import all_gather
    from fo_compiler.runtime import ops

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    sent, received = torch.ones(SMALL), torch.empty(SMALL)
    above, below = (rank + 1) % ranks, (rank - 1) % ranks

    def ours() -> None:
        ops.wait(ops.exchange(sent, above, below, name, "overhead"), sent)

    def pairs() -> None:
        batch = [dist.P2POp(dist.isend, sent, above), dist.P2POp(dist.irecv, received, below)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    gathered = torch.empty(SMALL * ranks)
    scattered = torch.empty(SMALL // ranks)
    result = {
        "exchange + wait (ours)": median_us(ours),
        "batch_isend_irecv + wait": median_us(pairs),
        "all_gather_into_tensor": median_us(lambda: dist.all_gather_into_tensor(gathered, sent)),
        "reduce_scatter_tensor": median_us(lambda: dist.reduce_scatter_tensor(scattered, sent)),
        "functional all_gather + wait": median_us(lambda: funcol.wait_tensor(all_gather(sent, 0, group))),
    }
    posting, waiting = [], []
    with undisturbed():
        for _ in range(100):
            dist.barrier()
            start = time.perf_counter()
            buffer = ops.exchange(sent, above, below, name, "overhead")
            posted = time.perf_counter()
            time.sleep(0.001)
            before = time.perf_counter()
            ops.wait(buffer, sent)
            posting.append((posted - start) * 1e6)
            waiting.append((time.perf_counter() - before) * 1e6)
    result["ours, while a profiler records"] = _profiled_us(ours)
    result["of which: exchange"] = statistics.median(posting)
    result["of which: wait for what is there"] = statistics.median(waiting)
    return result


def _profiled_us(once: Callable[[], Any]) -> float:
    """With a range for each post and each wait."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]):
        return median_us(once, 100)


def measure_compile(layers: int, whole: bool) -> dict[str, float]:
    """Seconds of a compile of a `layers`-layer Llama, and of our pass within it; on one process, in a fake group.

    Without `whole`, of the pass alone.
    """
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when Inductor is imported
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import llama

    from fo_compiler import FlashOverlapPass
    from fo_compiler.torch_adapter import init_fake_process_group

    dist.destroy_process_group()
    init_fake_process_group(0, RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    config = replace(llama.LlamaConfig(), n_layers=layers)
    seconds: dict[str, float] = {}
    spent, spent_cpu, nodes = [0.0], [0.0], [0]
    call = FlashOverlapPass.__call__

    def timed(self: Any, graph: Any) -> None:
        nodes[0] += len(graph.nodes)
        start, start_cpu = time.perf_counter(), time.process_time()
        call(self, graph)
        spent[0] += time.perf_counter() - start
        spent_cpu[0] += time.process_time() - start_cpu
        if not whole:
            _empty_results(graph)

    torch.compile(lambda x: x @ x + 1)(torch.ones(8, 8))  # imports Inductor
    FlashOverlapPass.__call__ = timed  # type: ignore[method-assign]
    try:
        for backend in ("inductor", "flashoverlap") if whole else ("flashoverlap",):
            torch.compiler.reset()
            torch.manual_seed(0)
            model = llama.apply_tensor_parallel(llama.Llama(config), mesh)
            options: dict[str, Any] | None = {"rewrite": "always"} if backend == "flashoverlap" else None
            compiled = torch.compile(model, backend=backend, options=options)
            tokens = torch.zeros(4, 128, dtype=torch.int64)
            start = time.perf_counter()
            compiled(tokens).float().sum().backward()
            seconds[backend] = time.perf_counter() - start
    finally:
        FlashOverlapPass.__call__ = call  # type: ignore[method-assign]
    row = {"layers": layers, "graph_nodes": nodes[0], "our_pass_s": round(spent[0], 3)}
    row["our_pass_cpu_s"] = round(spent_cpu[0], 3)  # equal where nothing else runs
    if whole:
        row |= {f"{backend}_s": round(took, 2) for backend, took in seconds.items()}
        row["share"] = round(spent[0] / seconds["flashoverlap"], 4)
    return row


def _empty_results(graph: Any) -> None:
    """Let a graph return empty tensors, and do nothing else."""
    import torch
    from torch.fx import map_arg

    (output,) = graph.find_nodes(op="output")

    def empty(node: Any) -> Any:
        value = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(value, torch.Tensor):
            return node
        with graph.inserting_before(output):
            made = graph.call_function(
                torch.ops.aten.empty_strided.default,
                (list(value.shape), list(value.stride())),
                {"dtype": value.dtype, "device": value.device},
            )
        made.meta["val"] = value
        return made

    output.args = map_arg(output.args, empty)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[2], help="whole compiles")
    parser.add_argument("--pass-layers", type=int, nargs="*", default=[2, 8, 32], help="our pass alone")
    parser.add_argument("--no-ops", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="of each compile; what takes longer is listed as not measured"
    )
    parser.add_argument("--out", type=Path, help="write the results to this file, after each of them")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {"ops_us": {}, "compile": []}

    def keep() -> None:
        if args.out:
            save(args.out, result)

    if not args.no_ops:
        with World(2, None) as world:
            of_ranks = world.run(measure_ops)
        result["ops_us"] = {name: round(max(r[name] for r in of_ranks), 1) for name in of_ranks[0]}
        for name, us in result["ops_us"].items():
            print(f"{name:36}{us:8.1f} us", flush=True)
        keep()
    status = 0
    for layers, whole in [*((n, True) for n in args.layers), *((n, False) for n in args.pass_layers)]:
        try:
            with World(1, None) as world:
                row = world.run(measure_compile, layers, whole, timeout_s=args.minutes * 60)[0]
        except (RuntimeError, TimeoutError) as error:
            print(f"FAILED: {layers} layers: {error}", file=sys.stderr, flush=True)
            row, status = {"layers": layers, "failed": f"not measured: {why(error)}"}, 1
        result["compile"].append(row)
        print(json.dumps(row), flush=True)
        keep()
    return status


if __name__ == "__main__":
    sys.exit(main())
