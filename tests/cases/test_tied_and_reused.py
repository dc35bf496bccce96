"""A weight used twice takes one step on the sum of its gradients, and a tie stays a tie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .helpers import BOTH, both, passes, same_curve, train


class Tied(nn.Module):
    """Embedding tied to the head, and one Linear used twice."""

    def __init__(self):
        super().__init__()
        self.e, self.m, self.h = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False)
        self.h.weight = self.e.weight

    def forward(self, ids):
        return self.h(torch.tanh(self.m(torch.tanh(self.m(self.e(ids))))))


class TwoHeads(nn.Module):
    """Two Linears that share one weight but not their biases."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Linear(6, 6), nn.Linear(6, 6)
        self.q.weight = self.p.weight

    def forward(self, x):
        return self.q(torch.tanh(self.p(x)))


def ids(i):
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(i))


def language_loss(model, i):
    return F.cross_entropy(model(ids(i)).flatten(0, 1), ids(i).flatten())


@BOTH
def test_tied_embedding_and_reused_linear_equal_dense(when):
    a, oa, b, ob = both(Tied, when)
    ignore = train(a, oa, b, ob, language_loss, n=4)
    assert b.h.weight is b.e.weight
    assert passes(a, b, 4, ignore)
    assert ob.state[b.e.weight]["step"] == ob.state[b.m.weight]["step"] == 4
    assert len(ob.state) == len(list(b.parameters())) == 3


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_tied_weights_with_lossy_states_follow_the_dense_loss(when, state):
    a, oa, b, ob = both(Tied, when, state=state)
    assert same_curve(a, oa, b, ob, language_loss)


@BOTH
def test_two_linears_that_share_a_weight(when):
    a, oa, b, ob = both(TwoHeads, when)
    ignore = train(a, oa, b, ob, lambda m, i: m(ids(i)[..., None].expand(2, 5, 6) / 13.0).square().sum())
    assert b.p.weight is b.q.weight and passes(a, b, 3, ignore)
    assert ob.state[b.p.weight]["step"] == 3


@BOTH
@pytest.mark.parametrize("used", ["embedding", "head"])
def test_only_one_end_of_the_tie_is_used(when, used):
    def loss(model, i):
        out = model.e(ids(i)) if used == "embedding" else model.h(torch.ones(2, 6) * (i + 1))
        return out.square().sum()

    a, oa, b, ob = both(Tied, when)
    assert passes(a, b, 3, train(a, oa, b, ob, loss))


@BOTH
def test_a_tie_made_after_fuse_is_one_weight_too(when):
    def untied():
        return nn.ModuleDict({"e": nn.Embedding(13, 6), "h": nn.Linear(6, 13, bias=False)})

    a, oa, b, ob = both(untied, when)
    for model in (a, b):
        model["h"].weight = model["e"].weight
    ignore = train(a, oa, b, ob, lambda m, i: F.cross_entropy(m["h"](m["e"](ids(i))).flatten(0, 1), ids(i).flatten()))
    assert b["h"].weight is b["e"].weight and passes(a, b, 3, ignore)


@BOTH
def test_one_module_under_two_names(when):
    def make():
        layer = nn.Linear(6, 6)
        return nn.Sequential(layer, nn.Tanh(), layer)

    a, oa, b, ob = both(make, when)
    ignore = train(a, oa, b, ob, lambda m, i: m(torch.linspace(-1, 1, 24).view(4, 6) * (i + 1)).square().sum())
    assert b[0] is b[2] and passes(a, b, 3, ignore)
