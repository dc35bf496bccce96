"""Launches through the CUDA driver against Triton's own, bit for bit, and steps by plans against the general way."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import _plans, ops
from fused_grad_optimizer.kernels import Gradient, Target, cuda_driver, dispatch, finite, launcher
from fused_grad_optimizer.rules import UPDATES
from fused_grad_optimizer.storage import STORAGES

pytestmark = pytest.mark.gpu
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
ADAMW = UPDATES["adamw"]


def noise(seed, *shape, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def make_target(n, k, storage):
    dtype = STORAGES[storage].dtype
    states = [noise(i, n, k, dtype=torch.float32).abs().mul(0.01).to(dtype) for i in (1, 2)]
    return Target(noise(0, n, k, dtype=dtype), states, [storage] * 3, 3)


def make_gradient(n, k, tokens, dtype, wide=0, scaled=False):
    dys = [noise(10 + i, t, n + wide, dtype=dtype)[:, :n] for i, t in enumerate(tokens)]
    xs = [noise(20 + i, t, k + wide, dtype=dtype)[:, :k] for i, t in enumerate(tokens)]
    return Gradient(dys, xs, scale=torch.full((), 0.37, device="cuda") if scaled else None)


def fresh(n, k, storage="bf16"):
    """A target, a flag that is not aligned to 16 bytes, and scalars."""
    target = make_target(n, k, storage)
    flag = torch.zeros(8, dtype=torch.int32, device="cuda")[3]
    return target, flag, ops.make_scalars(ADAMW, HYPER, 3, False, 0, target.weight.device, target.weight.dtype)


def stepped(gradient, n, k, storage):
    target, flag, scalars = fresh(n, k, storage)
    ops.step(target, gradient, ADAMW, scalars, flag)
    return [target.weight, *target.states]


def by_triton(monkeypatch, function):
    with monkeypatch.context() as patch:
        patch.setattr(cuda_driver, "_STATE", [None])
        return function()


CASES = {
    "bf16": (256, 512, (64,), torch.bfloat16, "bf16", {}),
    "bf16 factors, fp32 weight": (256, 512, (64,), torch.bfloat16, "fp32", {}),
    "fp32": (256, 512, (64,), torch.float32, "fp32", {}),
    "uneven": (136, 272, (77,), torch.bfloat16, "bf16", {"scaled": True}),
    "odd, fp32": (37, 29, (11,), torch.float32, "fp32", {"scaled": True}),
    "two pairs": (256, 256, (64, 33), torch.bfloat16, "bf16", {}),
    "two pairs, fp32": (256, 256, (64, 33), torch.float32, "fp32", {}),
    "strided": (128, 256, (64,), torch.bfloat16, "bf16", {"wide": 64}),
    "strided, fp32": (128, 256, (64,), torch.float32, "fp32", {"wide": 3}),
    "large": (1024, 4096, (512,), torch.bfloat16, "bf16", {}),
}


@pytest.mark.parametrize("kernel", [None, dispatch.PORTABLE])
@pytest.mark.parametrize("name", CASES)
def test_a_fused_step_has_tritons_bits(directly, monkeypatch, name, kernel):
    n, k, tokens, dtype, storage, options = CASES[name]
    if kernel is not None:
        monkeypatch.setenv("FORGE_KERNEL", kernel)
    gradient = make_gradient(n, k, tokens, dtype, **options)
    wanted = by_triton(monkeypatch, lambda: stepped(gradient, n, k, storage))
    stepped(gradient, n, k, storage)
    directly.clear()
    found = stepped(gradient, n, k, storage)
    assert len(directly) == 1 and launcher.refusals() == {}
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("dtype, storage", [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_a_dense_step_has_tritons_bits(directly, monkeypatch, dtype, storage):
    gradient = Gradient([], [], dense=noise(7, 33, 1001, dtype=dtype))
    wanted = by_triton(monkeypatch, lambda: stepped(gradient, 33, 1001, storage))
    stepped(gradient, 33, 1001, storage)
    directly.clear()
    found = stepped(gradient, 33, 1001, storage)
    assert len(directly) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def flag_of(tensors):
    flag = torch.zeros(8, dtype=torch.int32, device="cuda")[3]
    finite.check(tensors, flag)
    return flag.item()


def test_the_finite_check_finds_every_element(directly):
    wide = noise(0, 67, 3000)
    wide[:, :8], wide[:, 2600:] = float("nan"), float("inf")
    shapes = {0: (64, 256), 2: (5, 7), 3: (20001,), 4: ()}

    def tensors():
        made = {i: noise(i, *shape, dtype=torch.float32 if i > 1 else torch.bfloat16) for i, shape in shapes.items()}
        return [made[0], wide[:, 8:2600].clone().as_strided((67, 2592), (2592, 1)), made[2], made[3], made[4]]

    assert flag_of(tensors()) == 0 and flag_of([wide[:, 8:2600], noise(1, 3, 8)]) == 0
    assert flag_of([wide[:, 7:2600], noise(1, 3, 8)]) == 1 and flag_of([wide[:, 8:2601], noise(1, 3, 8)]) == 1
    for i in range(5):
        for place in (0, tensors()[i].numel() // 2, -1):
            bad = tensors()
            bad[i].view(-1)[place] = float("inf") if place else float("nan")
            assert flag_of(bad) == 1, (i, place)
    assert directly


def model_and_data(dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256), nn.Linear(256, 40)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    return model, [noise(i, tokens, 256, dtype=dtype) for i, tokens in enumerate([64, 64, 64, 48, 48, 48, 64, 64, 33])]


def trained(model, batches, when):
    optimizer = forge.fuse(model, "adamw", lr=1e-3, when=when)
    for x in batches:
        model(x).float().square().mean().backward()
        if when == "step":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_by_plans_has_the_bits_of_the_general_way(directly, monkeypatch, when, dtype):
    model, batches = model_and_data(dtype)
    other = copy.deepcopy(model)
    by_plans, optimizer = trained(model, batches, when)
    assert any(record.plan is not None and record.plan.bound for record in optimizer._records.values())
    assert directly and launcher.refusals() == {}
    monkeypatch.setattr(_plans, "make", lambda *_: None)
    in_general, _ = by_triton(monkeypatch, lambda: trained(other, batches, when))
    assert all(torch.equal(a, b) for a, b in zip(by_plans, in_general))


def test_a_weight_that_moves_is_stepped_where_it_is():
    model, batches = model_and_data(torch.bfloat16)
    other = copy.deepcopy(model)
    results = []
    for moves, m in ((True, model), (False, other)):
        optimizer = forge.fuse(m, "adamw", lr=1e-3, when="step")
        kept = []
        for i, x in enumerate([batches[0]] * 9):
            m(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if moves and i == 5:
                for p in m.parameters():
                    kept.append(p.data)
                    p.data = p.data.clone()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                before = [t.clone() for t in kept]
        results.append(list(m.parameters()))
        assert not moves or all(torch.equal(a, b) for a, b in zip(kept, before))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("tokens", [(64,), (64, 32)])
def test_a_captured_graph_replays_direct_launches(directly, tokens):
    n, k = 256, 512
    gradient = make_gradient(n, k, tokens, torch.bfloat16)
    wanted = stepped(gradient, n, k, "bf16")
    target, flag, scalars = fresh(n, k)
    before = [t.clone() for t in (target.weight, *target.states)]
    if len(tokens) == 1 or dispatch.choose(gradient, n, k, before)[0] == dispatch.HOPPER:
        for _ in range(2):
            ops.check_finite([*gradient.dys, *gradient.xs], flag)
            ops.step(target, gradient, ADAMW, scalars, flag)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        directly.clear()
        with torch.cuda.graph(graph):
            ops.check_finite([*gradient.dys, *gradient.xs], flag)
            ops.step(target, gradient, ADAMW, scalars, flag)
        assert len(directly) == 2
        for now, then in zip((target.weight, *target.states), before):
            now.copy_(then)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip((target.weight, *target.states), wanted))


def test_it_launches_on_the_current_stream(directly):
    """The operand is written late on a side stream: a launch on another stream would read it too early."""
    n, k = 512, 512
    gradient = make_gradient(n, k, (64,), torch.bfloat16)
    wanted = stepped(gradient, n, k, "bf16")
    target, flag, scalars = fresh(n, k)
    x = gradient.xs[0].clone()
    gradient.xs[0].zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    directly.clear()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        gradient.xs[0].copy_(x)
        ops.step(target, gradient, ADAMW, scalars, flag)
    side.synchronize()
    assert directly
    assert all(torch.equal(a, b) for a, b in zip((target.weight, *target.states), wanted))


def test_a_thread_that_has_not_used_cuda_yet(directly):
    n, k = 256, 256
    gradient = make_gradient(n, k, (64,), torch.bfloat16)
    wanted = stepped(gradient, n, k, "bf16")
    target, flag, scalars = fresh(n, k)
    torch.cuda.synchronize()
    errors = []

    def run():
        try:
            ops.step(target, gradient, ADAMW, scalars, flag)
        except BaseException as error:  # reported by the assertion below
            errors.append(error)

    directly.clear()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors and directly
    assert all(torch.equal(a, b) for a, b in zip((target.weight, *target.states), wanted))
