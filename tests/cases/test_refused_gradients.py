"""A backward that was refused leaves nothing behind that a later step() would apply."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, forge.fuse(model, "sgd", lr=1e-2)


def snapshot(model):
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_step_after_a_refused_scaled_loss_moves_nothing():
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="GradScaler.*when='step'"):
        scaler.scale(model(torch.ones(4, 6)).sum()).backward()
    optimizer.step()
    assert unchanged(model, before) and not optimizer.state


def test_step_after_a_refused_second_backward_moves_nothing():
    model, optimizer = model_and_optimizer()
    model(torch.ones(4, 6)).sum().backward()
    model.zero_grad()  # the module's own: it takes the marks of applied gradients away
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="second backward before step.*when='step'"):
        model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    assert unchanged(model, before)


def test_training_goes_on_after_a_refusal_without_zero_grad():
    model, optimizer = model_and_optimizer()
    other, theirs = model_and_optimizer()
    with pytest.raises(RuntimeError, match="GradScaler"):
        torch.amp.GradScaler("cpu").scale(model(torch.ones(4, 6)).sum()).backward()
    for m, o in ((model, optimizer), (other, theirs)):
        m(torch.ones(4, 6)).sum().backward()
        o.step()
    assert unchanged(model, snapshot(other))
