"""`step()` of many weights: one launch checks all gradients, and each weight is stepped or left as if it had one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fused_grad_optimizer import FusedOptimizer, _plans
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import cuda_driver, launcher
from tests.gpu.steps import noise
from tests.gpu.test_training import syncs_are_errors

pytestmark = pytest.mark.gpu
LAYERS, TOKENS = 64, 48
SHAPES = [(256, 256), (128, 512), (40, 264), (512, 64)]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def needs_the_driver():
    if cuda_driver.active() is None:
        pytest.skip("needs the CUDA driver")


def dtypes_of(kind: str, layer: int) -> tuple[torch.dtype, torch.dtype]:
    """Of the weight and of its factors."""
    if kind == "mixed":
        weight = [torch.bfloat16, torch.float32, torch.float32, torch.float16][layer % 4]
        return weight, [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16][layer % 4]
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[kind], {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]


def weights(kind: str = "bf16", devices=("cuda",)) -> list[nn.Parameter]:
    made = []
    for i in range(LAYERS):
        tensor = noise(i, *SHAPES[i % 4], dtype=dtypes_of(kind, i)[0])
        made.append(nn.Parameter(tensor.to(devices[i % len(devices)])))
    return made


def give_gradients(parameters, step: int, kind: str = "bf16", wide: int = 0, scale=None) -> None:
    for i, parameter in enumerate(parameters):
        factors = [
            (noise(1000 * step + 10 * i + j, TOKENS, n + wide, dtype=dtypes_of(kind, i)[1]).to(parameter.device))
            for j, n in enumerate(parameter.shape)
        ]
        parameter.grad = FactoredGrad(
            parameter.shape, parameter.dtype, pairs=[tuple(t[:, : t.shape[1] - wide] for t in factors)]
        )
        if scale is not None:
            parameter.grad.mul_(torch.full((), scale, device=parameter.device))


def spoil(parameter, which: int, place: int, value: float) -> None:
    factor = parameter.grad.pairs[0][which]
    index = divmod(place % factor.numel(), factor.shape[1])
    factor.data[index] = value  # through .data: as if backward had made it so


BAD = {4: (17, 0, -1, NAN), 5: (0, 1, 0, INF), 6: (63, 1, -1, -INF)}  # step: layer, dY or X, place, value


def trained(kind="bf16", wide=0, scale=None, devices=("cuda",), bad=BAD, steps=8):
    """All weights and states after the steps; names that were skipped."""
    parameters = weights(kind, devices)
    optimizer = FusedOptimizer(parameters, lr=1e-2, when="step")
    for step in range(steps):
        give_gradients(parameters, step, kind, wide, scale)
        if step in bad:
            layer, *place = bad[step]
            spoil(parameters[layer], *place)
            states = [optimizer.state[parameters[layer]][name] for name in ("exp_avg", "exp_avg_sq")]
            kept = [t.detach().clone() for t in (parameters[layer], *states)]
        optimizer.step()
        if step in bad:
            assert all(torch.equal(a, b) for a, b in zip(kept, (parameters[layer], *states)))
        optimizer.zero_grad()
    skipped = optimizer.skipped
    found = [p.detach() for p in parameters]
    for p in parameters:
        found += [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
    return found, skipped, [optimizer.state[p]["step"] for p in parameters]


@pytest.mark.filterwarnings("ignore:NaN or inf")
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("wide", [0, 8, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "mixed"])
def test_bits_and_skips_of_one_by_one(monkeypatch, directly, kind, wide, scale):
    found = trained(kind, wide, scale)
    assert directly.count("multi_finite_kernel") >= 4
    assert found[1] == {"parameter 17": 1, "parameter 0": 1, "parameter 63": 1}
    assert found[2] == [7 if i in (0, 17, 63) else 8 for i in range(LAYERS)]
    monkeypatch.setattr(_plans, "_FEWEST", 1 << 30)
    directly.clear()
    wanted = trained(kind, wide, scale)
    assert "multi_finite_kernel" not in directly
    assert found[1:] == wanted[1:] and all(torch.equal(a, b) for a, b in zip(found[0], wanted[0]))


def stepped() -> tuple[list[nn.Parameter], FusedOptimizer]:
    """After five steps: launches are bound."""
    parameters = weights()
    optimizer = FusedOptimizer(parameters, lr=1e-2, when="step")
    for step in range(5):
        give_gradients(parameters, step)
        optimizer.step()
    return parameters, optimizer


def test_launches(directly):
    parameters = weights()
    optimizer = FusedOptimizer(parameters, lr=1e-2, when="step")
    for step in range(6):
        give_gradients(parameters, step)
        directly.clear()
        optimizer.step()
    assert len(directly) == LAYERS + 1 and directly[0] == "multi_finite_kernel"
    assert launcher.refusals() == {}


def test_no_host_synchronisation():
    parameters, optimizer = stepped()
    give_gradients(parameters, 5)
    with syncs_are_errors():
        optimizer.step()


@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_on_another_stream_with_late_operands():
    """The NaN comes late, on the stream that steps; a check on another stream, or before it, would not see it."""
    parameters, optimizer = stepped()
    give_gradients(parameters, 5)
    torch.cuda.synchronize()
    kept = parameters[9].detach().clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        spoil(parameters[9], 0, 5, NAN)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    assert optimizer.skipped == {"parameter 9": 1}
    assert torch.equal(kept, parameters[9])


@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_uploads_that_wait_behind_a_busy_device():
    """None of them may read pinned memory that something else was put into meanwhile."""
    parameters = weights()
    optimizer = FusedOptimizer(parameters, lr=1e-3, when="step")
    sets = []
    for step in range(12):
        give_gradients(parameters, step)
        if step >= 4:
            spoil(parameters[5 * (step - 4)], step % 2, 7 * step, NAN)
        sets.append([p.grad for p in parameters])
    for step, grads in enumerate(sets):
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        if step == 4:
            torch.cuda.synchronize()
        if step >= 4:
            torch.cuda._sleep(20_000_000)
        optimizer.step()
        reused = [torch.full((1 << n,), 7, dtype=torch.uint8, pin_memory=True) for n in range(10, 15)]
        assert len(reused) == 5
    assert optimizer.skipped == {f"parameter {5 * i}": 1 for i in range(8)}


@pytest.mark.multi_gpu
@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_layers_on_two_devices(monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    devices = ("cuda:1", "cuda:0")
    found = trained("mixed", devices=devices)
    assert found[1] == {"parameter 17": 1, "parameter 0": 1, "parameter 63": 1}
    monkeypatch.setattr(_plans, "_FEWEST", 1 << 30)
    wanted = trained("mixed", devices=devices)
    assert found[1:] == wanted[1:] and all(torch.equal(a, b) for a, b in zip(found[0], wanted[0]))
