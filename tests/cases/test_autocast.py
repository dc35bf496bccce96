"""Autocast: dtypes as in dense training, updates in the weights' dtype, and no stale cached casts."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, pair, passes, ref

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def make():
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def on(device, when, make=make, **hyper):
    a, b = (m.to(device) for m in pair(make))
    return a, ref(a, **hyper), b, forge.fuse(b, when=when, lr=LR, weight_decay=0.01, **hyper)


def close(a, b, start) -> bool:
    """Within 2% of the way that dense training went."""
    way = torch.cat([(p - s).flatten() for p, s in zip(a.parameters(), start)]).norm()
    difference = torch.cat([(p - q).flatten() for p, q in zip(a.parameters(), b.parameters())]).norm()
    return bool(way > 0) and bool(difference <= 0.02 * way)


def step(model, optimizer, i, device, dtype, **options):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=dtype, **options):
        y = model(data(i, 4, 6).to(device))
        loss = y.float().pow(2).sum()
    loss.backward()
    optimizer.step()
    return y, loss.item()


@BOTH
@DEVICES
@HALF
def test_autocast_around_the_forward(when, device, dtype):
    a, oa, b, ob = on(device, when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    for i in range(3):
        ya, yb = (step(m, o, i, device, dtype)[0] for m, o in ((a, oa), (b, ob)))
        assert ya.dtype == yb.dtype == dtype
    assert all(p.dtype == torch.float32 for p in b.parameters())
    assert ob.state[b[0].weight]["exp_avg"].dtype == torch.float32
    assert close(a, b, start)


@DEVICES
@pytest.mark.parametrize("cache", [True, False])
@BOTH
def test_the_whole_loop_in_one_autocast_block(when, device, cache):
    """Dense training freezes here unless the cache is off; the reference is dense training without it."""
    a, oa, b, ob = on(device, when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    losses = [[], []]
    for k, (model, optimizer, enabled) in enumerate(((a, oa, False), (b, ob, cache))):
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=enabled):
            for _ in range(6):
                optimizer.zero_grad()
                loss = model(data(0, 4, 6).to(device)).float().pow(2).sum()
                loss.backward()
                optimizer.step()
                losses[k].append(loss.item())
    assert losses[0][-1] < 0.95 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert close(a, b, start)


@BOTH
def test_the_cached_cast_of_a_weight_used_outside_its_module(when):
    """F.linear on the weight goes through autocast's cache, which must not outlive a step."""
    a, oa, b, ob = both(lambda: nn.Linear(6, 6), when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    for model, optimizer, enabled in ((a, oa, False), (b, ob, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=enabled):
            for i in range(4):
                optimizer.zero_grad()
                x = data(i, 4, 6)
                y = nn.functional.linear(model(x).tanh(), model.weight)
                y.float().pow(2).sum().backward()
                optimizer.step()
    assert close(a, b, start)


@BOTH
def test_backward_inside_the_block(when):
    a, oa, b, ob = both(make, when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(data(i, 4, 6)).float().pow(2).sum().backward()
            optimizer.step()
    assert close(a, b, start)


@BOTH
def test_part_of_the_model_outside_autocast(when):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return self.b(x.float())

    a, oa, b, ob = both(Net, when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    for i in range(3):
        ya, yb = (step(m, o, i, "cpu", torch.bfloat16)[0] for m, o in ((a, oa), (b, ob)))
        assert ya.dtype == yb.dtype == torch.float32
    assert close(a, b, start)


@BOTH
def test_one_weight_used_in_two_dtypes_in_one_backward(when):
    a, oa, b, ob = both(lambda: nn.Linear(6, 6), when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = model(data(i, 4, 6))
            (low.float() + model(data(i + 9, 4, 6))).square().sum().backward()
            optimizer.step()
    assert close(a, b, start)


@BOTH
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype(when, weights):
    a, oa, b, ob = both(lambda: nn.Linear(6, 3).to(weights), when, state="fp32" if weights != torch.float64 else None)
    for model, optimizer in ((a, oa), (b, ob)):
        x = data(0, 4, 6).to(weights)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        optimizer.step()
        assert y.dtype == (torch.bfloat16 if weights == torch.bfloat16 else a(x).dtype)
    ob.zero_grad()
    assert passes(a.double(), b.double(), 1, lr=LR if weights == torch.float64 else 200 * LR)


@BOTH
def test_embedding_and_tied_head(when):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.h = nn.Embedding(9, 6), nn.Linear(6, 9)
            self.h.weight = self.e.weight

        def forward(self, ids):
            return self.h(self.e(ids).tanh())

    a, oa, b, ob = both(Tied, when, eps=1e-3)
    start = [p.detach().clone() for p in a.parameters()]
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(torch.tensor([i, 3, 3]))
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
            optimizer.step()
    assert close(a, b, start)


@pytest.mark.parametrize("block", [contextlib.nullcontext, torch.no_grad])
def test_a_wrong_dtype_without_autocast_is_an_error_as_in_dense(block):
    layer = forge.convert(nn.Linear(6, 3))
    with block(), pytest.raises(RuntimeError, match="dtype"):
        layer(data(0, 2, 6).bfloat16())


@BOTH
def test_losses_follow_dense_with_bf16_states(when):
    a, oa, b, ob = both(mlp, when, state="bf16")
    last = []
    for model, optimizer in ((a, oa), (b, ob)):
        losses = [step(model, optimizer, i % 4, "cpu", torch.bfloat16)[1] for i in range(50)]
        last.append((sum(losses[-4:]), sum(losses[:4])))
    assert last[0][0] < 0.5 * last[0][1]
    assert abs(last[1][0] - last[0][0]) <= 0.02 * last[0][1]
