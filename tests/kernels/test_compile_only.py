"""Every kernel compiles for every architecture without a GPU, on the installed Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def output_of(module: str) -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", f"tests.kernels.{module}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, cwd=root)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


def test_kernels_compile_fit_and_do_not_spill():
    printed = output_of("compile_only")
    for sm in (80, 90, 100, 120):
        assert f"sm_{sm} wgrad_step adamw bf16 bf16 4096x4096 all parts: compiled" in printed


def test_the_hopper_kernel_compiles_fits_and_does_not_spill():
    assert "adamw bf16 bf16: {'shared': 2" in output_of("hopper_variants")
