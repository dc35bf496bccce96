"""States follow their parameter to another memory layout, and are refused when its shape has changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedOptimizer, _small

from .helpers import BOTH, LR, data, passes, ref, train

GATHERED = pytest.mark.parametrize("gathered", [False, True])


def to_channels_last(model):
    model.to(memory_format=torch.channels_last)


def to_contiguous(model):
    model.weight.data = model.weight.data.contiguous()


@BOTH
@pytest.mark.parametrize("first, then", [(to_contiguous, to_channels_last), (to_channels_last, to_contiguous)])
def test_a_convolution_changes_its_memory_format(when, first, then):
    a = nn.Conv2d(4, 4, 3, bias=False)
    first(a)
    b = copy.deepcopy(a)
    oa, ob = ref(a), forge.fuse(b, when=when, lr=LR, weight_decay=0.01)

    def loss(model, i):
        return model(data(i, 2, 4, 5, 5)).square().sum()

    train(a, oa, b, ob, loss, 2)
    then(a)
    then(b)
    train(a, oa, b, ob, lambda m, i: loss(m, i + 2), 2)
    assert passes(a, b, 4)
    for name in ("exp_avg", "exp_avg_sq"):
        wanted, got = oa.state[a.weight][name], ob.state[b.weight][name]
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6) and got.stride() == b.weight.stride()


@GATHERED
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_a_state_of_other_strides_is_updated(monkeypatch, gathered, shape):
    monkeypatch.setattr(_small, "pays", lambda device, dtype: gathered)
    p, q = (nn.Parameter(data(0, *shape)) for _ in range(2))
    mine, dense = FusedOptimizer([p], lr=LR, when="step"), torch.optim.AdamW([q], lr=LR)
    for i in range(4):
        p.grad, q.grad = data(i + 1, *shape), data(i + 1, *shape)
        mine.step()
        dense.step()
        if i == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                state = mine.state[p][name]
                mine.state[p][name] = state.transpose(0, 1).contiguous().transpose(0, 1)
    assert (p - q).abs().max() < 1e-3 * LR
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(mine.state[p][name], dense.state[q][name], rtol=1e-5, atol=1e-8)


def test_states_of_unchanged_layout_keep_their_memory():
    shapes = [(), (0, 3), (1, 1), (4, 1, 3, 3), (3, 4)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    parameters.append(nn.Parameter(torch.ones(3, 4).t()))
    parameters.append(nn.Parameter(torch.ones(4, 1, 3, 3).to(memory_format=torch.channels_last)))
    optimizer = FusedOptimizer(parameters, lr=LR, when="step")
    kept = []
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        kept.append([optimizer.state[p]["exp_avg"] for p in parameters])
    assert all(a is b is c for a, b, c in zip(*kept))


# -- other shapes ------------------------------------------------------------------------------------------------------


def two_parameters(monkeypatch, gathered, rule="adamw", when="step"):
    """Stepped once, in which their values are 1 and their gradients 1."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: gathered)
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = FusedOptimizer([("a", a), ("b", b)], rule, lr=LR, when=when)
    (a.sum() + b.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return a, b, optimizer


@GATHERED
@pytest.mark.parametrize("shape", [(6,), (2,), (3, 1)])
def test_a_gradient_of_another_shape_is_refused_before_anything_moves(monkeypatch, gathered, shape):
    a, b, optimizer = two_parameters(monkeypatch, gathered)
    before, kept = a.detach().clone(), torch.ones(shape)
    a.grad, b.grad = torch.ones(2), torch.ones(3)
    b.data = kept.clone()
    with pytest.raises(ValueError, match=r"gradient of b has shape \(3,\).*zero_grad"):
        optimizer.step()
    assert torch.equal(a, before) and torch.equal(b, kept)
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 1


@GATHERED
@pytest.mark.parametrize("shape", [(6,), (2,), (3, 1)])
def test_a_state_of_another_shape_is_refused_and_popped(monkeypatch, gathered, shape):
    _, b, optimizer = two_parameters(monkeypatch, gathered)
    states = copy.deepcopy(optimizer.state[b])
    b.data = torch.ones(shape)
    b.grad = torch.full(shape, 2.0)
    with pytest.raises(ValueError, match=r"exp_avg of b has shape \(3,\).*optimizer\.state\.pop"):
        optimizer.step()
    assert torch.equal(b, torch.ones(shape))
    assert all(torch.equal(states[n], optimizer.state[b][n]) for n in ("exp_avg", "exp_avg_sq"))
    assert optimizer.state[b]["step"] == 1
    optimizer.state.pop(b)
    optimizer.step()
    dense = nn.Parameter(torch.ones(shape))
    dense.grad = torch.full(shape, 2.0)
    torch.optim.AdamW([dense], lr=LR).step()
    assert torch.allclose(b, dense, rtol=0, atol=1e-3 * LR) and optimizer.state[b]["step"] == 1


@GATHERED
def test_a_parameter_without_states_takes_another_shape_in_backward(monkeypatch, gathered):
    _, b, optimizer = two_parameters(monkeypatch, gathered, "sgd", "backward")
    b.data = torch.zeros(6)
    (2 * b).sum().backward()
    optimizer.step()
    assert torch.allclose(b, torch.full((6,), -2 * LR)) and b.grad is None
