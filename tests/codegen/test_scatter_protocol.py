"""The reduce-scatter region in one kernel: every interleaving of its kernel, its transfers and its runs, for small groups.

What is modelled is what the product gives the device, not a copy of it. The plan of a rank is read off the graph that the passes
rewrote. `whole_scatter.in_one_kernel` then runs, with the copy engine's own protocol, against streams, memory and a kernel that
write down what they are given: the tables of the kernel, and on each stream copies, signals, flags, and what waits for what.

    caller's stream   epoch + 1 | kernel | after all of comm | read the result | memory is somebody else's
    communication     after the caller's | wait for flag 0 | take `free` | copy | put `full` | take `full` | copy | ... | flag
    program p of P    tile p, p + P, ... by the kernel's table: wait for what is added; store; count; the last one raises the flag

`Model` makes actors of these and visits every state that they can reach. A buffer holds the number of the run, and of the slice,
whose data it has, so that whoever reads too early or too late finds another number. The buffers of a run are those of the run
before, as the allocator may have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fo_compiler.options import Options
from fo_compiler.passes.whole_nodes import WholeRegion
from fo_compiler.passes.whole_regions import read_region
from fo_compiler.runtime import streams, whole_plan, whole_scatter
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.peer_memory import SLOTS, CopyEngineTransport, free, full
from fo_compiler.runtime.whole_plan import Flags, Plan
from fo_compiler.schedule import Kind
from fo_compiler.testing import rewrite_for_rank
from tests.graphs import capture, reduce_scatter
from tests.passes.helpers import tensors

pytest.importorskip("triton")

CALLER, COMM = "caller", "comm"
Op = tuple[Any, ...]  # what it does, and with what
Issued = list[tuple[str, Op]]  # stream and op, in the order of the host
Edit = Callable[[int, Issued], Issued]


# --- what the product gives the device -------------------------------------------------------------------------------


@cache
def plans(ranks: int, m: int, family: str) -> tuple[Plan, ...]:
    """The arguments of the op, as the passes read them off the rewritten graph of each rank."""
    plain = capture(lambda x, w: reduce_scatter(x @ w, 0, ranks), tensors((ranks * m, 2), (2, 1), dtype=torch.float32))
    options, world, made = (
        Options(rewrite="always", schedule=family, slices_per_rank=m, slice_matmul="whole"),
        LocalWorld(ranks),
        [],
    )
    for rank in range(ranks):
        gm, _ = rewrite_for_rank(plain, options, world.transport(rank))
        found = read_region(gm.graph, "rs0", Kind.REDUCE_SCATTER)
        assert isinstance(found, WholeRegion), found
        made.append(Plan.of(found.order, found.posts, found.group_name, found.labels))
    return tuple(made)


class Recorder:
    """A rank's device: what each stream is given, with memory by name instead of by address."""

    def __init__(self, rank: int, ranks: int, inboxes: Tensor) -> None:
        self.rank, self.ranks, self.inboxes = rank, ranks, inboxes
        self.issued: Issued = []
        self.current = CALLER
        self.run = 0
        self.flags = 0  # address of the first one
        self.places: dict[str, tuple[int, int, int]] = {}  # buffer -> address, bytes of an item, items
        self.hold("slot", inboxes, inboxes[0, 0, 0].nbytes)

    def give(self, *op: Any) -> None:
        self.issued.append((self.current, op))

    def hold(self, name: str, tensor: Tensor, item_bytes: int) -> None:
        self.places[name] = tensor.data_ptr(), item_bytes, tensor.nbytes // item_bytes

    def where(self, address: int) -> tuple[str, int] | None:
        for name, (start, item, count) in self.places.items():
            if start <= address < start + item * count:
                return name, (address - start) // item
        return None

    # what `PeerTransfers` asks of memory

    def slot(self, rank: int, source: int, slot: int, like: Tensor) -> Tensor:
        return self.inboxes[rank, source, slot, : like.nbytes].view(like.dtype).view(like.shape)

    def put_signal(self, rank: int, channel: int) -> None:
        self.give("put", rank, channel)

    def wait_signal(self, rank: int, channel: int) -> None:
        self.give("take", rank, channel)

    # what is launched

    def kernel(
        self, a: Tensor, b: Tensor, like: Tensor, groups: Tensor, adds: Tensor | None, *_: Any, **__: Any
    ) -> None:
        own = sum(flag == 0 for _, _, flag, *_ in groups.tolist())
        self.places["out"] = like.data_ptr(), like.nbytes, own
        arrivals = adds.tolist() if adds is not None else []
        partials = [(self.where(place), (flag - self.flags) // 4) for place, flag in arrivals]
        self.give(
            "kernel",
            [
                (slice_, self.where(place), (flag - self.flags) // 4 if flag else None, partials[first : first + count])
                for slice_, place, flag, first, count in groups.tolist()
            ],
        )


@dataclass
class Stream:
    recorder: Recorder
    name: str

    def wait_stream(self, other: Stream) -> None:
        before = self.recorder.current
        self.recorder.current = self.name
        self.recorder.give("after", other.name, sum(name == other.name for name, _ in self.recorder.issued))
        self.recorder.current = before


class Cuda:
    """The part of torch.cuda that `streams.beside` uses."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def current_stream(self, device: object) -> Stream:
        return Stream(self.recorder, self.recorder.current)

    def Stream(self, device: object, priority: int) -> Stream:
        return Stream(self.recorder, COMM)

    @contextmanager
    def stream(self, target: Stream) -> Iterator[None]:
        before, self.recorder.current = self.recorder.current, target.name
        yield
        self.recorder.current = before


class Copies(TorchDispatchMode):
    """Writes down the copies between buffers, and the start of an epoch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            places = [self.recorder.where(tensor.data_ptr()) for tensor in args[:2]]
            if places != [None, None]:  # as late marks on their way to the host are
                self.recorder.give("copy", *places)
        if func is torch.ops.aten.add_.Tensor and args[0].dtype == torch.int32:
            self.recorder.give("epoch")
        return func(*args, **(kwargs or {}))


class Way(CopyEngineTransport):
    def __init__(self, recorder: Recorder, slice_bytes: int) -> None:
        super().__init__(lambda *_: recorder)
        self.recorder, self.slice_bytes = recorder, slice_bytes

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        return self.recorder.rank, self.recorder.ranks

    def _group(self, group_name: str) -> Recorder:
        return self.recorder

    def prepare(self, group_name: str, like: Tensor) -> None:
        self.recorder.hold("moving", like, self.slice_bytes)
        super().prepare(group_name, like)


@cache
def recorded(ranks: int, m: int, family: str, runs: int) -> tuple[Issued, ...]:
    """What each rank's device is given in `runs` runs of the op, one after the other."""
    from fo_compiler.codegen.kernels import whole_scatter as kernels

    inboxes = torch.zeros(ranks, ranks, SLOTS, 64, dtype=torch.uint8)
    given = []
    for rank, plan in enumerate(plans(ranks, m, family)):
        recorder = Recorder(rank, ranks, inboxes)

        def first_flag(flags: Flags, recorder: Recorder = recorder) -> Recorder:
            recorder.flags = flags.flags.data_ptr()
            return recorder

        a, b = torch.zeros(ranks * m, 1, 2), torch.zeros(2, 1)
        way = Way(recorder, slice_bytes=4)
        with pytest.MonkeyPatch.context() as patch, Copies(recorder):
            patch.setattr(torch, "cuda", Cuda(recorder))
            patch.setattr(streams, "_streams", {})
            patch.setattr(streams, "_index", lambda device: 0)
            patch.setattr(whole_plan, "_of_thread", type("Thread", (), {})())
            patch.setattr(Flags, "set", lambda flags, index, of=first_flag: of(flags).give("set", index))
            patch.setattr(Flags, "wait", lambda flags, index, of=first_flag: of(flags).give("wait", index))
            patch.setattr(kernels, "matmul_reduce_scatter", recorder.kernel)
            for run in range(1, runs + 1):
                recorder.give("run", run)
                whole_scatter.in_one_kernel(plan, a, b, torch.float32, way)
                recorder.give("result")
                recorder.give("reuse")
        given.append(recorder.issued)
    return tuple(given)


# --- the model --------------------------------------------------------------------------------------------------------

State = list[int]
GARBAGE = -1


class Race(AssertionError):
    """Something was read that is not what the reader needs."""


class Stuck(AssertionError):
    """Nobody can go on, and not all are done."""


@dataclass(frozen=True)
class Step:
    """`eager`: it is independent of all that can happen before it, and shows nothing that is checked: it is taken at once."""

    what: str
    guard: Callable[[State], bool]
    effect: Callable[[State], None]
    eager: bool = False


@dataclass(frozen=True)
class Kernel:
    """How the programs of the kernel work; the defaults are `codegen/kernels/whole_scatter.py`."""

    tiles: int = 2
    programs: int = 2
    residents: int | None = None  # programs that there is room for
    raised_at: int | None = None  # tiles
    resets: str = "last tile"
    adds_wait: bool = True
    compares: str = "epoch"


@dataclass
class Model:
    """Actors of all ranks on one state. `edit` changes what a rank's device is given; `one_queue`: its streams share one."""

    ranks: int
    m: int = 1
    family: str = "direct"
    runs: int = 2
    kernel: Kernel = field(default_factory=Kernel)
    edit: Edit = lambda rank, issued: issued
    one_queue: bool = False

    def __post_init__(self) -> None:
        self.names: dict[Any, int] = {}
        self.start: State = []
        self.actors: list[tuple[int, list[Step]]] = []  # where its position is, its steps
        for rank, issued in enumerate(recorded(self.ranks, self.m, self.family, self.runs)):
            self._rank(rank, self.edit(rank, list(issued)))

    def at(self, *name: Any) -> int:
        """The place of a variable in the state; 0 at the start."""
        if name not in self.names:
            self.names[name] = len(self.start)
            self.start.append(0)
        return self.names[name]

    def _rank(self, rank: int, issued: Issued) -> None:
        run, launches = 0, 0
        by_stream: dict[str, list[Step]] = {CALLER: [], COMM: []}
        programs: list[list[Step]] = [[] for _ in range(self.kernel.programs)]
        queue = self.at(rank, "queue")
        places = {stream: self.at(rank, "position", stream) for stream in by_stream}
        # Steps of a stream that are over when its first n ops are.
        over: dict[str, list[int]] = {stream: [0] for stream in by_stream}
        slices: dict[int, int] = {}
        for op in (op for _, op in issued if op[0] == "kernel"):
            slices = {place[1]: slice_ for slice_, place, flag, _ in op[1] if flag is not None}
        for number, (stream, op) in enumerate(issued):
            steps = by_stream[stream]
            kind, *what = op
            if kind in ("run", "nothing"):
                run, made = (what[0] if what else run), list[Step]()
            elif kind == "after":
                other, count = what
                made = [self._after(places[other], over[other][count])]
            elif kind == "kernel":
                launches += 1
                made = self._launch(rank, launches, run, what[0], programs)
            else:
                made = [self._op(rank, run, kind, what, slices)]
            if self.one_queue:
                made = self._in_turn(queue, number, kind, made)
            steps += made
            over[stream].append(len(steps))
        self.actors += [(places[stream], steps) for stream, steps in by_stream.items()]
        self.actors += [(self.at(rank, "position", p), steps) for p, steps in enumerate(programs)]

    @staticmethod
    def _after(position: int, count: int) -> Step:
        return Step("after", lambda s: s[position] >= count, lambda s: None, eager=True)

    @staticmethod
    def _in_turn(queue: int, number: int, kind: str, made: list[Step]) -> list[Step]:
        """A queue of the device starts what it is given in order; what waits for another stream holds up all behind it."""

        def start(s: State) -> None:
            s[queue] += 1

        before = made[0].guard if kind == "after" else lambda s: True
        first = Step(f"start {kind}", lambda s: s[queue] == number and before(s), start, eager=True)
        return [first, *made]

    def _op(self, rank: int, run: int, kind: str, what: list[Any], slices: dict[int, int]) -> Step:
        epoch = self.at(rank, "epoch")
        if kind == "epoch":
            return Step("epoch", lambda s: True, lambda s: s.__setitem__(epoch, s[epoch] + 1))
        if kind in ("set", "wait"):
            flag = self.at(rank, "flag", what[0])
            if kind == "wait":
                return Step("wait", lambda s: self._is_up(s, flag, epoch), lambda s: None)
            return Step("set", lambda s: True, lambda s: s.__setitem__(flag, s[epoch]))
        if kind in ("put", "take"):
            peer, channel = what
            signal = self.at("signal", *((peer, rank) if kind == "put" else (rank, peer)), channel)
            after = int(kind == "put")
            return Step(kind, lambda s: s[signal] != after, lambda s: s.__setitem__(signal, after), eager=True)
        if kind == "copy":
            return Step("copy", lambda s: True, self._copy(rank, run, *what, slices))
        if kind == "result":
            return Step("result", lambda s: True, self._result(rank, run))
        assert kind == "reuse"
        return Step("reuse", lambda s: True, self._reuse(rank))

    def _is_up(self, s: State, flag: int, epoch: int) -> bool:
        return s[flag] - s[epoch] >= 0 if self.kernel.compares == "epoch" else s[flag] != 0 or s[epoch] == 0

    def _tiles(self, rank: int, place: tuple[str, int]) -> list[int]:
        return [self.at(rank, *place, tile) for tile in range(self.kernel.tiles)]

    def _message(self, run: int, slice_: int) -> int:
        return run * self.ranks * self.m + slice_

    def _copy(
        self, rank: int, run: int, to: tuple[str, int], of: tuple[str, int], slices: dict[int, int]
    ) -> Callable[[State], None]:
        if to[0] == "slot":
            slot, tiles, message = self.at(*to), self._tiles(rank, of), self._message(run, slices[of[1]])

            def send(s: State) -> None:
                if any(s[tile] != run for tile in tiles):
                    raise Race(
                        f"rank {rank} sends slice {slices[of[1]]} of run {run}, its tiles are {[s[t] for t in tiles]}"
                    )
                s[slot] = message

            return send
        arrival, slot = self.at(rank, *to), self.at(*of)
        return lambda s: s.__setitem__(arrival, s[slot])

    def _result(self, rank: int, run: int) -> Callable[[State], None]:
        def read(s: State) -> None:
            for name, place in self.names.items():
                if name[:2] == (rank, "out") and s[place] != run:
                    raise Race(f"rank {rank} reads its result of run {run}, a tile is of run {s[place]}")

        return read

    def _reuse(self, rank: int) -> Callable[[State], None]:
        def overwrite(s: State) -> None:
            for name, place in self.names.items():
                if name[:2] in ((rank, "out"), (rank, "moving")):
                    s[place] = GARBAGE

        return overwrite

    def _launch(self, rank: int, launch: int, run: int, groups: list[Any], programs: list[list[Step]]) -> list[Step]:
        """The kernel on its stream, and its programs' share of the tiles: `index // tiles` of the table, in turn."""
        kernel, tiles = self.kernel, self.kernel.tiles
        begun, left, running = (self.at(rank, name) for name in ("begun", "left", "running"))
        counters = [self.at(rank, "counter", slice_) for slice_, *_ in groups]
        residents = kernel.residents or kernel.programs

        def begin(s: State) -> None:
            s[begun], s[left] = launch, kernel.programs

        def start(s: State, program: int) -> None:
            s[running] += 1
            if kernel.resets == "first program" and program == 0:
                for counter in counters:
                    s[counter] = 0

        def leave(s: State) -> None:
            s[running] -= 1
            s[left] -= 1

        eager = residents == kernel.programs and kernel.resets != "first program"
        for p, steps in enumerate(programs):
            steps.append(
                Step(
                    "start",
                    lambda s: s[begun] == launch and s[running] < residents,
                    lambda s, p=p: start(s, p),  # type: ignore[misc]
                    eager,
                )
            )
            for index in range(p, len(groups) * tiles, kernel.programs):
                steps.append(self._tile(rank, run, index % tiles, *groups[index // tiles]))
            steps.append(Step("leave", lambda s: True, leave, eager))
        return [
            Step("launch", lambda s: True, begin, eager=True),
            Step("end", lambda s: s[left] == 0, lambda s: None, eager=True),
        ]

    def _tile(
        self, rank: int, run: int, tile: int, slice_: int, place: tuple[str, int], flag: int | None, adds: list[Any]
    ) -> Step:
        """Wait, add, store and count in one step: whoever could come between them can come before, too."""
        kernel, message, epoch = self.kernel, self._message(run, slice_), self.at(rank, "epoch")
        arrivals = [(self.at(rank, *partial), self.at(rank, "flag", up)) for partial, up in adds]
        stored, counter = self._tiles(rank, place)[tile], self.at(rank, "counter", slice_)
        raised = None if flag is None else self.at(rank, "flag", flag)
        count = kernel.tiles if kernel.raised_at is None else kernel.raised_at

        def compute(s: State) -> None:
            for arrival, _ in arrivals:
                if s[arrival] != message:
                    raise Race(f"rank {rank} adds {s[arrival]} to slice {slice_} of run {run}, expected {message}")
            s[stored] = run
            if raised is not None:
                s[counter] += 1
                if s[counter] == count:
                    s[raised] = s[epoch]
                if s[counter] == kernel.tiles and kernel.resets == "last tile":
                    s[counter] = 0

        def ready(s: State) -> bool:
            return not kernel.adds_wait or all(self._is_up(s, up, epoch) for _, up in arrivals)

        return Step(f"tile {tile} of slice {slice_}", ready, compute)

    def explore(self) -> int:
        """Visit every reachable state; the number of them. Raises Race or Stuck."""
        start = tuple(self.start)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            enabled = []
            done = True
            for position, steps in self.actors:
                if state[position] == len(steps):
                    continue
                done = False
                step = steps[state[position]]
                if step.guard(state):  # type: ignore[arg-type]
                    enabled.append((position, step))
                    if step.eager:
                        enabled = enabled[-1:]
                        break
            if not enabled and not done:
                waiting = [steps[state[p]].what for p, steps in self.actors if state[p] < len(steps)]
                raise Stuck(f"nobody can go on: {', '.join(waiting)}")
            for position, step in enabled:
                after = list(state)
                step.effect(after)
                after[position] += 1
                if (found := tuple(after)) not in seen:
                    seen.add(found)
                    todo.append(found)
        return len(seen)


# --- the protocol as it is ---------------------------------------------------------------------------------------------

FAMILIES = ("direct", "ring", "bidirectional")


def test_what_is_modelled_is_what_a_step_gives_the_communication_stream() -> None:
    issued = recorded(2, 1, "direct", 2)[0]
    given = [op for stream, op in issued[: len(issued) // 2] if stream == COMM]
    position = sum(stream == CALLER for stream, _ in issued[: issued.index((COMM, given[0]))])
    assert given == [
        ("after", CALLER, position),
        ("wait", 1),
        ("take", 1, free(0)),
        ("copy", ("slot", 4), ("moving", 0)),
        ("put", 1, full(0)),
        ("take", 1, full(0)),
        ("copy", ("moving", 1), ("slot", 2)),
        ("put", 1, free(0)),
        ("set", 2),
    ]
    kernels = [op[1] for _, op in issued if op[0] == "kernel"]
    assert kernels == [[(1, ("moving", 0), 1, []), (0, ("out", 0), None, [(("moving", 1), 2)])]] * 2


@pytest.mark.parametrize(
    ("ranks", "m", "family", "kernel"),
    [
        *((2, m, family, Kernel()) for m in (1, 2) for family in FAMILIES),
        (2, 1, "ring", Kernel(tiles=3)),
        (2, 1, "direct", Kernel(tiles=3, programs=3)),
        (2, 1, "direct", Kernel(tiles=3, programs=1)),
        (3, 1, "ring", Kernel()),
        pytest.param(3, 1, "direct", Kernel(), marks=pytest.mark.nightly),
        pytest.param(3, 1, "ring", Kernel(tiles=3), marks=pytest.mark.nightly),
    ],
)
def test_no_order_reads_too_early_or_too_late_or_gets_stuck(ranks: int, m: int, family: str, kernel: Kernel) -> None:
    """With fewer programs than tiles, whose flags and buffers are those of the run before."""
    assert Model(ranks, m, family, kernel=kernel).explore() > 200


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_that_share_a_queue_of_the_device_do_not_hold_up_the_kernel(family: str) -> None:
    assert Model(2, 1, family, one_queue=True).explore() > 200


# --- protocols that were broken on purpose -----------------------------------------------------------------------------


def without(*found: Callable[[str, Op], bool]) -> Edit:
    """Leave out what is found."""
    return lambda rank, issued: [
        (stream, ("nothing",) if any(test(stream, op) for test in found) else op) for stream, op in issued
    ]


def signals(channel: Callable[[int], int]) -> Callable[[str, Op], bool]:
    channels = {channel(slot) for slot in range(SLOTS)}
    return lambda stream, op: op[0] in ("put", "take") and op[2] in channels


def on(stream: str, kind: str) -> Callable[[str, Op], bool]:
    return lambda of, op: (of, op[0]) == (stream, kind)


def fork_before_the_epoch(rank: int, issued: Issued) -> Issued:
    return [(stream, (*op[:2], op[2] - 1) if (stream, op[0]) == (COMM, "after") else op) for stream, op in issued]


def kernel_behind_transfers(rank: int, issued: Issued) -> Issued:
    """As the host issues them; each stream holds the same."""
    held, after = Issued(), Issued()
    for item in issued:
        if held and item[0] == CALLER:
            after += held
            held = []
        (held if item[1][0] == "kernel" else after).append(item)
    return after


def own_slices_first(rank: int, issued: Issued) -> Issued:
    return [(stream, (op[0], op[1][::-1]) if op[0] == "kernel" else op) for stream, op in issued]


def flags_before_their_copies(rank: int, issued: Issued) -> Issued:
    """What a step receives is said to be there before it is copied out of its slot."""
    after: Issued = []
    for item in issued:
        copy = max((i for i, (_, op) in enumerate(after) if op[0] == "copy"), default=0)
        after.insert(copy, item) if item[1][0] == "set" and copy else after.append(item)
    return after


BROKEN: dict[str, tuple[dict[str, Any], type[AssertionError]]] = {
    "a transfer does not wait for the flag of its slice": ({"edit": without(on(COMM, "wait"))}, Race),
    "a flag is raised a tile early": ({"kernel": Kernel(raised_at=1)}, Race),
    "nobody resets the counters": ({"kernel": Kernel(resets="nobody")}, Stuck),
    "the first program resets the counters when it starts": ({"kernel": Kernel(resets="first program")}, Stuck),
    "a tile does not wait for what is added": ({"kernel": Kernel(adds_wait=False)}, Race),
    "a flag of any run will do": ({"kernel": Kernel(compares="not zero")}, Race),
    "an epoch starts behind the fork": ({"edit": fork_before_the_epoch}, Race),
    "the epoch is never raised": ({"edit": without(on(CALLER, "epoch"))}, Race),
    "transfers do not wait for the caller": ({"edit": without(on(COMM, "after"))}, Race),
    "a slot is written before it is free": ({"edit": without(signals(free)), "ranks": 3, "family": "ring"}, Race),
    "a slot is read before it is full": ({"edit": without(signals(full))}, Race),
    "a flag is set before its copy": ({"edit": flags_before_their_copies}, Race),
    "own slices are computed first": ({"edit": own_slices_first}, Stuck),
    "there is no room for all programs": ({"kernel": Kernel(residents=1)}, Stuck),
    "the kernel is launched behind the transfers of one queue": (
        {"edit": kernel_behind_transfers, "one_queue": True},
        Stuck,
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_protocol_that_is_broken_is_found_out(how: str) -> None:
    changes, error = BROKEN[how]
    with pytest.raises(error):
        Model(**{"ranks": 2, **changes}).explore()
