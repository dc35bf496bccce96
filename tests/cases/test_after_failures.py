"""A step or a backward that failed leaves nothing behind: the next one takes the values it is given."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FactoredGrad, FusedOptimizer, _flags, _small
from fused_grad_optimizer import optimizer as optimizer_module

from .helpers import Explode


@pytest.fixture(params=[False, True], ids=["each", "gathered"])
def gathered(request, monkeypatch):
    monkeypatch.setattr(_small, "pays", lambda device, dtype: request.param)
    return request.param


def step_that_fails(optimizer):
    """A step that ends where it asks for the operands of a factored gradient."""
    original = optimizer_module.gradient_of

    def gradient_of(parameter, grad, *others):
        if isinstance(grad, FactoredGrad):
            raise KeyError("boom")
        return original(parameter, grad, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "gradient_of", gradient_of)
        with pytest.raises(KeyError, match="boom"):
            optimizer.step()


def failed_step(rule, first_gradient):
    """`(a, weight, c, optimizer)` after a step with lr=1 that an exception has ended at `weight`."""
    a, c = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    linear = forge.convert(nn.Linear(4, 4, bias=False))
    optimizer = FusedOptimizer([a, linear.weight, c], rule, lr=1.0, when="step")
    linear(torch.ones(2, 4)).sum().backward()
    a.grad, c.grad = torch.full((3,), first_gradient), torch.ones(3)
    step_that_fails(optimizer)
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
    a.sum().backward()
    other = forge.convert(nn.Linear(4, 4, bias=False))
    holder = FusedOptimizer([other.weight], "sgd", lr=1.0, when="step")
    other(torch.ones(2, 4)).sum().backward()
    linear.weight.grad = other.weight.grad
    step_that_fails(optimizer)
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


# -- a backward that failed before anything moved ----------------------------------------------------------------------


def fails_waiting(p, q):
    """The small gradient of p waits for the end of a backward that never comes."""
    with pytest.raises(KeyError, match="boom"):
        (Explode.apply(q * 1).sum() + (p * 1).sum()).backward()


def fails_refused(p, q):
    """The gradient of p has another shape."""
    loss = (p * 1).sum()
    p.data = torch.zeros(4)
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        loss.backward()
    p.data = torch.zeros(3)
    p.grad = None


def fails_launching(p, q):
    """The launch at the end of the backward fails: its scalars are made by then."""
    calls = []

    def launch(optimizer, buckets):
        _, number, fresh, *_ = buckets[0][0]
        (entry, *_), *_ = buckets[0][1]
        optimizer._scalars_of(entry.group, optimizer.rule.select(entry.group), number, fresh, entry.parameter)
        calls.append(entry)
        raise KeyError("boom")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_small, "_launch", launch)
        with pytest.raises(KeyError, match="boom"):
            (p + q).sum().backward()
    assert calls


FAILURES = pytest.mark.parametrize("fail", [fails_waiting, fails_refused, fails_launching])


@pytest.fixture
def failed_backward(monkeypatch, request):
    """`(p, q, optimizer, fail)`: `fail()` runs a backward that ends in an exception and moves nothing."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: True)
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([p, q], "sgd", lr=1.0)

    def run(fail):
        fail(p, q)
        assert torch.equal(p, torch.zeros(3)) and torch.equal(q, torch.zeros(3))

    return p, q, optimizer, run


@FAILURES
def test_the_next_backward_takes_the_lr_of_its_own_time(failed_backward, fail):
    p, _, optimizer, run = failed_backward
    run(fail)
    optimizer.param_groups[0]["lr"] = 0.25
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p, torch.full((3,), -0.25))


@FAILURES
def test_the_next_backward_knows_the_groups_of_its_own_time(failed_backward, fail):
    p, _, optimizer, run = failed_backward
    run(fail)
    new = nn.Parameter(torch.zeros(3))
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    optimizer.add_param_group({"params": [new], "lr": 0.125})
    (p + new).sum().backward()
    assert torch.equal(p, torch.full((3,), -0.5)) and torch.equal(new, torch.full((3,), -0.125))
    optimizer.step()


@FAILURES
def test_a_step_after_it_takes_the_lr_of_its_own_time(failed_backward, fail):
    p, _, optimizer, run = failed_backward
    run(fail)
    optimizer.param_groups[0]["lr"] = 0.25
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(p, torch.full((3,), -0.25))


def test_a_manager_s_next_backward_takes_the_lr_of_its_own_time():
    torch.manual_seed(0)
    model = nn.Sequential(*[forge.FusedLinear.from_linear(nn.Linear(4, 4, bias=False), "sgd") for _ in range(2)])
    manager = forge.FusedOptimizerManager(model)
    manager.pre_step(lr=1.0)
    before, x = model[1].weight.detach().clone(), torch.ones(2, 4)
    loss = model[1](x).sum()
    model[1].weight.data = torch.zeros(5, 4)
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        loss.backward()
    model[1].weight.data = before.clone()
    manager._groups["1"]["lr"] = 0.25
    model[1](x).sum().backward()
    assert torch.equal(model[1].weight, before - 0.25 * 2)


def test_a_gradient_stepped_after_the_backward_takes_the_lr_of_step():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([a, b], "sgd", lr=1.0)
    a.sum().backward()
    optimizer.param_groups[0]["lr"] = 0.25
    b.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(a, torch.full((3,), -1.0)) and torch.equal(b, torch.full((3,), -0.25))


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


def counts(optimizer):
    """In the order of the parameters, not of their first updates."""
    return [int(state["step"]) for _, state in sorted(optimizer.state_dict()["state"].items())]


@pytest.mark.parametrize("when", ["backward", "step"])
def test_counts_saved_and_shown_after_a_skip_are_right(learnt_late, when):
    """Three updates of p and q, of which the device skipped the last one of p; then one more of both."""
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([p, q], lr=1.0, when=when)
    for _ in range(2):
        (p + q).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (p + q).sum().backward()
    if when == "step":  # the flag is set while the step runs
        update = optimizer._update_generally
        optimizer._update_generally = lambda *args: (update(*args), learnt_late(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        del optimizer._update_generally
    else:
        learnt_late(optimizer)
    with pytest.warns(RuntimeWarning, match="NaN or inf in the gradients of parameter 0"):
        saved = copy.deepcopy(optimizer.state_dict())
    assert [int(s["step"]) for s in saved["state"].values()] == [2, 3]
    assert optimizer.state[p]["step"] == 2 and optimizer.state[q]["step"] == 3
    assert counts(optimizer) == [2, 3] and optimizer.skipped == {"parameter 0": 1}
    optimizer.step()
    optimizer.zero_grad()
    assert counts(optimizer) == [2, 3] and optimizer.skipped == {"parameter 0": 1}
    (p + q).sum().backward()
    optimizer.step()
    assert counts(optimizer) == [3, 4] and optimizer.skipped == {"parameter 0": 1}


def test_skipped_between_backward_and_step_knows_that_backward(learnt_late):
    p = nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([p], lr=1.0)
    p.sum().backward()
    learnt_late(optimizer)
    with pytest.warns(RuntimeWarning, match="parameter 0"):
        assert optimizer.skipped == {"parameter 0": 1}
    assert optimizer.state[p]["step"] == 0 and optimizer.skipped == {"parameter 0": 1}
    optimizer.step()
    assert counts(optimizer) == [0] and optimizer.skipped == {"parameter 0": 1}


def test_counts_that_a_manager_saves_after_a_skip_are_right(learnt_late):
    layers = [forge.FusedLinear.from_linear(nn.Linear(4, 4), rule, lr=1e-3) for rule in ("adamw", "lion")]
    model = nn.Sequential(*layers)
    manager = forge.FusedOptimizerManager(model)
    for _ in range(2):
        manager.pre_step()
        model(torch.ones(2, 4)).sum().backward()
    for optimizer in manager._optimizers.values():
        learnt_late(optimizer)
    with pytest.warns(RuntimeWarning, match="NaN or inf"):
        saved = manager.state_dict()
    assert [int(s["state"][0]["step"]) for s in saved.values()] == [1, 1]
    assert manager.skipped == {"0.weight": 1, "1.weight": 1}
    manager.pre_step()
    assert [int(s["state"][0]["step"]) for s in manager.state_dict().values()] == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3,), (512, 256), (300, 300)])
@pytest.mark.parametrize("when", ["backward", "step"])
def test_counts_saved_after_a_skip_on_a_gpu_are_right(shape, when):
    p, q = (nn.Parameter(torch.zeros(shape, device="cuda")) for _ in range(2))
    optimizer = FusedOptimizer([p, q], lr=1e-2, when=when)
    for i in range(3):
        ((p * (float("nan") if i == 2 else 1.0)) + q).sum().backward()
        if i == 2 and when == "backward":
            break
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match="NaN or inf in the gradients of parameter 0"):
        assert counts(optimizer) == [2, 3]
    optimizer.step()
    optimizer.zero_grad()
    (p + q).sum().backward()
    optimizer.step()
    assert counts(optimizer) == [3, 4] and optimizer.skipped == {"parameter 0": 1}


@pytest.mark.gpu
def test_counts_saved_on_a_gpu_whose_backward_ran_on_another_stream():
    p = nn.Parameter(torch.zeros(512, 512, device="cuda"))
    optimizer, stream = FusedOptimizer([p], lr=1e-2), torch.cuda.Stream()
    saved = []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        busy = torch.ones(4096, 4096, device="cuda")
        y = p * float("nan")
        y.register_hook(lambda g: g + 0 * (busy @ busy)[:512, :512].sum())  # the check waits for this
        loss = y.sum()
    with pytest.warns(RuntimeWarning, match="NaN or inf"):
        loss.backward()
        saved += counts(optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.step()
    assert saved == [0] == counts(optimizer) and torch.equal(p, torch.zeros_like(p))


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
