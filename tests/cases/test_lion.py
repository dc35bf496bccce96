"""Whole models under lion, against the paper's update typed as an ordinary torch optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from tests.reference.lion import Lion

from .helpers import BOTH, LR, data, pair, snapshot, unchanged


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.m, self.n = nn.Embedding(9, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.h = nn.Linear(6, 9)
        self.h.weight = self.e.weight

    def forward(self, ids):
        return self.h(self.n(self.m(self.e(ids)).tanh()))


@BOTH
@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.1}, {"betas": (0.95, 0.98), "weight_decay": 0.01}], ids=str)
def test_equals_the_paper_in_fp64(when, hyper):
    """In fp64, so that no sign hangs on rounding."""
    a, b = pair(lambda: Tied().double())
    oa, ob = Lion(a.parameters(), lr=LR, **hyper), forge.fuse(b, "lion", when=when, lr=LR, **hyper)
    before = snapshot(b)
    for i in range(8):
        ids = torch.randint(0, 9, (7,), generator=torch.Generator().manual_seed(i))
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            (model(ids) - data(i, 7, 9).double()).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert (p - q).abs().max() <= 1e-10, name
        assert torch.allclose(oa.state[p]["exp_avg"], ob.state[q]["exp_avg"], rtol=1e-9, atol=1e-12)
    assert not unchanged(b, before)


@BOTH
def test_the_oracle_tells_rules_apart(when):
    """sign(m) after the update of m, a common mistake, is another optimizer."""
    a, b = pair(lambda: nn.Linear(6, 3).double())
    oa, ob = Lion(a.parameters(), lr=LR, betas=(0.5, 0.9)), forge.fuse(b, "lion", when=when, lr=LR, betas=(0.9, 0.5))
    for i in range(8):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(data(i, 4, 6).double()).sum().backward()
            optimizer.step()
    assert (a.weight - b.weight).abs().max() > LR
