"""Side streams of a device: where a transfer or a slice of compute is launched, and the events that order it.

    with launch(device, stream, after, event):     # work inside goes to side stream `stream`
        ...                                        # behind the events `after`; then `event` is recorded
    join(device, after)                            # the caller's stream waits for events

Stream 0 is the stream of the caller: torch.cuda's current one, which is also the one that a CUDA graph captures. Event 0
is "all that the caller's stream holds by now". So every side stream forks from the capturing stream, and the plan
(`passes/streams.py`) sees to it that it joins again. Other numbers name an event between its recording and its last wait.

The streams are made once a process and device, however many regions and graphs use them. Events are kept by thread: a
graph runs in one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

CALLER = 0  # the stream of the caller; as an event: all that this stream holds by now
COMM = 1
COMPUTE = (2, 3)  # in turn, where slices of compute alternate between two streams
NO_EVENT = -1

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
_lock = threading.Lock()
_of_thread = threading.local()


def side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The side stream `number` of a device; the communication stream goes before compute where both wait."""
    index = _index(device)
    with _lock:
        if (index, number) not in _streams:
            _streams[index, number] = torch.cuda.Stream(device=index, priority=-1 if number == COMM else 0)
        return _streams[index, number]


@contextmanager
def launch(device: torch.device, stream: int, after: Sequence[int], event: int) -> Iterator[None]:
    """Launch what runs inside on `stream`, behind the events `after`, and record `event` behind it."""
    caller = torch.cuda.current_stream(_index(device))
    target = caller if stream == CALLER else side_stream(device, stream)
    events = _events(device)
    for number in after:
        if number != CALLER:
            target.wait_event(events[number])
        elif target is not caller:
            target.wait_stream(caller)
    with nullcontext() if target is caller else torch.cuda.stream(target):
        yield
    if event != NO_EVENT:
        # A new one each time: an event that was recorded in a captured graph must not be waited for outside of it.
        events[event] = torch.cuda.Event()
        events[event].record(target)


def join(device: torch.device, after: Sequence[int]) -> None:
    """Make the caller's stream wait for events; the host does not wait."""
    with launch(device, CALLER, after, NO_EVENT):
        pass


@contextmanager
def beside(device: torch.device, body: Callable[[], None], *, body_first: bool = True) -> Iterator[None]:
    """Launch `body` on the communication stream, then what runs inside on the caller's; the caller's waits for both.

    Also where one of them fails half-way: the memory that the transfers use is the caller's. Without `body_first`, where the body
    waits for what runs inside, that is launched first. Either way both run behind what the caller's stream held before.
    """
    try:
        with launch(device, COMM, (CALLER,), NO_EVENT):
            if body_first:
                body()
        yield
        if not body_first:
            with launch(device, COMM, (), NO_EVENT):
                body()
    finally:
        torch.cuda.current_stream(_index(device)).wait_stream(side_stream(device, COMM))


def recorded(device: torch.device, event: int) -> torch.cuda.Event:
    """The event that was recorded last under a number."""
    return _events(device)[event]


def _events(device: torch.device) -> dict[int, torch.cuda.Event]:
    by_device = _of_thread.__dict__.setdefault("events", {})
    events: dict[int, torch.cuda.Event] = by_device.setdefault(_index(device), {})
    return events


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
