"""Tensors that a gradient consists of, modified in place before the optimizer uses them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FactoredGrad

from .helpers import LR, data, pair, passes, snapshot, unchanged

N, K = 24, 16


def grad_of(i, tokens=1):
    return FactoredGrad((N, K), torch.float32, pairs=[(data(2 * i, tokens, N), data(2 * i + 1, tokens, K))])


def foreach_add(grad, buffer):
    torch._foreach_add_([grad], [buffer])
    return grad


ADDITIONS = {
    "add_": lambda g, b: g.add_(b),
    "grad + buffer": lambda g, b: g + b,
    "buffer + grad": lambda g, b: b + g,
    "foreach": foreach_add,
    "a copy of it": lambda g, b: (g + b).clone(),
    "added to another": lambda g, b: grad_of(1).add_(g.add_(b)).sub_(grad_of(1).to_dense()),
}


@pytest.mark.filterwarnings("ignore:.*needs the elements of a factored gradient")
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("way", ADDITIONS)
def test_a_buffer_that_was_added_is_free_for_other_uses(way, pairs):
    grad = grad_of(0) if pairs else FactoredGrad((N, K), torch.float32)
    buffer = data(9, N, K)
    wanted = grad.to_dense() + buffer
    found = ADDITIONS[way](grad, buffer)
    buffer.fill_(100.0)
    assert torch.allclose(found.to_dense(), wanted, rtol=1e-5, atol=1e-5)


def test_weight_decay_by_hand_equals_dense():
    a, b = pair(lambda: nn.Linear(K, N, bias=False))
    oa, ob = torch.optim.SGD(a.parameters(), lr=LR), forge.fuse(b, "sgd", lr=LR, when="step")
    buffer = torch.empty(N, K)
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(data(i, 2, K)).square().sum().backward()
            torch.mul(model.weight.detach(), 0.1, out=buffer)
            model.weight.grad.add_(buffer)
            buffer.zero_()
            optimizer.step()
    assert passes(a, b, 3)


def one_layer():
    layer = nn.Linear(K, N, bias=False)
    return layer, forge.fuse(layer, "sgd", lr=LR, when="step")


def test_a_gradient_that_backward_was_given_is_not_copied_but_watched():
    layer, optimizer = one_layer()
    given, kept = torch.ones(N, K), snapshot(layer)
    layer(data(0, 1, K)).sum().backward()
    torch.autograd.backward([layer.weight], [given])
    assert layer.weight.grad.dense.data_ptr() == given.data_ptr()
    given.zero_()
    for use in (optimizer.step, layer.weight.grad.to_dense, layer.weight.grad.clone().norm):
        with pytest.raises(RuntimeError, match="modified in place"):
            use()
    for change in (lambda g: g.mul_(0.5).to_dense(), lambda g: g.add_(torch.ones(N, K)), lambda g: grad_of(0).add_(g)):
        with pytest.raises(RuntimeError, match="modified in place"):
            change(layer.weight.grad.clone())
    layer.weight.grad.mul_(0.5)  # as clipping does: step() is where nothing moves
    with pytest.raises(RuntimeError, match="modified in place"):
        optimizer.step()
    assert unchanged(layer, kept) and not optimizer.state


def test_a_use_outside_the_module_is_neither_copied_nor_refused():
    a, b = pair(lambda: nn.Linear(K, N, bias=False))
    optimizers = torch.optim.SGD(a.parameters(), lr=LR), forge.fuse(b, "sgd", lr=LR, when="step")
    came = []
    for model, optimizer in zip((a, b), optimizers):
        hooked = model.weight.view(N, K)
        hooked.register_hook(lambda g: came.append(g.data_ptr()))
        model(data(0, 1, K)).sum().backward()
        F.linear(data(1, 5, K), hooked).square().sum().backward()
        if model is b:
            assert b.weight.grad.dense.data_ptr() == came[-1]
        model.weight.grad.mul_(0.5)
        optimizer.step()
    assert passes(a, b, 1)


@pytest.mark.parametrize("state", ["fresh", "trained"])
def test_a_step_with_a_modified_factor_moves_nothing(state):
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    optimizer = forge.fuse(model, "adamw", lr=LR, when="step")
    if state == "trained":
        model(data(5, 2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept, steps = snapshot(model), [optimizer.state[p].get("step", 0) for p in model.parameters()]
    hidden = model[1](model[0](data(0, 2, 64)))
    model[2](hidden).sum().backward()
    with torch.no_grad():
        hidden.zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the gradient of 2\.weight was modified in place"):
            optimizer.step()
        assert unchanged(model, kept)
    assert [optimizer.state[p].get("step", 0) for p in model.parameters()] == steps
    optimizer.zero_grad()
    model(data(1, 2, 64)).sum().backward()
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [s + 1 for s in steps]
