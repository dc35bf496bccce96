"""requires_grad is read when it matters: frozen, half frozen, frozen later and unfrozen later equal torch.optim."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.modules import linear as linear_module

BOTH = pytest.mark.parametrize("when", ["backward", "step"])
LR = 1e-2


def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)  # BitFit: the bias alone trains
    model[4].bias.requires_grad_(False)
    return model


def both(when, build=make, **hyper):
    a = build()
    b = copy.deepcopy(a)
    hyper = {"lr": LR, "weight_decay": 0.1, "eps": 1e-4, **hyper}
    return a, torch.optim.AdamW(a.parameters(), **hyper), b, forge.fuse(b, when=when, **hyper)


def one_step(model, optimizer, i):
    optimizer.zero_grad()
    model(data(i, 7, 6)).square().sum().backward()
    optimizer.step()


@BOTH
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_frozen_and_thawed_in_the_middle_equals_dense(when, rule):
    a = make()
    b = copy.deepcopy(a)
    hyper = {"lr": LR, "weight_decay": 0.1, **({"momentum": 0.9} if rule == "sgd" else {"eps": 1e-4})}
    oa = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[rule](a.parameters(), **hyper)
    ob = forge.fuse(b, rule, when=when, **hyper)
    first = [p.detach().clone() for p in b.parameters()]
    for i in range(6):
        if i == 3:
            frozen = b[4].weight.detach().clone()
            for m, o in ((a, oa), (b, ob)):
                o.zero_grad()
                m[0].requires_grad_(True)
                m[4].weight.requires_grad_(False)
            assert torch.equal(b[0].weight, first[0]) and b[0].weight not in ob.state  # no decay while frozen
        for m, o in ((a, oa), (b, ob)):
            one_step(m, o, i)
    assert gap(a, b) <= 1e-3 * LR * 6
    assert torch.equal(b[4].weight, frozen)  # no momentum tail
    assert torch.equal(b[2].weight, first[2]) and torch.equal(b[4].bias, first[5])
    assert not torch.equal(b[0].weight, first[0]) and not torch.equal(b[2].bias, first[3])
    assert ob.state_dict()["state"][0]["step"] == 3  # thawed layers begin at step 1
    assert b[2].weight not in ob.state


@BOTH
def test_a_thawed_layer_is_stepped_in_backward_too(when):
    model = make()
    optimizer = forge.fuse(model, when=when, lr=LR)
    one_step(model, optimizer, 0)
    model[0].requires_grad_(True)
    for i in range(1, 4):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        model(data(i, 7, 6)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)
        assert optimizer.state[model[0].weight]["step"] == i
    # after the first step of the thawed layer, backward steps it at once
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    model(data(5, 7, 6)).square().sum().backward()
    assert torch.equal(model[0].weight, before) == (when == "step")


@BOTH
def test_gradual_unfreezing_layer_by_layer(when):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        model[:3].requires_grad_(False)
        return model

    a, oa, b, ob = both(when, build)
    for i in range(4):
        for m, o in ((a, oa), (b, ob)):
            one_step(m, o, i)
            if i < 3:
                m[2 - i].requires_grad_(True)
    assert gap(a, b) <= 1e-3 * LR * 4
    assert [int(ob.state[block[0].weight]["step"]) for block in b] == [1, 2, 3, 4]


@BOTH
def test_frozen_thawed_and_frozen_again_every_step(when):
    a, oa, b, ob = both(when)
    for i in range(6):
        for m, o in ((a, oa), (b, ob)):
            o.zero_grad()
            m[0].requires_grad_(i % 2 == 1)
            m[4].requires_grad_(i % 3 == 0)
            one_step(m, o, i)
    assert gap(a, b) <= 1e-3 * LR * 6
    assert ob.state[b[0].weight]["step"] == 3 and ob.state[b[4].weight]["step"] == 2


@BOTH
def test_a_frozen_layer_keeps_no_input_and_computes_no_weight_gradient(when, monkeypatch):
    made, original = [], linear_module.of_pair

    def count(weight, dy, x):
        made.append(tuple(weight.shape))
        return original(weight, dy, x)

    monkeypatch.setattr(linear_module, "of_pair", count)
    model = make()
    optimizer = forge.fuse(model, when=when, lr=LR)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hidden = model[:2](data(0, 7, 6))
        assert not kept and not hidden.requires_grad  # nothing trains before or in layer 0
        model[2](hidden)
        assert not [t for t in kept if t.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr()]
    model(data(0, 7, 6)).square().sum().backward()
    assert made == [(3, 4)]
    optimizer.step()


@BOTH
def test_gradient_flows_through_frozen_layers_to_the_input(when):
    a, _, b, ob = both(when)
    for model in (a, b):
        model.requires_grad_(False)
    xs = [data(0, 7, 6).requires_grad_() for _ in range(2)]
    for model, x in zip((a, b), xs):
        model(x).square().sum().backward()
    assert torch.allclose(xs[0].grad, xs[1].grad, rtol=1e-6)
    before = [p.detach().clone() for p in b.parameters()]
    ob.step()
    ob.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(b.parameters(), before)) and not ob.state


@BOTH
def test_frozen_embedding_and_embedding_thawed_later(when):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 6), nn.Linear(6, 3)
            self.embed.requires_grad_(False)

        def forward(self, x):
            return self.out(self.embed(x).tanh())

    torch.manual_seed(0)
    a = Net()
    b = copy.deepcopy(a)
    oa, ob = torch.optim.AdamW(a.parameters(), lr=LR, eps=1e-4), forge.fuse(b, when=when, lr=LR, eps=1e-4)
    first = b.embed.weight.detach().clone()
    for i in range(4):
        if i == 2:
            assert torch.equal(b.embed.weight, first)
            for m in (a, b):
                m.embed.requires_grad_(True)
        for m, o in ((a, oa), (b, ob)):
            o.zero_grad()
            m(torch.tensor([0, 2, 2, i])).square().sum().backward()
            o.step()
    assert gap(a, b) <= 1e-3 * LR * 4 and ob.state[b.embed.weight]["step"] == 2


def test_frozen_between_backward_and_step_is_stepped_by_the_gradient_it_has():
    """torch.optim steps whatever has a gradient; so does when="step"."""
    a, oa, b, ob = both("step")
    for m, o in ((a, oa), (b, ob)):
        m(data(0, 7, 6)).square().sum().backward()
        m[4].weight.requires_grad_(False)
        o.step()
    assert gap(a, b) <= 1e-3 * LR


def test_a_gradient_left_from_before_freezing_goes_with_zero_grad():
    a, oa, b, ob = both("step")
    for m, o in ((a, oa), (b, ob)):
        m(data(0, 7, 6)).square().sum().backward()
        assert m is a or isinstance(m[4].weight.grad, FactoredGrad)
        m[4].weight.requires_grad_(False)
        one_step(m, o, 1)
    assert gap(a, b) <= 1e-3 * LR and b[4].weight not in ob.state


@BOTH
def test_only_trainable_parameters_given_to_the_optimizer(when):
    a = make()
    b = forge.convert(copy.deepcopy(a))
    oa = torch.optim.AdamW([p for p in a.parameters() if p.requires_grad], lr=LR, eps=1e-4)
    ob = forge.FusedOptimizer([p for p in b.parameters() if p.requires_grad], when=when, lr=LR, eps=1e-4)
    for i in range(3):
        for m, o in ((a, oa), (b, ob)):
            one_step(m, o, i)
    assert gap(a, b) <= 1e-3 * LR * 3 and len(ob.state) == 2


@BOTH
def test_a_model_frozen_completely_can_be_fused_and_thawed(when):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).requires_grad_(False)

    a, oa, b, ob = both(when, build)
    for m, o in ((a, oa), (b, ob)):
        m(data(0, 7, 6))
        o.step()
        m.requires_grad_(True)
        for i in range(3):
            one_step(m, o, i)
    assert gap(a, b) <= 1e-3 * LR * 3 and ob.state[b[0].weight]["step"] == 3
