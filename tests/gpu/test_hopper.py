"""The Hopper kernel against fp64 and, bit for bit, against the same mainloop followed by `param_step`."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import Gradient, dispatch
from fused_grad_optimizer.kernels.configs import HOPPER, hopper_config
from fused_grad_optimizer.kernels.tuning import Choice
from fused_grad_optimizer.rules import UPDATES
from tests.gpu.steps import HYPER, copy_of, make_target, noise, take_step

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("FORGE_KERNEL", "wgrad_step_hopper")
    if torch.cuda.get_device_capability() != (9, 0) or dispatch.hopper_kernel() is None:
        pytest.skip("needs a Hopper GPU and a Triton that the kernel compiles with")


def factors(n, k, tokens, dtype=torch.bfloat16, scale=None):
    """A Gradient of one (dY, X) pair for each number of tokens."""
    dys = [noise(2 * i, t, n, dtype=dtype) / t**0.5 for i, t in enumerate(tokens)]
    return Gradient(dys, [noise(2 * i + 1, t, k, dtype=dtype) for i, t in enumerate(tokens)], scale=scale)


def dense(gradient, n, k):
    """The gradient in fp32 by the kernel's own mainloop, written over NaN."""
    return ops.wgrad(gradient, torch.Size((n, k)), 0, n, torch.float32)


def step_with(config, target, gradient, update):
    """`take_step` by the Hopper kernel in a configuration that need not be the one it would take."""
    stores, stochastic = ops._stores(target.storages)
    scalars = ops.make_scalars(update, HYPER, 3, False, 0, target.weight.device, target.weight.dtype)
    dispatch.hopper_kernel().launch(
        gradient, *target.weight.shape, config, target=target, scalars=scalars.values, keys=scalars.keys,
        update=update, stores=stores, stochastic=stochastic,
    )  # fmt: skip


def assert_takes(gradient, n, k, *tensors):
    assert dispatch.choose(gradient, n, k, list(tensors))[0] == dispatch.HOPPER


def assert_same(a, b):
    assert torch.equal(a.weight, b.weight)
    assert all(torch.equal(x, y) for x, y in zip(a.states, b.states))


@pytest.mark.parametrize(
    "weight, state",
    [("bf16", "bf16"), ("bf16-nearest", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "fp32")],
)
@pytest.mark.parametrize("n, k", [(336, 1008), (336, 1024), (200, 1056), (24, 64)])  # whole lanes of 128 bytes or not
@pytest.mark.parametrize("name", UPDATES)
def test_fused_equals_unfused_bit_for_bit(name, n, k, weight, state):
    update = UPDATES[name]
    gradient = factors(n, k, (70, 1, 64), scale=torch.tensor(0.3, device="cuda"))
    fused = make_target(update, n, k, weight, state)
    unfused = copy_of(fused)
    assert_takes(gradient, n, k, fused.weight, *fused.states)
    take_step(fused, gradient, update)
    take_step(unfused, Gradient([], [], dense=dense(gradient, n, k)), update)
    assert_same(fused, unfused)


@pytest.mark.parametrize("tokens", [(4096,), (2048, 1, 2100)], ids=str)
@pytest.mark.parametrize("weight, state", [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("name", UPDATES)
def test_wide_tiles_step_bit_for_bit_as_narrow_ones(name, weight, state, tokens):
    """Many tokens of a weight with work for all multiprocessors; the sums of both are of 16 tokens at a time."""
    update, n, k = UPDATES[name], 1024, 4096
    scale = torch.tensor(0.3, device="cuda") if len(tokens) > 1 else None
    gradient = factors(n, k, tokens, scale=scale)
    wide = make_target(update, n, k, weight, state)
    start, unfused = copy_of(wide), copy_of(wide)
    tensors = [wide.weight, *wide.states]
    _, options = dispatch.launcher(Choice(HOPPER), n, k, tensors, sum(tokens), torch.bfloat16)
    assert (options["config"].block_k, options["config"].mma_warps) == (256, 8)
    take_step(wide, gradient, update)
    take_step(unfused, Gradient([], [], dense=dense(gradient, n, k)), update)
    assert_same(wide, unfused)
    other_order = dataclasses.replace(options["config"], group=3)
    for config in (hopper_config(sum(t.element_size() for t in tensors)), other_order):
        other = copy_of(start)
        step_with(config, other, gradient, update)
        assert_same(wide, other)


@pytest.mark.parametrize("seed", range(200))
def test_random_shapes_against_fp64(seed):
    """Within twice the error of torch's own product of the same tensors."""
    rng = random.Random(seed)
    n, k = rng.randint(1, 700), 16 * rng.randint(1, 60)
    tokens = tuple(rng.randint(1, 400) for _ in range(rng.randint(1, 4)))
    n += -n % 8  # rows of dY begin at multiples of 16 bytes
    gradient = factors(n, k, tokens, rng.choice([torch.bfloat16, torch.float16]))
    out = torch.empty(0, device="cuda")
    assert_takes(gradient, n, k, out)
    exact = sum(dy.double().t() @ x.double() for dy, x in zip(gradient.dys, gradient.xs))
    torchs = torch.mm(torch.cat(gradient.dys).t(), torch.cat(gradient.xs), out_dtype=torch.float32)
    error = (dense(gradient, n, k) - exact).norm()
    assert error <= 2 * (torchs - exact).norm() + 1e-6 * exact.norm()


def test_rows_of_a_wider_tensor():
    """dY and X as slices: a row stride that is larger than the row."""
    update, n, k = UPDATES["adamw"], 128, 256
    wide_dy, wide_x = noise(0, 200, 512) * 0.1, noise(1, 200, 1024)
    sliced = Gradient([wide_dy[:, 64:192]], [wide_x[:, 128:384]])
    fused = make_target(update, n, k)
    wanted = copy_of(fused)
    assert_takes(sliced, n, k, fused.weight)
    take_step(fused, sliced, update)
    take_step(wanted, Gradient([sliced.dys[0].contiguous()], [sliced.xs[0].contiguous()]), update)
    assert_same(fused, wanted)


@pytest.mark.parametrize("k", [1024, 1040])
def test_a_thousand_runs_have_the_same_bits(k):
    update, n = UPDATES["adamw"], 1024
    gradient, start = factors(n, k, (300,)), make_target(update, n, k)
    first = copy_of(start)
    take_step(first, gradient, update)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = copy_of(start)
        take_step(again, gradient, update)
        different += (again.weight != first.weight).sum() + sum(
            (a != b).sum() for a, b in zip(again.states, first.states)
        )
    assert different.item() == 0


def test_a_flag_leaves_everything_untouched():
    update, n, k = UPDATES["adamw"], 256, 256
    fused = make_target(update, n, k)
    before = copy_of(fused)
    take_step(fused, factors(n, k, (64,)), update, torch.ones(1, dtype=torch.int32, device="cuda"))
    assert_same(fused, before)


def test_what_it_cannot_take_goes_to_the_portable_kernel(monkeypatch):
    monkeypatch.delenv("FORGE_KERNEL")
    gradient = factors(128, 256, (64,))
    out = torch.empty(128, 256, device="cuda")
    assert dispatch.choose(gradient, 128, 256, [out], storing=True)[0] == dispatch.HOPPER
    unaligned = Gradient([noise(0, 64, 129)[:, 1:]], [noise(1, 64, 256)])
    for declined, n, k in (
        (unaligned, 128, 256),
        (factors(128, 200, (64,)), 128, 200),
        (factors(128, 256, (64,), torch.float32), 128, 256),
        (factors(128, 256, (8,) * 5), 128, 256),
    ):
        kernel, reason = dispatch.choose(declined, n, k, [out], storing=True)
        assert kernel == dispatch.PORTABLE and reason
        assert dispatch.choose(declined, n, k, [out])[0] in (dispatch.PORTABLE, dispatch.CHUNKED)
        exact = sum(dy.double().t() @ x.double() for dy, x in zip(declined.dys, declined.xs))
        assert (dense(declined, n, k) - exact).norm() <= 1e-5 * exact.norm()
    monkeypatch.setenv("FORGE_KERNEL", "wgrad_step")
    assert dispatch.choose(gradient, 128, 256, [out])[0] == dispatch.PORTABLE
    monkeypatch.setenv("FORGE_KERNEL", "wgrad_step_hopper")
    dispatch._say_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="FORGE_KERNEL=wgrad_step_hopper is not followed"):
        assert dispatch.choose(unaligned, 128, 256, [out])[0] == dispatch.PORTABLE
