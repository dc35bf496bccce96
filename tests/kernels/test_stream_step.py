"""`stream_step` in each configuration: the bits of `param_step`, in Triton's interpreter and (`-m gpu`) on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import configs, interpreting
from fused_grad_optimizer.rules import UPDATES
from tests.kernels.steps import HYPER, make_problem, same_bits

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not interpreting(), reason="a kernel: needs the interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
CONFIGS = pytest.mark.parametrize("config", sorted(configs.STREAM_CONFIGS))
# Blocks of 64 in the interpreter, so that a program has several; whole blocks, and a part of one at the end.
SHAPES = {"cpu": [(16, 40), (7, 29), (1, 1)], "cuda": [(4096, 4096), (1000, 1003), (1, 1)]}


def stepped(problem, config, flag=None, start=0):
    """The problem's step by Triton kernels: `param_step` for no configuration."""
    from fused_grad_optimizer.kernels import param_step, stream_step

    target, update = problem.target(), UPDATES[problem.update]
    device = target.weight.device
    scalars = ops.make_scalars(update, HYPER, 3, False, 7, device, target.weight.dtype)
    stores, stochastic = ops._stores(target.storages)
    options = {"scalars": scalars.values, "keys": scalars.keys, "flag": flag, "update": update, "stores": stores,
               "stochastic": stochastic}  # fmt: skip
    if start:
        dense = problem.gradient.dense.view(-1)[start:]
        stream_step.launch(target, dense, config, start=start, **options)
    else:
        param_step.launch(problem.gradient, target, config=config, **options)
    return target


def config_of(name, device):
    config = configs.STREAM_CONFIGS[name]
    return dataclasses.replace(config, block=64, programs=1) if device == "cpu" else config


@CONFIGS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "bf16-nearest"])
@pytest.mark.parametrize("update", sorted(UPDATES))
def test_the_bits_of_param_step(update, storage, config, device):
    for n, k in SHAPES[device]:
        for dtype in (torch.float32, torch.bfloat16):
            problem = make_problem(n, k, [], dense=True, update=update, storage=storage, dtype=dtype, device=device)
            problem.gradient.dense.view(-1)[::5] = -0.0
            found = stepped(problem, config_of(config, device))
            assert same_bits(found, stepped(problem, None))
            assert (n, k) == (1, 1) or not torch.equal(found.weight, problem.weight)


@CONFIGS
@pytest.mark.parametrize("device", DEVICES)
def test_a_flag_leaves_everything_untouched(config, device):
    problem = make_problem(33, 20, [], dense=True, storage="bf16", device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    assert same_bits(stepped(problem, config_of(config, device), flag), problem.target())
    assert not same_bits(stepped(problem, config_of(config, device), flag - 1), problem.target())


@CONFIGS
@pytest.mark.parametrize("device", DEVICES)
def test_elements_from_a_row_on(config, device):
    problem = make_problem(40, 33, [], dense=True, storage="bf16", device=device)
    found, whole = stepped(problem, config_of(config, device), start=7 * 33), stepped(problem, None)
    for new, old, wanted in zip((found.weight, *found.states), (problem.weight, *problem.states),
                                (whole.weight, *whole.states)):  # fmt: skip
        assert torch.equal(new[:7], old[:7]) and torch.equal(new[7:], wanted[7:])


@pytest.mark.parametrize("device", DEVICES)
def test_which_gradients_it_takes(monkeypatch, device):
    """Others keep to `param_step`, whatever the configuration."""
    monkeypatch.setattr(configs, "LARGE_CONFIG", "wide")
    monkeypatch.setattr(configs, "LARGE_COUNT", 1)
    problem = make_problem(40, 33, [], dense=True, rows=9, scale=0.5, storage="bf16", device=device)
    assert same_bits(stepped(problem, None), stepped(problem, configs.STREAM_CONFIGS["wide"]))
    plain = make_problem(40, 33, [], dense=True, storage="bf16", device=device)
    first = stepped(plain, None)
    monkeypatch.setattr(configs, "LARGE_COUNT", 1 << 40)
    assert same_bits(first, stepped(plain, None))


def test_the_choice(monkeypatch):
    monkeypatch.setattr(configs, "LARGE_CONFIG", "wide")
    assert configs.stream_config(configs.LARGE_COUNT - 1) is None
    assert configs.stream_config(configs.LARGE_COUNT) == configs.STREAM_CONFIGS["wide"]
    for config in configs.STREAM_CONFIGS.values():
        assert config.block // (32 * config.num_warps) in (8, 16) and bool(config.stages) == bool(config.programs)
