"""Runs the kernel tests again with the Triton kernels in Triton's interpreter, and compares them with the CPU path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]

COMPARE = """
import os, torch
from tests.kernels.steps import make_problem, run_step, same_bits
for update in ("adamw", "lion", "sgd_momentum", "sgd", "adam"):
    problem = make_problem(37, 29, [], dense=True, update=update, storage="bf16")
    kernel = run_step(problem)
    os.environ["TRITON_INTERPRET"] = "0"
    torch_form = run_step(problem)
    os.environ["TRITON_INTERPRET"] = "1"
    assert same_bits(kernel, torch_form), update
print("same bits")
"""


def _run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


def test_kernels_in_the_interpreter():
    files = ("tests/kernels/test_steps.py", "tests/kernels/test_configs.py")
    result = _run("-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def test_stochastic_rounding_has_the_same_bits_in_kernels_and_on_the_cpu():
    result = _run("-c", COMPARE)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "same bits" in result.stdout
