"""The scheduler is cheap to import: torch and sympy are for those who run tensors or ask for formulas."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["fo_compiler.schedule", "fo_compiler.schedule.choose", "fo_compiler.commands.plan"])
def test_importing_takes_neither_torch_nor_sympy(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'sympy', 'ortools'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
