"""A step or a backward that failed leaves nothing behind: the next one takes the values it is given."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedOptimizer, _flags, _small

from .helpers import Explode


@pytest.fixture(params=[False, True], ids=["each", "gathered"])
def gathered(request, monkeypatch):
    monkeypatch.setattr(_small, "pays", lambda device, dtype: request.param)
    return request.param


def failed_step(rule, first_gradient):
    """`(a, weight, c, optimizer)` after a step with lr=1 that a factor modified in place has ended at `weight`."""
    a, c = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    linear = forge.convert(nn.Linear(4, 4, bias=False))
    optimizer = FusedOptimizer([a, linear.weight, c], rule, lr=1.0, when="step")
    x = torch.ones(2, 4)
    linear(x).sum().backward()
    a.grad, c.grad = torch.full((3,), first_gradient), torch.ones(3)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        optimizer.step()
    optimizer.zero_grad()
    return a, linear.weight, c, optimizer


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_weight_that_did_not_move_was_not_counted(gathered, rule):
    a, weight, c, optimizer = failed_step(rule, 1.0)
    assert optimizer.state[weight]["step"] == 0
    assert optimizer.state[c].get("step", 0) == 0 and torch.equal(c, torch.zeros(3))
    weight.grad = torch.ones(4, 4)
    wanted = weight.detach().clone().requires_grad_()
    wanted.grad = torch.ones(4, 4)
    {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[rule]([wanted], lr=1.0).step()
    optimizer.step()
    assert torch.allclose(weight, wanted, atol=1e-5) and optimizer.state[weight]["step"] == 1


def test_the_step_after_a_failed_one_takes_the_new_lr(gathered):
    *_, c, optimizer = failed_step("sgd", 1.0)
    optimizer.param_groups[0]["lr"] = 0.25
    c.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(c, torch.full((3,), -0.25))


def test_the_step_after_a_failed_one_takes_finite_gradients(gathered):
    a, _, _, optimizer = failed_step("sgd", float("nan"))
    assert torch.equal(a, torch.zeros(3))
    a.grad = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the NaN, which is said late
        optimizer.step()
    assert torch.equal(a, torch.full((3,), -1.0))
    # gathered, the NaN was not looked at before the failure
    assert optimizer.skipped == ({} if gathered else {"parameter 0": 1})


def test_a_failed_step_ends_the_pass_of_backward(gathered):
    a, linear = nn.Parameter(torch.zeros(3)), forge.convert(nn.Linear(4, 4, bias=False))
    optimizer = FusedOptimizer([a, linear.weight], "sgd", lr=1.0)
    x = torch.ones(2, 4)
    a.sum().backward()
    other = forge.convert(nn.Linear(4, 4, bias=False))
    holder = FusedOptimizer([other.weight], "sgd", lr=1.0, when="step")
    other(x).sum().backward()
    linear.weight.grad = other.weight.grad
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        optimizer.step()
    assert a.grad is None and torch.equal(a, torch.full((3,), -1.0))
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.5
    a.sum().backward()
    optimizer.step()
    assert torch.equal(a, torch.full((3,), -1.5))
    del holder


def test_zero_grad_after_a_backward_that_failed_before_anything_moved(monkeypatch):
    """The small gradient waited for the end of the backward, and was dropped."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: True)
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([p, q], "sgd", lr=1.0)
    with pytest.raises(KeyError, match="boom"):
        (Explode.apply(q * 1).sum() + (p * 1).sum()).backward()
    optimizer.zero_grad()
    assert torch.equal(p, torch.zeros(3))
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.25}
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p, torch.full((3,), -0.25))


# -- updates that a device has skipped ---------------------------------------------------------------------------------


class _Copied:
    def synchronize(self):
        pass


@pytest.fixture
def learnt_late(monkeypatch):
    """The host learns of skips as it does from a GPU: `set_flag(optimizer)` marks parameter 0, which was counted."""

    def end(self):
        self._pending += [(flags.clone(), _Copied()) for flags in self._flags.values()]

    monkeypatch.setattr(_flags.SkipFlags, "end", end)
    return lambda optimizer: optimizer._flags.of(0, torch.device("cpu")).fill_(1)


@pytest.mark.parametrize("fits", [True, False])
def test_a_skip_is_not_taken_off_a_state_that_was_loaded_since(learnt_late, fits):
    p = nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([p], lr=1.0)
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    p.sum().backward()
    learnt_late(optimizer)
    with pytest.warns(RuntimeWarning, match="NaN or inf in the gradients of parameter 0"):
        if fits:
            optimizer.load_state_dict(saved)
        else:
            with pytest.raises(ValueError, match="parameter groups"):
                optimizer.load_state_dict({**saved, "param_groups": []})
    optimizer.step()
    p.sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 4  # 3 + the last one
    assert optimizer.skipped == {"parameter 0": 1}


@pytest.mark.parametrize("how", ["clear", "pop"])
def test_a_skip_of_a_state_that_is_gone_is_only_said(learnt_late, how):
    p = nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([p], lr=1.0)
    p.sum().backward()
    learnt_late(optimizer)
    optimizer.step()
    optimizer.state.clear() if how == "clear" else optimizer.state.pop(p)
    with pytest.warns(RuntimeWarning, match="parameter 0"):
        p.sum().backward()
    optimizer.step()
    assert optimizer.state[p]["step"] == 1 and optimizer.skipped == {"parameter 0": 1}


def test_values_loaded_between_backward_and_step_are_taken():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([a, b], "sgd", lr=1.0)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    a.sum().backward()
    optimizer.load_state_dict(saved)
    b.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(a, torch.full((3,), -1.0)) and torch.equal(b, torch.full((3,), -0.25))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3,), (512, 256), (300, 300)])
def test_a_skip_on_a_gpu_is_not_taken_off_a_loaded_state(shape):
    p = nn.Parameter(torch.zeros(shape, device="cuda"))
    optimizer = FusedOptimizer([p], lr=1e-2)
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
    saved, weights = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    (p * float("nan")).sum().backward()
    with pytest.warns(RuntimeWarning, match="NaN or inf"):
        optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(p, weights) and optimizer.state_dict()["state"][0]["step"] == 3
    (p * float("nan")).sum().backward()
    optimizer.step()
    optimizer.state.clear()
    with pytest.warns(RuntimeWarning, match="NaN or inf"):
        p.sum().backward()
    optimizer.step()
    assert optimizer.state[p]["step"] == 1 and optimizer.skipped == {"parameter 0": 2}
