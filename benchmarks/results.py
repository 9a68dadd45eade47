"""Where results go, and how: whole files or none, written after each case."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def save(path: Path, data: Any) -> None:
    """Write `data` as JSON; whoever reads the file meanwhile sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(beside, path)


def why(error: BaseException) -> str:
    """A failure in one line: of a traceback, its last line that names an error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in reversed(lines) if "Error" in line), lines[0])
