"""Small parameters stepped together on a GPU: the bits of stepping each at once, few launches, no synchronisation."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import _small
from tests.cases.helpers import Explode
from tests.gpu.test_training import syncs_are_errors

pytestmark = pytest.mark.gpu
LR = 1e-2
BOTH = pytest.mark.parametrize("when", ["backward", "step"])


def model_of(dtype=torch.bfloat16, blocks=6, dim=96):
    """Norms and biases of `blocks` blocks; one bias has 3 elements."""
    torch.manual_seed(0)
    layers = []
    for _ in range(blocks):
        layers += [nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(dim, 3)).to("cuda", dtype)


def inputs(i, dtype, dim=96):
    return torch.randn(8, dim, generator=torch.Generator().manual_seed(i)).to("cuda", dtype)


def trained(when, dtype, rule="adamw", stream=None, bad=None, **hyper):
    model = model_of(dtype)
    norms = [p for n, p in model.named_parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": norms, "lr": 0.5 * LR}, {"params": others}]
    optimizer = forge.fuse(model, rule, lr=LR, when=when, param_groups=groups, **hyper)
    steps = []
    model[3].weight.register_hook(lambda g: g * float("nan") if bad is not None and len(steps) == bad else g)
    for i in range(4):
        loss = model(inputs(i, dtype)).float().square().mean()
        if stream is None:
            loss.backward()
        else:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss.backward()
            torch.cuda.current_stream().wait_stream(stream)
        if when == "step" and bad is None:  # clipping would spread the NaN
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(i)
    state = optimizer.state_dict()["state"]
    tensors = [p.detach().clone() for p in model.parameters()]
    return tensors + [torch.as_tensor(state[k][n]) for k in sorted(state) for n in sorted(state[k])], optimizer.skipped


def one_by_one(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(_small, "pays", lambda device, dtype: False)
        return trained(*args, **kwargs)


def assert_same(found, wanted):
    assert len(found[0]) == len(wanted[0]) > 1 and found[1] == wanted[1]
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0]))


@BOTH
@pytest.mark.parametrize("state", [None, "fp32", "bf16-nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["adamw", "adam", "lion", "sgd"])
def test_the_bits_of_one_by_one(monkeypatch, rule, dtype, state, when):
    options = {"rule": rule, "state": state, "maximize": rule == "lion"}
    assert_same(trained(when, dtype, **options), one_by_one(monkeypatch, when, dtype, **options))


@BOTH
@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_nan_in_one_norm(monkeypatch, when):
    found = trained(when, torch.bfloat16, bad=2)
    assert found[1] == {"3.weight": 1}
    assert_same(found, one_by_one(monkeypatch, when, torch.bfloat16, bad=2))


@BOTH
def test_backward_on_another_stream(monkeypatch, when):
    wanted = one_by_one(monkeypatch, when, torch.float32)
    for _ in range(5):
        assert_same(trained(when, torch.float32, stream=torch.cuda.Stream()), wanted)


@BOTH
def test_forward_on_another_stream_than_backward(when):
    """Accumulation runs on the stream of the forward; the flush at the end of backward on the caller's."""
    found = []
    for stream in (None, torch.cuda.Stream()):
        model = model_of(torch.float32)
        optimizer = forge.fuse(model, lr=LR, when=when)
        for i in range(4):
            x = inputs(i, torch.float32)
            if stream is None:
                loss = model(x).square().mean()
            else:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss = model(x).square().mean()
                torch.cuda.current_stream().wait_stream(stream)
            loss.backward()
            torch.full((1 << 20,), float("nan"), device="cuda")  # takes memory that was freed too early
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@BOTH
def test_no_host_synchronisation(when):
    model = model_of()
    optimizer = forge.fuse(model, lr=LR, when=when)
    xs = [inputs(i, torch.bfloat16) for i in range(3)]

    def one_step(x):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    one_step(xs[0])
    with syncs_are_errors():
        one_step(xs[1])
        one_step(xs[2])


@BOTH
def test_launches(when):
    """19 norms and biases in one launch of the check and one of the step."""
    model = model_of()
    optimizer = forge.fuse(model, lr=LR, when=when)
    for i in range(2):
        optimizer.zero_grad()
        model(inputs(i, torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler, about cycles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(inputs(2, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "multi" in event.name]
    assert sum("nonfinite" in n for n in names) == 1 and sum("forge_multi_adamw" in n for n in names) == 1
    # the factors of the last weight [3, 96] are larger than it: when="step" folded them into a dense gradient
    others = [e.name for e in profile.events() if e.name.startswith("forge_param")]
    assert len(others) == (1 if when == "step" else 0)


@BOTH
def test_an_exception_drops_what_waits(when):
    model = model_of(torch.float32)
    optimizer = forge.fuse(model, lr=LR, when=when)
    before = [p.detach().clone() for p in model.parameters()]
    for attempt in range(3):
        with pytest.raises(KeyError, match="boom"):
            model[9:](Explode.apply(model[:9](inputs(attempt, torch.float32)))).square().mean().backward()
        if when == "backward":
            with pytest.raises(RuntimeError, match="ended with an exception") as error:
                optimizer.step()
            assert "bias" not in str(error.value) and model[9].weight.grad is None
        optimizer.zero_grad()
    small = [(p, q) for p, q in zip(model.parameters(), before) if p.dim() == 1]
    assert all(torch.equal(p, q) for p, q in small)
    model(inputs(0, torch.float32)).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in small)
    assert {optimizer.state[p]["step"] for p, _ in small} == {1}


@BOTH
def test_equals_torch_optim(when):
    dense = model_of(torch.float32)
    fused = copy.deepcopy(dense)
    pairs = [(dense, torch.optim.AdamW(dense.parameters(), lr=1e-3, eps=1e-4)),
             (fused, forge.fuse(fused, lr=1e-3, eps=1e-4, when=when))]  # fmt: skip
    for i in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(inputs(i, torch.float32)).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(dense.named_parameters(), fused.parameters()):
        assert (p - q).abs().max().item() < 1e-3 * 1e-3 * 5, name  # a thousandth of the way that lr allows
