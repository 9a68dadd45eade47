from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """`world(n)`: n ranks, started once a session. Only one world runs at a time: processes are ended on a change."""
    cache: Path = tmp_path_factory.mktemp("inductor_cache")
    running: dict[int, World] = {}

    def of_size(ranks: int) -> World:
        for other in [size for size in running if size != ranks]:
            running.pop(other).close()
        if ranks not in running:
            running[ranks] = World(ranks, str(cache))
        return running[ranks]

    yield of_size
    for left in running.values():
        left.close()
