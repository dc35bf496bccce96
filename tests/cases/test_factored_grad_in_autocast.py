"""What a factored gradient forms inside an autocast block is as exact as outside it."""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer.factored_grad import FactoredGrad

from .helpers import data

N, K, T = 40, 24, 33
FACTORS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
KINDS = pytest.mark.parametrize("kind", ["one pair", "scaled pairs", "rows", "everything"])


def make(kind, dtype):
    """`(gradient of an fp32 weight, the same in fp64, the sum of the magnitudes of its terms)`."""
    pairs = [(data(i, T, N).to(dtype), data(i + 10, T, K).to(dtype)) for i in range(1 if kind == "one pair" else 3)]
    ids, dy = torch.randint(0, N, (T,), generator=torch.Generator().manual_seed(5)), data(6, T, K).to(dtype)
    one_hot = torch.nn.functional.one_hot(ids, N).double()
    parts = {"pairs": pairs} if kind != "rows" else {"rows": [(ids, dy)]}
    if kind == "everything":
        parts |= {"rows": [(ids, dy)], "dense": data(7, N, K)}
    gradient = FactoredGrad((N, K), torch.float32, **parts)
    terms = [*parts.get("pairs", []), *([(one_hot, dy)] if "rows" in parts else [])]
    exact = sum(a.double().T @ b.double() for a, b in terms) + parts.get("dense", torch.zeros(N, K)).double()
    size = sum(a.double().abs().T @ b.double().abs() for a, b in terms) + parts.get("dense", torch.zeros(N, K)).abs()
    if kind == "scaled pairs":
        gradient.mul_(0.3)
        exact, size = 0.3 * exact, 0.3 * size
    return gradient, exact, size


def bound(size):
    """Summing n terms in fp32 errs by at most n 2^-24 of their magnitudes; bf16 would err by 2^-9 of one term."""
    return (3 * T + T + 4) * 2**-24 * size


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@FACTORS
@KINDS
def test_to_dense(kind, dtype):
    gradient, exact, size = make(kind, dtype)
    outside = gradient.to_dense()
    with autocast():
        dense = gradient.to_dense()
        halves = gradient.to_dense(torch.bfloat16)
    assert dense.dtype == torch.float32 and torch.equal(dense, outside)
    assert ((dense.double() - exact).abs() <= bound(size)).all()
    assert torch.equal(halves, dense.bfloat16())  # rounded once


@FACTORS
@KINDS
@pytest.mark.parametrize("order", [2, 1, float("inf")])
def test_norm(kind, dtype, order):
    """The norm of the errors of the elements, and the rounding of a sum of N K terms."""
    gradient, exact, size = make(kind, dtype)
    with autocast():
        norm = gradient.norm(order)
    expected = torch.linalg.vector_norm(exact, order)
    allowed = torch.linalg.vector_norm(bound(size), order) + N * K * 2**-24 * expected
    assert norm.dtype == torch.float32 and (norm.double() - expected).abs() <= allowed
    assert allowed <= 5e-4 * expected


@FACTORS
@KINDS
def test_fold(kind, dtype):
    gradient, exact, size = make(kind, dtype)
    with autocast():
        gradient.fold()
    assert not gradient.pairs and not gradient.rows and gradient.dense.dtype == torch.float32
    assert ((gradient.dense.double() - exact).abs() <= bound(size)).all()
    assert torch.equal(gradient.to_dense(), gradient.dense)


@FACTORS
def test_two_scales_are_folded_when_they_meet(dtype):
    one, exact_one, size_one = make("scaled pairs", dtype)
    two, exact_two, size_two = make("one pair", dtype)
    with autocast():
        one.add_(two)
    assert ((one.to_dense().double() - exact_one - exact_two).abs() <= bound(size_one + size_two)).all()
