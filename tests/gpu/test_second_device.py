"""A model on a GPU that is not the current one, and one on two GPUs at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

pytestmark = pytest.mark.multi_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["backward", "step"])
def test_equals_the_same_model_on_the_current_device(when, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32)).to(
        "cuda:0", dtype
    )
    second = copy.deepcopy(first).to("cuda:1")
    ids = torch.randint(32, (4, 9))
    for model in (first, second):
        optimizer = forge.fuse(model, when=when, lr=1e-2)
        for _ in range(3):
            model(ids.to(next(model.parameters()).device)).float().square().mean().backward()
            if when == "step":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.cuda.current_device() == 0
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a.cpu(), b.cpu())


class Branches(nn.Module):
    """A branch on each GPU, whose gradients come at the same time, on two threads of autograd."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).double() for _ in range(2)
        )

    def forward(self, x):
        return sum(branch(x.to(branch[0].weight.device)).square().mean().to("cpu") for branch in self.branches)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_model_on_two_devices_is_one_pass(when):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    dense = Branches()
    fused = copy.deepcopy(dense)
    for i, branch in enumerate(fused.branches):
        branch.to(f"cuda:{i}")
    theirs = torch.optim.AdamW(dense.parameters(), lr=1e-3)
    ours = forge.fuse(fused, "adamw", lr=1e-3, when=when)
    for i in range(200):
        x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for model, optimizer in ((dense, theirs), (fused, ours)):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(state["step"] == 200 for state in ours.state.values())
    for p, q in zip(dense.parameters(), fused.parameters()):
        assert (p - q.cpu()).abs().max() <= 1e-6
