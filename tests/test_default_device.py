"""Tensors that the library makes for itself do not follow torch's default device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4))


def train(net, optimizer, ids, clip):
    for _ in range(3):
        net(ids).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("when", ["backward", "step"])
def test_training_and_resuming_inside_another_default_device(when, rule, dtype):
    ids = torch.tensor([[1, 5, 1], [0, 15, 2]])
    nets = [model().to(dtype)]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [forge.fuse(net, rule, when=when, lr=1e-2) for net in nets]
    train(nets[0], optimizers[0], ids, when == "step")
    with torch.device("meta"):
        train(nets[1], optimizers[1], ids, when == "step")
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.equal(a, b)
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        for name, value in optimizers[0].state[a].items():
            other = optimizers[1].state[b][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
