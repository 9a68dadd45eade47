"""Processes that may die, hang or be cut off: one world a test, each rank with a time limit.

    outcomes = run_fleet(3, body, timeout_s=150, meanwhile=...)

Each rank calls `body(Rank)`; what it returns or raises is its outcome. The processes are forked from a server that has
imported torch, so that a world costs little more than its test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import Any

GROUP_TIMEOUT_S = 10


@dataclass
class Rank:
    """What a rank knows of itself. `tell` sends a line to the test while the rank runs."""

    rank: int
    ranks: int
    port: int
    tell: Callable[[str], None]
    host: str = "127.0.0.1"
    enter: Callable[[], None] | None = None  # before anything is connected

    def join(self, timeout_s: float = GROUP_TIMEOUT_S) -> str:
        """Join the others; the name of a group whose operations end after `timeout_s`."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.host}:{self.port}",
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=60),
        )
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        assert group is not None
        return group.group_name


@dataclass
class Outcome:
    """How a rank ended: `result`, or the `error` it raised; neither where it was killed or still ran at the end."""

    result: Any = None
    error: str = ""
    traceback: str = ""
    exit_code: int | None = None  # None: it still ran, and was killed by the test
    told: list[str] = field(default_factory=list)


def run_fleet(
    ranks: int,
    body: Callable[[Rank], Any],
    *,
    timeout_s: float = 150,
    meanwhile: Callable[[int, str, Sequence[int]], None] = lambda rank, line, pids: None,
    enter: Sequence[Callable[[], None]] = (),
    host: str = "127.0.0.1",
    outlives: Sequence[int] = (),
) -> list[Outcome]:
    """The outcomes by rank. `meanwhile(rank, line, pids)` is called in the test when a rank tells something.

    Ranks in `outlives` are not waited for: they are killed when all others have ended.
    """
    port = _free_port()
    workers: list[tuple[BaseProcess, Connection]] = []
    outcomes = [Outcome() for _ in range(ranks)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.fault_checks"])
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (body, rank, ranks, port, theirs, host, enter[rank] if enter else None)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        pids = [process.pid or 0 for process, _ in workers]
        listening = {connection: rank for rank, (_, connection) in enumerate(workers)}
        while set(listening.values()) - set(outlives):
            ready = wait_for_any(list(listening), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = listening[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    del listening[connection]
                    continue
                if kind == "told":
                    outcomes[rank].told.append(value)
                    meanwhile(rank, value, pids)
                else:
                    setattr(outcomes[rank], kind, value)
                    if kind == "error":
                        outcomes[rank].traceback = connection.recv()[1]
        for rank, (process, _) in enumerate(workers):
            if rank not in outlives:
                process.join(max(0.0, min(5.0, deadline - time.monotonic())))
                outcomes[rank].exit_code = process.exitcode
    finally:
        for process, connection in workers:
            connection.close()
            if process.is_alive():
                process.kill()
            process.join()
    assert port_is_free(port), "the port of the store is still bound"
    for process, _ in workers:
        assert not os.path.exists(f"/proc/{process.pid}/stat"), f"process {process.pid} is left"
    return outcomes


def _serve(
    body: Callable[[Rank], Any],
    rank: int,
    ranks: int,
    port: int,
    connection: Connection,
    host: str,
    enter: Callable[[], None] | None,
) -> None:
    for name in [name for name in os.environ if name.startswith("FO_")]:
        del os.environ[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if enter is not None:
        enter()
    try:
        result = body(Rank(rank, ranks, port, lambda line: connection.send(("told", line)), host))
        connection.send(("result", result))
        code = 0
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
        connection.send(("traceback", traceback.format_exc()))
        code = 1
    connection.close()
    os._exit(code)  # as a job that has failed: no goodbye


def port_is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger; a listener may not
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
