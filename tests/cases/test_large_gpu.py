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


def cut_off(tokens):
    """Tensor cores cut their sums off instead of rounding them: up to 2^-24 of a sum a step of 16 tokens."""
    return tokens / 16 * 2**-24


class Reference:
    """Torch's AdamW in fp32 on a part of a weight, and how far rounding to bf16 may lead away from it.

    eps = 1 keeps AdamW's g / (sqrt(v) + eps) smooth: an error of the gradient moves a weight by at most lr times it.
    (With a small eps the first step is the sign of g, and any summation order is wrong somewhere.)
    """

    def __init__(self, weight, state="fp32", tokens=0):
        self.weight = nn.Parameter(weight.detach().float().clone())
        self.optimizer = torch.optim.AdamW([self.weight], lr=LR, weight_decay=DECAY, eps=1.0)
        self.largest = self.weight.detach().abs()
        self.allowed = torch.zeros_like(self.largest)
        # a thousandth of lr for the gradient's summation; bf16 states are wrong by a unit: 2^-7 of m, 2^-8 of sqrt v
        self.of_lr = 1e-3 + cut_off(tokens) + (0.0 if state == "fp32" else 1.5 * 2**-7)

    def step(self, grad):
        self.weight.grad = grad
        self.optimizer.step()
        self.largest = torch.maximum(self.largest, self.weight.detach().abs())
        # the rounding of each step moves the weight by less than one unit in the last place of what it was then
        self.allowed = self.allowed + self.of_lr * LR + 2**-7 * self.largest

    def assert_near(self, part):
        excess = ((part.float() - self.weight).abs() - self.allowed).max().item()
        assert excess <= 0, f"{excess} more than allowed"

    def assert_moment_near(self, kept, name, allowed):
        wanted = self.optimizer.state[self.weight][name]
        assert (kept.float() - wanted).norm() <= allowed * wanted.norm()


def assert_only_decayed(part, start, steps):
    reference, allowed = start.clone(), torch.zeros_like(start)
    for _ in range(steps):
        allowed += 2**-7 * reference.abs()
        reference *= 1 - LR * DECAY
    assert ((part.float() - reference).abs() <= allowed).all()


def rows_near(count, size):
    middle = 2**31 // size
    return torch.tensor([0, 1, middle - 1, middle, middle + 1, count - 2, count - 1], device="cuda")


def chunked_gradient(dy, x, tokens):
    """dY^T X in fp32, by parts that torch can address; each part in fp64 where it is small enough."""
    return sum(a.double().t() @ b.double() for a, b in zip(dy.split(tokens), x.split(tokens))).float()


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
@pytest.mark.parametrize("width", [H, H + 56])  # the Hopper kernel takes multiples of 16 only
def test_linear_with_more_than_2_31_elements(when, state, width):
    layer = large(nn.Linear, width, V, bias=False)
    rows = rows_near(V, width)
    others = torch.tensor([7, V // 3, 2**31 // width + 9, V - 9], device="cuda")
    start = layer.weight.detach()[others].float()
    reference = Reference(layer.weight[rows], state)
    optimizer = forge.fuse(layer, when=when, state=state, lr=LR, weight_decay=DECAY, eps=1.0)
    for i in range(3):
        x = noise(i, 64, width) * 0.1
        optimizer.zero_grad()
        y = layer(x)
        upstream = torch.zeros_like(y)
        upstream[:, rows] = noise(i + 9, 64, len(rows))
        y.backward(upstream)
        grad = upstream[:, rows].float().t() @ x.float()
        del y
        optimizer.step()
        reference.step(grad)
    reference.assert_near(layer.weight[rows])
    assert_only_decayed(layer.weight[others], start, 3)
    for name in ("exp_avg", "exp_avg_sq"):
        kept = optimizer.state[layer.weight][name]
        reference.assert_moment_near(kept[rows], name, 0.02)
        assert kept[others].abs().max() == 0


def check_one_step(when, tokens, k, n, chunk):
    layer = large(nn.Linear, k, n, bias=False)
    reference = Reference(layer.weight, tokens=tokens)
    optimizer = forge.fuse(layer, when=when, state="fp32", lr=LR, weight_decay=DECAY, eps=1.0)
    x, upstream = noise(0, tokens, k), noise(1, tokens, n) / tokens**0.5
    layer(x).backward(upstream)
    reference.step(chunked_gradient(upstream, x, chunk))
    optimizer.step()
    reference.assert_near(layer.weight)
    reference.assert_moment_near(optimizer.state[layer.weight]["exp_avg"], "exp_avg", 1e-3 + cut_off(tokens))


@BOTH
def test_inputs_with_more_than_2_31_elements(when):
    """600,000 tokens of 8,192 features."""
    check_one_step(when, 600_000, 8_192, 16, chunk=60_000)


@BOTH
@pytest.mark.parametrize("tokens, k, n", [(6_000_000, 16, 16), (33, 16, 5_000_000), (33, 5_000_000, 16)])
def test_more_tiles_than_a_grid_axis_takes(when, tokens, k, n):
    check_one_step(when, tokens, k, n, chunk=1_000_000)


@BOTH
def test_embedding_with_more_than_2_31_elements(when):
    layer = large(nn.Embedding, V, H)
    rows = rows_near(V, H)
    ids = torch.cat([rows, rows[-1:], rows[:1]])
    others = torch.tensor([7, V // 3, V - 9], device="cuda")
    start = layer.weight.detach()[others].float()
    reference = Reference(layer.weight[rows], "bf16")
    optimizer = forge.fuse(layer, when=when, state="bf16", lr=LR, weight_decay=DECAY, eps=1.0)
    for i in range(3):
        optimizer.zero_grad()
        upstream = noise(i, len(ids), H)
        layer(ids).backward(upstream)
        grad = upstream[:7].float()
        grad[6] += upstream[7].float()
        grad[0] += upstream[8].float()
        optimizer.step()
        reference.step(grad)
    reference.assert_near(layer.weight[rows])
    assert_only_decayed(layer.weight[others], start, 3)
    assert optimizer.state[layer.weight]["exp_avg"][others].abs().max() == 0
