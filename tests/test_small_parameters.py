"""Small dense parameters stepped together: in every situation the bits of stepping each at once.

The gathering is switched on for the CPU here, where the operator is a loop; `tests/gpu/test_small.py` runs kernels.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer import _small
from fused_grad_optimizer.factored_grad import AppliedGrad
from fused_grad_optimizer.optimizer import FusedOptimizer
from tests.cases.helpers import BOTH, Explode, data

LR = 1e-2


class Calls:
    """Counts launches of `multi_step`, and how many parameters each took."""

    def __init__(self, monkeypatch):
        self.sizes = []
        launch = _small._launch

        def counted(optimizer, buckets):
            self.sizes.append(sum(len(bucket) for _, bucket in buckets))
            launch(optimizer, buckets)

        monkeypatch.setattr(_small, "_launch", counted)


@pytest.fixture
def gathered(monkeypatch):
    """Gathering on the CPU."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: True)
    return Calls(monkeypatch)


def groups_of(model, **groups_by_name):
    """Parameter groups that cover the model: those named, then all others."""
    made = dict(model.named_parameters())
    groups = [{"params": [made.pop(n) for n in names], **hyper} for names, hyper in groups_by_name.values()]
    return [*groups, {"params": list(made.values())}]


def model_of(dtype=torch.float32):
    """Four linears with biases and two norms: 8 small dense parameters, 4 factored weights, an embedding."""
    torch.manual_seed(0)
    block = [nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)]
    return nn.Sequential(
        nn.Embedding(7, 8), *copy.deepcopy(block), *copy.deepcopy(block)[:2], nn.Tanh(), nn.Linear(12, 3)
    ).to(dtype)  # fmt: skip


DENSE = [name for name, p in model_of().named_parameters() if p.dim() == 1]
IDS = torch.tensor([[0, 1, 2, 6], [3, 3, 4, 0]])


def loss_of(model, i, scale=1.0):
    return (model((IDS + i) % 7).float() * scale).square().mean()


def result(model, optimizer):
    """Everything that training leaves: weights, states, step counts, skips."""
    state = optimizer.state_dict()["state"]
    tensors = [p.detach().clone() for p in model.parameters()]
    for key in sorted(state):
        tensors += [torch.as_tensor(state[key][name]) for name in sorted(state[key])]
    return tensors, optimizer.skipped


def assert_both_ways(monkeypatch, run):
    """`run()` gives the same bits, skips and warnings with each stepped at once and with gathering."""
    found = []
    for on in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(_small, "pays", lambda device, dtype, on=on: on)
            calls = Calls(patch)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tensors, *others = run()
            assert bool(calls.sizes) == on
            found.append((tensors, [*others, sorted(str(w.message) for w in caught)]))
    assert len(found[0][0]) == len(found[1][0]) > 1
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def trained(make_optimizer, steps=3, dtype=torch.float32, after=lambda model, optimizer, i: None, loss=loss_of):
    model = model_of(dtype)
    optimizer = make_optimizer(model)
    for i in range(steps):
        loss(model, i).backward()
        after(model, optimizer, i)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


# -- equal to stepping each at once ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rule, hyper", [("adamw", {}), ("adam", {}), ("lion", {}), ("sgd", {}),
                                         ("sgd", {"momentum": 0.9})], ids=str)  # fmt: skip
def test_rules_and_dtypes(monkeypatch, rule, hyper, dtype, maximize, when):
    options = {"lr": LR, "maximize": maximize, "weight_decay": 0.1, "seed": 3, **hyper}
    assert_both_ways(
        monkeypatch, lambda: trained(lambda m: forge.fuse(m, rule, when=when, **options), 3, dtype)
    )  # fmt: skip


@BOTH
def test_against_torch_optim(gathered, when):
    dense, fused = model_of(), model_of()
    pairs = [(dense, torch.optim.AdamW(dense.parameters(), lr=LR, eps=1e-4)),
             (fused, forge.fuse(fused, lr=LR, eps=1e-4, when=when))]  # fmt: skip
    for i in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
    gap = max((p - q).abs().max().item() for p, q in zip(dense.parameters(), fused.parameters()))
    assert gap < 1e-3 * LR * 4
    assert gathered.sizes == [len(DENSE)] * 4


@BOTH
def test_groups_with_other_values_that_change(monkeypatch, when):
    def make(model):
        norms = ["1.weight", "1.bias", "5.weight", "5.bias"]
        groups = groups_of(model, norms=(norms, {"weight_decay": 0.0, "lr": 3 * LR, "maximize": True}))
        return forge.fuse(model, lr=LR, when=when, param_groups=groups)

    def change(model, optimizer, i):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)

    assert_both_ways(monkeypatch, lambda: trained(make, after=change))


@BOTH
@pytest.mark.parametrize("bad", [["1.weight"], ["1.weight", "4.bias"], DENSE])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(monkeypatch, when, bad, value):
    def make(model):
        optimizer = forge.fuse(model, lr=LR, when=when)
        forwards = []
        model.register_forward_hook(lambda *_: forwards.append(0))
        for name in bad:
            model.get_parameter(name).register_hook(lambda g: g * (value if len(forwards) == 2 else 1.0))
        return optimizer

    def run():
        tensors, skipped = trained(make, 3)
        assert skipped == dict.fromkeys(bad, 1)
        return tensors, skipped

    assert_both_ways(monkeypatch, run)


def test_clipping_and_accumulation(monkeypatch):
    def accumulate(model, optimizer, i):
        (loss_of(model, i + 1) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when="step"), after=accumulate))


def test_grad_scaler_with_an_inf(monkeypatch):
    def run():
        model = model_of()
        optimizer = forge.fuse(model, lr=LR, when="step")
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for i in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i, float("inf") if i == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[model[1].weight]["step"] == 3
        return result(model, optimizer)

    assert_both_ways(monkeypatch, run)


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpoints(monkeypatch, when, reentrant, whole):
    """Segments of one layer; or one segment that holds every small parameter."""

    def loss(model, i):
        x = model[0]((IDS + i) % 7)
        segments = [model[1:]] if whole else list(model[1:])
        for segment in segments:
            x = checkpoint(segment, x, use_reentrant=reentrant)
        return x.square().mean()

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), loss=loss))


@BOTH
def test_a_layer_reused_over_time(monkeypatch, when):
    def loss(model, i):
        x = model[0]((IDS + i) % 7)
        for _ in range(3):
            x = model[4](model[3](model[2](model[1](x))))
        return x.square().mean()

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), loss=loss))


@BOTH
def test_frozen_and_thawed(monkeypatch, when):
    def freeze(model, optimizer, i):
        model[1].weight.requires_grad_(i % 2 == 1)
        model[4].bias.requires_grad_(i != 1)

    assert_both_ways(monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), 5, after=freeze))


@BOTH
def test_two_optimizers_in_one_backward(monkeypatch, when):
    def run():
        model = model_of()
        first = FusedOptimizer(model[:4].parameters(), lr=LR, when=when)
        second = FusedOptimizer(model[4:].parameters(), "sgd", lr=LR, momentum=0.9, when=when)
        for i in range(3):
            loss_of(model, i).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return [*result(model, first)[0], *result(model, second)[0]], first.skipped

    assert_both_ways(monkeypatch, run)


@BOTH
def test_state_dict_round_trip(monkeypatch, when):
    def run():
        model = model_of(torch.bfloat16)
        optimizer = forge.fuse(model, lr=LR, when=when)
        for i in range(4):
            if i == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.release()
                optimizer = forge.fuse(model, lr=LR, when=when)
                optimizer.load_state_dict(saved)
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        return result(model, optimizer)

    assert_both_ways(monkeypatch, run)


@BOTH
def test_gradients_put_there_by_hand(monkeypatch, when):
    def replace(model, optimizer, i):
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.grad = torch.linspace(-1, 1, parameter.numel() * 2)[::2]

    def untouched(model, i):
        return model[0].weight.sum() * 0.0

    assert_both_ways(
        monkeypatch, lambda: trained(lambda m: forge.fuse(m, lr=LR, when=when), after=replace, loss=untouched)
    )  # fmt: skip


def test_a_manager(monkeypatch):
    """A fused weight that is used outside its module has a dense gradient, and is small."""

    def run():
        torch.manual_seed(0)
        layers = [forge.FusedLinear.from_linear(nn.Linear(6, 6), rule, "fp32", lr=LR) for rule in ("adamw", "lion")]
        model = nn.Sequential(*layers)
        manager = forge.FusedOptimizerManager(model)
        for i in range(3):
            manager.pre_step(lr=LR)
            F.linear(layers[1](data(i, 4, 6)), layers[0].weight).square().mean().backward()
        manager.pre_step()
        return [p.detach().clone() for p in model.parameters()], manager.skipped

    assert_both_ways(monkeypatch, run)


# -- when things move, and what an exception leaves --------------------------------------------------------------------


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
