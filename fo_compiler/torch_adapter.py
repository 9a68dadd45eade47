"""The only module that touches private names of torch. Each one says where it lives and since when.

Supported: torch 2.11 to 2.14. Importing this module is cheap: Inductor is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from importlib import import_module
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import fx
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]

from .errors import OptionError, TorchVersionError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
OLDEST = (2, 11)

if TORCH_VERSION < OLDEST:
    raise TorchVersionError(
        f"fo-compiler needs torch >= {OLDEST[0]}.{OLDEST[1]}, found {torch.__version__}. "
        "Install a newer torch in this environment."
    )


def resolve_process_group(group_name: str) -> ProcessGroup:
    """The process group with this name (torch.distributed.distributed_c10d, 2.11 to 2.14)."""
    group: ProcessGroup = _c10d()._resolve_process_group(cast(Any, group_name))
    return group


@cache  # an import statement in a function that runs for every message is a third of its time
def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


def point_to_point(group: ProcessGroup, device: torch.device) -> Any:
    """What sends and receives for a group on this type of device (ProcessGroup._get_backend, 2.11 to 2.14)."""
    return group._get_backend(device)


def has_name(group: ProcessGroup, group_name: str) -> bool:
    """Whether a group is still what this name stands for: it may have been destroyed (distributed_c10d._world, 2.11 to 2.14)."""
    return bool(_c10d()._world.pg_names.get(group) == group_name)


def group_store(group: ProcessGroup) -> Store | None:
    """The store of the default process group, which all ranks reach; None for the fake backend, which has no peers."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if dist.get_backend(group) == "fake":
        return None
    store: Store = c10d._get_default_store()  # type: ignore[attr-defined, unused-ignore]
    return store


def prefixed(store: Store, prefix: str) -> Store:
    """A part of a store, with keys of its own."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined, unused-ignore]

    return PrefixStore(prefix, store)


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long an operation of a group may take (ProcessGroup backend options, 2.11 to 2.14).

    Of its backend for CUDA where it has one: a group may have been made for the CPU on a machine with GPUs.
    """
    devices = {device.type for device in group._device_types}
    on_cuda = "cuda" in devices and torch.cuda.is_available()
    timeout: timedelta = group._get_backend(torch.device("cuda" if on_cuda else "cpu")).options._timeout
    return timeout


def allows_tf32() -> bool:
    """Whether float32 matmuls on CUDA may be tf32, by whichever of torch's settings it was said (2.11 to 2.14).

    To read the older one, `allow_tf32`, raises where the newer one was used.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def coalesces(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a send and a receive of this group have to be posted as one (ProcessGroup._get_backend, 2.11 to 2.14)."""
    return bool(group._get_backend(device).supports_coalescing)


def functional_collective(name: str) -> Callable[..., Any]:
    """A function of torch.distributed._functional_collectives (older than 2.11) by its name of torch 2.13, which renamed some."""
    module = import_module("torch.distributed._functional_collectives")
    found = getattr(module, name, None) or getattr(module, name.replace("_single", "_tensor"))
    return cast(Callable[..., Any], found)


def group_members() -> dict[str, list[int]]:
    """Name -> global ranks of every process group that this process is in (distributed_c10d._world, 2.11 to 2.14)."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch.distributed.distributed_c10d import _world

    # A group that this rank is no member of is listed under a number, which has no name.
    return {
        _world.pg_names[group]: sorted(ranks, key=ranks.__getitem__)
        for group, ranks in _world.pg_group_ranks.items()
        if group in _world.pg_names
    }


def inductor_option_names() -> set[str]:
    """Names of Inductor's configuration (torch._inductor.list_options is public, and slow to import)."""
    import torch._inductor

    return set(torch._inductor.list_options())


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's configuration for a torch.compile mode; raises OptionError, listing the modes, for an unknown one."""
    import torch._inductor

    if mode is None or mode == "default":
        return {}
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    if not isinstance(mode, str) or mode not in modes:
        raise OptionError.wrong("mode", f"one of {', '.join(map(repr, sorted(modes)))}, or None", mode)
    return dict(modes[mode])


def configured_post_passes() -> list[Callable[[fx.Graph], None]]:
    """The custom post-grad passes that are configured globally: one before 2.13, one or a list since."""
    import torch._inductor.config as config

    return as_pass_list(config.post_grad_custom_post_pass)


def as_pass_list(value: Any) -> list[Callable[[fx.Graph], None]]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    config_patches: Mapping[str, Any],
    inner: Callable[..., Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """AOTAutograd and Inductor, with configuration for this compile alone; `inner` stands in for Inductor on each graph.

    Lives in torch._inductor.compile_fx, 2.11 to 2.14.
    """
    from torch._inductor.compile_fx import compile_fx

    others = {} if inner is None else {"inner_compile": cast(Any, inner)}
    return compile_fx(gm, example_inputs, config_patches=dict(config_patches), **others)  # type: ignore[return-value]


def compile_error() -> type[Exception]:
    """What ends a compile, wherever in torch it fails (torch._dynamo.exc, older than 2.11)."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def with_own_code(function: Callable[..., T]) -> Callable[..., T]:
    """The same function for a compile of its own: torch keeps compiles by code object, no more than eight for each."""
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, None, None, function.__closure__)
    return cast(Callable[..., T], own)


@contextmanager
def every_inductor_compile(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Inside the block, on every thread, a compile by Inductor gets the configuration that `change` makes of its own.

    Each caller in torch looks compile_fx up in torch._inductor.compile_fx when it compiles (2.11 to 2.14). Inductor's
    global configuration would not do: it belongs to a thread since 2.13, and a backward graph may be compiled on another
    one, or after the block; configuration that came with the forward graph is kept for it.
    """
    module: Any = import_module("torch._inductor.compile_fx")
    original = module.compile_fx
    form = signature(original)
    is_open = True

    @wraps(original)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        if not is_open:
            return original(*args, **kwargs)
        call = form.bind(*args, **kwargs)
        call.arguments["config_patches"] = change(dict(call.arguments.get("config_patches") or {}))
        return original(*call.args, **call.kwargs)

    module.compile_fx = compile_fx
    try:
        yield
    finally:
        is_open = False
        if module.compile_fx is compile_fx:  # else somebody has wrapped it in turn, and calls us: we only hand on
            module.compile_fx = original


def fuse_as_micro_pipeline_does(graph: fx.Graph) -> None:
    """Run torch's own pass for tensor parallelism on a graph, as if NCCL and symmetric memory were there.

    torch._inductor.fx_passes.micro_pipeline_tp, 2.11 to 2.14: it replaces an all-gather before, or a reduce-scatter after a
    matmul by a fused op. For comparison only.
    """
    import torch.distributed as dist
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch.distributed._symmetric_memory import _test_mode

    with _test_mode(), patch.object(dist, "is_nccl_available", lambda: True):
        micro_pipeline_tp_pass(graph)


def inductor_pass_class() -> type:
    """Base class of a custom Inductor pass (torch._inductor.custom_graph_pass, 2.11 to 2.14)."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def orders_mutation() -> bool:
    """Whether `run_after` takes an op that writes to an argument and returns nothing: not before torch 2.13."""
    return TORCH_VERSION >= (2, 13)


def run_after(node: fx.Node, dependencies: Iterable[fx.Node]) -> fx.Node:
    """Make Inductor run `node` after `dependencies`, without making it read them; returns the node that replaces it.

    The control_deps operator (torch._inductor.fx_passes.control_dependencies, 2.11 to 2.14) calls a one-node subgraph.
    That node gets no "val": Inductor would take the subgraph's output for a graph output and pin its strides, and a
    matmul could no longer write into its part of a joined buffer.
    """
    from torch._inductor.fx_passes.control_dependencies import control_deps
    from torch.fx._lazy_graph_module import _LazyGraphModule  # makes no code of a graph that nobody calls

    graph, owner = node.graph, node.graph.owning_module
    assert owner is not None
    operands: list[fx.Node] = list(node.all_input_nodes)
    body = fx.Graph(owner)
    inner: dict[fx.Node, fx.Node] = {}
    for index, operand in enumerate(operands):
        inner[operand] = body.placeholder(f"arg_{index}")
        inner[operand].meta.update(operand.meta)
    call = body.call_function(
        node.target,  # type: ignore[arg-type]
        fx.map_arg(node.args, inner.__getitem__),
        fx.map_arg(node.kwargs, inner.__getitem__),
    )
    call.meta.update({**node.meta, "val": None})
    body.output(call)
    attribute = f"fo_{node.name}"
    setattr(owner, attribute, _LazyGraphModule(owner, body))
    with graph.inserting_before(node):
        subgraph = graph.get_attr(attribute)
        ordered = graph.call_function(control_deps, (tuple(dependencies), subgraph, *operands))
    ordered.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
    node.replace_all_uses_with(ordered)
    name = node.name
    graph.erase_node(node)
    ordered.name = name
    return ordered


def profiling() -> bool:
    """Whether a profiler records in this process (torch.autograd.profiler, 2.11 to 2.14)."""
    return torch.autograd.profiler._is_profiler_enabled


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """`torch.empty`, contiguous, with the dtype and device of `like`.

    On a CPU by what Inductor's programs call (torch._C._dynamo.guards, 2.11 to 2.14): with cold caches `torch.empty`
    takes 0.06 ms, this a third of it.
    """
    if not like.is_cpu:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    strides: tuple[int, ...] = ()
    stride = 1
    for size in reversed(shape):
        strides, stride = (stride, *strides), stride * (size or 1)
    made: torch.Tensor = _empty_strided_cpu(tuple(shape), strides, like.dtype)
    return made


def emits_direct_call(op: torch._ops.OpOverload) -> None:
    """Let Inductor's Python programs call `torch.ops.<name>.direct`, a plain function, where the graph has an op.

    By the registry of torch._inductor.codegen.custom_extern_kernel_codegen (2.11 to 2.14). C++ programs (`cpp_wrapper`)
    do not ask it for ops of ours.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    from torch._inductor.virtualized import V

    name = f"torch.ops.{op.namespace}.{op._opname}"

    def emit(node: Any, _writeline: Callable[[str], None]) -> None:
        node.python_kernel_name = f"{name}.direct"  # which the registry does not have, so it is written as any other
        V.graph.wrapper_code.generate_fallback_kernel(node)

    CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(f"{name}.{op._overloadname}", CustomCodegen(python=emit))


def has_float32_products(device: torch.device) -> bool:
    """Whether `mm.dtype` and `bmm.dtype` give the float32 product of bfloat16 matrices (CUDA, 2.11 to 2.14).

    Inductor's own matmul (`triton.native_matmul`) forgets the dtype that was asked for.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    from torch._inductor import config

    return not config.triton.native_matmul


def symbolic_expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size (torch.SymInt.node.expr, 2.11 to 2.14)."""
    return size.node.expr


def known_divisible(size: torch.SymInt) -> set[Any]:
    """What the graph of a symbolic size is known to divide, as sympy remainders that are 0: `Mod(s, 4)`, from its guards.

    Lives in ShapeEnv.divisible (torch.fx.experimental.symbolic_shapes, 2.11 to 2.14).
    """
    known: set[Any] = size.node.shape_env.divisible
    return known


def floor_division(size: Any, divisor: int) -> Any:
    """`size // divisor` as torch writes it in sympy (torch.utils._sympy.functions.FloorDiv, 2.11 to 2.14)."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(size, divisor)


def without_guards(fake_mode: Any) -> AbstractContextManager[None]:
    """Ops on fake tensors of this mode add no guard in it: for sizes that are right for all values by proof.

    What torch then asks of a size is answered for the example alone. So no size may be 1 there, and another number elsewhere.

    Lives in ShapeEnv.suppress_guards (torch.fx.experimental.symbolic_shapes, 2.11 to 2.14).
    """
    shape_env = getattr(fake_mode, "shape_env", None)
    suppressed: AbstractContextManager[None] = nullcontext() if shape_env is None else shape_env.suppress_guards()
    return suppressed


def size_hint(size: torch.SymInt, expression: Any = None) -> int | None:
    """The value of a symbolic size in the example that is compiled, without a guard; None if it depends on data.

    With `expression` the value of another size of the same graph. Lives in ShapeEnv.backed_var_to_val
    (torch.fx.experimental.symbolic_shapes, 2.11 to 2.14).
    """
    expression = size.node.expr if expression is None else expression
    known = expression.xreplace(size.node.shape_env.backed_var_to_val)
    return int(known) if known.is_number else None


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of nested containers (torch.utils._pytree, 2.11 to 2.14)."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write an artifact of the current compile for tlparse (torch._logging.trace_structured, 2.11 to 2.14)."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


def generate_code(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    move: Callable[[fx.GraphModule, list[Any]], list[Any]],
    **arguments: Any,
) -> str:
    """Inductor's program for a graph; nothing is loaded or run.

    `move` may put the graph and its inputs on another device between Inductor's graph passes and its lowering.
    Lives in torch._inductor.compile_fx and GraphLowering (torch._inductor.graph), 2.11 to 2.14.
    """
    from unittest import mock

    import torch._inductor.config as config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    lower = GraphLowering.run
    programs: list[str] = []

    class Generated(Exception):
        pass

    def run(lowering: Any, *inputs: Any) -> Any:
        return lower(lowering, *move(lowering.module, list(inputs)))

    def stop(lowering: Any) -> Any:
        program = lowering.codegen()[0]
        programs.append(getattr(program, "value", program))
        raise Generated

    with (
        config.patch(fx_graph_cache=False, compile_threads=1),
        mock.patch.object(GraphLowering, "run", run),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
    ):
        try:
            compile_fx_inner(gm, example_inputs, **arguments)
        except Exception as error:
            if not programs or not _caused_by(error, Generated):
                raise
    return programs[0]


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind) or kind.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def forget_devices() -> None:
    """Let Inductor ask again what a device is: it keeps the answers for the life of the process.

    Lives in torch._inductor.runtime.hints and torch._inductor.utils, 2.11 to 2.14.
    """
    import torch._inductor.utils as utils
    from torch._inductor.runtime.hints import DeviceProperties

    names = ("is_big_gpu", "get_max_num_sms", "using_b200", "get_gpu_type", "get_gpu_dram_gbps", "get_device_tflops")
    for function in (DeviceProperties.create, *(getattr(utils, name, None) for name in names)):
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()


def compile_triton_kernel(name: str, source: str) -> list[Any]:
    """The compiled variants of a Triton kernel that Inductor wrote, for the active driver's target, none of them loaded.

    With several configurations to choose from, all of them: the choice is made by timing them on the device.
    Lives in PyCodeCache (torch._inductor.codecache) and torch._inductor.runtime.triton_heuristics, 2.11 to 2.14.
    """
    from unittest import mock

    import torch._inductor.config as config
    from torch._inductor.codecache import PyCodeCache

    # Inductor's own launcher keeps no assembly.
    launcher = config.patch(use_static_triton_launcher=False, use_static_cuda_launcher=False)
    with launcher, mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"):
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
    return [result.kernel for result in kernel.compile_results]


def fake_tensor_on(value: Any, device: torch.device) -> Any:
    """A fake tensor like `value` on a device that need not exist (torch._subclasses.fake_tensor, 2.11 to 2.14)."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if not isinstance(value, FakeTensor):
        return value
    with unset_fake_temporarily():
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, like, device)


@cache
def _fake() -> Any:
    import torch._subclasses.fake_tensor as fake_tensor

    return fake_tensor


def is_plain_fake(value: Any, mode: Any) -> bool:
    """Whether sizes, strides, dtype and device, all known, say all of a fake tensor of this mode.

    Lives in torch._subclasses.fake_tensor, 2.11 to 2.14.
    """
    return (
        type(value) is _fake().FakeTensor
        and value.fake_mode is mode
        and value.constant is None
        and value.real_tensor is None
        and value.layout is torch.strided
        and not (value._has_symbolic_sizes_strides or value.requires_grad or value.is_quantized)
        and not (value.is_conj() or value.is_neg() or value.is_inference())
    )


def new_fake(
    mode: Any,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A fake tensor made without a call of an op, in memory of its own or, from `offset` on, in that of another one.

    As FakeTensorMode makes one out of its cache (torch._subclasses.fake_tensor, 2.11 to 2.14).
    """
    fake = _fake()
    with fake.in_kernel_invocation_manager(mode):
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if memory is not None:
            made.set_(memory.untyped_storage(), offset, shape, stride)
    return fake.FakeTensor(mode, made, device)  # type: ignore[no-any-return]


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are in the same memory, fake ones too (torch._C._is_alias_of, 2.11 to 2.14)."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined, unused-ignore]


def fake_module(module: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Put the meta tensors of a module, shards of DTensors included, on fake CPU memory; returns the mode and the inputs.

    Lives in torch._subclasses.fake_tensor, 2.11 to 2.14.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.tensor import DTensor

    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            local = fake(tensor.to_local())
            return DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        return FakeTensor(mode, tensor, torch.device("cpu"))  # type: ignore[no-any-return, unused-ignore]

    with torch.no_grad():
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                setattr(part, name, torch.nn.Parameter(fake(parameter.detach()), parameter.requires_grad))
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, fake(buffer))
        return mode, [fake(tensor) for tensor in inputs]


def init_fake_process_group(rank: int, world_size: int) -> None:
    """A process group of ranks that are not there (torch.testing._internal.distributed.fake_pg, 2.11 to 2.14)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """The same for a block."""
    import torch.distributed as dist

    init_fake_process_group(rank, world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class SymmetricMemory:
    """Inboxes of a group that each rank maps, and signals (torch.distributed._symmetric_memory, 2.11 to 2.14).

    A rank's memory has `slots` slots of `slot_bytes` for each source. Making it is a rendezvous of all ranks of the group.
    A signal that does not come within the group's time-out ends in an error of the device: its kernel gives up, and says which.
    """

    def __init__(self, group_name: str, device: torch.device, ranks: int, slots: int, slot_bytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        self.slots, self.slot_bytes = slots, slot_bytes
        # An allocation of its own. `symmetric_memory.empty` may take a part of one from its pool, but buffers count from the
        # start of an allocation, and whoever shares one shares its signals, too.
        self._memory = _SymmetricMemory.empty_strided_p2p((ranks * slots * slot_bytes,), (1,), torch.uint8, device)
        self._handle = rendezvous(self._memory, cast(Any, group_name))
        self._timeout_ms = int(group_timeout(resolve_process_group(group_name)).total_seconds() * 1e3)
        self.rank: int = self._handle.rank

    def slot(self, rank: int, source: int, slot: int, like: torch.Tensor) -> torch.Tensor:
        offset = (source * self.slots + slot) * self.slot_bytes // like.element_size()
        return self._handle.get_buffer(rank, like.shape, like.dtype, offset)

    def put_signal(self, rank: int, channel: int) -> None:
        self._handle.put_signal(rank, channel, self._timeout_ms)

    def wait_signal(self, rank: int, channel: int) -> None:
        self._handle.wait_signal(rank, channel, self._timeout_ms)


def without_peer_memory(device: torch.device) -> str:
    """Why symmetric memory cannot be used on a device; empty if it can (_SymmetricMemory, 2.11 to 2.14)."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return "this torch has no symmetric memory"
    backend = _SymmetricMemory.get_backend(device)
    if not backend:
        return f"symmetric memory has no backend for {device}"
    # The others have no signals between two ranks, or memory that is not mapped.
    return (
        ""
        if backend == "CUDA"
        else f"symmetric memory is by {backend} here, and only torch's own (CUDA) has what is needed"
    )


def async_tp_ops() -> Any:
    """PyTorch's fused ops of AsyncTP (torch.distributed._symmetric_memory registers them, 2.11 to 2.14)."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def memory_bandwidth(GBps: float) -> AbstractContextManager[Any]:
    """Let Inductor's overlap scheduler take this where it asks a GPU for its own, on a machine without one
    (torch.utils._runtime_estimation, 2.11 to 2.14)."""
    return patch("torch.utils._runtime_estimation.get_gpu_dram_gbps", lambda: GBps, create=True)
