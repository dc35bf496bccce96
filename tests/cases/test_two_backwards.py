"""Two losses before one step: one step on the sum, or an error before anything moves on wrong numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .helpers import BOTH, both, data, mlp, passes, same_curve, snapshot, unchanged


def one_layer():
    return nn.Linear(6, 3)


@pytest.mark.parametrize("make", [mlp, one_layer])
@pytest.mark.parametrize("kept_graph", [True, False])
def test_one_step_on_the_sum(make, kept_graph):
    a, oa, b, ob = both(make, "step")
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            y = model(data(i, 7, 6))
            y.pow(2).mean().backward(retain_graph=kept_graph)
            (y if kept_graph else model(data(i + 9, 7, 6))).abs().mean().backward()
            optimizer.step()
    assert passes(a, b, 3)
    assert all(ob.state[p]["step"] == 3 for p in b.parameters())


def test_losses_of_different_size_and_sign():
    a, oa, b, ob = both(mlp, "step")
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(data(i, 7, 6)).pow(2).mean().backward()
            (-0.3 * model(data(i + 9, 2, 6)).sum()).backward()
            model[2](data(i, 1, 8)).sum().backward()
            optimizer.step()
    assert passes(a, b, 3)


@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_two_losses_with_lossy_states(state):
    def two(model, i):
        x = data(i % 5, 7, 6)
        (0.5 * model(x).pow(2).mean()).backward()
        return (model(x) - 1).pow(2).mean()

    a, oa, b, ob = both(mlp, "step", state=state)
    assert same_curve(a, oa, b, ob, two)


@pytest.mark.parametrize("make", [mlp, one_layer])
@pytest.mark.parametrize("kept_graph", [True, False])
def test_updates_in_backward_refuse_the_second_loss(make, kept_graph):
    """Also on a single layer, where no saved tensor would notice that the weight has changed."""
    a, oa, b, ob = both(make, "backward")
    y = b(data(0, 7, 6))
    y.pow(2).mean().backward(retain_graph=kept_graph)
    before = snapshot(b)
    second = y if kept_graph else b(data(1, 7, 6))
    with pytest.raises(RuntimeError, match="when='step'|modified by an inplace operation"):
        second.abs().mean().backward()
    assert unchanged(b, before)
    ob.step()
    oa.zero_grad()
    a(data(0, 7, 6)).pow(2).mean().backward()
    oa.step()
    assert passes(a, b, 1)


def test_updates_in_backward_with_a_step_after_each_fresh_forward():
    a, oa, b, ob = both(mlp, "backward")
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            for loss in (lambda y: y.pow(2).mean(), lambda y: y.abs().mean()):
                optimizer.zero_grad()
                loss(model(data(i, 7, 6))).backward()
                optimizer.step()
    assert passes(a, b, 6)


@BOTH
def test_the_sum_of_two_losses_in_one_backward(when):
    a, oa, b, ob = both(mlp, when)
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            y = model(data(i, 7, 6))
            torch.autograd.backward([y.pow(2).mean(), y.abs().mean()])
            optimizer.step()
    assert passes(a, b, 3)


@BOTH
def test_two_losses_on_disjoint_parts_of_a_model(when):
    """Two backwards that share no parameter; in backward mode the second is refused all the same, and says so."""
    a, oa, b, ob = both(lambda: nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]), when)
    for model in (a, b):
        model[0](data(0, 4, 6)).square().sum().backward()
    if when == "backward":
        with pytest.raises(RuntimeError, match="second backward.*when='step'"):
            b[1](data(1, 4, 6)).square().sum().backward()
        return
    for model, optimizer in ((a, oa), (b, ob)):
        model[1](data(1, 4, 6)).square().sum().backward()
        optimizer.step()
    assert passes(a, b, 1)


@BOTH
def test_autograd_grad_moves_nothing(when):
    """A gradient that is asked for as a value is neither applied nor kept."""
    a, oa, b, ob = both(mlp, when)
    before = snapshot(b)
    x = data(0, 7, 6).requires_grad_()
    wanted = torch.autograd.grad(a(x).square().sum(), [x, *a.parameters()])
    got = torch.autograd.grad(b(x).square().sum(), [x, *b.parameters()])
    for dense, fused in zip(wanted, got):
        fused = fused.to_dense() if hasattr(fused, "pairs") else fused
        assert torch.allclose(dense, fused, rtol=1e-5, atol=1e-6)
    assert unchanged(b, before) and all(p.grad is None for p in b.parameters())
    for model, optimizer in ((a, oa), (b, ob)):
        model(x).square().sum().backward()
        optimizer.step()
    assert passes(a, b, 1)
