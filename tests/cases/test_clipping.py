"""Clipping clips all gradients, factored ones too, and reports the whole norm; or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .helpers import both, data, passes, snapshot, unchanged

BIG_EPS = 1e-2  # else Adam hides the scale of the gradient


def make():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def run(change, state="fp32", n=3):
    """`n` steps of both models with `change(model)` between backward and step; returns what change returned."""
    a, oa, b, ob = both(make, "step", state=state, eps=BIG_EPS)
    returned = []
    for i in range(n):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            (100 * model(data(i, 4, 8)).pow(2).sum()).backward()
            returned.append(change(model))
            optimizer.step()
    return a, b, list(zip(returned[::2], returned[1::2]))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_clip_grad_norm_returns_and_applies_the_dense_norm(norm_type, foreach):
    def clip(m):
        return nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type, error_if_nonfinite=True, foreach=foreach).item()

    a, b, norms = run(clip)
    assert all(dense == pytest.approx(fused, rel=1e-5) and dense > 1 for dense, fused in norms)
    assert passes(a, b, 3)


def test_clip_grad_norm_with_bf16_states():
    a, b, norms = run(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1).item(), state="bf16", n=1)
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-5)
    assert passes(a, b, 3)


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_value_is_exact_and_says_what_it_costs(foreach):
    def clip(m):
        if type(m[0]) is nn.Linear:
            return nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=foreach)
        with pytest.warns(UserWarning, match="clamp.*needs the elements of a factored gradient"):
            return nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=foreach)

    a, b, _ = run(clip)
    assert passes(a, b, 3)


def test_clipping_twice_reports_the_clipped_norm():
    def clip(m):
        first = nn.utils.clip_grad_norm_(m.parameters(), 1.0).item()
        return first, nn.utils.clip_grad_norm_(m.parameters(), 0.1).item(), nn.utils.get_total_norm(
            [p.grad for p in m.parameters()]
        ).item()  # fmt: skip

    a, b, norms = run(clip)
    for dense, fused in norms:
        assert dense == pytest.approx(fused, rel=1e-5)
        assert fused[1] == pytest.approx(1.0, rel=1e-4) and fused[2] == pytest.approx(0.1, rel=1e-4)
    assert passes(a, b, 3)


@pytest.mark.parametrize(
    "scale",
    [
        lambda p: p.grad.mul_(0.5),
        lambda p: p.grad.div_(4.0),
        lambda p: p.grad.mul_(torch.tensor(0.5)),
        lambda p: setattr(p, "grad", p.grad * 0.25),
        lambda p: p.grad.data.mul_(0.5),
        lambda p: p.grad.detach().mul_(0.5),
    ],
    ids=["mul_", "div_", "mul_tensor", "replaced", "data", "detach"],
)
def test_scaling_a_gradient_by_hand_reaches_the_factors(scale):
    a, b, _ = run(lambda m: [scale(p) for p in m.parameters()] and None)
    assert passes(a, b, 3)


def test_logged_norms_of_single_gradients():
    _, _, norms = run(lambda m: [f(p.grad).item() for p in m.parameters() for f in (torch.norm, torch.linalg.norm)])
    for dense, fused in norms:
        assert dense == pytest.approx(fused, rel=1e-5)
    _, _, norms = run(lambda m: [p.grad.norm().item() for p in m.parameters()])
    for dense, fused in norms:
        assert dense == pytest.approx(fused, rel=1e-5) and min(fused) > 0


def test_error_if_nonfinite_raises_and_nothing_moves():
    a, oa, b, ob = both(make, "step")
    x = data(0, 4, 8)
    x[0, 0] = float("nan")
    b(x).sum().backward()
    before = snapshot(b)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(b.parameters(), 0.1, error_if_nonfinite=True)
    ob.zero_grad()
    assert unchanged(b, before)


def test_a_part_of_the_parameters():
    def clip(m):
        return nn.utils.clip_grad_norm_(m[0].parameters(), 0.1).item()

    a, b, norms = run(clip)
    assert all(dense == pytest.approx(fused, rel=1e-5) for dense, fused in norms) and passes(a, b, 3)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    "clip",
    [
        lambda p, foreach: nn.utils.clip_grad_norm_(p, 0.1, foreach=foreach),
        lambda p, foreach: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf"), foreach=foreach),
        lambda p, foreach: nn.utils.clip_grad_value_(p, 1e-3, foreach=foreach),
        lambda p, foreach: nn.utils.get_total_norm([q.grad for q in p], foreach=foreach),
    ],
    ids=["norm", "inf", "value", "total"],
)
def test_every_clip_is_refused_after_updates_in_backward(clip, foreach):
    _, _, model, optimizer = both(make, "backward")
    model(data(0, 4, 8)).pow(2).sum().backward()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="already applied during backward.*when='step'"):
        clip(list(model.parameters()), foreach)
    assert unchanged(model, before)
    optimizer.step()
