"""step(closure), wrappers that put backward inside step, and step() at unusual times."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, passes, same_curve, snapshot, unchanged


def closure_of(model, optimizer, i):
    def closure():
        optimizer.zero_grad()
        loss = model(data(i, 7, 6)).pow(2).sum()
        loss.backward()
        return loss

    return closure


@BOTH
@pytest.mark.parametrize("grad", [True, False])
def test_closure_equals_dense_and_its_loss_is_returned(when, grad):
    a, oa, b, ob = both(mlp, when)
    for i in range(3):
        with torch.set_grad_enabled(grad):
            dense, fused = (o.step(closure_of(m, o, i)) for m, o in ((a, oa), (b, ob)))
        assert fused.item() == pytest.approx(dense.item(), rel=1e-4) and fused.item() > 0
    assert passes(a, b, 3) and ob.state[b[0].weight]["step"] == 3


@BOTH
def test_a_closure_without_zero_grad_and_with_a_plain_number(when):
    a, oa, b, ob = both(mlp, when)
    for model, optimizer in ((a, oa), (b, ob)):

        def closure(model=model):
            model(data(0, 7, 6)).pow(2).sum().backward()
            return 1.25

        assert optimizer.step(closure=closure) == 1.25
    assert passes(a, b, 1)


@BOTH
def test_a_closure_that_skips_backward_steps_nothing(when):
    _, _, b, ob = both(mlp, when)
    before = snapshot(b)
    assert ob.step(lambda: None) is None
    assert unchanged(b, before) and not ob.state


@BOTH
def test_an_exception_in_a_closure_reaches_the_caller(when):
    _, _, b, ob = both(mlp, when)
    before = snapshot(b)

    def closure():
        raise KeyError("from the closure")

    with pytest.raises(KeyError, match="from the closure"):
        ob.step(closure)
    assert unchanged(b, before)
    ob.step(closure_of(b, ob, 0))
    assert not unchanged(b, before)


@BOTH
def test_a_closure_after_an_earlier_backward(when):
    """Dense adds the two; updates in backward refuse the second one."""
    a, oa, b, ob = both(mlp, when)
    for model, optimizer in ((a, oa), (b, ob)):

        def closure(model=model):
            loss = model(data(1, 7, 6)).pow(2).sum()
            loss.backward()
            return loss

        model(data(0, 7, 6)).pow(2).sum().backward()
        if model is b and when == "backward":
            before = snapshot(b)
            with pytest.raises(RuntimeError, match="second backward before step.*when='step'"):
                optimizer.step(closure)
            assert unchanged(b, before)
            return
        optimizer.step(closure)
    assert passes(a, b, 1)


@BOTH
def test_step_twice_and_before_any_backward(when):
    a, oa, b, ob = both(mlp, when)
    before = snapshot(b)
    ob.step()
    assert unchanged(b, before) and not ob.state
    for model, optimizer in ((a, oa), (b, ob)):
        closure_of(model, optimizer, 0)()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        optimizer.step()
    assert passes(a, b, 1) and ob.state[b[0].weight]["step"] == 1


def test_step_twice_on_a_kept_gradient_steps_twice_as_dense_does():
    a, oa, b, ob = both(mlp, "step")
    for model, optimizer in ((a, oa), (b, ob)):
        closure_of(model, optimizer, 0)()
        optimizer.step()
        optimizer.step()
    assert passes(a, b, 2) and ob.state[b[0].weight]["step"] == 2


def test_step_twice_without_zero_grad_uses_no_gradient_twice_in_backward_mode():
    _, _, b, ob = both(mlp, "backward")
    closure_of(b, ob, 0)()
    ob.step()
    before = snapshot(b)
    ob.step()
    assert unchanged(b, before) and all(p.grad is None for p in b.parameters())


class Wrapper(torch.optim.Optimizer):
    """As trainers wrap optimizers: shares groups and state, passes calls on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()


@BOTH
def test_is_an_optimizer_for_schedulers_and_wrappers(when):
    a, oa, b, ob = both(mlp, when)
    assert isinstance(ob, torch.optim.Optimizer)
    for model, optimizer in ((a, Wrapper(oa)), (b, Wrapper(ob))):
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        for i in range(3):
            optimizer.step(closure_of(model, optimizer, i))
            scheduler.step()
    assert passes(a, b, 3)
    assert ob.param_groups[0]["lr"] == pytest.approx(LR / 8)


@BOTH
def test_step_hooks_run_around_the_step(when):
    _, _, b, ob = both(mlp, when)
    calls = []
    ob.register_step_pre_hook(lambda *_: calls.append("before"))
    ob.register_step_post_hook(lambda *_: calls.append("after"))
    ob.step(closure_of(b, ob, 0))
    assert calls == ["before", "after"]


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_lossy_states_through_a_closure(when, state):
    a, oa, b, ob = both(mlp, when, state=state)
    assert same_curve(a, oa, b, ob, lambda m, i: (m(data(i % 4, 7, 6)) - 1).pow(2).mean())


def test_fused_manager_is_no_obstacle_to_a_closure_of_the_other_optimizer():
    """The rest of the model is stepped by a closure while backward steps the fused layers."""
    model = mlp()
    model[0] = forge.FusedLinear.from_linear(model[0], lr=LR)
    manager = forge.FusedOptimizerManager(model)
    rest = torch.optim.AdamW(manager.get_non_fused_params(), lr=LR)
    before = snapshot(model)

    def closure():
        rest.zero_grad()
        loss = model(data(0, 7, 6)).pow(2).sum()
        loss.backward()
        return loss

    manager.pre_step(lr=LR)
    assert rest.step(closure).item() > 0
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before))
