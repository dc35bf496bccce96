"""The portable kernel with every configuration: right, fused == unfused bit for bit; and which configuration is chosen.

The kernel runs in Triton's interpreter (`test_interpreter.py`) and, with `-m gpu`, on the GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import configs, interpreting
from fused_grad_optimizer.kernels.configs import gemm_config
from tests.kernels.sass import SHARED_MEMORY
from tests.kernels.steps import (
    gradient_fp64,
    make_problem,
    relative_error,
    run_step,
    run_unfused,
    same_bits,
    step_fp64,
)

CONFIGS = {
    "wide": configs._WIDE,
    "wide, long pieces": replace(configs._WIDE, piece=64, registers=255),
    "middle": configs._MIDDLE,
    "middle, all rows": replace(configs._MIDDLE, halve_rows=False),
    "small": configs._SMALL,
    "odd": configs._ODD,
    "one piece": replace(configs._SMALL, piece=64, halve_rows=False),
    "wide fp32": configs._WIDE_FP32,
    "small fp32": configs._SMALL_FP32,
}
PARTS = [{}, {"rows": 40, "dense": True, "scale": -2.0}]
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not interpreting(), reason="no Triton kernels on the CPU"))
DEVICES = [CPU, pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def use(monkeypatch):
    """`use(config)` makes the portable kernel run with it."""

    def use(config):
        from fused_grad_optimizer.kernels import wgrad_step

        monkeypatch.setenv("FORGE_KERNEL", "wgrad_step")
        monkeypatch.setattr(wgrad_step, "gemm_config", lambda *args, **kwargs: config)

    return use


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, k, tokens, parts", [(150, 141, [33, 0, 65], PARTS[1]), (256, 160, [48], PARTS[0])])
@pytest.mark.parametrize("name", CONFIGS)
def test_right_against_fp64(name, n, k, tokens, parts, device, use):
    use(CONFIGS[name])
    problem = make_problem(n, k, tokens, device=device, **parts)
    result = run_step(problem)
    for value, reference in zip((result.weight, *result.states), step_fp64(problem)):
        assert relative_error(value, reference) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, k, parts", [(150, 141, PARTS[1]), (256, 160, PARTS[0])])
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_equals_unfused_bit_for_bit(name, n, k, parts, device, use):
    use(CONFIGS[name])
    # Triton's interpreter computes bf16 dots wrongly, so inputs are bf16 only where kernels are compiled.
    dtype = torch.float32 if interpreting() or "fp32" in name else torch.bfloat16
    problem = make_problem(n, k, [48], storage="bf16", dtype=dtype, device=device, **parts)
    assert same_bits(run_step(problem), run_unfused(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [[40], [40, 9]], ids=str)
@pytest.mark.parametrize("name", ["wide", "middle", "wide fp32"])
def test_rows_of_the_gradient(name, tokens, device, use):
    use(CONFIGS[name])
    problem = make_problem(300, 160, tokens, device=device, **PARTS[1])
    expected = gradient_fp64(problem.gradient, 300, 160)
    for start, end in ((0, 300), (16, 300), (37, 290)):
        stored = ops.wgrad(problem.gradient, problem.weight.shape, start, end, torch.float32)
        assert relative_error(stored, expected[start:end]) < 2e-6


def test_choice_by_size_dtype_and_device():
    hopper, ampere, bf16 = (9, 0), (8, 6), torch.bfloat16
    assert gemm_config(14336, 4096, bf16, compute_capability=hopper) is configs._WIDE
    assert gemm_config(14336, 4096, bf16, compute_capability=ampere) is configs._MIDDLE
    assert gemm_config(14336, 4096, torch.float32, compute_capability=hopper) is configs._WIDE_FP32
    assert gemm_config(512, 512, bf16, compute_capability=hopper) is configs._SMALL
    for n, k, aligned in ((14336, 4095, True), (14333, 4096, True), (14336, 4096, False)):
        assert gemm_config(n, k, bf16, aligned=aligned, compute_capability=hopper) is configs._ODD


@pytest.mark.parametrize("name", ["wide", "middle", "small", "wide fp32", "small fp32"])
def test_operand_stages_fit_the_smallest_shared_memory(name):
    config, element = CONFIGS[name], 4 if "fp32" in name else 2
    stages = config.num_stages * (config.block_n + config.block_k) * config.block_t * element
    assert 2 * stages <= min(SHARED_MEMORY.values())
