"""Learning rates, schedulers and groups reach the step, whenever and however they are changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, pair, passes, ref, snapshot, train, unchanged


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def grouped(when, state="fp32"):
    a, b = pair(mlp)
    return a, torch.optim.AdamW(groups(a)), b, forge.fuse(b, when=when, state=state, param_groups=groups(b))


def loss(model, i):
    return model(data(i, 7, 6)).square().mean()


def scheduled(a, oa, b, ob, make, n=6):
    """`n` steps, each optimizer under its own scheduler from `make(optimizer)`."""
    for model, optimizer in ((a, oa), (b, ob)):
        scheduler = make(optimizer)
        for i in range(n):
            optimizer.zero_grad()
            value = loss(model, i)
            value.backward()
            optimizer.step()
            scheduler.step(*([value.item()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    assert [g["lr"] for g in oa.param_groups] == pytest.approx([g["lr"] for g in ob.param_groups])
    return passes(a, b, n)


@BOTH
def test_groups_equal_dense(when):
    a, oa, b, ob = grouped(when)
    train(a, oa, b, ob, loss, 4)
    assert passes(a, b, 4)


@BOTH
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, t / 3)),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[2e-2, 1e-2], total_steps=8),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
        ),
    ],
    ids=["warm-up", "one-cycle", "plateau", "cosine", "sequential"],
)
def test_schedulers_equal_dense(when, make):
    assert scheduled(*grouped(when), make)


@BOTH
def test_a_step_at_learning_rate_zero_keeps_weights_and_fills_moments(when):
    _, _, b, ob = both(mlp, when)
    lr_scheduler.LambdaLR(ob, lambda t: min(1.0, t / 3))
    before = snapshot(b)
    loss(b, 0).backward()
    ob.step()
    assert unchanged(b, before)
    assert ob.state[b[0].weight]["step"] == 1 and ob.state[b[0].weight]["exp_avg"].abs().max() > 0


@BOTH
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_groups_changed_in_the_middle_and_one_added(when, state):
    a, oa, b, ob = grouped(when, state)
    extras = pair(lambda: nn.Linear(3, 3))
    held = list(ob.param_groups)
    for i in range(8):
        for model, optimizer, extra in ((a, oa, extras[0]), (b, ob, extras[1])):
            if i == 3:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
                    group["weight_decay"] = 0
            if i == 5:
                optimizer.add_param_group({"params": extra.parameters(), "lr": 1e-3})
            optimizer.zero_grad()
            extra.zero_grad()
            extra(model(data(i, 7, 6))).square().mean().backward()
            optimizer.step()
    assert all(g is h for g, h in zip(ob.param_groups, held)) and len(ob.param_groups) == 3
    assert ob.state[extras[1].weight]["step"] == 3
    if state == "fp32":
        assert passes(a, b, 8) and passes(*extras, 3)
    else:
        assert passes(a, b, 8, lr=20 * LR) and passes(*extras, 3, lr=20 * LR)


@BOTH
def test_round_trip_keeps_groups_and_their_identity(when):
    _, _, b, ob = grouped(when)
    loss(b, 0).backward()
    ob.step()
    ob.param_groups[0]["lr"], ob.param_groups[1]["betas"] = 0.125, (0.5, 0.75)
    saved = copy.deepcopy(ob.state_dict())
    other = forge.fuse(c := mlp(), when=when, param_groups=groups(c))
    held = list(other.param_groups)
    scheduler = lr_scheduler.LambdaLR(other, lambda t: 1.0)
    other.load_state_dict(saved)
    assert all(g is h for g, h in zip(other.param_groups, held))
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.125 and held[1]["betas"] == (0.5, 0.75)
    assert held[0]["weight_decay"] == 0.1 and held[1]["weight_decay"] == 0.0
    loaded = other.state_dict()["param_groups"]
    assert [{k: v for k, v in g.items() if k != "initial_lr"} for g in loaded] == saved["param_groups"]


@BOTH
def test_resuming_a_scheduler(when):
    a, oa, b, ob = both(mlp, when)
    for model, optimizer in ((a, oa), (b, ob)):
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=9)
        for i in range(6):
            if i == 3:
                saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            optimizer.zero_grad()
            loss(model, i).backward()
            optimizer.step()
            scheduler.step()
    assert passes(a, b, 6)


@BOTH
def test_a_tensor_learning_rate(when):
    a, b = pair(mlp)
    ob = forge.fuse(b, when=when, lr=torch.tensor(LR))
    oa = ref(a)
    train(a, oa, b, ob, loss, 2)
    oa.param_groups[0]["lr"] = 0.5 * LR
    ob.param_groups[0]["lr"].fill_(0.5 * LR)
    train(a, oa, b, ob, loss, 2)
    assert passes(a, b, 4)


def test_a_learning_rate_changed_between_backward_and_step_counts_in_step_mode():
    a, oa, b, ob = both(mlp, "step")
    for model, optimizer in ((a, oa), (b, ob)):
        loss(model, 0).backward()
        optimizer.param_groups[0]["lr"] = 3 * LR
        optimizer.step()
    assert passes(a, b, 1)


def test_a_group_that_does_not_fit_is_refused_and_nothing_is_added():
    _, _, b, ob = grouped("step")
    for bad, message in (({"lr": -1.0}, "lr"), ({"betas": (1.5, 0.9)}, "beta")):
        with pytest.raises(ValueError, match=message):
            ob.add_param_group({"params": nn.Linear(2, 2).parameters(), **bad})
    with pytest.raises(ValueError, match="given twice, before as 0.weight"):
        ob.add_param_group({"params": [b[0].weight]})
    assert len(ob.param_groups) == 2
    loss(b, 0).backward()
    ob.step()
