"""bf16 weights move by updates far below half a unit in the last place, and their decay is not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH

STATES = pytest.mark.parametrize("state", ["fp32", "bf16", None])


def ones():
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    return layer


def mean_after(layer, optimizer, factor, n=200):
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for _ in range(n):
        optimizer.zero_grad()
        (layer(x).sum() * factor).backward()
        optimizer.step()
    return layer.weight.double().mean().item()


@BOTH
@STATES
def test_small_steps_arrive_on_average(when, state):
    layer = ones()
    optimizer = forge.fuse(layer, when=when, lr=1e-4, state=state, weight_decay=0.0)
    assert mean_after(layer, optimizer, 1.0) == pytest.approx(0.98, abs=5e-4)
    assert layer.weight.dtype == torch.bfloat16


@BOTH
@STATES
def test_decay_alone_arrives_on_average(when, state):
    layer = ones()
    optimizer = forge.fuse(layer, when=when, lr=1e-3, state=state, weight_decay=0.1)
    assert mean_after(layer, optimizer, 0.0) == pytest.approx((1 - 1e-4) ** 200, abs=5e-4)


@BOTH
def test_rounding_to_nearest_loses_both_and_says_so(when):
    layer = ones()
    with pytest.warns(UserWarning, match="rounded to nearest"):
        optimizer = forge.fuse(layer, when=when, lr=1e-4, weight="nearest", weight_decay=0.1)
    assert mean_after(layer, optimizer, 1.0, n=20) == 1.0


@BOTH
def test_an_embedding_moves_too(when):
    layer = nn.Embedding(64, 64, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    optimizer = forge.fuse(layer, when=when, lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        layer(torch.arange(64)).sum().backward()
        optimizer.step()
    assert layer.weight.double().mean().item() == pytest.approx(0.99, abs=5e-4)


@BOTH
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(when):
    found = []
    for seed in (1, 1, 2):
        layer = ones()
        optimizer = forge.fuse(layer, when=when, lr=1e-4, seed=seed)
        mean_after(layer, optimizer, 1.0, n=5)
        found.append(layer.weight.detach().clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
