"""Runs tests/codegen/interpreted in a process of its own: Triton reads TRITON_INTERPRET when a kernel is decorated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def run(times: int, timeout_s: int) -> None:
    """All files in one process, which takes seconds to start."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--timeout", str(timeout_s // 4), str(FOLDER)],
        env=os.environ | {"TRITON_INTERPRET": "1", "FO_KERNEL_EXAMPLES": str(times)},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_kernels_compute_what_they_say() -> None:
    run(times=1, timeout_s=280)


@pytest.mark.nightly
def test_kernels_compute_what_they_say_at_length() -> None:
    run(times=20, timeout_s=3000)
