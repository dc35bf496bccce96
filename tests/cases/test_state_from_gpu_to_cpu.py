"""Optimizer state saved on a GPU goes on in a CPU model, wherever torch.load put its tensors."""

from __future__ import annotations

import io

import pytest
import torch

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, data, mlp, passes

pytestmark = pytest.mark.gpu
MAPS = pytest.mark.parametrize("map_location", ["cpu", None])
STEPS = 3


def run(model, optimizer, n, first=0):
    device = model[0].weight.device
    for i in range(first, first + n):
        optimizer.zero_grad()
        model(data(i, 7, 6).to(device)).square().mean().backward()
        optimizer.step()


def fused(when, state, device):
    torch.manual_seed(0)
    model = mlp().to(device)
    return model, forge.fuse(model, "adamw", when=when, lr=LR, eps=1e-3, state=state)


def saved_on_gpu(when, state, map_location):
    """The trained model and its optimizer on the GPU, and what torch.load makes of their saved state."""
    model, optimizer = fused(when, state, "cuda")
    run(model, optimizer, STEPS)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    return model, optimizer, *torch.load(file, map_location=map_location)


@BOTH
@MAPS
def test_both_go_on_as_torch_optim_on_the_cpu(when, map_location):
    """eps = 1e-3: an update moves by at most lr / eps times the rounding of a gradient, here about 1e-6 of it."""
    gpu, gpu_optimizer, weights, states = saved_on_gpu(when, "fp32", map_location)
    moment = states["state"][0]["exp_avg"]
    assert moment.device.type == (map_location or "cuda")
    model, optimizer = fused(when, "fp32", "cpu")
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    run(gpu, gpu_optimizer, 2, first=STEPS)
    run(model, optimizer, 2, first=STEPS)
    torch.manual_seed(0)
    dense = mlp()
    run(dense, torch.optim.AdamW(dense.parameters(), lr=LR, eps=1e-3), STEPS + 2)
    gpu_on_cpu = mlp()
    gpu_on_cpu.load_state_dict(gpu.state_dict())
    assert passes(dense, model, STEPS + 2) and passes(dense, gpu_on_cpu, STEPS + 2)
    for parameter in model.parameters():
        assert parameter.device.type == "cpu" and optimizer.state[parameter]["step"] == STEPS + 2


@BOTH
@MAPS
@pytest.mark.parametrize("state", ["fp32", "bf16", "bf16-nearest", None])
def test_states_keep_their_bits_and_follow_the_parameter(when, map_location, state):
    _, gpu_optimizer, _, states = saved_on_gpu(when, state, map_location)
    model, optimizer = fused(when, state, "cpu")
    optimizer.load_state_dict(states)
    for i, values in gpu_optimizer.state_dict()["state"].items():
        for name, saved in values.items():
            loaded = optimizer.state_dict()["state"][i][name]
            assert loaded.device.type == "cpu" and loaded.dtype == saved.dtype and torch.equal(loaded, saved.cpu())
    run(model, optimizer, 1)
