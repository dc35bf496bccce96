"""Models with fused layers for the manager's tests, and one step of them."""

from __future__ import annotations

import torch
from torch import nn

from fused_grad_optimizer import FusedLinear

from .cases.helpers import data

LR = 1e-4


def fused_layers(state_mode="fp32", optimizer_type="adamw", **hyper):
    torch.manual_seed(0)
    layers = [FusedLinear.from_linear(nn.Linear(6, 8), optimizer_type, state_mode, **hyper), nn.Tanh(),
              FusedLinear.from_linear(nn.Linear(8, 3), optimizer_type, state_mode, **hyper)]  # fmt: skip
    return nn.Sequential(*layers)


def plain_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def one_step(model, manager, other=None, seed=0, **pre):
    manager.pre_step(**pre)
    loss = model(data(seed, 4, 6)).square().sum()
    loss.backward()
    if other is not None:
        other.step()
        other.zero_grad()
    return loss.item()
