"""fuse() changes no output: subclasses, patched, quantised and frozen layers stay as they are, bare layers convert."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_grad_optimizer as forge

BOTH = pytest.mark.parametrize("when", ["backward", "step"])
LR = 1e-2


def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(make, when, inputs=6):
    """fuse() keeps every bit of the output, then three steps equal dense AdamW's; returns `(model, optimizer)`."""
    torch.manual_seed(0)
    a = make()
    b = copy.deepcopy(a)
    before = b(data(0, 4, inputs))
    oa = torch.optim.AdamW([p for p in a.parameters() if p.is_floating_point()], lr=LR, eps=1e-4)
    ob = forge.fuse(b, when=when, lr=LR, eps=1e-4)
    assert torch.equal(before, b(data(0, 4, inputs)))
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(data(i, 4, inputs)).square().sum().backward()
            optimizer.step()
    assert max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters())) <= 1e-3 * LR * 3
    return b, ob


class Half(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x).clamp(-1, 1)


class SameForward(nn.Linear):
    pass


class HalfEmbedding(nn.Embedding):
    def forward(self, ids):
        return 0.5 * super().forward(ids)


class Quantised(nn.Linear):
    """Integer weight that does not train, a bias that does."""

    def __init__(self, i, o):
        super().__init__(i, o)
        del self.weight
        self.weight = nn.Parameter(torch.randint(0, 255, (o, i), dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, (self.weight.float() - 128) / 256, self.bias)


@BOTH
def test_a_subclass_keeps_its_forward(when):
    b, ob = check(lambda: nn.Sequential(Half(6, 6), nn.Linear(6, 3)), when)
    assert type(b[0]) is Half and ob.report.converted == {"1": "FusedLinear"}
    assert "Half is a subclass" in ob.report.skipped["0"]


@BOTH
def test_a_subclass_without_code_of_its_own_trains(when):
    b, _ = check(lambda: nn.Sequential(SameForward(6, 6), nn.Linear(6, 3)), when)
    assert type(b[0]) is SameForward


@BOTH
def test_non_dynamically_quantizable_linear_is_left_alone(when):
    kind = nn.modules.linear.NonDynamicallyQuantizableLinear
    b, _ = check(lambda: nn.Sequential(kind(6, 6), nn.Linear(6, 3)), when)
    assert type(b[0]) is kind


@BOTH
def test_an_embedding_subclass_keeps_its_forward(when):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = HalfEmbedding(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.embed(torch.tensor([0, 3, 3, 1])) + x)

    b, ob = check(Net, when)
    assert type(b.embed) is HalfEmbedding and "embed" in ob.report.skipped


@BOTH
def test_a_patched_forward_is_kept(when):
    def make():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        model[0].forward = types.MethodType(lambda self, x: 2 * F.linear(x, self.weight, self.bias).relu(), model[0])
        return model

    torch.manual_seed(0)
    model = make()
    before = model(data(0, 4, 6))
    optimizer = forge.fuse(model, when=when, lr=LR)
    assert torch.equal(before, model(data(0, 4, 6))) and "replaced" in optimizer.report.skipped["0"]
    torch.manual_seed(0)
    dense = make()
    theirs = torch.optim.AdamW(dense.parameters(), lr=LR)
    for m, o in ((dense, theirs), (model, optimizer)):
        m(data(0, 4, 6)).square().sum().backward()
        o.step()
    for p, q in zip(dense.parameters(), model.parameters()):
        assert (p - q).abs().max() <= 1e-3 * LR


@BOTH
def test_a_forward_patched_after_fuse_is_kept_and_trains(when):
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    b = copy.deepcopy(a)
    oa, ob = torch.optim.AdamW(a.parameters(), lr=LR, eps=1e-4), forge.fuse(b, when=when, lr=LR, eps=1e-4)
    for model, optimizer in ((a, oa), (b, ob)):
        original = model[0].forward
        model[0].forward = lambda x, original=original: 2 * original(x).relu()
        model(data(0, 4, 6)).square().sum().backward()
        optimizer.step()
    assert max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters())) <= 1e-3 * LR


@BOTH
def test_an_integer_weight_is_untouched_and_its_bias_trains(when):
    torch.manual_seed(0)
    model = nn.Sequential(Quantised(6, 6), nn.Linear(6, 3))
    codes, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    dense = copy.deepcopy(model)
    theirs = torch.optim.AdamW([p for p in dense.parameters() if p.requires_grad], lr=LR)
    optimizer = forge.fuse(model, when=when, lr=LR)
    for m, o in ((dense, theirs), (model, optimizer)):
        m(data(0, 4, 6)).square().sum().backward()
        o.step()
    assert torch.equal(model[0].weight, codes) and model[0].weight.dtype == torch.uint8
    assert not torch.equal(model[0].bias, bias) and (dense[0].bias - model[0].bias).abs().max() <= 1e-3 * LR
    assert model[0].weight not in optimizer.state


def test_an_integer_weight_in_a_plain_linear_is_skipped_with_its_dtype():
    layer = nn.Linear(6, 3)
    layer.weight = nn.Parameter(torch.zeros(3, 6, dtype=torch.uint8), requires_grad=False)
    model = nn.Sequential(nn.Linear(6, 6), layer)
    optimizer = forge.fuse(model, lr=LR)
    assert type(layer) is nn.Linear and "torch.uint8" in optimizer.report.skipped["1"]


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_a_bare_linear_trains(when, bias):
    b, ob = check(lambda: nn.Linear(6, 3, bias=bias), when)
    assert isinstance(b, forge.FusedLinear) and ob.report.converted == {"": "FusedLinear"}
    assert ob.state[b.weight]["step"] == 3


@BOTH
def test_a_bare_embedding_trains(when):
    layer = nn.Embedding(5, 4)
    before = layer.weight.detach().clone()
    optimizer = forge.fuse(layer, when=when, lr=LR, weight_decay=0.0)
    layer(torch.tensor([1, 1, 4])).sum().backward()
    optimizer.step()
    moved = (layer.weight - before).abs().amax(1) > 0
    assert isinstance(layer, forge.FusedEmbedding) and moved.tolist() == [False, True, False, False, True]


@BOTH
def test_one_layer_under_two_names_is_stepped_once(when):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second, self.out = self.first, nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.second(self.first(x).tanh()))

    b, ob = check(Net, when)
    assert b.first is b.second and ob.state[b.first.weight]["step"] == 3
    assert len(ob.param_groups[0]["params"]) == 4


@BOTH
def test_hooks_and_attributes_of_a_layer_survive(when):
    layer = nn.Linear(6, 3)
    layer.note = "mine"
    seen = []
    layer.register_forward_hook(lambda *a: seen.append("forward"))
    layer.register_full_backward_hook(lambda *a: seen.append("backward"))
    names, first = list(layer.state_dict()), layer.weight
    optimizer = forge.fuse(layer, when=when, lr=LR)
    layer(data(0, 4, 6).requires_grad_()).sum().backward()
    optimizer.step()
    assert seen == ["forward", "backward"] and layer.note == "mine"
    assert list(layer.state_dict()) == names and layer.weight is first and isinstance(layer, nn.Linear)


@BOTH
def test_weight_norm_and_other_computed_weights_train(when):
    b, ob = check(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3)), when)
    assert "0" in ob.report.skipped and ob.report.converted == {"1": "FusedLinear"}


def test_a_parametrization_added_after_fuse_still_computes_the_weight():
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    dense = copy.deepcopy(layer)
    forge.convert(layer)
    for m in (dense, layer):
        torch.manual_seed(1)
        nn.utils.parametrizations.weight_norm(m)
        m(data(0, 4, 6)).square().sum().backward()
    assert torch.equal(dense(data(1, 4, 6)), layer(data(1, 4, 6)))
    for p, q in zip(dense.parameters(), layer.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)


def test_second_fuse_changes_nothing_before_it_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    first = forge.fuse(model, lr=LR)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"0\.weight is already stepped by another FusedOptimizer.*release"):
        forge.fuse(model, lr=0.5)
    model(data(0, 4, 6)).sum().backward()
    first.step()
    assert first.state[model[0].weight]["step"] == 1
    for p, q in zip(model.parameters(), before):
        assert 0 < (p - q).abs().max() <= 1.1 * LR


def test_convert_twice_is_the_same_as_once():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    parameters = list(model.parameters())
    assert forge.convert(forge.convert(model)) is model
    assert all(p is q for p, q in zip(model.parameters(), parameters))
    assert forge.conversion_report(model).converted == {"0": "FusedLinear", "1": "FusedLinear"}
