"""Host time of one layer update: what eager training pays for each layer besides the kernels.

Limits are shares of what forward and backward of a plain layer take on the same machine, so that they hold for slow
hosts too: 82 .. 115 us on the hosts of H200s, where an update took 25.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import threading
import time

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedOptimizer, _hooks
from fused_grad_optimizer import optimizer as optimizer_module
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import cuda_driver, finite, launcher

pytestmark = pytest.mark.gpu
SAMPLES = 60
LAYERS, WIDTH, TOKENS = 64, 256, 64  # so small that the device is never waited for


@pytest.fixture(autouse=True)
def quiet():
    if cuda_driver.active() is None:
        pytest.skip("needs the CUDA driver")
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def layers(dtype=torch.bfloat16):
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda").to(dtype)) for _ in range(LAYERS)]


def factors(count=1, dtype=torch.bfloat16):
    return [
        [tuple(torch.randn(TOKENS, WIDTH, device="cuda").to(dtype) for _ in range(2)) for _ in range(count)]
        for _ in range(LAYERS)
    ]


def give_gradients(parameters, pairs):
    for parameter, some in zip(parameters, pairs):
        parameter.grad = FactoredGrad(parameter.shape, parameter.dtype, pairs=some)


def microseconds(run, prepare) -> float:
    """Median us a layer of `run`, with the device idle before it; prints the least and the ninth decile."""
    times = []
    for _ in range(SAMPLES):
        prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / LAYERS * 1e6)
    torch.cuda.synchronize()
    print(f"[{min(times):.1f} .. {statistics.quantiles(times[5:], n=10)[-1]:.1f}]", end=" ")
    return statistics.median(times[5:])


def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to("cuda", torch.bfloat16)


def inputs():
    return torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)


def plain_layer() -> float:
    """us of forward and backward of a layer that FORGE has nothing to do with."""
    plain, x = model(), inputs()
    return microseconds(lambda: plain(x).sum().backward(), plain.zero_grad)


@pytest.mark.parametrize("dtype, pairs", [(torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 2)])
def test_one_layer_update_in_step(dtype, pairs):
    if pairs > 1 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the portable kernel takes several pairs by a table, which is made for each launch")
    parameters, made = layers(dtype), factors(pairs, dtype)
    optimizer = FusedOptimizer(parameters, "adamw", lr=1e-3, when="step")
    print()
    found = microseconds(optimizer.step, lambda: give_gradients(parameters, made))
    print(f"{dtype}, {pairs} pair(s): {found:.1f} us a layer in step(); launched by Triton: {launcher.refusals()}")
    give_gradients(parameters, made)
    torch.cuda.synchronize()
    with cProfile.Profile() as profile:
        optimizer.step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    assert found < 0.5 * (1 + pairs) * plain_layer()


def test_what_a_backward_costs_more_than_one_of_plain_layers():
    """Forward and backward with updates in backward, against the same with ordinary gradients."""
    fused, x = model(), inputs()
    optimizer = forge.fuse(fused, "adamw", lr=1e-3, when="backward")

    def clear():
        optimizer.step()
        optimizer.zero_grad()

    ordinary, updating = plain_layer(), microseconds(lambda: fused(x).sum().backward(), clear)
    print(f"\nforward + backward: {ordinary:.1f} us a layer, with updates {updating:.1f}")
    assert updating < 2.2 * ordinary


def test_where_the_time_of_a_backward_goes(monkeypatch):
    """Each line does more than the one above it, those with a clock aside. Nothing may take the general way, or run on
    a second thread."""
    x, general, threads = inputs(), [], set()
    found = {"plain layers": plain_layer()}
    factored = forge.convert(model())
    found["factored gradients"] = microseconds(lambda: factored(x).sum().backward(), factored.zero_grad)
    for parameter in factored.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
    found["  and an empty hook"] = microseconds(lambda: factored(x).sum().backward(), factored.zero_grad)
    stepped, updated = model(), model()
    later = forge.fuse(stepped, "adamw", lr=1e-3, when="step")
    found["when='step', without step()"] = microseconds(lambda: stepped(x).sum().backward(), later.zero_grad)
    now = forge.fuse(updated, "adamw", lr=1e-3, when="backward")

    def clear():
        now.step()
        now.zero_grad()

    for _ in range(4):
        updated(x).sum().backward()
        clear()
    original, encoded = optimizer_module.step, []
    encode = cuda_driver.CudaDriver.encode
    monkeypatch.setattr(optimizer_module, "step", lambda *args: (general.append(args), original(*args)))
    monkeypatch.setattr(cuda_driver.CudaDriver, "encode", lambda *args: (encoded.append(1), encode(*args))[1])
    found["when='backward'"] = microseconds(lambda: updated(x).sum().backward(), clear)
    apply, inside = _hooks._apply_gradient, []

    def timed(*args):
        start = time.perf_counter()
        apply(*args)
        inside.append(time.perf_counter() - start)

    monkeypatch.setattr(_hooks, "_apply_gradient", timed)
    found["  with a clock in the hooks"] = microseconds(lambda: updated(x).sum().backward(), clear)
    found["  of which in the hooks"] = statistics.median(inside) * 1e6
    print("\n" + "\n".join(f"{name:30s} {time:6.1f} us a layer" for name, time in found.items()))
    print(f"hooks ran on {len(threads)} thread(s); {len(encoded) / SAMPLES / LAYERS:.2f} tensor maps encoded a layer")
    assert not general and len(threads) == 1
    assert len(encoded) < SAMPLES * LAYERS


def test_lengths_that_change_each_step():
    """The general way, launched directly."""
    parameters = layers()
    optimizer = FusedOptimizer(parameters, "adamw", lr=1e-3, when="step")
    lengths = iter(range(1, 1000))

    def prepare():
        tokens = 8 * next(lengths)
        made = [tuple(torch.zeros(tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))]
        give_gradients(parameters, [made] * LAYERS)

    found = microseconds(optimizer.step, prepare)
    print(f"\na new length each step: {found:.1f} us a layer")
    assert found < 4 * plain_layer()


def test_the_parts():
    """Launches alone."""
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    tensors = [torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    finite.check(tensors, flag)
    _, positional, constants = finite.arguments(tensors, flag)
    direct = launcher.find(finite.nonfinite_kernel, positional, constants)
    assert isinstance(direct, launcher.DirectLaunch)
    numbers, _ = direct.values(positional)

    def each(function):
        def run():
            for _ in range(LAYERS):
                function()

        return microseconds(run, lambda: None)

    parts = {
        "one launch, arguments in place": lambda: direct.run((1, 1, 1), direct.arguments, numbers),
        "one launch by the general way": lambda: finite.check(tensors, flag),
        "one launch by Triton": lambda: finite.nonfinite_kernel[(1,)](*positional, **constants),
        "an empty torch operation on the device": lambda: flag.zero_(),
    }
    found = {name: each(function) for name, function in parts.items()}
    print("\n" + "\n".join(f"{name:40s} {time:6.2f} us" for name, time in found.items()))
    in_place, _, triton, _ = found.values()
    assert in_place < triton
