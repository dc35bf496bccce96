"""Saved optimizer state comes back bit for bit, in the dtype it had, from and to torch.optim as well."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, data, gap, mlp, snapshot, train, unchanged

DTYPE_OF = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-nearest": torch.bfloat16}


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return mlp().to(dtype)


def run(model, optimizer, n, first=0):
    dtype = model[0].weight.dtype
    for i in range(first, first + n):
        optimizer.zero_grad()
        model(data(i, 7, 6).to(dtype)).square().mean().backward()
        optimizer.step()


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu")


def tensors(state_dict):
    return [(i, k, v) for i, s in sorted(state_dict["state"].items()) for k, v in sorted(s.items())]


def assert_same_state(one, two):
    assert len(tensors(one)) == len(tensors(two)) > 0
    for (i, k, v), (j, name, w) in zip(tensors(one), tensors(two)):
        assert (i, k, v.dtype) == (j, name, w.dtype) and torch.equal(v, w)


@BOTH
@pytest.mark.parametrize("state", ["fp32", "bf16", "bf16-nearest", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_resumed_run_is_bit_equal(when, state, dtype):
    first = make(dtype)
    optimizer = forge.fuse(first, "adamw", when=when, lr=1e-3, state=state)
    run(first, optimizer, 4)
    before = optimizer.state_dict()
    weights, loaded = saved_and_loaded((first.state_dict(), before))
    second = make(dtype)
    second.load_state_dict(weights)
    resumed = forge.fuse(second, "adamw", when=when, lr=1e-3, state=state)
    resumed.load_state_dict(loaded)
    assert_same_state(before, resumed.state_dict())
    default = torch.float32 if dtype == torch.float16 else dtype
    for _, name, value in tensors(resumed.state_dict()):
        assert value.dtype == (torch.float32 if name == "step" else DTYPE_OF.get(state, default))
    run(first, optimizer, 3, first=4)
    run(second, resumed, 3, first=4)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters()))
    assert_same_state(optimizer.state_dict(), resumed.state_dict())


@BOTH
@pytest.mark.parametrize("rule, hyper", [("sgd", {"momentum": 0.9}), ("sgd", {}), ("lion", {}), ("adam", {})])
def test_other_rules_resume_bit_equal(when, rule, hyper):
    first = make()
    optimizer = forge.fuse(first, rule, when=when, lr=1e-3, **hyper)
    run(first, optimizer, 3)
    weights, loaded = saved_and_loaded((first.state_dict(), optimizer.state_dict()))
    second = make()
    second.load_state_dict(weights)
    resumed = forge.fuse(second, rule, when=when, lr=1e-3, **hyper)
    resumed.load_state_dict(loaded)
    run(first, optimizer, 2, first=3)
    run(second, resumed, 2, first=3)
    assert gap(first, second) == 0.0


def test_saved_state_is_a_copy_of_the_step_counter():
    model = make()
    optimizer = forge.fuse(model, when="step")
    run(model, optimizer, 1)
    saved = optimizer.state_dict()
    run(model, optimizer, 1)
    assert saved["state"][0]["step"].item() == 1 and optimizer.state_dict()["state"][0]["step"].item() == 2


@pytest.mark.parametrize("source, target", [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16-nearest")])
def test_state_is_converted_to_the_mode_of_the_optimizer_that_loads(source, target):
    first, second = make(), make()
    optimizer = forge.fuse(first, when="step", state=source)
    run(first, optimizer, 3)
    resumed = forge.fuse(second, when="step", state=target)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for (_, name, old), (_, _, new) in zip(tensors(optimizer.state_dict()), tensors(resumed.state_dict())):
        assert new.dtype == (torch.float32 if name == "step" else DTYPE_OF[target])
        assert torch.allclose(old.float(), new.float(), rtol=2**-8, atol=0.0)
    run(second, resumed, 1)


@pytest.mark.parametrize("source, target", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_into_a_model_of_another_weight_dtype(source, target, state):
    first, second = make(source), make(target)
    optimizer = forge.fuse(first, when="step", state=state)
    run(first, optimizer, 3)
    resumed = forge.fuse(second, when="step", state=state)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert_same_state(optimizer.state_dict(), resumed.state_dict())
    run(second, resumed, 1)


@BOTH
def test_from_torch_adamw(when):
    dense = make()
    theirs = torch.optim.AdamW(dense.parameters(), lr=1e-2)
    run(dense, theirs, 3)
    fused = copy.deepcopy(dense)
    ours = forge.fuse(fused, when=when, lr=5.0)
    ours.load_state_dict(saved_and_loaded(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2
    train(dense, theirs, fused, ours, lambda m, i: m(data(i + 3, 7, 6)).square().mean())
    assert gap(dense, fused) <= 1e-3 * 1e-2 * 3
    assert ours.state_dict()["state"][0]["step"].item() == 6


@BOTH
def test_into_torch_adamw(when):
    fused = make()
    ours = forge.fuse(fused, when=when, lr=1e-2, state="fp32")
    run(fused, ours, 3)
    dense = make()
    dense.load_state_dict(fused.state_dict())
    theirs = torch.optim.AdamW(dense.parameters(), lr=5.0)
    theirs.load_state_dict(saved_and_loaded(ours.state_dict()))
    train(dense, theirs, fused, ours, lambda m, i: m(data(i + 3, 7, 6)).square().mean())
    assert gap(dense, fused) <= 1e-3 * 1e-2 * 3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_from_and_into_torch_sgd(momentum):
    dense = make()
    theirs = torch.optim.SGD(dense.parameters(), lr=1e-2, momentum=momentum)
    run(dense, theirs, 2)
    fused = copy.deepcopy(dense)
    ours = forge.fuse(fused, "sgd", lr=1e-2, momentum=momentum)
    ours.load_state_dict(saved_and_loaded(theirs.state_dict()))
    train(dense, theirs, fused, ours, lambda m, i: m(data(i + 3, 7, 6)).square().mean())
    assert gap(dense, fused) <= 1e-3 * 1e-2 * 3
    again = torch.optim.SGD(dense.parameters(), lr=1e-2, momentum=momentum)
    again.load_state_dict(saved_and_loaded(ours.state_dict()))
    run(dense, again, 1)


def _wrong_shape(d):
    last = max(d["state"])
    d["state"][last]["exp_avg"] = torch.zeros(99)


def _other_rule(d):
    for values in d["state"].values():
        values["momentum_buffer"] = values.pop("exp_avg")


def _fewer_parameters(d):
    d["param_groups"][0]["params"].pop()


def _more_groups(d):
    d["param_groups"].append({**d["param_groups"][0], "params": []})


def _amsgrad(d):
    d["param_groups"][0]["amsgrad"] = True


def _bad_lr(d):
    d["param_groups"][0]["lr"] = -1.0


@BOTH
@pytest.mark.parametrize(
    "spoil, message",
    [
        (_wrong_shape, r"exp_avg of 2\.bias has shape \(99,\)"),
        (_other_rule, "momentum_buffer.*adamw has"),
        (_fewer_parameters, "group 0 of state_dict has 3 parameters"),
        (_more_groups, "2 parameter groups"),
        (_amsgrad, "amsgrad"),
        (_bad_lr, "lr"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(when, spoil, message):
    model = make()
    optimizer = forge.fuse(model, when=when, lr=1e-2)
    run(model, optimizer, 2)
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 0.5
    spoil(bad)
    before, state, groups = snapshot(model), copy.deepcopy(optimizer.state_dict()), optimizer.param_groups
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    assert_same_state(state, optimizer.state_dict())
    assert optimizer.state_dict()["param_groups"] == state["param_groups"] and optimizer.param_groups is groups
    assert unchanged(model, before)


def test_state_of_torch_sgd_is_refused_by_adamw():
    dense, fused = make(), make()
    theirs = torch.optim.SGD(dense.parameters(), lr=1e-2, momentum=0.9)
    run(dense, theirs, 1)
    optimizer = forge.fuse(fused, lr=1e-3)
    with pytest.raises(ValueError, match="momentum"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3


def test_loaded_tensors_are_not_shared_with_the_state_dict():
    first, second = make(), make()
    optimizer = forge.fuse(first, when="step")
    run(first, optimizer, 1)
    saved = optimizer.state_dict()
    copied = copy.deepcopy(saved)
    resumed = forge.fuse(second, when="step")
    resumed.load_state_dict(saved)
    run(second, resumed, 1)
    assert_same_state(saved, copied)


def test_a_model_that_never_stepped():
    first, second = make(), nn.Sequential(*make())
    optimizer, other = forge.fuse(first), forge.fuse(second)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    run(second, other, 1)
    assert other.state_dict()["state"][0]["step"].item() == 1
