"""All kinds of bf16 parameters and states keep what rounding to nearest would lose, measured against fp32 AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, data


def constant_gradient(kind):
    """`(module, its parameter of ones, a loss whose gradient is 1 everywhere)`."""
    if kind == "bias":
        module = nn.Linear(4, 4096)
        return module, module.bias, lambda: module(torch.zeros(1, 4, dtype=torch.bfloat16)).sum()
    if kind == "norm":
        module = nn.LayerNorm(4096)
        return module, module.weight, lambda: module.weight.sum()
    module = nn.ParameterList([nn.Parameter(torch.ones(4, 1024))])
    return module, module[0], lambda: module[0].sum()


@BOTH
@pytest.mark.parametrize("kind", ["bias", "norm", "parameter"])
def test_what_is_not_a_matrix_of_a_linear_moves_too(when, kind):
    module, parameter, loss = constant_gradient(kind)
    module.bfloat16()
    nn.init.ones_(parameter)
    optimizer = forge.fuse(module, when=when, lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert parameter.dtype == torch.bfloat16
    assert parameter.double().mean().item() == pytest.approx(0.98, abs=5e-4)


@BOTH
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
def test_other_rules_move_by_the_same_constant_gradient(when, rule):
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    optimizer = forge.fuse(layer, rule, when=when, lr=1e-4)
    for _ in range(200):
        optimizer.zero_grad()
        layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert layer.weight.double().mean().item() == pytest.approx(0.98, abs=5e-4)


@BOTH
def test_decay_and_step_share_one_rounding(when):
    """A step that cancels decay exactly leaves the weight where it is; two roundings would scatter it."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    optimizer = forge.fuse(layer, "sgd", when=when, lr=1e-3, weight_decay=0.25)
    for _ in range(50):
        optimizer.zero_grad()
        (-0.25 * layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum()).backward()
        optimizer.step()
    assert torch.equal(layer.weight, torch.ones(64, 64, dtype=torch.bfloat16))


@BOTH
def test_second_moments_in_bf16_do_not_stall(when):
    """beta2 = 0.999: a decay of v by 0.1% is under half a unit in the last place of bf16."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    optimizer = forge.fuse(layer, when=when, state="bf16", lr=1e-6)
    for i in range(350):
        optimizer.zero_grad()
        (layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum() * (4.0 if i < 50 else 0.0)).backward()
        optimizer.step()
    expected = 16 * (1 - 0.999**50) * 0.999**300
    found = optimizer.state[layer.weight]["exp_avg_sq"]
    assert found.dtype == torch.bfloat16 and found.double().mean().item() == pytest.approx(expected, rel=0.02)


@BOTH
@pytest.mark.parametrize("state", ["fp32", "bf16", None])
def test_a_bf16_model_follows_fp32_adamw(when, state):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()

    models = make().float(), make()
    optimizers = (
        torch.optim.AdamW(models[0].parameters(), lr=2e-4),
        forge.fuse(models[1], when=when, state=state, lr=2e-4),
    )
    curves = [], []
    for i in range(150):
        x = data(i % 8, 32, 16)
        target = torch.stack([x[:, :4].sum(1), x[:, 4], x[:, 5] * 2, x[:, 6:9].sum(1)], 1)
        for curve, model, optimizer in zip(curves, models, optimizers):
            optimizer.zero_grad()
            loss = (model(x.to(model[0].weight.dtype)).float() - target).square().mean()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    dense, fused = (sum(c[-16:]) / 16 for c in curves)
    assert dense < 0.9 * curves[0][0]
    assert abs(fused - dense) <= 0.02 * dense
