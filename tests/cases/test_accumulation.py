"""Micro-batches add up to the large batch, in fp32, in bounded memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import both, data, mlp, pair, passes, same_curve, snapshot, unchanged


@pytest.mark.parametrize("parts", [[4, 4, 4, 3], [15], [1] * 15, [14, 1], [8, 0, 7]])
def test_uneven_micro_batches_equal_the_large_batch(parts):
    a, oa, b, ob = both(mlp, "step")
    for i in range(3):
        oa.zero_grad(), ob.zero_grad()
        (a(data(i, 15, 6)).pow(2).sum() / 15).backward()
        for x in data(i, 15, 6).split(parts):
            (b(x).pow(2).sum() / 15).backward()
        oa.step(), ob.step()
    assert passes(a, b, 3)
    assert ob.state[b[0].weight]["step"] == 3


def test_embeddings_and_a_tie_accumulate():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.h = nn.Embedding(9, 4), nn.Linear(4, 9)
            self.h.weight = self.e.weight

        def forward(self, ids):
            return self.h(torch.tanh(self.e(ids)))

    a, oa, b, ob = both(Tied, "step")
    for i in range(3):
        ids = torch.randint(0, 9, (11,), generator=torch.Generator().manual_seed(i))
        oa.zero_grad(), ob.zero_grad()
        a(ids).square().sum().backward()
        for part in ids.split([4, 4, 3]):
            b(part).square().sum().backward()
        oa.step(), ob.step()
    assert passes(a, b, 3)


def test_the_last_window_of_an_epoch():
    """Ten micro-batches in windows of four: the last window has two, each weighted by its own count."""
    a, oa, b, ob = both(mlp, "step")
    batches = [data(i, 3, 6) for i in range(10)]
    for start in range(0, 10, 4):
        window = batches[start : start + 4]
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            for x in [torch.cat(window)] if model is a else window:
                (model(x).pow(2).sum() / (3 * len(window))).backward()
            optimizer.step()
    assert passes(a, b, 3)


@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_accumulation_with_lossy_states(state):
    def accumulated(model, i):
        parts = data(i % 4, 12, 6).split(4)
        for x in parts[:-1]:
            ((model(x) - 1).square().mean() / 3).backward()
        return (model(parts[-1]) - 1).square().mean() / 3

    a, oa, b, ob = both(mlp, "step", state=state)
    assert same_curve(a, oa, b, ob, accumulated)


def exp_avg_of_one_weight(inputs, fold=False):
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = forge.fuse(layer, "adamw", when="step", state="fp32")
    for value in inputs:
        layer(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
        if fold:
            layer.weight.grad.fold()
    optimizer.step()
    return optimizer.state[layer.weight]["exp_avg"].item()


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("inputs", [[256.0, 1.0], [1.0, 256.0], [256.0] + [1.0] * 7, [512.0, 1.0, 1.0, 1.0]])
def test_low_bits_of_bf16_micro_batches_are_kept(inputs, fold):
    """A bf16 sum of 256 and 1 is 256."""
    assert exp_avg_of_one_weight(inputs, fold) == pytest.approx(0.1 * sum(inputs), rel=1e-6)


def test_bf16_sum_is_never_further_from_fp64_than_a_dense_bf16_sum():
    a, b = pair(lambda: nn.Linear(16, 8, bias=False, dtype=torch.bfloat16))
    optimizer = forge.fuse(b, when="step", state="fp32")
    exact = torch.zeros(8, 16, dtype=torch.float64)
    for i in range(24):
        x = data(i, 5, 16).bfloat16()
        for model in (a, b):
            y = model(x)
            y.sum().backward()
        exact += torch.ones(8, 5, dtype=torch.float64) @ x.double()
    got = b.weight.grad.to_dense(torch.float32).double()
    assert (got - exact).abs().max() <= 0.1 * (a.weight.grad.double() - exact).abs().max()
    optimizer.step()
    assert torch.allclose(optimizer.state[b.weight]["exp_avg"].double(), 0.1 * exact, rtol=1e-5, atol=1e-5)


def test_no_input_survives_and_kept_bytes_are_bounded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    optimizer = forge.fuse(model, when="step")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    seen = []
    for i in range(64):
        x = data(i, 6, 32)
        seen.append(weakref.ref(x))
        model(x).square().sum().backward()
        grads = [model[k].weight.grad for k in (0, 2)]
        kept = sum(g.factor_bytes() + (g.dense.numel() * 4 if g.dense is not None else 0) for g in grads)
        assert kept <= 2 * weights
        del x, grads
    gc.collect()
    assert sum(ref() is not None for ref in seen) < 64
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_zero_grad_without_a_step_drops_everything():
    model = mlp()
    optimizer = forge.fuse(model, when="step")
    x = data(0, 4, 6)
    seen, before = weakref.ref(x), snapshot(model)
    model(x).sum().backward()
    del x
    optimizer.zero_grad()
    gc.collect()
    assert seen() is None
    optimizer.step()
    assert unchanged(model, before)


def test_accumulation_is_refused_with_updates_in_backward():
    _, _, model, optimizer = both(mlp, "backward")
    (model(data(0, 4, 6)).pow(2).sum() / 2).backward()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="second backward before step.*when='step'"):
        (model(data(1, 4, 6)).pow(2).sum() / 2).backward()
    assert unchanged(model, before)
    optimizer.step()
