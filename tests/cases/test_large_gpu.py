"""More than 2^31 elements, and more tiles than a grid's y and z axes take. Against the rows or chunks alone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

pytestmark = pytest.mark.gpu
BOTH = pytest.mark.parametrize("when", ["backward", "step"])
LR, DECAY = 1e-2, 0.1
V, H = 262_144 + 64, 8_200  # V * H > 2^31
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def room():
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def noise(seed, *shape, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


def large(kind, *sizes, **options):
    """A layer without the slow default initialisation."""
    layer = nn.utils.skip_init(kind, *sizes, device="cuda", dtype=BF16, **options)
    torch.manual_seed(0)
    layer.weight.data.normal_(0, 0.02)
    return layer


def fp32_reference(weight):
    """An fp32 copy of a part of a weight, and its AdamW."""
    parameter = nn.Parameter(weight.detach().float().clone())
    return parameter, torch.optim.AdamW([parameter], lr=LR, weight_decay=DECAY, eps=1e-3)


def assert_near(part, reference, steps):
    """Within a thousandth of the way, and `steps` roundings of bf16."""
    allowed = 1e-3 * LR * steps + steps * 2**-7 * reference.abs()
    assert ((part.float() - reference).abs() <= allowed).all()


def rows_near(count, size):
    middle = 2**31 // size
    return torch.tensor([0, 1, middle - 1, middle, middle + 1, count - 2, count - 1], device="cuda")


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_linear_with_more_than_2_31_elements(when, state):
    layer = large(nn.Linear, H, V, bias=False)
    rows = rows_near(V, H)
    others = torch.tensor([7, V // 3, 2**31 // H + 9, V - 9], device="cuda")
    start = layer.weight.detach()[others].float()
    reference, dense = fp32_reference(layer.weight[rows])
    optimizer = forge.fuse(layer, when=when, state=state, lr=LR, weight_decay=DECAY, eps=1e-3)
    for i in range(3):
        x = noise(i, 64, H) * 0.1
        optimizer.zero_grad()
        y = layer(x)
        upstream = torch.zeros_like(y)
        upstream[:, rows] = noise(i + 9, 64, len(rows))
        y.backward(upstream)
        reference.grad = upstream[:, rows].float().t() @ x.float()
        del y
        optimizer.step()
        dense.step()
    assert_near(layer.weight[rows], reference, 3)
    assert_near(layer.weight[others], start * (1 - LR * DECAY) ** 3, 3)
    for name in ("exp_avg", "exp_avg_sq"):
        kept, wanted = optimizer.state[layer.weight][name], dense.state[reference][name]
        assert (kept[rows].float() - wanted).norm() <= 0.02 * wanted.norm()
        assert kept[others].abs().max() == 0


@BOTH
def test_inputs_with_more_than_2_31_elements(when):
    """600,000 tokens of 8,192 features."""
    tokens, k, n = 600_000, 8_192, 16
    layer = large(nn.Linear, k, n, bias=False)
    reference, dense = fp32_reference(layer.weight)
    optimizer = forge.fuse(layer, when=when, state="fp32", lr=LR, weight_decay=DECAY, eps=1e-3)
    x, upstream = noise(0, tokens, k), noise(1, tokens, n) / tokens**0.5
    layer(x).backward(upstream)
    reference.grad = sum(dy.float().t() @ part.float() for dy, part in zip(upstream.split(60_000), x.split(60_000)))
    optimizer.step()
    dense.step()
    assert_near(layer.weight, reference, 1)
    wanted = dense.state[reference]["exp_avg"]
    assert (optimizer.state[layer.weight]["exp_avg"] - wanted).norm() <= 1e-3 * wanted.norm()


@BOTH
@pytest.mark.parametrize("tokens, k, n", [(6_000_000, 16, 16), (33, 16, 5_000_000), (33, 5_000_000, 16)])
def test_more_tiles_than_a_grid_axis_takes(when, tokens, k, n):
    layer = large(nn.Linear, k, n, bias=False)
    reference, dense = fp32_reference(layer.weight)
    optimizer = forge.fuse(layer, when=when, state="fp32", lr=LR, weight_decay=DECAY, eps=1e-3)
    x, upstream = noise(0, tokens, k), noise(1, tokens, n) / tokens**0.5
    layer(x).backward(upstream)
    reference.grad = sum(
        dy.float().t() @ part.float() for dy, part in zip(upstream.split(1_000_000), x.split(1_000_000))
    )
    optimizer.step()
    dense.step()
    assert_near(layer.weight, reference, 1)
    wanted = dense.state[reference]["exp_avg"]
    assert (optimizer.state[layer.weight]["exp_avg"] - wanted).norm() <= 1e-3 * wanted.norm()


@BOTH
def test_embedding_with_more_than_2_31_elements(when):
    layer = large(nn.Embedding, V, H)
    ids = rows_near(V, H)
    ids = torch.cat([ids, ids[-1:], ids[:1]])
    others = torch.tensor([7, V // 3, V - 9], device="cuda")
    start = layer.weight.detach()[others].float()
    reference, dense = fp32_reference(layer.weight[rows_near(V, H)])
    optimizer = forge.fuse(layer, when=when, state="bf16", lr=LR, weight_decay=DECAY, eps=1e-3)
    for i in range(3):
        optimizer.zero_grad()
        upstream = noise(i, len(ids), H)
        layer(ids).backward(upstream)
        grad = upstream[:7].float()
        grad[6] += upstream[7].float()
        grad[0] += upstream[8].float()
        reference.grad = grad
        optimizer.step()
        dense.step()
    assert_near(layer.weight[rows_near(V, H)], reference, 3)
    assert_near(layer.weight[others], start * (1 - LR * DECAY) ** 3, 3)
    assert optimizer.state[layer.weight]["exp_avg"][others].abs().max() == 0
