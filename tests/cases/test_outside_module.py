"""A weight that is used without its module's forward trains like any other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .helpers import BOTH, both, data, passes, train


def ids(i):
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(i))


class FunctionalHead(nn.Module):
    """Ends in F.linear(h, self.head.weight), tied to the embedding or not."""

    def __init__(self, tied):
        super().__init__()
        self.e, self.m, self.head = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.e.weight

    def forward(self, x):
        return F.linear(torch.tanh(self.m(self.e(x))), self.head.weight)


class HalfAndHalf(nn.Module):
    """The same weight through the module, through F.linear and through its elements."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x):
        return F.linear(torch.tanh(self.l(x)), self.l.weight, self.l.bias) @ self.l.weight.exp()


def cross_entropy(model, i):
    return F.cross_entropy(model(ids(i)).flatten(0, 1), ids(i).flatten())


@BOTH
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(when, norm_first):
    def make():
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)

    a, oa, b, ob = both(make, when)
    out_proj = b.self_attn.out_proj.weight.detach().clone()
    ignore = train(a, oa, b, ob, lambda m, i: (m(data(i, 2, 5, 8)) * data(9 + i, 2, 5, 8)).sum())
    assert passes(a, b, 3, ignore)
    assert not torch.equal(b.self_attn.out_proj.weight, out_proj)
    a.eval(), b.eval()
    with torch.no_grad():  # the fast path reads the weights without calling any submodule
        assert torch.allclose(a(data(9, 2, 5, 8)), b(data(9, 2, 5, 8)), atol=1e-4)


@BOTH
def test_multihead_attention_with_separate_projections(when):
    a, oa, b, ob = both(lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True), when)

    def loss(m, i):
        y, _ = m(data(i, 2, 5, 8), data(i + 20, 2, 3, 6), data(i + 40, 2, 3, 4))
        return y.square().sum()

    assert passes(a, b, 3, train(a, oa, b, ob, loss))


@BOTH
@pytest.mark.parametrize("tied", [False, True])
def test_head_applied_as_a_function_moves_and_it_is_said(when, tied):
    a, oa, b, ob = both(lambda: FunctionalHead(tied), when)
    before = b.head.weight.detach().clone()
    if tied:  # the embedding's factors and the head's dense part are one gradient
        ignore = train(a, oa, b, ob, cross_entropy)
    else:
        with pytest.warns(UserWarning, match=r"head\.weight got a dense gradient"):
            ignore = train(a, oa, b, ob, cross_entropy)
    assert passes(a, b, 3, ignore)
    assert not torch.equal(b.head.weight, before)
    assert ob.state[b.head.weight]["step"] == 3


@BOTH
def test_mixed_uses_add_up_to_one_step(when):
    a, oa, b, ob = both(HalfAndHalf, when)
    ignore = train(a, oa, b, ob, lambda m, i: m(data(i, 4, 6)).square().mean())
    assert passes(a, b, 3, ignore)
    assert ob.state[b.l.weight]["step"] == 3


@BOTH
def test_a_penalty_on_the_weights_adds_to_the_gradient(when):
    a, oa, b, ob = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), when)

    def loss(m, i):
        return m(data(i, 4, 6)).square().mean() + 0.1 * sum(p.square().sum() for p in m.parameters())

    assert passes(a, b, 3, train(a, oa, b, ob, loss))


@BOTH
def test_functional_embedding(when):
    a, oa, b, ob = both(lambda: nn.Embedding(13, 6), when)

    def loss(m, i):
        return (m(ids(i)) + F.embedding(ids(i + 5), m.weight)).square().sum()

    assert passes(a, b, 3, train(a, oa, b, ob, loss))
