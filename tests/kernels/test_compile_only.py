"""Every kernel compiles for every architecture without a GPU, on the installed Triton."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.stub_cuda import build  # noqa: E402


def output_of(module: str, *arguments: str, environment=os.environ) -> str:
    root = Path(__file__).parents[2]
    environment = {**environment, "PYTHONPATH": f"{root / 'src'}:{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, cwd=root)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


def test_kernels_compile_fit_and_do_not_spill():
    printed = output_of("compile_only")
    for sm in (80, 90, 100, 120):
        assert f"sm_{sm} wgrad_step adamw bf16 bf16 4096x4096 all parts: compiled" in printed


def test_the_hopper_kernel_compiles_fits_and_does_not_spill():
    assert "adamw bf16 bf16: {'shared': 2" in output_of("hopper_variants")


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler")
def test_direct_launches_pass_the_bytes_that_tritons_launcher_passes(tmp_path):
    printed = output_of("stub_cuda", str(tmp_path), environment=build(tmp_path))
    assert printed.count("the same") == 10 and "0 failed; refused: {}" in printed
