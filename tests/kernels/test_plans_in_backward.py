"""Plans in the hook of `when="backward"`, on the fake driver: what stands in `.grad`, what is said to have moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from fused_grad_optimizer import FusedOptimizer, _hooks, _plans  # noqa: E402
from fused_grad_optimizer._applied_grad import AppliedGrad  # noqa: E402
from fused_grad_optimizer.factored_grad import FactoredGrad  # noqa: E402
from fused_grad_optimizer.kernels import bound  # noqa: E402
from tests.kernels.fake_training import give_gradient, layers, pair  # noqa: E402


class Use(torch.autograd.Function):
    """A use of the weight whose gradient is these factors."""

    @staticmethod
    def forward(ctx, weight, factors):
        ctx.factors, ctx.shape, ctx.dtype = factors, weight.shape, weight.dtype
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return FactoredGrad(ctx.shape, ctx.dtype, pairs=[ctx.factors]), None


def one(opt, parameter: nn.Parameter, factors) -> None:
    Use.apply(parameter, factors).backward()
    opt.step()
    opt.zero_grad()


def warm(opt, parameter: nn.Parameter, factors) -> None:
    for _ in range(4):
        one(opt, parameter, factors)


def test_the_mark_and_one_name(cuda, general):
    (parameter,), factors = layers(1), pair()
    opt = FusedOptimizer([parameter], lr=1e-3)
    warm(opt, parameter, factors)
    general.clear()
    Use.apply(parameter, factors).backward()
    assert not general and isinstance(parameter.grad, AppliedGrad)
    assert opt._pass.moved == ["parameter 0"]
    with pytest.raises(RuntimeError, match="second backward"):
        Use.apply(parameter, factors).backward()
    opt.step()
    assert parameter.grad is None


def test_one_name_when_the_plan_is_not_for_it(cuda, general):
    (parameter,), factors = layers(1), pair()
    opt = FusedOptimizer([parameter], lr=1e-3)
    warm(opt, parameter, factors)
    opt.param_groups[0]["maximize"] = True
    general.clear()
    Use.apply(parameter, factors).backward()
    assert len(general) == 1 and opt._pass.moved == ["parameter 0"]
    assert isinstance(parameter.grad, AppliedGrad)


@pytest.mark.parametrize("other", ["steps", "raises"])
def test_one_name_while_another_device_s_thread_steps(cuda, monkeypatch, other):
    """The second weight is stepped while the first one's plan finds out that it is not for this gradient."""
    (first, second), factors = layers(2), pair()
    opt = FusedOptimizer([first, second], lr=1e-3)
    for _ in range(4):
        (Use.apply(first, factors) + Use.apply(second, factors)).backward()
        opt.step()
    update = _plans.update

    def updated(optimizer, parameter, record, group, grad):
        if parameter is second:
            if other == "raises":
                raise KeyError("boom")
            return update(optimizer, parameter, record, group, grad)
        found = opt._stepped[id(second)]
        grad = FactoredGrad(second.shape, second.dtype, pairs=[factors])
        try:
            assert _hooks._applied_by_plan(opt, second, found[1], found[0], grad)
        except KeyError:
            assert other == "raises"
        seen.extend(opt._pass.moved)
        return False

    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(_plans, "update", updated)
        patch.setattr(opt, "_update_generally", lambda *args: 1 // 0)  # the first one does not get further
        with pytest.raises(ZeroDivisionError):
            Use.apply(first, factors).backward()
    assert seen == ["parameter 0", "parameter 1"]
    assert opt._pass.moved == ["parameter 1", "parameter 0"]


def test_a_plan_made_outside_of_backward_for_another_dtype(cuda, general):
    """The mark follows the weight, also when backward never took the general way with this dtype."""
    (parameter,), factors = layers(1), pair()
    opt = FusedOptimizer([parameter], lr=1e-3)
    warm(opt, parameter, factors)
    parameter.data = parameter.data.float()
    for _ in range(4):
        give_gradient(parameter, pair(dtype=torch.float32))
        opt.step()
    general.clear()
    Use.apply(parameter, pair(dtype=torch.float32)).backward()
    assert not general
    assert isinstance(parameter.grad, AppliedGrad) and parameter.grad.dtype == torch.float32


def test_a_launch_that_fails(cuda, monkeypatch):
    (parameter,), factors = layers(1), pair()
    opt = FusedOptimizer([parameter], lr=1e-3)
    warm(opt, parameter, factors)

    def fail(self, addresses, start):
        raise RuntimeError("CUDA error 700")

    with monkeypatch.context() as patch:
        patch.setattr(bound.BoundStep, "launch", fail)
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            Use.apply(parameter, factors).backward()
    assert parameter.grad is None
    with pytest.raises(RuntimeError, match="after it had updated parameter 0"):
        opt.step()


def test_a_gradient_of_the_shape_that_the_weight_had_in_forward(cuda, general):
    """Refused each time: nothing is bound to the smaller memory."""
    (parameter,), factors = layers(1), pair()
    opt = FusedOptimizer([parameter], lr=1e-3)
    warm(opt, parameter, factors)
    present = parameter.data
    for _ in range(4):
        parameter.data = torch.zeros(512, 256, dtype=torch.bfloat16)
        loss = Use.apply(parameter, (pair(512)[0], factors[1]))
        parameter.data = present
        cuda.direct.clear()
        cuda.triton.clear()
        with pytest.raises(ValueError, match="shape"):
            loss.backward()
        assert not cuda.direct and not cuda.triton
        parameter.grad = None
        opt.zero_grad()
