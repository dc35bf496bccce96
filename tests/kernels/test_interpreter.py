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

FINITE = """
import torch
from fused_grad_optimizer.kernels import finite

def flag_of(tensors):
    flag = torch.zeros(1, dtype=torch.int32)
    finite.check(tensors, flag)
    return int(flag)

wide = torch.randn(37, 300)
wide[:, :3], wide[:, 260:] = float("nan"), float("inf")  # outside the slice
make = lambda: [torch.randn(5, 7), wide.clone()[:, 3:260], torch.randn(()), torch.randn(20001), torch.empty(0, 4),
                torch.randn(64, 64).to(torch.bfloat16), *[torch.randn(3) for _ in range(12)]]
assert flag_of(make()) == 0 and flag_of([]) == 0
checked = 0
for i, count in enumerate(t.numel() for t in make()):
    for value in (float("nan"), float("inf"), -float("inf")):
        for place in {0, count // 2, count - 1} if count else ():
            tensors = make()
            index = divmod(place, tensors[i].shape[-1]) if tensors[i].dim() == 2 else place
            tensors[i][index if tensors[i].dim() else ()] = value
            assert flag_of(tensors) == 1, (i, value, place)
            checked += 1
print(checked, "found")
"""


def _run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


def test_kernels_in_the_interpreter():
    files = [f"tests/kernels/test_{name}.py" for name in ("steps", "configs", "chunked", "multi_step", "multi_finite")]
    result = _run("-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def test_stochastic_rounding_has_the_same_bits_in_kernels_and_on_the_cpu():
    result = _run("-c", COMPARE)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "same bits" in result.stdout


def test_the_finite_check_reads_every_element_and_no_other():
    result = _run("-c", FINITE)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "found" in result.stdout
