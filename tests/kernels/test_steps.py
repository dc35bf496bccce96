"""The step kernels: right against fp64, fused == unfused bit for bit, and independent of tiles.

These run on the CPU's torch operations; with TRITON_INTERPRET=1 the same tests run the Triton kernels in Triton's
interpreter (`test_interpreter.py` does that), and with `-m gpu` they run on the GPU.
"""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer.kernels import interpreting, tile_cpu
from fused_grad_optimizer.rules import UPDATES
from tests.kernels.steps import make_problem, relative_error, run_step, run_unfused, same_bits, step_fp64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1, 1, [1]), (5, 3, [7]), (70, 130, [33, 0, 65]), (129, 65, [0]), (64, 64, [64, 64])]
PARTS = [{}, {"scale": 0.37}, {"dense": True}, {"rows": 11}, {"rows": 40, "dense": True, "scale": -2.0}]


@pytest.fixture(autouse=True)
def poisoned_empties(monkeypatch):
    """`torch.empty` comes filled with NaN, so that an element nobody writes is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("n, k, tokens", SHAPES)
def test_right_against_fp64(n, k, tokens, parts, device):
    problem = make_problem(n, k, tokens, device=device, **parts)
    result = run_step(problem)
    for value, reference in zip((result.weight, *result.states), step_fp64(problem)):
        assert relative_error(value, reference) < 2e-6  # a few fp32 roundings


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("update", sorted(UPDATES))
def test_every_update_against_fp64(update, device):
    problem = make_problem(33, 70, [50], update=update, device=device)
    result = run_step(problem)
    for value, reference in zip((result.weight, *result.states), step_fp64(problem)):
        assert relative_error(value, reference) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "bf16-nearest"])
@pytest.mark.parametrize("update", sorted(UPDATES))
def test_fused_equals_unfused_bit_for_bit(update, storage, parts, device, monkeypatch):
    monkeypatch.setenv("FORGE_KERNEL", "wgrad_step")  # whatever a table says: chunks have another mainloop
    # Triton's interpreter computes bf16 dots wrongly, so inputs are bf16 only where kernels are compiled.
    dtype = torch.bfloat16 if storage != "fp32" and not interpreting() else torch.float32
    problem = make_problem(130, 67, [40, 9], update=update, storage=storage, dtype=dtype, device=device, **parts)
    assert same_bits(run_step(problem), run_unfused(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, k", [(33, 70), (128, 128)])
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("update", sorted(UPDATES))
def test_without_a_learning_rate_states_move_and_weights_do_not(update, storage, n, k, device):
    """The first step of a warm-up; also weights of 0, and states and gradients of 0, whose divisor would be eps."""
    dtype = torch.bfloat16 if storage != "fp32" and not interpreting() else torch.float32
    problem = make_problem(n, k, [40], update=update, storage=storage, dtype=dtype, device=device)
    for tensor in (problem.weight, *problem.states):
        tensor[: n // 2] = 0
    problem.gradient.dys[0][:, : n // 3] = 0
    result = run_step(problem, lr=0.0)
    assert torch.equal(result.weight, problem.weight)
    assert not any(torch.equal(a, b) for a, b in zip(result.states, problem.states))


@pytest.mark.parametrize("device", DEVICES)
def test_strided_inputs(device):
    problem = make_problem(40, 48, [30], device=device)
    dy, x = problem.gradient.dys[0], problem.gradient.xs[0]
    wide = torch.cat([dy, torch.full_like(dy, 1e9)], 1)[:, :40]
    row = x[:1].expand(30, -1)
    problem.gradient.dys[0], problem.gradient.xs[0] = wide, row
    result = run_step(problem)
    assert not wide.is_contiguous() and row.stride(0) == 0
    assert relative_error(result.weight, step_fp64(problem)[0]) < 2e-6


def test_bits_do_not_depend_on_the_block_size(monkeypatch):
    problem = make_problem(64, 32, [], dense=True, storage="bf16")
    first = run_step(problem)
    monkeypatch.setattr(tile_cpu, "BLOCK_ELEMENTS", 100)
    assert same_bits(first, run_step(problem))


def test_cpu_blocks_are_never_the_whole_weight():
    for n, k in ((2, 2), (3, 1000), (1000, 3), (4096, 4096)):
        assert tile_cpu.block_rows(n, k) < n
