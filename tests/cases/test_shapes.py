"""Odd shapes: one to four dimensions, no tokens, one feature, sizes that divide nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, pair, passes, train

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def one_step(when, make, x, device="cpu", dtype=torch.float32):
    a, b = (m.to(device, dtype) for m in pair(make))
    oa = torch.optim.AdamW(a.parameters(), lr=LR, eps=1e-4)
    ob = forge.fuse(b, when=when, lr=LR, eps=1e-4)
    x = x.to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    for model, optimizer in ((a, oa), (b, ob)):
        y = model(x)
        y.pow(2).sum().backward()
        optimizer.step()
    assert a(x).shape == b(x).shape
    return a, b


@BOTH
@DEVICES
@pytest.mark.parametrize("fi, fo", [(1, 1), (5, 3), (17, 33), (1000, 7), (1, 9), (9, 1)])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3), (0,), (2, 0), (0, 4)], ids=str)
def test_linear(when, device, fi, fo, lead):
    a, b = one_step(when, lambda: nn.Linear(fi, fo), data(1, *lead, fi), device)
    assert passes(a, b, 1) and type(b) is forge.FusedLinear


@BOTH
@pytest.mark.parametrize("fi, fo", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(), (4,), (0,)], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
def test_layers_without_elements_take_the_ordinary_path(when, fi, fo, lead):
    a, b = one_step(when, lambda: nn.Linear(fi, fo), data(1, *lead, fi))
    assert type(b) is nn.Linear
    assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(a.parameters(), b.parameters()))


@BOTH
@DEVICES
@pytest.mark.parametrize("ids", [5, [], [1], [[[1, 2, 2, 0]] * 3] * 2, [[], []]], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_embedding(when, device, ids, kind):
    a, b = one_step(when, lambda: nn.Embedding(7, 3), torch.tensor(ids, dtype=kind), device)
    assert passes(a, b, 1) and type(b) is forge.FusedEmbedding


@BOTH
@DEVICES
@pytest.mark.parametrize("rows, width", [(1, 1), (1, 5), (9, 1), (1001, 33)])
def test_embedding_sizes(when, device, rows, width):
    ids = torch.randint(0, rows, (2, 7), generator=torch.Generator().manual_seed(0))
    a, b = one_step(when, lambda: nn.Embedding(rows, width), ids, device)
    assert passes(a, b, 1)


@BOTH
@DEVICES
@pytest.mark.parametrize("dtype, way", [(torch.float64, 1e-3), (torch.float32, 1e-3), (torch.float16, 0.2),
                                        (torch.bfloat16, 1.0)])  # fmt: skip
@pytest.mark.parametrize("embedding", [False, True])
def test_dtypes(when, device, dtype, way, embedding):
    """The allowed difference is a share of lr, and one unit in the last place of the weight."""
    make = (lambda: nn.Embedding(9, 8)) if embedding else (lambda: nn.Linear(5, 8))
    x = torch.tensor([[1, 2, 8]]) if embedding else data(1, 2, 3, 5)
    a, b = one_step(when, make, x, device, dtype)
    for p, q in zip(a.parameters(), b.parameters()):
        assert q.dtype == dtype
        unit = torch.finfo(dtype).eps * p.detach().double().abs()
        assert ((p - q).detach().double().abs() <= way * LR + (unit if dtype.itemsize == 2 else 0)).all()


@BOTH
def test_float64_is_exact_to_float64(when):
    a, oa, b, ob = both(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double(), when, state=None)
    train(a, oa, b, ob, lambda m, i: m(data(i, 4, 5).double()).square().sum(), 5)
    assert all((p - q).abs().max() <= 1e-10 for p, q in zip(a.parameters(), b.parameters()))
    assert ob.state[b[0].weight]["exp_avg"].dtype == torch.float64


@BOTH
def test_a_batch_size_that_changes_every_step(when):
    a, oa, b, ob = both(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), when)
    sizes = [(4,), (7, 2), (0,), (), (1, 1, 1), (33,)]
    ignore = train(a, oa, b, ob, lambda m, i: m(data(i, *sizes[i], 5)).square().sum(), 6)
    assert passes(a, b, 6, ignore)


@BOTH
def test_non_contiguous_weights(when):
    """A transposed view as weight (to_dense strides [1, K]): stepped in its own order."""

    def make():
        layer = nn.Linear(5, 3)
        layer.weight = nn.Parameter(torch.randn(5, 3).t())
        return layer

    a, b = make(), make()
    b.weight = nn.Parameter(a.weight.detach().t().clone().t())
    b.bias = nn.Parameter(a.bias.detach().clone())
    assert not b.weight.is_contiguous()
    ob = forge.fuse(b, when=when, lr=LR, weight_decay=0.01)
    ignore = train(a, torch.optim.AdamW(a.parameters(), lr=LR), b, ob, lambda m, i: m(data(i, 4, 5)).square().sum())
    assert passes(a, b, 3, ignore) and "contiguous" in ob.report.skipped[""]


def test_inputs_of_a_wrong_size_are_errors_as_in_dense():
    layer = nn.Linear(5, 3)
    optimizer = forge.fuse(layer, lr=LR)
    before = layer.weight.detach().clone()
    for x in (data(0, 4, 6), torch.tensor(1.0), data(0, 5, 4)):
        with pytest.raises((RuntimeError, IndexError)):
            layer(x)
    embedding = nn.Embedding(5, 3)
    with pytest.raises(IndexError):
        forge.convert(embedding)(torch.tensor([5]))
    optimizer.step()
    assert torch.equal(layer.weight, before)
