"""The examples run, on two processes, and end without an error: each compares with plain Inductor itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "collectives", "rewritten"),
    [("ulysses.py", 8, 8), ("simple_fsdp.py", 8, 5)],
    ids=["ulysses", "simple_fsdp"],
)
def test_an_example_runs_and_reports_each_collective(
    example: str, collectives: int, rewritten: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            ROOT / "examples" / example,
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "ATEN_CPU_CAPABILITY": "default",  # kernels without vector types compile sooner
        },
    )
    assert done.returncode == 0, done.stderr
    assert "equal those under plain Inductor" in done.stdout
    found = int(done.stdout.partition(f" of {collectives} collectives rewritten")[0].rpartition("\n")[2])
    assert found >= rewritten, done.stdout
