"""Small dense parameters stepped together: in every situation the bits of stepping each at once.

The gathering is switched on for the CPU here, where the operator is a loop; `tests/gpu/test_small.py` runs the kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer.optimizer import FusedOptimizer
from tests.cases.helpers import BOTH, data
from tests.small_helpers import (
    DENSE,
    IDS,
    LR,
    assert_both_ways,
    gather,
    groups_of,
    loss_of,
    model_of,
    result,
    trained,
)


@pytest.fixture
def gathered(monkeypatch):
    return gather(monkeypatch)


@BOTH
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rule, hyper", [("adamw", {}), ("adam", {}), ("lion", {}), ("sgd", {}),
                                         ("sgd", {"momentum": 0.9})], ids=str)  # fmt: skip
def test_rules_and_dtypes(monkeypatch, rule, hyper, dtype, maximize, when):
    options = {"lr": LR, "maximize": maximize, "weight_decay": 0.1, "seed": 3, **hyper}
    assert_both_ways(
        monkeypatch, lambda: trained(lambda m: forge.fuse(m, rule, when=when, **options), 3, dtype)
    )  # fmt: skip


@BOTH
def test_against_torch_optim(gathered, when):
    dense, fused = model_of(), model_of()
    pairs = [(dense, torch.optim.AdamW(dense.parameters(), lr=LR, eps=1e-4)),
             (fused, forge.fuse(fused, lr=LR, eps=1e-4, when=when))]  # fmt: skip
    for i in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
    gap = max((p - q).abs().max().item() for p, q in zip(dense.parameters(), fused.parameters()))
    assert gap < 1e-3 * LR * 4
    assert gathered.sizes == [len(DENSE)] * 4


@BOTH
def test_groups_with_other_values_that_change(monkeypatch, when):
    def make(model):
        norms = ["1.weight", "1.bias", "5.weight", "5.bias"]
        groups = groups_of(model, norms=(norms, {"weight_decay": 0.0, "lr": 3 * LR, "maximize": True}))
        return forge.fuse(model, lr=LR, when=when, param_groups=groups)

    def change(model, optimizer, i):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)

    assert_both_ways(monkeypatch, lambda: trained(make, after=change))


@BOTH
@pytest.mark.parametrize("bad", [["1.weight"], ["1.weight", "4.bias"], DENSE])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(monkeypatch, when, bad, value):
    def make(model):
        optimizer = forge.fuse(model, lr=LR, when=when)
        forwards = []
        model.register_forward_hook(lambda *_: forwards.append(0))
        for name in bad:
            model.get_parameter(name).register_hook(lambda g: g * (value if len(forwards) == 2 else 1.0))
        return optimizer

    def run():
        tensors, skipped = trained(make, 3)
        assert skipped == dict.fromkeys(bad, 1)
        return tensors, skipped

    assert_both_ways(monkeypatch, run)


def test_clipping_and_accumulation(monkeypatch):
    def accumulate(model, optimizer, i):
        (loss_of(model, i + 1) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when="step"), after=accumulate))


def test_grad_scaler_with_an_inf(monkeypatch):
    def run():
        model = model_of()
        optimizer = forge.fuse(model, lr=LR, when="step")
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for i in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i, float("inf") if i == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[model[1].weight]["step"] == 3
        return result(model, optimizer)

    assert_both_ways(monkeypatch, run)


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpoints(monkeypatch, when, reentrant, whole):
    """Segments of one layer; or one segment that holds every small parameter."""

    def loss(model, i):
        x = model[0]((IDS + i) % 7)
        segments = [model[1:]] if whole else list(model[1:])
        for segment in segments:
            x = checkpoint(segment, x, use_reentrant=reentrant)
        return x.square().mean()

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), loss=loss))


@BOTH
def test_a_layer_reused_over_time(monkeypatch, when):
    def loss(model, i):
        x = model[0]((IDS + i) % 7)
        for _ in range(3):
            x = model[4](model[3](model[2](model[1](x))))
        return x.square().mean()

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), loss=loss))


@BOTH
def test_frozen_and_thawed(monkeypatch, when):
    def freeze(model, optimizer, i):
        model[1].weight.requires_grad_(i % 2 == 1)
        model[4].bias.requires_grad_(i != 1)

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), 5, after=freeze))


@BOTH
def test_two_optimizers_in_one_backward(monkeypatch, when):
    def run():
        model = model_of()
        first = FusedOptimizer(model[:4].parameters(), lr=LR, when=when)
        second = FusedOptimizer(model[4:].parameters(), "sgd", lr=LR, momentum=0.9, when=when)
        for i in range(3):
            loss_of(model, i).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return [*result(model, first)[0], *result(model, second)[0]], first.skipped

    assert_both_ways(monkeypatch, run)


@BOTH
def test_state_dict_round_trip(monkeypatch, when):
    def run():
        model = model_of(torch.bfloat16)
        optimizer = forge.fuse(model, lr=LR, when=when)
        for i in range(4):
            if i == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.release()
                optimizer = forge.fuse(model, lr=LR, when=when)
                optimizer.load_state_dict(saved)
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        return result(model, optimizer)

    assert_both_ways(monkeypatch, run)


@BOTH
def test_gradients_put_there_by_hand(monkeypatch, when):
    def replace(model, optimizer, i):
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.grad = torch.linspace(-1, 1, parameter.numel() * 2)[::2]

    def untouched(model, i):
        return model[0].weight.sum() * 0.0

    assert_both_ways(
        monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), after=replace, loss=untouched)
    )  # fmt: skip


def test_a_manager(monkeypatch):
    """A fused weight that is used outside its module has a dense gradient, and is small."""

    def run():
        torch.manual_seed(0)
        layers = [forge.FusedLinear.from_linear(nn.Linear(6, 6), rule, "fp32", lr=LR) for rule in ("adamw", "lion")]
        model = nn.Sequential(*layers)
        manager = forge.FusedOptimizerManager(model)
        for i in range(3):
            manager.pre_step(lr=LR)
            F.linear(layers[1](data(i, 4, 6)), layers[0].weight).square().mean().backward()
        manager.pre_step()
        return [p.detach().clone() for p in model.parameters()], manager.skipped

    assert_both_ways(monkeypatch, run)


def test_two_parameters_on_one_memory_take_a_launch_each(gathered):
    first = nn.Parameter(torch.zeros(5))
    second, other = nn.Parameter(first.data), nn.Parameter(torch.zeros(3))
    optimizer = forge.FusedOptimizer([first, second, other], "sgd", lr=1.0, when="step")
    for parameter in (first, second, other):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert gathered.sizes == [2, 1]
    assert torch.equal(first, torch.full((5,), -2.0)) and torch.equal(other, torch.full((3,), -1.0))
