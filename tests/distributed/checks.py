"""What the ranks run: each function here is called on every rank of a world at the same time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fo_compiler
from fo_compiler import Record
from fo_compiler.passes.sites import is_collective
from fo_compiler.runtime import ops
from fo_compiler.runtime.ops import pending_transfers
from fo_compiler.torch_adapter import functional_collective
from tests.tapers import ragged

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama import Llama, LlamaConfig, apply_tensor_parallel


def gather_on_dim_0_then_cat(x: Tensor, dim: int, group: Any) -> Tensor:
    """What `all_gather_tensor` does, in a form that dynamo of torch 2.11 follows for each dim."""
    gathered = funcol.all_gather_tensor(x, 0, group)
    return gathered if dim == 0 else torch.cat(torch.chunk(gathered, dist.get_world_size(), 0), dim)


# Renamed in torch 2.13; the old names warn since.
all_gather = getattr(funcol, "all_gather_single", None) or gather_on_dim_0_then_cat
reduce_scatter = functional_collective("reduce_scatter_single")

CONFIG = LlamaConfig(vocab_size=48, dim=96, n_layers=1, n_heads=24, n_kv_heads=12, hidden_dim=48)
BATCH, SEQ_LEN = 2, 24


class CountCollectives(CustomGraphPass):
    """Counts the collectives of every graph that plain Inductor compiles: what our records are held against."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.count += sum(is_collective(node) for node in graph.nodes)

    def uuid(self) -> None:
        return None


def plain(function: Any) -> tuple[Any, CountCollectives]:
    counter = CountCollectives()
    return torch.compile(function, options={"post_grad_custom_post_pass": counter}), counter


def ours(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="flashoverlap", options={"rewrite": "always", **options})


def generating(kernels: bool) -> AbstractContextManager[None]:
    """Without `kernels` Inductor calls ATen for everything and generates no C++: quicker, where only values matter."""
    return config.patch(fallback_by_default=not kernels)  # type: ignore[no-any-return]


def assert_one_record_each(records: list[Record], collectives: int) -> None:
    names = [(record.graph, record.collective) for record in records]
    assert len(set(names)) == len(names), names
    assert len(names) == collectives, f"{len(names)} records of {collectives} collectives: {names}"
    for record in records:
        assert record.reason
        assert record.rewritten == (record.schedule is not None) == bool(record.region), record


def assert_nothing_left(registry_before: int) -> None:
    assert pending_transfers() == []
    assert torch._C._distributed_c10d._get_work_registry_size() == registry_before


def shared(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same random tensor on every rank."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def own(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor of this rank."""
    return shared(seed * 1000 + dist.get_rank(), *shape, dtype=dtype)


# --- the demo model -------------------------------------------------------------------------------------------------


def train(
    compile_: Callable[[Any], Any], mesh: DeviceMesh, steps: int, sequence_parallel: bool = True
) -> dict[str, Tensor]:
    """Losses, and this rank's gradients of the first and parameters after the last step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = apply_tensor_parallel(Llama(CONFIG).double(), mesh, sequence_parallel)
    step_of = compile_(model)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found: dict[str, Tensor] = {}
    losses = []
    for step in range(steps):
        loss = F.cross_entropy(step_of(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                found[f"grad {name}"] = local(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found["losses"] = torch.stack(losses)
    found |= {f"value {name}": local(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@lru_cache
def mesh_of(axis: int | None) -> DeviceMesh:
    """All ranks on one axis, or one axis of a mesh of 2 x 2."""
    if axis is None:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return mesh_2x2()["ab"[axis]]


@lru_cache
def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


@lru_cache
def train_plain(
    axis: int | None, steps: int, kernels: bool, sequence_parallel: bool = True
) -> tuple[dict[str, Tensor], int]:
    counters: list[CountCollectives] = []

    def compile_(model: Any) -> Any:
        compiled, counter = plain(model)
        counters.append(counter)
        return compiled

    with generating(kernels):
        return train(compile_, mesh_of(axis), steps, sequence_parallel), counters[0].count


def model_trains_as_under_plain_inductor(
    schedule: str, slices_per_rank: int, *, axis: int | None = None, steps: int = 3, kernels: bool = False
) -> list[Record]:
    want, collectives = train_plain(axis, steps, kernels)
    registry = torch._C._distributed_c10d._get_work_registry_size()
    with fo_compiler.record() as report, generating(kernels):
        got = train(lambda model: ours(model, schedule=schedule, slices_per_rank=slices_per_rank), mesh_of(axis), steps)
    assert want["losses"][-1] < want["losses"][0]
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    assert_one_record_each(report.records, collectives)
    assert_nothing_left(registry)
    return report.records


def all_reduces_train_as_under_plain_inductor(rewrite: str) -> list[Record]:
    """Tensor parallel without sequence parallel, with generated kernels: Inductor runs an all-reduce that is left alone
    in place, on memory that it plans itself."""
    want, collectives = train_plain(None, 3, True, False)
    with fo_compiler.record() as report:
        got = train(lambda model: ours(model, rewrite=rewrite), mesh_of(None), 3, False)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    assert_one_record_each(report.records, collectives)
    return report.records


# --- collectives one by one -----------------------------------------------------------------------------------------


def matches_eager(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], collectives: int, kernels: bool = False, **options: Any
) -> list[Record]:
    """Compile a function, compare every output with eager, twice; returns the records."""
    registry = torch._C._distributed_c10d._get_work_registry_size()
    want = function(*(tensor.clone() for tensor in inputs))
    with fo_compiler.record() as report, generating(kernels):
        compiled = ours(function, **options)
        for _ in range(2):
            got = compiled(*(tensor.clone() for tensor in inputs))
            for index, (a, b) in enumerate(zip(got, want, strict=True)):
                torch.testing.assert_close(
                    a, b, rtol=1e-12, atol=1e-10, msg=lambda m, index=index: f"output {index}: {m}"
                )
                assert a.stride() == b.stride(), f"output {index}"
    assert_one_record_each(report.records, collectives)
    assert_nothing_left(registry)
    return report.records


SIZES = (12, 24, 12, 24)  # of dims, before the last one: divide by 2, 3 and 4 ranks
K = 24


def every_dim(
    schedule: str, slices_per_rank: int, dims: tuple[int, ...] = (2, 3, 4), kernels: bool = False
) -> list[Record]:
    """Functional collectives along every dim of tensors of so many dims, in one graph."""
    group = dist.group.WORLD

    def function(*tensors: Tensor) -> list[Tensor]:
        weight, *tensors_ = tensors
        results = []
        for x in tensors_:
            for dim in range(x.dim()):
                gathered = all_gather(x, dim, group)
                w = weight.repeat(dist.get_world_size(), 1) if dim == x.dim() - 1 else weight
                results.append(gathered @ w)
                results.append(reduce_scatter(x @ weight, "sum", dim, group))
                results.append(all_gather(x @ weight, dim, group))
        return results

    inputs = (shared(0, K, K), *(own(n, *SIZES[: n - 1], K) for n in dims))
    with torch.no_grad():
        return matches_eager(
            function, inputs, 3 * sum(dims), kernels, schedule=schedule, slices_per_rank=slices_per_rank
        )


def in_ragged_pieces() -> list[Record]:
    with ragged(1):
        return every_dim("tapered", 4, (2,))


def all_reduces_in_slices() -> list[Record]:
    """All-reduces by the library in slices, with generated kernels: they run in place."""
    group = dist.group.WORLD

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = funcol.all_reduce(x @ w, "sum", group)
        return torch.relu(h), funcol.all_reduce(torch.tanh(x @ w), "sum", group) + 1

    return matches_eager(function, (own(1, 36, K), shared(0, K, 10)), 2, True, schedule="library")


def user_code(average: bool) -> list[Record]:
    """Collectives of torch.distributed that write into a tensor of the caller."""
    ranks = dist.get_world_size()

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        into = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(into, x)
        rows, columns = ([torch.empty_like(x) for _ in range(ranks)] for _ in range(2))
        dist.all_gather(rows, x)
        dist.all_gather(columns, x)
        summed = x.new_empty(x.shape[0] // ranks, w.shape[1])
        dist.reduce_scatter_tensor(summed, x @ w)
        results = [into @ w, torch.cat(rows) @ w, torch.cat(columns, 1) @ w.repeat(ranks, 1), summed]
        if average:
            averaged = x.new_empty(x.shape[0] // ranks, w.shape[1])
            dist.reduce_scatter_tensor(averaged, x @ w, op=dist.ReduceOp.AVG)
            results.append(averaged)
        return results

    with torch.no_grad():
        return matches_eager(function, (own(1, 24, K), shared(0, K, 16)), 5 if average else 4)


def sixteen_bits() -> list[Record]:
    """bfloat16: no further from float64 than the plain collectives are."""
    group = dist.group.WORLD

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (
            all_gather(x, 0, group) @ w,
            reduce_scatter(x @ w, "sum", 0, group),
        )

    x, w = own(1, 96, 64, dtype=torch.bfloat16), shared(0, 64, 96, dtype=torch.bfloat16)
    exact = function(x.double(), w.double())
    with generating(False):
        baseline = torch.compile(function)(x, w)
    records = []
    for schedule in ("auto", "direct", "ring"):
        torch._dynamo.reset()
        with fo_compiler.record() as report, generating(False):
            got = ours(function, schedule=schedule)(x, w)
        records += report.records
        for a, b, c in zip(got, baseline, exact, strict=True):
            assert a.dtype == torch.bfloat16
            assert a.shape == b.shape
            error, allowed = ((t.double() - c).square().mean().sqrt().item() for t in (a, b))
            if schedule != "ring":  # a ring rounds at every hop: it is never chosen by itself for a sum
                assert error <= 1.02 * allowed, f"{schedule}: {error} > {allowed}"
            torch.testing.assert_close(a.double(), c, rtol=0.05, atol=0.5)
    return records


def both_axes_of_a_mesh() -> list[Record]:
    """Collectives of both axes of a mesh of 2 x 2 in one graph."""
    mesh = mesh_2x2()

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        results = []
        for axis in range(2):
            group = (mesh, axis)
            results.append(all_gather(x, 0, group) @ w)
            results.append(reduce_scatter(x @ w, "sum", 1, group))
        return results

    with torch.no_grad():
        records = []
        for schedule in ("ring", "direct"):
            torch._dynamo.reset()
            records += matches_eager(function, (own(1, 12, K), shared(0, K, 12)), 4, schedule=schedule)
    return records


def world_of_one() -> list[Record]:
    group = dist.group.WORLD

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        return [all_gather(x, 0, group) @ w, reduce_scatter(x @ w, "sum", 0, group)]

    with torch.no_grad():
        return matches_eager(function, (own(1, 8, K), shared(0, K, 12)), 2)


def a_tensor_that_is_changed_after_it_was_sent() -> list[Record]:
    """The change has to wait for the transfer, which is large enough to be on its way for a while."""
    group = dist.group.WORLD

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        y = all_gather(x, 0, group) @ w
        x.fill_(-1e6)
        return [y, x]

    with torch.no_grad():
        return matches_eager(function, (own(1, 4096, 256), shared(0, 256, 8)), 1, schedule="direct")


# --- the cache ------------------------------------------------------------------------------------------------------


def messages_of_several_sizes() -> list[list[float]]:
    """Small ones posted behind large ones, which do not fit the socket; first and last values that arrive."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    peers, name = ((rank + 1) % ranks, (rank - 1) % ranks), dist.group.WORLD.group_name
    sent = [torch.full(((3_000_000, 4)[step % 2],), rank + 0.1 * step, dtype=torch.float32) for step in range(6)]
    under_way = [ops.exchange(tensor, *peers, name, f"step {step}") for step, tensor in enumerate(sent)]
    seen = []
    for received, tensor in zip(under_way, sent, strict=True):
        received = ops.wait(received, tensor)
        assert bool((received == received[0]).all())
        seen.append([round(received[0].item(), 3), round(received[-1].item(), 3)])
    return seen


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """all-gather -> two matmuls -> reduce-scatter, with gradients."""
    group = dist.group.WORLD
    hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 0, group) @ up)
    return funcol.reduce_scatter_tensor_autograd(hidden @ down, "sum", 0, group)


def checkpointed(mode: str) -> list[Record]:
    """Gradients of a checkpointed block equal eager's, and no more is saved for backward than by plain Inductor."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        if mode == "none":
            return x + mlp(x, up, down)
        kwargs = {} if mode == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}
        return x + checkpoint(mlp, x, up, down, use_reentrant=False, **kwargs)

    def step(call: Callable[..., Tensor], compiled: bool = True) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        leaves = [own(1, 12, 8).requires_grad_(), own(2, 8, 16).requires_grad_(), own(3, 16, 8).requires_grad_()]
        given = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if compiled else nullcontext():
            result = call(*leaves)
        result.square().sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], sum(saved.values())

    want, _ = step(lambda x, up, down: x + mlp(x, up, down), compiled=False)
    with generating(False):
        _, plain_bytes = step(torch.compile(block))
        with fo_compiler.record() as report:
            got, our_bytes = step(ours(block))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert our_bytes <= plain_bytes, f"{our_bytes} bytes saved, {plain_bytes} by plain Inductor"
    return report.records


TOGGLED: tuple[dict[str, Any] | None, ...] = (
    None,  # plain Inductor
    {"schedule": "ring"},
    {"rewrite": "never"},
    {"schedule": "direct", "slices_per_rank": 2},
    None,
    {"schedule": "ring"},
)


def options_toggled() -> tuple[list[list[str]], list[int]]:
    """Options toggled in one process, plain Inductor between them: values and records are right each time.

    Returns what each run did with its collectives, and how many of its graphs did not come from the cache.
    """
    inputs = [own(1, 12, 8), own(2, 8, 16), own(3, 16, 8)]
    want: list[Tensor] | None = None
    did = []
    misses = []
    for options in TOGGLED:
        torch._dynamo.utils.counters.clear()
        torch._dynamo.reset()
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with fo_compiler.record() as report:
            call = torch.compile(mlp) if options is None else ours(mlp, **options)
            with generating(False):
                for _ in range(2):
                    for leaf in leaves:
                        leaf.grad = None
                    result = call(*leaves)
                    result.square().sum().backward()
        got = [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        want = want or got
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        if options is None:
            assert report.records == []
        else:
            assert_one_record_each(report.records, 4)
        misses.append(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])
        did.append([f"{record.graph} {record.schedule}" for record in report.records])
    assert_nothing_left(0)
    return did, misses


# --- a machine that no family fits ----------------------------------------------------------------------------------


def searched_schedules(machine: str) -> list[Record]:
    """One all-gather and one reduce-scatter on a machine with one slow link: transfers that only receive, or only send."""
    group = dist.group.WORLD

    def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return reduce_scatter(torch.relu(all_gather(x, 0, group) @ w) @ v, "sum", 0, group)

    inputs = own(1, 8, 16), own(2, 16, 24), own(3, 24, 8)
    call = ours(block, machine=machine, slices_per_rank=1)
    with fo_compiler.record() as report:
        for _ in range(3):
            torch.testing.assert_close(call(*inputs), block(*inputs), rtol=1e-12, atol=1e-12)
    assert_one_record_each(report.records, 2)
    assert_nothing_left(0)
    return report.records


# --- when something breaks ------------------------------------------------------------------------------------------


def a_peer_that_dies() -> str:
    """The last rank ends without a word; the others get an error that names the region, and do not hang."""
    import os

    def function(x: Tensor, w: Tensor) -> Tensor:
        return all_gather(x, 0, dist.group.WORLD) @ w

    call = ours(function)
    inputs = (own(1, 8, K), shared(0, K, 12))
    with torch.no_grad(), generating(False):
        call(*inputs)
        if dist.get_rank() == dist.get_world_size() - 1:
            os._exit(0)
        try:
            for _ in range(3):
                call(*inputs)
        except fo_compiler.TransferError as error:
            return str(error)
    return "no error"


def fails_on_rank_one() -> None:
    assert dist.get_rank() != 1
