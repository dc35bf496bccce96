"""Host time of one layer update: what eager training pays for each layer besides the kernels.

Limits are shares of what forward and backward of a plain layer take on the same machine, so that they hold for slow
hosts too: 82 .. 115 us on the hosts of H200s, where an update took 25.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import threading
import time

import pytest
import torch

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedOptimizer, _hooks
from fused_grad_optimizer import optimizer as optimizer_module
from fused_grad_optimizer.cli.benchmarks import host
from fused_grad_optimizer.kernels import cuda_driver, finite, launcher

pytestmark = pytest.mark.gpu
SAMPLES = 60
LAYERS, WIDTH = 64, 256  # so small that the device is never waited for
SETTINGS = host.HostSettings(
    LAYERS, WIDTH, tokens=64, rounds=SAMPLES - host.WARMUP, dtype=torch.bfloat16, device=torch.device("cuda")
)


@pytest.fixture(autouse=True)
def quiet():
    if cuda_driver.active() is None:
        pytest.skip("needs the CUDA driver")
    with host.no_collection():
        yield


def microseconds(case: host.Case) -> float:
    """Median us a layer; prints the least and the ninth decile."""
    times = host.microseconds(case, SETTINGS)
    print(f"[{times.least:.1f} .. {times.ninth_decile:.1f}]", end=" ")
    return times.us


def plain_layer() -> float:
    return microseconds(host.plain(SETTINGS))


@pytest.mark.parametrize("dtype, pairs", [(torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 2)])
def test_one_layer_update_in_step(dtype, pairs):
    if pairs > 1 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the portable kernel takes several pairs by a table, which is made for each launch")
    case = host.stepping(SETTINGS, dtype, pairs)
    print()
    found = microseconds(case)
    print(f"{dtype}, {pairs} pair(s): {found:.1f} us a layer in step(); launched by Triton: {launcher.refusals()}")
    case.prepare()
    torch.cuda.synchronize()
    with cProfile.Profile() as profile:
        case.run()
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    assert found < 0.5 * (1 + pairs) * plain_layer()


def test_what_a_backward_costs_more_than_one_of_plain_layers():
    """Forward and backward with updates in backward, against the same with ordinary gradients."""
    ordinary, updating = plain_layer(), microseconds(host.updating(SETTINGS))
    print(f"\nforward + backward: {ordinary:.1f} us a layer, with updates {updating:.1f}")
    assert updating < 2.2 * ordinary


def test_where_the_time_of_a_backward_goes(monkeypatch):
    """Each line does more than the one above it, those with a clock aside. Nothing may take the general way, or run on
    a second thread."""
    general, threads = [], set()
    found = {"plain layers": plain_layer()}
    layers = forge.convert(host.model(SETTINGS))
    factored = host.forward_backward(layers, SETTINGS)
    found["factored gradients"] = microseconds(factored)
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
    found["  and an empty hook"] = microseconds(factored)
    found["when='step', without step()"] = microseconds(host.collecting(SETTINGS))
    updating = host.updating(SETTINGS)
    for _ in range(4):
        updating.run()
        updating.prepare()
    original, encoded = optimizer_module.step, []
    encode = cuda_driver.CudaDriver.encode
    monkeypatch.setattr(optimizer_module, "step", lambda *args: (general.append(args), original(*args)))
    monkeypatch.setattr(cuda_driver.CudaDriver, "encode", lambda *args: (encoded.append(1), encode(*args))[1])
    found["when='backward'"] = microseconds(updating)
    apply, inside = _hooks._apply_gradient, []

    def timed(*args):
        start = time.perf_counter()
        apply(*args)
        inside.append(time.perf_counter() - start)

    monkeypatch.setattr(_hooks, "_apply_gradient", timed)
    found["  with a clock in the hooks"] = microseconds(updating)
    found["  of which in the hooks"] = statistics.median(inside) * 1e6
    print("\n" + "\n".join(f"{name:30s} {time:6.1f} us a layer" for name, time in found.items()))
    print(f"hooks ran on {len(threads)} thread(s); {len(encoded) / SAMPLES / LAYERS:.2f} tensor maps encoded a layer")
    assert not general and len(threads) == 1
    assert len(encoded) < SAMPLES * LAYERS


def test_lengths_that_change_each_step():
    """The general way, launched directly."""
    parameters = host.weights(SETTINGS, torch.bfloat16)
    optimizer = FusedOptimizer(parameters, "adamw", lr=1e-3, when="step")
    lengths = iter(range(1, 1000))

    def prepare():
        tokens = 8 * next(lengths)
        made = [tuple(torch.zeros(tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))]
        host.give_gradients(parameters, [made] * LAYERS)

    found = microseconds(host.Case(optimizer.step, prepare))
    print(f"\na new length each step: {found:.1f} us a layer")
    assert found < 4 * plain_layer()


def test_the_parts():
    """Launches alone."""
    cases = host.launches(SETTINGS)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    tensors = [torch.zeros(SETTINGS.tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    cases["one launch by the general way"] = host.each(lambda: finite.check(tensors, flag), SETTINGS)
    found = {name: microseconds(case) for name, case in cases.items()}
    print("\n" + "\n".join(f"{name:40s} {time:6.2f} us" for name, time in found.items()))
    assert found[host.IN_PLACE] < found[host.BY_TRITON]
