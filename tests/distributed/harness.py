"""Real processes on gloo for tests: started once a world size, then given one check after the other.

    world.run(check, *args)      calls the module-level function `check` on every rank; the results by rank

A check that raises on a rank, or that lasts too long, ends the processes; the next check gets fresh ones.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

GROUP_TIMEOUT_S = 60  # of a collective or transfer
GRACE_S = 5  # for the other ranks, when one has failed


class RankFailed(AssertionError):
    """A check raised on some rank; the message has the traceback of each rank that raised."""


class World:
    """`ranks` processes, in one gloo group each, that share one compile cache."""

    def __init__(self, ranks: int, cache_dir: str) -> None:
        self.ranks = ranks
        self.cache_dir = cache_dir
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, check: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
        """The results of `check(*args)` by rank. Raises RankFailed, or TimeoutError."""
        self._start()
        for _, connection in self._workers:
            connection.send((check, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        open_ = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while open_:
            ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, "the process ended")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = {rank: answer for rank, (good, answer) in answers.items() if not good}
        if failed:
            self.close()
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        if open_:
            self.close()
            raise TimeoutError(f"{check}: ranks {sorted(open_.values())} not done after {timeout_s} s")
        return [answers[rank][1] for rank in range(self.ranks)]

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        if self._workers:
            self._meeting_place.cleanup()
        self._workers = []

    def _start(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("spawn")
        self._meeting_place = tempfile.TemporaryDirectory(prefix="fo_rendezvous_")
        path = f"{self._meeting_place.name}/store"
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, path, self.cache_dir, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(rank: int, ranks: int, rendezvous: str, cache_dir: str, connection: Connection) -> None:
    """The life of one rank: checks come in, results go out, until the other end closes."""
    for name in [name for name in os.environ if name.startswith("FO_")]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compile workers a rank
    import torch
    import torch._inductor.config
    import torch.distributed as dist

    torch._inductor.config.cpp.simdlen = 1  # kernels without vector types compile in two thirds of the time
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            check, args = connection.recv()
        except EOFError:
            break
        torch._dynamo.reset()
        try:
            connection.send((True, check(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()
