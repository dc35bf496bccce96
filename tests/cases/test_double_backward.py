"""Gradients of gradients: penalties, score matching and MAML give dense training's weights."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

from .helpers import BOTH, both, data, passes, snapshot, train, unchanged

# A weight whose gradient comes from a gradient's graph gets it dense, which is said once.
pytestmark = pytest.mark.filterwarnings("ignore:.*got a dense gradient:UserWarning")


def critic():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def penalty(model, i):
    x = data(i, 5, 3).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((g.norm(dim=1) - 1) ** 2).mean()


def wgan(model, i):
    return model(data(i + 20, 5, 3)).mean() - model(data(i + 40, 5, 3)).mean() + 10 * penalty(model, i)


def score_matching(model, i):
    """Divergence of a vector field, by one backward for each coordinate."""
    x = data(i, 4, 3).requires_grad_()
    (s,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    trace = sum(torch.autograd.grad(s[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(3))
    return (0.5 * s.square().sum(1) + trace).mean()


def weight_gradient_norm(model, i):
    """The penalised gradient is the weights' own."""
    grads = torch.autograd.grad(model(data(i, 5, 3)).square().mean(), list(model.parameters()), create_graph=True)
    return sum(g.square().sum() for g in grads)


def maml(model, i):
    parameters = dict(model.named_parameters())
    inner = model(data(i, 5, 3)).square().mean()
    grads = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    adapted = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), grads)}
    return (functional_call(model, adapted, (data(i + 9, 5, 3),)) - 1).square().mean()


@BOTH
@pytest.mark.parametrize("loss", [penalty, wgan, score_matching, weight_gradient_norm, maml])
def test_equals_dense(when, loss):
    a, oa, b, ob = both(critic, when, eps=1e-4)
    first = snapshot(b)
    train(a, oa, b, ob, loss)
    assert passes(a, b, 3)
    assert not torch.equal(b[0].weight, first[0]) and ob.state[b[0].weight]["step"] == 3


@BOTH
def test_penalty_through_an_embedding_and_a_layer_norm(when):
    def make():
        return nn.ModuleDict({"e": nn.Embedding(7, 3), "n": nn.LayerNorm(3), "m": critic()})

    def loss(model, i):
        e = model["e"](torch.tensor([i, 3, 3]))
        (g,) = torch.autograd.grad(model["m"](model["n"](e)).sum(), e, create_graph=True)
        return g.square().sum()

    a, oa, b, ob = both(make, when, eps=1e-4)
    assert passes(a, b, 3, train(a, oa, b, ob, loss))


@BOTH
def test_the_first_gradient_alone_moves_nothing(when):
    _, _, b, ob = both(critic, when)
    before = snapshot(b)
    penalty(b, 0)
    assert unchanged(b, before) and all(p.grad is None for p in b.parameters())
    ob.step()
    assert unchanged(b, before)


def test_backward_with_create_graph_accumulates_the_dense_gradient():
    a, oa, b, ob = both(critic, "step", eps=1e-4)
    for model, optimizer in ((a, oa), (b, ob)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")  # of torch, once a process
            model(data(0, 5, 3)).square().mean().backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        for p in model.parameters():
            p.grad = p.grad.detach()
        optimizer.step()
    assert passes(a, b, 1)
