"""When small parameters that are stepped together move, and what an exception leaves of those that wait."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer import _small
from fused_grad_optimizer._applied_grad import AppliedGrad
from tests.cases.helpers import BOTH, Explode, data
from tests.small_helpers import (
    DENSE,
    IDS,
    LR,
    Calls,
    assert_both_ways,
    gather,
    groups_of,
    loss_of,
    model_of,
    trained,
)


@pytest.fixture
def gathered(monkeypatch):
    return gather(monkeypatch)


def before_and_names(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved_names(model, before):
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def test_all_have_moved_when_backward_returns(gathered):
    model = model_of()
    optimizer = forge.fuse(model, lr=LR)
    before = before_and_names(model)
    loss_of(model, 0).backward()
    assert moved_names(model, before) == set(before)
    assert all(isinstance(p.grad, AppliedGrad) for p in model.parameters())
    assert gathered.sizes == [len(DENSE)]
    with pytest.raises(RuntimeError, match=r"already applied.*when='step'"):
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"already applied and cannot be dropped") as error:
        optimizer.zero_grad()
    assert "1.weight" in str(error.value)


def explode(model, after=5):
    """A backward that ends with an exception once it is through the layers from `after` on."""
    with pytest.raises(KeyError, match="boom"):
        x = model[:after](IDS)
        model[after:](Explode.apply(x)).square().mean().backward()


@pytest.mark.parametrize("next_call", ["step", "zero_grad", "backward", "none"])
def test_an_exception_drops_what_waits(gathered, next_call):
    model = model_of()
    optimizer = forge.fuse(model, lr=LR)
    loss_of(model, 0).backward()
    optimizer.step()
    gathered.sizes.clear()
    before = before_and_names(model)
    explode(model)
    assert moved_names(model, before) == {"6.weight", "8.weight"} and not gathered.sizes
    assert model[5].weight.grad is None and model[8].bias.grad is None
    assert {optimizer.state[p]["step"] for n, p in model.named_parameters() if n in DENSE} == {1}
    if next_call != "none":
        calls = {
            "step": optimizer.step,
            "zero_grad": optimizer.zero_grad,
            "backward": lambda: model[:2](IDS).square().mean().backward(),
        }
        with pytest.raises(RuntimeError, match=r"exception after it had updated 8\.weight, 6\.weight; the other"):
            calls[next_call]()
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    assert moved_names(model, before) == {"6.weight", "8.weight"} and not gathered.sizes
    loss_of(model, 1).backward()
    optimizer.step()
    assert {optimizer.state[p]["step"] for n, p in model.named_parameters() if n in DENSE} == {2}
    assert gathered.sizes == [len(DENSE)]


@pytest.mark.parametrize("next_call", ["step", "zero_grad", "zero_grad(False)", "backward", "state_dict", "release"])
def test_an_exception_before_anything_moved_is_forgotten(gathered, next_call):
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    optimizer = forge.fuse(model, lr=LR)
    before = before_and_names(model)
    with pytest.raises(KeyError, match="boom"):
        model[1](Explode.apply(model[0](data(0, 4, 6)))).square().sum().backward()
    {
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "zero_grad(False)": lambda: optimizer.zero_grad(set_to_none=False),
        "backward": lambda: None,
        "state_dict": optimizer.state_dict,
        "release": optimizer.release,
    }[next_call]()
    assert not moved_names(model, before) and not gathered.sizes and not optimizer.state
    if next_call == "release":
        return
    (model(data(0, 4, 6)) * data(1, 6)).sum().backward()
    optimizer.step()
    assert moved_names(model, before) == set(before) and gathered.sizes == [4]
    assert {state["step"] for state in optimizer.state.values()} == {1}


@pytest.mark.parametrize("inside", [False, True])
def test_an_exception_and_reentrant_checkpoints(gathered, inside):
    """What a segment gave has moved at its end; what the failed backward around it gave after that has not."""
    model = model_of()
    optimizer = forge.fuse(model, lr=LR)
    before = before_and_names(model)
    x = model[:5](IDS)
    if inside:
        x = checkpoint(lambda y: model[5](Explode.apply(y)), x, use_reentrant=True)
        x = checkpoint(model[6], x, use_reentrant=True)
    else:
        x = checkpoint(model[6], model[5](Explode.apply(x)), use_reentrant=True)
    with pytest.raises(KeyError, match="boom"):
        model[8](model[7](x)).square().mean().backward()
    moved = {"6.weight", "6.bias", "8.weight", "8.bias"}
    assert moved_names(model, before) == moved
    with pytest.raises(RuntimeError, match="ended with an exception") as error:
        optimizer.step()
    assert all(name in str(error.value) for name in moved) and "5.weight" not in str(error.value)
    assert model[5].weight.grad is None
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.state[model[5].weight]["step"] == 1 and optimizer.state[model[8].bias]["step"] == 2


def test_a_failure_of_the_launch_itself(gathered, monkeypatch):
    model = model_of()
    optimizer = forge.fuse(model, lr=LR, param_groups=groups_of(model, a=(["8.bias"], {"lr": 0.5})))
    before = before_and_names(model)
    counted = _small._launch

    def fails_at_second(o, buckets):
        if gathered.sizes:
            raise MemoryError("no room")
        counted(o, buckets)

    monkeypatch.setattr(_small, "_launch", fails_at_second)
    with pytest.raises(MemoryError):
        loss_of(model, 0).backward()
    monkeypatch.setattr(_small, "_launch", counted)
    moved = {n for n in before if n not in DENSE} | {"8.bias"}
    assert moved_names(model, before) == moved
    assert all(p.grad is None for n, p in model.named_parameters() if n not in moved)
    with pytest.raises(RuntimeError, match="8.bias") as error:
        optimizer.step()
    assert "1.weight" not in str(error.value)
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.state[model[8].bias]["step"] == 2 and optimizer.state[model[1].bias]["step"] == 1


def test_a_state_dict_in_the_middle_is_whole(gathered):
    """Taken inside a backward: everything that had its gradient has moved, with its states and its step."""
    model = model_of()
    optimizer = forge.fuse(model, lr=LR)
    before = before_and_names(model)
    taken = []
    model[4].weight.register_post_accumulate_grad_hook(
        lambda p: taken.append((copy.deepcopy(optimizer.state_dict()["state"]), moved_names(model, before)))
    )
    loss_of(model, 0).backward()
    state, moved = taken[0]
    assert {"5.weight", "5.bias", "6.bias", "8.bias"} <= moved and "1.weight" not in moved
    names = list(before)
    assert {names[key] for key in state} == moved
    assert all(values["step"] == 1 and values["exp_avg"].any() for values in state.values())
    optimizer.step()
    assert sorted(gathered.sizes) == [4, 4]


def test_a_full_queue_is_stepped_early(monkeypatch):
    monkeypatch.setattr(_small, "WAITING", 20)
    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR)))


def test_how_much_waits(gathered, monkeypatch):
    monkeypatch.setattr(_small, "WAITING", 20)
    model = model_of()
    optimizer = forge.fuse(model, lr=LR)
    loss_of(model, 0).backward()
    optimizer.step()
    assert sum(gathered.sizes) == len(DENSE) and len(gathered.sizes) > 2  # 12 elements are the largest


def test_two_updates_in_one_backward(gathered):
    """A later hook takes away the mark of the first, which lets a nested backward give the norm a second gradient."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    optimizer = forge.fuse(model, lr=LR)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x = model[0](data(0, 4, 6))
    (model[1](checkpoint(model[1], x, use_reentrant=True)) * data(1, 6)).sum().backward()
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [1, 1, 2, 2]


def test_sizes(gathered, monkeypatch):
    monkeypatch.setattr(_small, "SMALL", 10)
    model = model_of()
    optimizer = forge.fuse(model, lr=LR)
    loss_of(model, 0).backward()
    optimizer.step()
    few = [p for n, p in model.named_parameters() if n in DENSE and p.numel() <= 10]
    assert gathered.sizes == [len(few)] and 0 < len(few) < len(DENSE)


def test_gradients_and_optimizer_are_freed(gathered):
    model = nn.LayerNorm(6)
    optimizer = forge.fuse(model, lr=LR)
    seen = []
    model.weight.register_hook(lambda g: seen.append(weakref.ref(g)))
    (model(data(0, 4, 6)) * data(1, 6)).sum().backward()
    gone = [weakref.ref(optimizer), weakref.ref(model)]
    assert len(optimizer._queue._entries) == 0
    del model, optimizer
    gc.collect()
    assert [r() is None for r in gone + seen] == [True] * 3


def test_equal_groups_share_a_launch(gathered):
    model = model_of()
    groups = groups_of(model, a=(["1.weight", "1.bias"], {}), b=(["8.bias"], {"lr": LR}))
    optimizer = forge.fuse(model, lr=LR, when="step", param_groups=groups)
    loss_of(model, 0).backward()
    optimizer.step()
    assert gathered.sizes == [len(DENSE)]


@BOTH
def test_off_where_it_does_not_pay(monkeypatch, when):
    calls = Calls(monkeypatch)
    model = model_of()
    optimizer = forge.fuse(model, lr=LR, when=when)
    loss_of(model, 0).backward()
    optimizer.step()
    assert not calls.sizes
    assert not _small.pays(torch.device("cpu"), torch.float32)


def test_a_state_dict_on_another_thread_drops_nothing_of_a_running_backward(gathered):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = forge.fuse(model, "sgd", lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]

    def save_elsewhere(grad):
        thread = threading.Thread(target=optimizer.state_dict)
        thread.start()
        thread.join()
        return grad

    model[0].weight.register_hook(save_elsewhere)
    (model(torch.randn(3, 4)) * torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before))
