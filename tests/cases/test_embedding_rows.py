"""Rows of an embedding that are not in the batch move as dense AdamW moves them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from tests.reference.lion import Lion

from .helpers import BOTH, LR, both, data, gap, pair, passes, same_curve

BATCHES = ([0, 1, 1], [2], [2, 0], [5])


def train_on(pairs, batches=BATCHES):
    for ids in batches:
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(torch.tensor(ids)).pow(2).sum().backward()
            optimizer.step()


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}],
    ids=["plain", "padding", "last-padding", "by-frequency", "max-norm"],
)
def test_every_row_equals_dense(when, options):
    a, oa, b, ob = both(lambda: nn.Embedding(9, 4, **options), when, weight_decay=0.1)
    train_on(((a, oa), (b, ob)))
    assert passes(a, b, 4)
    assert ob.state[b.weight]["step"] == 4


@BOTH
def test_absent_rows_move_by_momentum_and_unseen_rows_by_decay(when):
    lr = 0.1
    a, oa, b, ob = both(lambda: nn.Embedding(9, 4), when, weight_decay=0.1, lr=lr)
    train_on(((a, oa), (b, ob)), [[0, 1]])
    before = b.weight.detach().clone()
    train_on(((a, oa), (b, ob)), [[2]])
    way = (b.weight - before * (1 - lr * 0.1)).abs().amax(1)
    assert way[0] > 0.05 and way[1] > 0.05 and way[2] > 0.05
    assert way[3:].max() < 1e-6
    assert passes(a, b, 2, lr=lr)


@BOTH
@pytest.mark.parametrize(
    "rule, dense, hyper",
    [
        ("adam", torch.optim.Adam, {"lr": 1e-2}),
        ("adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
        ("sgd", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
        ("sgd", torch.optim.SGD, {"lr": 1e-2}),
    ],
)
def test_other_rules(when, rule, dense, hyper):
    a, b = pair(lambda: nn.Embedding(9, 4))
    train_on(((a, dense(a.parameters(), **hyper)), (b, forge.fuse(b, rule, when=when, **hyper))))
    assert gap(a, b) <= 1e-3 * 1e-2 * 4


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_lossy_states_follow_the_dense_loss(when, state):
    a, oa, b, ob = both(lambda: nn.Embedding(9, 4), when, state=state)
    assert same_curve(a, oa, b, ob, lambda m, i: (m(torch.tensor(BATCHES[i % 4])) - 2).square().mean())


@BOTH
def test_ids_refilled_in_place_after_backward(when):
    a, oa, b, ob = both(lambda: nn.Embedding(9, 4), when)
    for first in (0, 3, 5):
        for model, optimizer in ((a, oa), (b, ob)):
            ids = torch.tensor([first, first + 1])
            optimizer.zero_grad()
            model(ids).pow(2).sum().backward()
            ids.fill_(8)
            optimizer.step()
    assert passes(a, b, 3)


class OneHot(nn.Module):
    """The definition of an embedding: a product with one-hot rows, in fp64."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().double())

    def forward(self, ids):
        return nn.functional.one_hot(ids, len(self.weight)).double() @ self.weight


RULES = pytest.mark.parametrize(
    "rule, oracle, hyper",
    [
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
        ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
        ("sgd", torch.optim.SGD, {"weight_decay": 0.1}),
        ("sgd", torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
        ("sgd", torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
        ("lion", Lion, {"weight_decay": 0.1}),
    ],
    ids=str,
)
REPEATED = ([[0, 1, 1], [2, 2, 2]], [[2, 0, 2]], [[5, 5], [1, 5]], [[8]])


@BOTH
@RULES
def test_equals_a_one_hot_product_in_fp64(when, rule, oracle, hyper):
    """Both in fp64, where only the order of summation differs: no sign or division can hang on rounding."""
    torch.manual_seed(0)
    fused = nn.Embedding(9, 4, dtype=torch.float64)
    exact = OneHot(fused.weight)
    optimizers = oracle(exact.parameters(), lr=LR, **hyper), forge.fuse(fused, rule, when=when, lr=LR, **hyper)
    before = fused.weight.detach().clone()
    for step, ids in enumerate(REPEATED):
        ids = torch.tensor(ids)
        for model, optimizer in zip((exact, fused), optimizers):
            optimizer.zero_grad()
            (model(ids) - data(step, *ids.shape, 4).double()).pow(2).sum().backward()
            optimizer.step()
        assert (fused.weight - exact.weight).abs().max() <= 1e-12
    moved = (fused.weight - before).abs().amax(1)
    assert moved[[0, 1, 2, 5, 8]].min() > 1e-4
    assert (moved[[3, 4, 6, 7]].min() > 0) == ("weight_decay" in hyper)  # never seen


@BOTH
@pytest.mark.parametrize("hyper", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_one_id_a_thousand_times(when, hyper):
    """Summing n terms in fp32, in any order, errs by at most n 2^-24 of the sum of their magnitudes."""
    torch.manual_seed(0)
    fused = nn.Embedding(9, 4)
    exact = OneHot(fused.weight)
    optimizers = (
        torch.optim.SGD(exact.parameters(), lr=LR, **hyper),
        forge.fuse(fused, "sgd", when=when, lr=LR, **hyper),
    )
    ids = torch.tensor([3] * 1000 + [0, 7, 7])[torch.randperm(1003)]
    upstream = data(0, 1003, 4)
    for model, optimizer in zip((exact, fused), optimizers):
        for _ in range(2):
            optimizer.zero_grad()
            y = model(ids)
            y.backward(upstream.to(y.dtype))
            optimizer.step()
    way = LR * (5.0 if hyper else 2.0)  # Nesterov's two steps move by (1.9 + 2.71) lr of the gradient, plain ones by 2
    magnitudes = torch.stack([upstream[ids == row].abs().sum(0) for row in range(9)])
    bound = 2**-24 * (1000 * way * magnitudes + 8 * (fused.weight.abs() + way * magnitudes))  # sum; a step's roundings
    assert ((fused.weight - exact.weight).abs() <= bound).all()
    assert bound[3].max() < 0.01 * LR * magnitudes[3].min()


@BOTH
def test_one_id_a_thousand_times_in_bf16_is_summed_in_fp32(when):
    """A sum of ones kept in bf16 stops at 256; 125 has 7 bits, so that no rounding is left in the weight."""
    layer = nn.Embedding(9, 4, dtype=torch.bfloat16)
    nn.init.zeros_(layer.weight)
    optimizer = forge.fuse(layer, "sgd", when=when, lr=0.125)
    layer(torch.tensor([3] * 1000 + [0])).sum().backward()
    optimizer.step()
    expected = torch.zeros(9, 4)
    expected[3], expected[0] = -125.0, -0.125
    assert torch.equal(layer.weight.float(), expected)


@BOTH
@pytest.mark.parametrize("state", ["fp32", "bf16", None])
def test_absent_rows_of_a_bf16_embedding_still_decay(when, state):
    """Each step takes lr wd = 1e-4 of a weight, a fortieth of the spacing 2^-8 of bf16 below 1: only the mean shows it.

    A stochastic rounding by a part p of the spacing has variance 2^-16 p (1 - p) <= 2^-8 1e-4. After 200 steps the mean
    of 128 * 64 weights has deviation sqrt(200 * 2^-8 * 1e-4 / 8192) = 1e-4; 5 deviations are allowed.
    """
    layer = nn.Embedding(257, 64, dtype=torch.bfloat16)
    sign = torch.where(torch.arange(257) % 2 == 0, 1.0, -1.0)  # rounding down is not rounding towards 0
    layer.weight.data.copy_(sign[:, None].expand(257, 64))
    optimizer = forge.fuse(layer, "adamw", when=when, lr=1e-3, weight_decay=0.1, state=state)
    for _ in range(200):
        optimizer.zero_grad()
        layer(torch.tensor([256])).sum().backward()
        optimizer.step()
    absent = layer.weight.double()[:256]
    for rows in (absent[0::2], -absent[1::2]):
        assert rows.mean().item() == pytest.approx((1 - 1e-4) ** 200, abs=5e-4)
    assert layer.weight.double()[256].mean() < 0.9  # the present row: 200 steps of lr, and its decay
