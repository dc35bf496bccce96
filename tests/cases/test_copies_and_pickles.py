"""deepcopy, averages, adapters and pickles of a model in the middle of training."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, pair, passes, ref, saved_and_loaded, snapshot, train, unchanged


def loss(model, i):
    return model(data(i, 4, 6)).pow(2).sum()


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@BOTH
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("pending", [True, False])
def test_copies_are_independent(when, way, pending):
    a, oa, b, ob = both(mlp, when)
    for model, optimizer in ((a, oa), (b, ob)):
        loss(model, 0).backward()
        if model is b and pending:
            c = COPIES[way](b)
        optimizer.step()
        optimizer.zero_grad()
    if not pending:
        c = COPIES[way](b)
    c.zero_grad()
    kept = snapshot(c)
    train(a, oa, b, ob, lambda m, i: loss(m, i + 1), 3)
    assert passes(a, b, 4) and unchanged(c, kept)
    live = snapshot(b)
    loss(c, 1).backward()
    assert unchanged(c, kept) and unchanged(b, live)
    plain = mlp()
    plain.load_state_dict(c.state_dict())
    loss(plain, 1).backward()
    for p, q in zip(c.parameters(), plain.parameters()):
        assert type(p.grad) is torch.Tensor and torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    assert ob.state[b[0].weight]["step"] == 4


@BOTH
def test_a_copy_can_be_fused_itself(when):
    a, oa, b, ob = both(mlp, when)
    c = copy.deepcopy(b)
    oc = forge.fuse(c, when=when, lr=LR, weight_decay=0.01)
    kept = snapshot(b)
    train(a, oa, c, oc, loss)
    assert passes(a, c, 3) and unchanged(b, kept) and not ob.state


@BOTH
@pytest.mark.parametrize("ema", [True, False])
def test_averages_equal_dense_averages(when, ema):
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if ema else {}
    a, oa, b, ob = both(mlp, when)
    averages = []
    for model, optimizer in ((a, oa), (b, ob)):
        model(data(0, 4, 6)).pow(2).sum().backward()
        average = AveragedModel(model, **options)
        optimizer.step()
        average.update_parameters(model)
        for i in range(1, 4):
            optimizer.zero_grad()
            loss(model, i).backward()
            optimizer.step()
            average.update_parameters(model)
        averages.append(average.module)
    assert passes(a, b, 4) and passes(*averages, 4)
    assert not torch.equal(averages[1][0].weight, b[0].weight)


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        torch.manual_seed(7)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.B = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)

    def forward(self, x):
        return self.base(x) + x @ self.A.t() @ self.B.t()

    def merged(self):
        self.base.weight.data += self.B.data @ self.A.data
        return self.base.requires_grad_(True)


@BOTH
def test_lora_made_after_fuse(when):
    a, oa, b, ob = both(mlp, when)
    train(a, oa, b, ob, loss, 2)
    for model, optimizer in ((a, oa), (b, ob)):
        model[0] = Lora(model[0])
        optimizer.add_param_group({"params": [model[0].A, model[0].B]})
    frozen = b[0].base.weight.detach().clone()
    train(a, oa, b, ob, loss, 3)
    assert passes(a, b, 5) and torch.equal(b[0].base.weight, frozen)
    for model in (a, b):
        model[0] = model[0].merged()
    assert not torch.equal(b[0].weight, frozen)
    train(a, oa, b, ob, loss, 2)
    assert passes(a, b, 7) and ob.state[b[0].weight]["step"] == 4


@BOTH
def test_lora_modules_fused_as_a_whole(when):
    def make():
        model = mlp()
        model[0] = Lora(model[0])
        return model

    a, oa, b, ob = both(make, when)
    frozen = b[0].base.weight.detach().clone()
    train(a, oa, b, ob, loss)
    assert passes(a, b, 3) and torch.equal(b[0].base.weight, frozen)


@BOTH
def test_a_head_replaced_by_its_copy_is_noticed(when):
    """As adapters do with modules_to_save."""
    a, oa, b, ob = both(mlp, when)
    old = b[2].weight
    b[2] = copy.deepcopy(b[2])
    kept, head = old.detach().clone(), b[2].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"does not step: 2\.bias, 2\.weight"):
        loss(b, 0).backward()
        ob.step()
    assert torch.equal(old, kept) and torch.equal(b[2].weight, head)
    ob.add_param_group({"params": list(b[2].parameters())})
    ob.zero_grad()
    loss(b, 1).backward()
    ob.step()
    assert ob.state[b[2].weight]["step"] == 1 and not torch.equal(b[2].weight, head)


def test_a_whole_model_loads_in_another_process(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), mlp())
    optimizer = forge.fuse(model, lr=LR)
    model(torch.tensor([1, 2])).sum().backward()
    torch.save(model, tmp_path / "model.pt")
    optimizer.step()
    wanted = model(torch.tensor([3, 4])).detach()
    torch.save(wanted, tmp_path / "wanted.pt")
    code = (
        "import sys, torch, fused_grad_optimizer as f\n"
        "m = torch.load(sys.argv[1] + '/model.pt', weights_only=False); w = torch.load(sys.argv[1] + '/wanted.pt')\n"
        "ids = torch.tensor([3, 4]); assert torch.equal(m(ids), w)\n"
        "m.zero_grad(); o = f.fuse(m, lr=1e-2); m(ids).sum().backward(); o.step()\n"
        "assert not torch.equal(m(ids), w); print('loaded')"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "loaded", result.stderr


@BOTH
def test_a_state_dict_of_a_fused_model_loads_into_a_plain_one(when):
    _, _, b, ob = both(mlp, when)
    loss(b, 0).backward()
    state = saved_and_loaded(b.state_dict())
    plain = mlp()
    plain.load_state_dict(state)
    assert torch.equal(plain(data(1, 2, 6)), b(data(1, 2, 6)))
    assert all(type(v) is torch.Tensor for v in state.values())
    ob.step()


def test_a_copied_factored_gradient_is_its_own():
    _, _, b, ob = both(mlp, "step")
    loss(b, 0).backward()
    gradient = b[0].weight.grad
    other = copy.deepcopy(gradient)
    wanted = gradient.to_dense()
    other.mul_(3.0)
    assert torch.equal(gradient.to_dense(), wanted) and torch.allclose(other.to_dense(), 3 * wanted)
    again = pickle.loads(pickle.dumps(gradient))
    assert torch.equal(again.to_dense(), wanted)
    ob.step()


@BOTH
def test_the_optimizer_of_a_model_that_is_gone_keeps_nothing_alive(when):
    """A live copy keeps neither the optimizer nor the model."""
    import gc
    import weakref

    a, b = pair(mlp)
    optimizer = forge.fuse(b, when=when, lr=LR)
    loss(b, 0).backward()
    optimizer.step()
    c = copy.deepcopy(b)
    seen = weakref.ref(b[0].weight), weakref.ref(optimizer)
    del b, optimizer
    gc.collect()
    assert seen[0]() is None and seen[1]() is None
    train(a, ref(a), c, forge.fuse(c, when=when, lr=LR, weight_decay=0.01), loss, 1)


@BOTH
@pytest.mark.parametrize("way", [*COPIES, "copy"])
def test_an_optimizer_is_not_copied_but_its_state_dict_is(when, way):
    a, oa, b, ob = both(mlp, when)
    train(a, oa, b, ob, loss, 2)
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        {**COPIES, "copy": copy.copy}[way](ob)
    c = copy.deepcopy(b)
    oc = forge.fuse(c, when=when, lr=1.0)
    oc.load_state_dict(copy.deepcopy(ob.state_dict()))
    kept = snapshot(b)
    train(a, oa, c, oc, lambda m, i: loss(m, i + 2), 2)
    assert passes(a, c, 4) and unchanged(b, kept)
