"""`explain` names the path that a step takes; FORGE_KERNEL is followed, or it is said that it is not."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer.explain import explain
from fused_grad_optimizer.kernels import dispatch, tuning
from fused_grad_optimizer.kernels.configs import CHUNKED, HOPPER, PORTABLE

BF16 = {"device": "cpu", "weight_dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.delenv("FORGE_KERNEL", raising=False)
    dispatch._say_once.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch):
    """CPU tensors pass for those of a Hopper card without a table."""
    pytest.importorskip("triton")
    monkeypatch.setattr(sys.modules[explain.__module__], "triton_reason", lambda device, dtype: None)
    monkeypatch.setattr(dispatch, "_is_hopper", lambda device: True)
    if dispatch.hopper_kernel() is None:
        pytest.skip("this Triton has no Gluon for the Hopper kernel")


def test_path_reason_and_crossover(on_hopper):
    for tokens, path in ((512, HOPPER), (40000, CHUNKED)):
        found = explain(4096, 4096, tokens, **BF16)
        assert found.path == path and found.crossover == 32768
        assert f"{HOPPER} up to T=32768" in found.reason and f"T={tokens}" in found.reason


def test_on_the_cpu():
    found = forge.explain(64, 64, 512, device="cpu", weight_dtype=torch.float32, rule="lion", weight="nearest")
    assert found.path == "tile_cpu" and found.crossover is None and "lion" in found.reason


def test_a_weight_that_several_layers_share(on_hopper):
    """The tokens of all uses count; with an embedding's rows among them no Hopper kernel takes it."""
    assert explain(4096, 4096, 10_000, **BF16).path == HOPPER
    assert explain(4096, 4096, 10_000, uses=4, **BF16).path == CHUNKED
    tied = explain(4096, 4096, 512, embedding=True, **BF16)
    assert tied.path == PORTABLE and "rows of an embedding" in tied.reason
    assert explain(4096, 4096, 8, uses=5, **BF16).path == PORTABLE  # more pairs than that kernel takes


def test_rings_that_do_not_fit_are_not_said_to_run(on_hopper, monkeypatch):
    large = tuning.choice(HOPPER, {"stages": 8, "slots": 4})
    monkeypatch.setattr(tuning, "ranges", lambda *key: tuning.Ranges((), (large,), "a table"))
    found = explain(4096, 4096, 512, **BF16)
    assert found.path == HOPPER and "stages=8 does not fit here" in found.reason


def test_rows_that_are_not_stored_in_whole_vectors(on_hopper):
    assert "multiples of 16" in explain(64, 120, 8, **BF16).reason


@pytest.mark.parametrize("changes", [
    {"n": 0}, {"n": -5}, {"n": "a"}, {"k": 2.5}, {"t": 0}, {"t": 512.5}, {"uses": 0}, {"device": "abacus"},
    {"device": "cuda:99"}, {"weight_dtype": torch.int32}, {"weight_dtype": "float32"}, {"input_dtype": torch.int8},
    {"rule": "adagrad"}, {"state": "int3"}, {"weight": "up"},
], ids=str)  # fmt: skip
def test_wrong_arguments(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        explain(**{"n": 8, "k": 8, "t": 8, **BF16, **changes})


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 24))


@pytest.mark.parametrize("when", ["step", "backward"])
@pytest.mark.parametrize("value", ["fastest", ""])
def test_an_unknown_path_is_refused_before_anything_moves(value, when, monkeypatch):
    model = small_model()
    before = [p.clone() for p in model.parameters()]
    optimizer = forge.fuse(model, "sgd", lr=0.1, when=when)
    monkeypatch.setenv("FORGE_KERNEL", value)
    with pytest.raises(ValueError, match="FORGE_KERNEL=.* is not a path; use one of"):
        model(torch.ones(3, 16)).sum().backward()
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before))
    with pytest.raises(ValueError, match="FORGE_KERNEL"):
        explain(8, 8, 8, **BF16)
    monkeypatch.delenv("FORGE_KERNEL")
    optimizer.zero_grad()
    model(torch.ones(3, 16)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_a_path_that_nothing_follows_is_said_once(monkeypatch):
    monkeypatch.setenv("FORGE_KERNEL", CHUNKED)
    model = small_model()
    optimizer = forge.fuse(model, "sgd", lr=0.1, when="step")
    model(torch.ones(3, 16)).sum().backward()
    with pytest.warns(RuntimeWarning, match=f"FORGE_KERNEL={CHUNKED} is not followed: no Triton kernels on device"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain(8, 8, 8, **BF16)
        model(torch.ones(3, 16)).sum().backward()
        optimizer.step()
