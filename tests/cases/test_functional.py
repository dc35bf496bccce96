"""torch.func and functional_call: substituted weights take the ordinary path, and the live model does not move."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, snapshot, train, unchanged


def live_and_plain(when):
    torch.manual_seed(0)
    live = mlp()
    plain = copy.deepcopy(live)
    return live, plain, forge.fuse(live, when=when, lr=LR)


def function(net, x):
    return lambda p: functional_call(net, p, (x,)).pow(2).sum()


def detached(model):
    return {k: v.detach().clone() for k, v in model.named_parameters()}


def assert_untouched(model, optimizer, before):
    assert unchanged(model, before) and not optimizer.state
    assert all(p.grad is None for p in model.parameters())


TRANSFORMS = {
    "grad": lambda net, p, x: grad(function(net, x))(p),
    "vmap-grad": lambda net, p, x: vmap(grad(lambda q, t: function(net, t)(q)), (None, 0))(p, x),
    "vmap-ensemble": lambda net, p, x: vmap(lambda q: functional_call(net, q, (x,)))(
        {k: torch.stack([v, v * 2]) for k, v in p.items()}
    ),
    "jacrev": lambda net, p, x: jacrev(lambda q: functional_call(net, q, (x,)))(p),
    "jvp": lambda net, p, x: jvp(function(net, x), (p,), ({k: torch.ones_like(v) for k, v in p.items()},)),
    "vjp": lambda net, p, x: vjp(function(net, x), p)[1](torch.tensor(1.0)),
    "hessian": lambda net, p, x: hessian(lambda w: function(net, x)({**p, "2.weight": w}))(p["2.weight"]),
    "of-the-input": lambda net, p, x: vmap(jacrev(net))(x),
}


@BOTH
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_equal_the_plain_model_s(when, transform):
    live, plain, optimizer = live_and_plain(when)
    before, x = snapshot(live), data(0, 4, 6)
    got, wanted = (TRANSFORMS[transform](m, detached(plain), x) for m in (live, plain))
    leaves = list(zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted)))
    assert leaves and all(torch.allclose(g, w, rtol=1e-4, atol=1e-6) for g, w in leaves)
    assert all(type(g) is torch.Tensor for g, _ in leaves)
    assert_untouched(live, optimizer, before)


@BOTH
def test_a_substituted_weight_gets_its_own_gradient_and_is_not_moved(when):
    live, plain, optimizer = live_and_plain(when)
    before, x = snapshot(live), data(0, 4, 6)
    found = []
    for net in (live, plain):
        w = (detached(plain)["0.weight"] + 1).requires_grad_()
        kept = w.detach().clone()
        functional_call(net, {**detached(plain), "0.weight": w}, (x,)).pow(2).sum().backward()
        assert torch.equal(w.detach(), kept) and type(w.grad) is torch.Tensor
        found.append(w.grad)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5)
    assert_untouched(live, optimizer, before)
    optimizer.step()
    assert_untouched(live, optimizer, before)


@BOTH
def test_a_substituted_parameter_that_is_another_parameter_object(when):
    live, plain, optimizer = live_and_plain(when)
    before = snapshot(live)
    own = {k: nn.Parameter(v * 2) for k, v in detached(plain).items()}
    functional_call(live, own, (data(0, 4, 6),)).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in own.values())
    assert all(torch.equal(p.detach(), v * 2) for p, v in zip(own.values(), detached(plain).values()))
    assert_untouched(live, optimizer, before)


@BOTH
def test_some_weights_substituted_the_others_live(when):
    """Dense: the live ones get their gradients and step, the substituted one does not move them."""
    a, oa, b, ob = both(mlp, when)
    for model, optimizer in ((a, oa), (b, ob)):
        w = torch.full((8, 6), 0.1, requires_grad=True)
        functional_call(model, {"0.weight": w}, (data(0, 4, 6),)).pow(2).sum().backward()
        assert w.grad is not None
        optimizer.step()
    assert all((p - q).abs().max() <= 1e-5 for p, q in zip(a.parameters(), b.parameters()))
    assert not ob.state.get(b[0].weight) and ob.state[b[2].weight]["step"] == 1


@BOTH
def test_functional_call_with_the_live_parameters_themselves_trains_them(when):
    a, oa, b, ob = both(mlp, when)
    train(a, oa, b, ob, lambda m, i: functional_call(m, dict(m.named_parameters()), (data(i, 4, 6),)).pow(2).sum())
    assert all((p - q).abs().max() <= 1e-3 * LR * 3 for p, q in zip(a.parameters(), b.parameters()))
    assert ob.state[b[0].weight]["step"] == 3


@BOTH
def test_training_goes_on_after_a_transform(when):
    a, oa, b, ob = both(mlp, when)
    plain = copy.deepcopy(a)

    def loss(model, i):
        TRANSFORMS["vmap-grad"](model, detached(plain), data(i, 4, 6))
        return model(data(i, 4, 6)).square().sum()

    train(a, oa, b, ob, loss)
    assert all((p - q).abs().max() <= 1e-3 * LR * 3 for p, q in zip(a.parameters(), b.parameters()))


@BOTH
def test_an_embedding_too(when):
    torch.manual_seed(0)
    live = nn.Embedding(7, 3)
    plain = copy.deepcopy(live)
    optimizer = forge.fuse(live, when=when, lr=LR)
    before, ids = snapshot(live), torch.tensor([1, 1, 4])
    p = detached(plain)
    got, wanted = (grad(lambda q, m=m: functional_call(m, q, (ids,)).pow(2).sum())(p) for m in (live, plain))
    assert torch.allclose(got["weight"], wanted["weight"])
    w = p["weight"].clone().requires_grad_()
    functional_call(live, {"weight": w}, (ids,)).pow(2).sum().backward()
    assert torch.allclose(w.grad, wanted["weight"])
    assert_untouched(live, optimizer, before)


def dual_input(net, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.detach()


FORWARD = {
    "dual input": dual_input,
    "jacobian": lambda net, x: torch.autograd.functional.jacobian(net, x, strategy="forward-mode", vectorize=True),
    "reverse jacobian": torch.autograd.functional.jacobian,
}


@BOTH
@pytest.mark.parametrize("way", FORWARD)
def test_forward_mode_equals_the_plain_model_s(when, way):
    live, plain, optimizer = live_and_plain(when)
    before, x = snapshot(live), data(0, 4, 6)
    got, wanted = (FORWARD[way](model, x) for model in (live, plain))
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert_untouched(live, optimizer, before)
    live(x).sum().backward()
    assert when == "backward" or isinstance(live[0].weight.grad, forge.FactoredGrad)
    optimizer.step()
