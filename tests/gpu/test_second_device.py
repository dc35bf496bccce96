"""A model on a GPU that is not the current one."""

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
