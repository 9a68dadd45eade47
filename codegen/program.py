"""Read a program that Inductor generated: its launches with streams, events and memory, as a plan of `passes/races.py`.

What Inductor makes of a graph decides which memory a launch uses: it reuses buffers, writes in place and copies views. So
the race checker looks at the program too, and not at the graph alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..passes.races import Launch, Plan
from ..runtime.streams import CALLER, NO_EVENT

_STREAMS = ("stream", "after", "event")
_OURS = "torch.ops.fo_compiler."
_ALLOCATIONS = ("empty_strided_cuda", "empty_strided_cpu", "empty_strided", "empty_strided_p2p")
# What the host does by itself; checks look at a tensor's sizes and address only, and their names differ between versions.
_HOST_ONLY = ("assert_", "get_raw_stream", "torch.cuda.set_device", "args.clear")


def plan_of_program(source: str) -> Plan:
    """The launches of the program's `call`, in order. A buffer is named by the first variable that held its memory."""
    tree = ast.parse(source)
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call")
    return _Reader(tree).read(call)


def launch_table(plan: Plan) -> str:
    """One line a launch: its stream, the events that it runs behind and records, and what it is."""
    lines = []
    for launch in plan:
        if launch.name.startswith(("del ", "return")):
            continue
        stream = "caller" if launch.stream == CALLER else f"side {launch.stream}"
        after = " ".join("caller" if event == CALLER else f"e{event}" for event in launch.after)
        event = "" if launch.event == NO_EVENT else f"e{launch.event}"
        lines.append(
            f"{stream:8} {after and 'after ' + after:20} {event and 'records ' + event:12} {launch.name}".rstrip()
        )
    return "\n".join(lines) + "\n"


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.parameters = dict(_kernel_parameters(tree))
        self.memory: dict[str, str] = {}  # variable -> the first variable that held its memory
        self.place: dict[str, str] = {}  # variable -> which part of its memory it is, where it is not all of it
        self.launches: list[Launch] = []
        self.slices: dict[str, set[str]] = defaultdict(set)  # memory -> the places in it that are written separately

    def read(self, call: ast.FunctionDef) -> Plan:
        self._block(call.body)
        return tuple(
            Launch(
                launch.name, launch.stream, launch.after, launch.event,
                *(self._places(names) for names in (launch.reads, launch.writes, launch.holds)),
            )
            for launch in self.launches
        )  # fmt: skip

    def _places(self, names: frozenset[str]) -> frozenset[str]:
        parts = {name: self.slices.get(name) for name in names}
        whole = frozenset(name for name, inner in parts.items() if not inner)
        return whole.union(*(self._places(frozenset(inner)) for inner in parts.values() if inner))

    def _block(self, body: list[ast.stmt]) -> None:
        for statement, following in zip(body, [*body[1:], None], strict=True):
            match statement:
                case ast.With():
                    self._block(statement.body)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name("args")):
                    self.memory.update({name.id: name.id for name in names if isinstance(name, ast.Name)})
                case ast.Assign(targets=[ast.Name(target)]):
                    self._assign(target, statement.value)
                    self._place(target, statement.value, following)
                case ast.Expr(value=ast.Call() as call):
                    self._launch(call, None)
                case ast.Delete():
                    held = self._used(*statement.targets)
                    if held:
                        self.launches.append(Launch(f"del {ast.unparse(statement)[4:]}", holds=held))
                    for gone in statement.targets:
                        self.memory.pop(ast.unparse(gone), None)
                        self.place.pop(ast.unparse(gone), None)
                case ast.Return():
                    self.launches.append(Launch("return", holds=frozenset(self.memory.values())))

    def _assign(self, target: str, value: ast.expr) -> None:
        if isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            if function == "reinterpret_tensor":
                value = value.args[0]
            elif function in _ALLOCATIONS:
                self.memory[target] = target
                return
            else:
                self._launch(value, target)
                return
        match value:
            case ast.Name(source) if source in self.memory:
                self.memory[target] = self.memory[source]
            case ast.Subscript(value=ast.Name(source), slice=index) if source in self.memory:  # one of several results
                self.memory[target] = f"{self.memory[source]}.{ast.unparse(index)}"
                self.slices[self.memory[source]].add(self.memory[target])

    def _place(self, target: str, value: ast.expr, following: ast.stmt | None) -> None:
        """A part of a joined buffer, which a matmul writes; a variable that takes over all of the memory is none."""
        match value:
            case ast.Call(func=ast.Name("reinterpret_tensor"), args=[ast.Name(source), _, _, offset]):
                taken_over = isinstance(following, ast.Delete) and source in map(ast.unparse, following.targets)
                if source in self.memory and not taken_over:
                    self.place[target] = f"{self.memory[source]}[{ast.unparse(offset)}:]"
                    self.slices[self.memory[source]].add(self.place[target])

    def _launch(self, call: ast.Call, target: str | None) -> None:
        function = ast.unparse(call.func)
        if function.startswith(_HOST_ONLY):
            return
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        name = function.removeprefix("torch.ops.").removesuffix(".default").removesuffix(".direct")
        used = self._used(*call.args)
        reads, writes, holds = used, frozenset[str](), frozenset[str]()
        streams: dict[str, Any] = {}
        if function.startswith(_OURS):
            streams = {key: ast.literal_eval(keywords[key]) for key in _STREAMS if key in keywords}
        match name:
            case "fo_compiler.wait":
                reads, holds = frozenset(), used
                if target is not None:
                    self.memory[target] = next(iter(self._used(call.args[0])))
                    target = None
            case "fo_compiler.fork" | "fo_compiler.join":
                reads, holds = frozenset(), used
            case "fo_compiler.slice_matmul":
                (out,) = self._used(call.args[0])
                place = f"{out}[{ast.unparse(call.args[4])}:]"
                self.slices[out].add(place)
                reads, writes = self._used(*call.args[1:]), frozenset({place})
            case _ if name.endswith(".run") and (parameters := self.parameters.get(name.removesuffix(".run"))):
                arguments = list(zip(parameters, call.args, strict=False))
                writes = self._used(*(value for parameter, value in arguments if "out_ptr" in parameter))
                reads = self._used(*(value for parameter, value in arguments if "in_" in parameter))
            case _ if "out" in keywords:
                writes = self._used(keywords["out"])
            case _ if name.split(".")[-1].endswith("_"):
                writes = self._used(call.args[0])
        if target is not None:
            self.memory[target] = target
            if name not in ("fo_compiler.fork", "fo_compiler.announce"):
                writes |= {target}
        self.launches.append(
            Launch(
                name.removesuffix(".run"), streams.get("stream", CALLER), tuple(streams.get("after", ())),
                streams.get("event", NO_EVENT), reads, writes, holds,
            )
        )  # fmt: skip

    def _used(self, *expressions: ast.expr) -> frozenset[str]:
        """The memory that expressions name."""
        names = (node.id for expression in expressions for node in ast.walk(expression) if isinstance(node, ast.Name))
        return frozenset(self.place.get(name, self.memory[name]) for name in names if name in self.memory)


def triton_sources(source: str) -> dict[str, str]:
    """The sources of a program's Triton kernels by name: it hands each to `async_compile.triton`."""
    return dict(_triton_calls(ast.parse(source)))


def _triton_calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, text = (ast.literal_eval(argument) for argument in node.args[:2])
            yield name, text


def _kernel_parameters(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for name, text in _triton_calls(tree):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield name, [argument.arg for argument in node.args.args]
