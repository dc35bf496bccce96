"""Saved state that would continue with other numbers, or is malformed, is refused by name, and nothing changes then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from tests.reference.lion import Lion

from .helpers import BOTH, LR, data, gap, mlp, pair, passes, snapshot, train, unchanged

ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def loss(model, i):
    return model(data(i, 7, 6)).square().mean()


def run(model, optimizer, n, first=0):
    for i in range(first, first + n):
        optimizer.zero_grad()
        loss(model, i).backward()
        optimizer.step()


def refused(model, optimizer, saved, message):
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(saved)
    assert len(str(caught.value)) < 400
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"] and unchanged(model, before)
    assert list(now["state"]) == list(state["state"])
    for key, values in state["state"].items():
        assert list(now["state"][key]) == list(values)
        assert all(torch.equal(now["state"][key][k], v) for k, v in values.items())


def continues(dense, theirs, fused, rule, hyper, when, change=lambda saved: saved):
    """`rule` goes on from what `theirs` saved as `theirs` itself does."""
    ours = forge.fuse(fused, rule, when=when, **hyper)
    ours.load_state_dict(change(copy.deepcopy(theirs.state_dict())))
    return passes(dense, fused, 3, train(dense, theirs, fused, ours, loss))


# -- the weight decay of Adam and of AdamW -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("saves, loads", [("adam", "adamw"), ("adamw", "adam"), ("adam", "adam"), ("adamw", "adamw")])
def test_weight_decay_of_another_kind(when, weight_decay, saves, loads):
    dense, _ = pair(mlp)
    theirs = ADAMS[saves](dense.parameters(), lr=LR, weight_decay=weight_decay)
    run(dense, theirs, 2)
    fused = copy.deepcopy(dense)
    if saves == loads or weight_decay == 0.0:
        assert continues(dense, theirs, fused, loads, {"lr": 5.0, "weight_decay": 0.5}, when)
        return
    ours = forge.fuse(fused, loads, when=when, lr=LR)
    refused(fused, ours, theirs.state_dict(), f"decoupled_weight_decay=.* rule '{loads}' .*; use rule '{saves}'")


def test_torch_s_adam_with_decoupled_weight_decay_is_adamw():
    dense, _ = pair(mlp)
    theirs = torch.optim.Adam(dense.parameters(), lr=LR, weight_decay=0.3, decoupled_weight_decay=True)
    run(dense, theirs, 2)
    fused = copy.deepcopy(dense)
    ours = forge.fuse(fused, "adam", lr=LR)
    refused(fused, ours, theirs.state_dict(), "use rule 'adamw'")
    ours.release()
    assert continues(dense, theirs, fused, "adamw", {"lr": LR}, "backward")


def test_weight_decay_of_another_kind_in_one_group():
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "weight_decay": 0.1}]
    theirs = torch.optim.AdamW([dict(g) for g in groups], lr=LR, weight_decay=0.0)
    ours = forge.FusedOptimizer(groups, "adam", lr=LR, weight_decay=0.0)
    refused(model, ours, theirs.state_dict(), "use rule 'adamw'")
    with pytest.raises(ValueError, match="decoupled_weight_decay=False .* use rule 'adam'"):
        forge.FusedOptimizer([{"params": mlp().parameters(), "decoupled_weight_decay": False}], "adamw", lr=LR)


def test_a_saved_group_that_does_not_say_which_kind():
    dense, _ = pair(mlp)
    theirs = torch.optim.AdamW(dense.parameters(), lr=LR, weight_decay=0.3)
    run(dense, theirs, 2)

    def older(saved):
        del saved["param_groups"][0]["decoupled_weight_decay"]
        return saved

    assert continues(dense, theirs, copy.deepcopy(dense), "adamw", {"lr": LR}, "step", older)


@BOTH
@pytest.mark.parametrize("saves, loads", [("adam", "adamw"), ("adamw", "adam")])
def test_weight_decay_of_another_kind_saved_here(when, saves, loads):
    dense, fused = pair(mlp)
    ours = forge.fuse(fused, saves, when=when, lr=LR, weight_decay=0.3)
    run(fused, ours, 2)
    saved = copy.deepcopy(ours.state_dict())
    other = forge.fuse(dense, loads, when=when, lr=LR, weight_decay=0.3)
    refused(dense, other, saved, f"decoupled_weight_decay=.* rule '{loads}' .*; use rule '{saves}'")
    ours.load_state_dict(saved)
    assert "decoupled_weight_decay" not in ours.param_groups[0]
    for group in saved["param_groups"]:  # as files of earlier versions
        del group["decoupled_weight_decay"]
    other.load_state_dict(saved)
    assert int(other.state[dense[0].weight]["step"]) == 2


def test_weight_decay_of_another_kind_in_a_manager():
    """A state_dict whose key was renamed by hand."""

    def made(rule):
        model = nn.Sequential(forge.FusedLinear.from_linear(nn.Linear(6, 3), rule, "fp32", lr=LR, weight_decay=0.1))
        return model, forge.FusedOptimizerManager(model)

    (_, manager), (_, other) = made("adam"), made("adamw")
    saved = {"adamw/fp32": manager.state_dict()["adam/fp32"]}
    with pytest.raises(ValueError, match="use rule 'adam'"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("saves, loads", [("adam", "adam"), ("adamw", "adamw"), ("adamw", "adam")])
def test_torch_s_optimizers_go_on_from_what_is_saved_here(saves, loads):
    """torch's Adam follows what is said. (Its AdamW is always decoupled.)"""
    dense, fused = pair(mlp)
    ours = forge.fuse(fused, saves, when="step", lr=LR, weight_decay=0.3)
    run(fused, ours, 2)
    dense.load_state_dict(fused.state_dict())
    theirs = ADAMS[loads](dense.parameters(), lr=5.0)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert passes(dense, fused, 3, train(dense, theirs, fused, ours, loss))


# -- what is shared ----------------------------------------------------------------------------------------------------


@BOTH
def test_loaded_settings_are_not_shared(when):
    first, second = mlp(), mlp()
    one, two = (forge.fuse(model, when=when, lr=LR) for model in (first, second))
    one.param_groups[0].update(lr=torch.tensor(LR), betas=[0.8, 0.97], notes={"of": [1]})
    saved = one.state_dict()
    two.load_state_dict(saved)
    one.param_groups[0]["lr"].fill_(0.5)
    one.param_groups[0]["betas"][0] = 0.1
    saved["param_groups"][0]["notes"]["of"].append(2)
    group = two.param_groups[0]
    assert float(group["lr"]) == pytest.approx(LR) and tuple(group["betas"]) == (0.8, 0.97)
    assert group["notes"] == {"of": [1]}


def test_a_tensor_shared_by_two_groups_stays_shared_as_in_torch_optim():
    made = []
    for make in (torch.optim.AdamW, forge.FusedOptimizer):
        lr = torch.tensor(LR)
        optimizer = make([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for _ in range(2)])
        optimizer.load_state_dict(optimizer.state_dict())
        made.append([group["lr"] for group in optimizer.param_groups])
        assert made[-1][0] is not lr
    assert [a is b for a, b in made] == [True, True]


# -- states that are not all there -------------------------------------------------------------------------------------


def _set(path, value):
    def change(saved):
        *parents, last = path
        for key in parents:
            saved = saved[key]
        saved[last] = value

    return change


def _without(*path):
    def change(saved):
        *parents, last = path
        for key in parents:
            saved = saved[key]
        del saved[last]

    return change


def _only(*names):
    def change(saved):
        saved["state"][0] = {name: saved["state"][0][name] for name in names}

    return change


STEP = r"step of 0\.weight is .* a whole number from 0 on"
KEPT = torch.zeros(8, 6)
MALFORMED = {
    "a group without params": (_without("param_groups", 0, "params"), "group 0 of state_dict must be a dict with a"),
    "params a number": (_set(["param_groups", 0, "params"], 5), "group 0 of state_dict must be a dict with a list"),
    "params None": (_set(["param_groups", 0, "params"], None), "group 0 of state_dict must be a dict with a list"),
    "params of lists": (_set(["param_groups", 0, "params"], [[0], 1, 2, 3]), r"'params' of group 0 .* holds \[0\]"),
    "names a number": (_set(["param_groups", 0, "param_names"], 5), "'param_names' of group 0 of state_dict is 5"),
    "a group that is none": (_set(["param_groups", 0], 5), "group 0 of state_dict must be a dict"),
    "groups a number": (_set(["param_groups"], 5), "'param_groups' of state_dict is 5; a list"),
    "groups None": (_set(["param_groups"], None), "'param_groups' of state_dict is None; a list"),
    "groups a dict": (_set(["param_groups"], {0: {}}), "'param_groups' of state_dict is a dict"),
    "state None": (_set(["state"], None), "'state' of state_dict is None; a dict"),
    "state a list": (_set(["state"], [{}]), "'state' of state_dict is a list"),
    "a state 3": (_set(["state", 0], 3), r"the state of 0\.weight is 3 in state_dict; a dict"),
    "a state None": (_set(["state", 0], None), r"the state of 0\.weight is None in state_dict; a dict"),
    "amsgrad of a tensor": (_set(["param_groups", 0, "amsgrad"], torch.ones(2)), "amsgrad=a Tensor of shape"),
    "a kind of weight decay": (_set(["param_groups", 0, "decoupled_weight_decay"], "x"), "True or False is needed"),
    "on meta": (_set(["state", 0, "exp_avg"], KEPT.to("meta")), r"exp_avg of 0\.weight has .* on meta"),
    "sparse": (_set(["state", 0, "exp_avg"], KEPT.to_sparse()), r"exp_avg of 0\.weight has layout torch.sparse_coo"),
    "complex": (_set(["state", 0, "exp_avg"], KEPT.cfloat()), r"exp_avg of 0\.weight has .*complex64"),
    "no step": (_without("state", 0, "step"), r"no step for 0\.weight; adamw cannot continue"),
    "no exp_avg_sq": (_without("state", 0, "exp_avg_sq"), r"no exp_avg_sq for 0\.weight at step 2; adamw cannot"),
    "exp_avg None": (_set(["state", 0, "exp_avg"], None), r"no exp_avg for 0\.weight at step 2"),
    "only step": (_only("step"), r"no exp_avg, exp_avg_sq for 0\.weight at step 2"),
    **{f"step {step!r}": (_set(["state", 0, "step"], step), STEP)
       for step in (None, -1, torch.tensor(-1.0), 1.5, float("nan"), float("inf"), "2", torch.ones(2), [2],
                    torch.ones((), device="meta"))},
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(when, what):
    model = mlp()
    optimizer = forge.fuse(model, when=when, lr=LR)
    run(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    change, message = MALFORMED[what]
    change(saved)
    groups = saved["param_groups"]
    if isinstance(groups, list) and isinstance(groups[0], dict):
        groups[0]["lr"] = 0.5  # would show that it was loaded
    refused(model, optimizer, saved, message)
    run(model, optimizer, 1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_state():
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    run(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.quantize_per_tensor(KEPT, 1.0, 0, torch.qint8)
    refused(model, optimizer, saved, r"exp_avg of 0\.weight has .*torch\.qint8")


def test_lion_without_its_state_is_refused_and_without_a_step_continues():
    dense, _ = pair(mlp)
    theirs = Lion(dense.parameters(), lr=1e-3)
    run(dense, theirs, 2)
    saved = {"state": {i: {"exp_avg": theirs.state[p]["exp_avg"]} for i, p in enumerate(dense.parameters())},
             "param_groups": [{"lr": 1e-3, "params": [0, 1, 2, 3]}]}  # fmt: skip
    fused = copy.deepcopy(dense)
    ours = forge.fuse(fused, "lion", state="fp32", lr=5.0)
    refused(fused, ours, {**saved, "state": {0: {"step": 2}}}, r"no exp_avg for 0\.weight at step 2; lion cannot")
    ours.load_state_dict(saved)
    assert passes(dense, fused, 3, train(dense, theirs, fused, ours, loss), lr=1e-3)


# -- states that need not be there -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("buffer", [{"momentum_buffer": None}, {}])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgd_without_a_momentum_buffer_begins_one_as_torch_does(when, buffer, dampening):
    dense, fused = pair(mlp)
    hyper = {"lr": LR, "momentum": 0.9, "dampening": dampening}
    theirs, ours = torch.optim.SGD(dense.parameters(), **hyper), forge.fuse(fused, "sgd", when=when, **hyper)
    for model, optimizer in ((dense, theirs), (fused, ours)):
        run(model, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0] = dict(buffer)
        optimizer.load_state_dict(saved)
    train(dense, theirs, fused, ours, loss)
    assert gap(dense, fused) <= 1e-3 * LR * 3


@BOTH
@pytest.mark.parametrize("values", [{}, {"step": 0}, {"step": torch.tensor(0.0)}])
def test_an_empty_state_is_a_parameter_that_never_stepped(when, values):
    dense, fused = pair(mlp)
    theirs, ours = torch.optim.AdamW(dense.parameters(), lr=LR), forge.fuse(fused, when=when, lr=LR)
    for model, optimizer in ((dense, theirs), (fused, ours)):
        run(model, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0] = {} if optimizer is theirs else values
        optimizer.load_state_dict(saved)
    assert passes(dense, fused, 3, train(dense, theirs, fused, ours, loss))
    steps = [int(ours.state_dict()["state"][i]["step"]) for i in range(4)]
    assert steps == [int(theirs.state_dict()["state"][i]["step"]) for i in range(4)] == [3, 5, 5, 5]
