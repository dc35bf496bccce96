"""Parameters replaced after fuse(): they are noticed, never silently left behind; a change of dtype converts states."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, passes, ref, snapshot, unchanged

NOTICED = "does not step"


class TiedLM(nn.Module):
    def __init__(self, vocab=6):
        super().__init__()
        self.e, self.h = nn.Embedding(vocab, 4), nn.Linear(4, vocab, bias=False)
        self.h.weight = self.e.weight

    def forward(self, ids):
        return self.h(torch.tanh(self.e(ids)))


def step_once(model, optimizer, ids=(0, 1, 5)):
    ids = torch.tensor(ids)
    optimizer.zero_grad()
    F.cross_entropy(model(ids), ids.flip(0)).backward()
    optimizer.step()


def resize(model, vocab=8):
    new = nn.Embedding(vocab, 4)
    new.weight.data[:6] = model.e.weight.data
    model.e = new
    model.h.weight = new.weight
    model.h.out_features = vocab


@BOTH
def test_a_resized_vocabulary_is_noticed_at_the_first_step(when):
    model = TiedLM()
    optimizer = forge.fuse(model, when=when, lr=LR)
    step_once(model, optimizer)
    old = model.e.weight
    resize(model)
    before, state = old.detach().clone(), copy.deepcopy(optimizer.state[old])
    with pytest.warns(UserWarning, match=rf"{NOTICED}: e\.weight"):
        step_once(model, optimizer, (6, 7))
    assert torch.equal(old, before)  # the dead tensor is not trained on
    assert optimizer.state[old]["step"] == state["step"]


@BOTH
def test_release_and_fuse_again_trains_the_resized_model_as_dense_does(when):
    a, oa, b, ob = both(TiedLM, when)
    step_once(a, oa)
    step_once(b, ob)
    for model in (a, b):
        torch.manual_seed(1)
        resize(model)
    ob.release()
    oa, ob = ref(a), forge.fuse(b, when=when, lr=LR, weight_decay=0.01)
    for _ in range(3):
        step_once(a, oa, (6, 7, 0))
        step_once(b, ob, (6, 7, 0))
    assert b.h.weight is b.e.weight and passes(a, b, 4)
    assert ob.state[b.e.weight]["step"] == 3


@BOTH
def test_add_param_group_is_the_other_remedy(when):
    model = TiedLM()
    optimizer = forge.fuse(model, when=when, lr=LR)
    step_once(model, optimizer)
    resize(model)
    optimizer.add_param_group({"params": [model.e.weight]})
    before = model.e.weight.detach().clone()
    step_once(model, optimizer, (6, 7))
    assert optimizer.state[model.e.weight]["step"] == 1
    assert (model.e.weight - before).abs().amax(1).min() > 0


@BOTH
def test_load_with_assign_is_noticed(when):
    model = mlp()
    optimizer = forge.fuse(model, when=when, lr=LR)
    model(data(0, 4, 6)).square().sum().backward()
    optimizer.step()
    old = dict(model.named_parameters())
    before = snapshot(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert model[0].weight is not old["0.weight"]
    optimizer.zero_grad()
    model(data(1, 4, 6)).square().sum().backward()
    with pytest.warns(UserWarning, match=r"0\.bias, 0\.weight, 2\.bias, 2\.weight"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(old.values(), before))


@BOTH
def test_load_without_assign_keeps_the_parameters(when):
    a, oa, b, ob = both(mlp, when)
    for i in range(4):
        for model, optimizer in ((a, oa), (b, ob)):
            if i == 2:
                torch.manual_seed(5)
                model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
            optimizer.zero_grad()
            model(data(i, 4, 6)).square().sum().backward()
            optimizer.step()
    assert passes(a, b, 4)


@BOTH
@pytest.mark.parametrize("kind", ["plain", "appended", "parameter"])
def test_a_new_layer_is_noticed_and_the_rest_trains(when, kind):
    a, oa, b, ob = both(mlp, when)
    for model in (a, b):
        torch.manual_seed(3)
        if kind == "plain":
            model[2] = nn.Linear(8, 3)
        elif kind == "appended":
            model.append(nn.Linear(3, 3))
        else:
            model[0].bias = nn.Parameter(torch.zeros(8))
    name = {"plain": r"2\.bias, 2\.weight", "appended": r"3\.bias, 3\.weight", "parameter": r"0\.bias"}[kind]
    for i in range(3):
        oa.zero_grad()
        a(data(i, 4, 6)).square().sum().backward()
        oa.step()
        ob.zero_grad()
        if i:  # said once
            b(data(i, 4, 6)).square().sum().backward()
            ob.step()
            continue
        with pytest.warns(UserWarning, match=f"{NOTICED}: {name}"):
            b(data(i, 4, 6)).square().sum().backward()
            ob.step()
    assert passes(a, b, 3)  # as torch.optim: what it does not own stands still, everything else equals dense


@BOTH
def test_a_new_frozen_layer_is_no_reason_to_warn(when):
    model = mlp()
    optimizer = forge.fuse(model, when=when, lr=LR)
    model.append(nn.Linear(3, 3).requires_grad_(False))
    before = snapshot(model)
    model(data(0, 4, 6)).square().sum().backward()
    optimizer.step()
    assert not unchanged(model[:3], before[:4])


@BOTH
@pytest.mark.parametrize("make", [mlp, TiedLM], ids=["mlp", "tied"])
@pytest.mark.parametrize("source, target", [(torch.float32, torch.bfloat16), (torch.float32, torch.float64),
                                            (torch.bfloat16, torch.float32)])  # fmt: skip
def test_a_change_of_dtype_goes_on_with_the_state_converted(when, make, source, target):
    def loss(model, i):
        if make is TiedLM:
            return F.cross_entropy(model(torch.tensor([0, 1, 5])), torch.tensor([5, 1, 0]))
        return model(data(i, 4, 6).to(model[0].weight.dtype)).square().sum()

    torch.manual_seed(0)
    model = make().to(source)
    optimizer = forge.fuse(model, when=when, lr=LR, state=None)
    for i in range(2):
        optimizer.zero_grad()
        loss(model, i).backward()
        optimizer.step()
    parameter = next(model.parameters())
    first_moment = optimizer.state[parameter]["exp_avg"].double()
    optimizer.zero_grad()
    model.to(target)
    dense = copy.deepcopy(model).double()
    theirs = torch.optim.AdamW(dense.parameters(), lr=LR)
    theirs.load_state_dict({**theirs.state_dict(), "state": copy.deepcopy(optimizer.state_dict()["state"])})
    before = snapshot(model)
    for m, o in ((dense, theirs), (model, optimizer)):
        o.zero_grad()
        loss(m, 2).backward()
        o.step()
    assert next(model.parameters()) is parameter and parameter.dtype == target
    assert not unchanged(model, before)
    state = optimizer.state[parameter]
    assert state["step"] == 3 and state["exp_avg"].dtype == target
    assert (state["exp_avg"].double() - theirs.state[next(dense.parameters())]["exp_avg"]).norm() <= (
        0.02 * first_moment.norm()
    )
    for p, q in zip(model.parameters(), dense.parameters()):
        assert (p.double() - q).abs().max() <= (0.01 if torch.bfloat16 in (source, target) else 1e-3) * LR + (
            p.abs().max() * 2**-7 if target == torch.bfloat16 else 0.0
        )


@BOTH
@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("warm", [0, 2])
def test_moving_a_model_after_a_gradient_is_there_equals_torch_optim(when, target, warm):
    """.to(dtype) between backward and step; the oracle is trained in fp64 throughout by torch.optim.

    bf16: the move rounds a weight by half a spacing and the step by up to one, 1.5 * 2^-7 of its size in all; rounding
    both moments and the gradient by 2^-9 each changes an update by less than 0.01 lr.
    """
    lr = 0.1 if target == torch.bfloat16 else LR
    torch.manual_seed(0)
    model = mlp()
    dense = copy.deepcopy(model).double()
    optimizer, theirs = forge.fuse(model, when=when, lr=lr), torch.optim.AdamW(dense.parameters(), lr=lr)
    for i in range(warm + 1):
        before = snapshot(dense)
        for m, o in ((dense, theirs), (model, optimizer)):
            o.zero_grad()
            m(data(i, 4, 6).to(m[0].weight.dtype)).square().sum().backward()
            if m is model and i == warm:
                m.to(target)
            o.step()
    assert {p.dtype for p in model.parameters()} == {target}
    for p, q, start in zip(model.parameters(), dense.parameters(), before):
        rounded = 0.01 * lr + 1.5 * 2**-7 * q.abs() if target == torch.bfloat16 else 0.0
        assert ((p.double() - q).abs() <= 1e-3 * lr * (warm + 1) + rounded).all()
        assert (q - start).abs().max() > 0.5 * lr
        assert optimizer.state[p]["step"] == warm + 1
    go_on(model, optimizer, dense, theirs, lr * (warm + 2))


def go_on(model, optimizer, dense, theirs, way):
    """One more step in the new dtype; in fp64 it equals the oracle's."""
    before = snapshot(model)
    for m, o in ((dense, theirs), (model, optimizer)):
        o.zero_grad()
        m(data(9, 4, 6).to(m[0].weight.dtype)).square().sum().backward()
        o.step()
    for p, q in zip(model.parameters(), before):
        assert not torch.equal(p, q) and optimizer.state[p]["exp_avg"].dtype == p.dtype
    if model[0].weight.dtype == torch.float64:
        assert all((p - q).abs().max() <= 1e-3 * way for p, q in zip(model.parameters(), dense.parameters()))


def test_moving_a_model_between_backward_and_step_moves_all_of_it():
    model = mlp()
    optimizer = forge.fuse(model, when="backward", lr=LR)
    model(data(0, 4, 6)).square().sum().backward()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with pytest.raises(RuntimeError, match="already applied"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
