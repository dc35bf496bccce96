"""Rows of an embedding that are not in the batch move as dense AdamW moves them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, both, gap, pair, passes, same_curve

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
