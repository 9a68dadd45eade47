"""Ranks for measurements: gloo processes, each in a namespace of the shaped network or all on loopback.

with World(ranks, shaping) as world:
    world.run(function, *args)      calls the module-level `function` on every rank; the results by rank
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from .network import INTERFACE, Network, Shaping, address, enter, why_unshaped

PORT = 29_561
START_S = 0.004  # from an agreed start being sent to the start


@dataclass(frozen=True)
class _Place:
    """Where a rank runs."""

    rank: int
    ranks: int
    namespace: str | None
    rendezvous: str


class World:
    """`ranks` processes in one gloo group. `shaping` None: on loopback, as fast as it is."""

    def __init__(self, ranks: int, shaping: Shaping | None) -> None:
        self.ranks = ranks
        self.network = Network(ranks, shaping) if shaping else None
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._stack = ExitStack()

    def __enter__(self) -> World:
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fo_bench_"))
            if self.network:
                stack.enter_context(self.network)
            stack.callback(self._end)
            context = multiprocessing.get_context("spawn")
            for rank in range(self.ranks):
                place = _Place(
                    rank,
                    self.ranks,
                    self.network.names[rank] if self.network else None,
                    f"tcp://{address(0)}:{PORT}" if self.network else f"file://{directory}/rendezvous",
                )
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(place, directory, theirs), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 600) -> list[Any]:
        """The results of `function(*args)` by rank. Raises RuntimeError with the traceback of a rank that raised."""
        for _, connection in self._workers:
            connection.send((function, args))
        results: dict[int, Any] = {}
        rank_of = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.ranks:
            missing = [connection for connection, rank in rank_of.items() if rank not in results]
            ready = wait(missing, deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"{function.__name__}: not done after {timeout_s} s")
            for connection in missing:
                if connection not in ready:
                    continue
                try:
                    good, value = connection.recv()
                except EOFError:
                    good, value = False, self._end_of(rank_of[connection])
                if not good:
                    raise RuntimeError(f"rank {rank_of[connection]}: {value}")
                results[rank_of[connection]] = value
        return [results[rank] for rank in range(self.ranks)]

    def _end_of(self, rank: int) -> str:
        """How a rank that is gone has ended."""
        process = self._workers[rank][0]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            killed = " (out of memory, or killed by hand)" if code == -signal.SIGKILL else ""
            return f"the process was ended by {signal.Signals(-code).name}{killed}"
        return f"the process ended with status {code}"

    def _end(self) -> None:
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(0.3)
            if process.is_alive():
                process.kill()
                process.join()


def shaping_here(
    rate: str, slow_rank: int | None = None, slow_factor: float = 0.5, nodes: int = 1
) -> tuple[Shaping | None, str]:
    """The shaping if it is possible here, and a line that says what the links are."""
    shaping = Shaping(rate, slow_rank, slow_factor, nodes)
    shaping.bits_per_second(0)
    reason = why_unshaped()
    if reason:
        return None, f"unshaped loopback ({reason}); a rate limit needs root and network namespaces"
    slow = "" if slow_rank is None else f", that of rank {slow_rank} {slow_factor:g} of it"
    if nodes > 1:
        slow = f", {nodes} nodes, whose ranks share {slow_factor:g} of it on the way out"
    return shaping, f"every uplink limited to {rate}{slow}"


def synchronized(ranks: int) -> float:
    """A moment that all ranks of the default group wait for; its time, on the clock that they share."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = torch.tensor([time.perf_counter() + START_S + 0.0005 * ranks], dtype=torch.float64)
    dist.broadcast(start, 0)
    moment = start.item()
    sleep_until(moment)
    return moment


def sleep_until(moment: float) -> None:
    """Sleep up to a moment of `time.perf_counter`."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


@contextmanager
def undisturbed(wanted: bool = True) -> Iterator[None]:
    """Let other programs wait while this one measures, where this is allowed (root).

    All threads alike: gloo's polls for a lock that another one holds, and would not let a lesser one go on. Not for real matmuls,
    which would keep the transport from its work.
    """
    if wanted:
        _schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        if wanted:
            _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


def _serve(place: _Place, directory: str, connection: Connection) -> None:
    """The life of one rank."""
    if place.namespace:
        enter(place.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    _sharp_timers()
    os.environ.update(
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=f"{directory}/inductor",
    )
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of functions that have newer names
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=120),
    )
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            break
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except BrokenPipeError:
            break
    os._exit(0)  # peers may be gone already: no goodbye


def _sharp_timers() -> None:
    """Let sleeps of this thread end when they should, not up to 50 us later (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in nanoseconds
