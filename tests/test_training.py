"""Whole trainings in both modes against torch.optim on a dense copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_grad_optimizer as forge
from tests.test_semantics import BOTH, LR, data, dense_and_fused, gap


@BOTH
def test_llama_trains_within_twice_the_gap_of_two_summation_orders(when):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip

    def make():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    def train(model, optimizer, order=None):
        losses = []
        for i in range(20):
            ids = torch.randint(0, 9, (4, 32), generator=torch.Generator().manual_seed(i))
            ids = ids if order is None else ids[order]
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses), torch.cat([p.detach().flatten() for p in model.parameters()])

    dense = make()
    losses, weights = train(dense, torch.optim.AdamW(dense.parameters(), lr=1e-3))
    other = make()
    other_losses, other_weights = train(
        other, torch.optim.AdamW(other.parameters(), lr=1e-3), torch.tensor([2, 0, 3, 1])
    )
    fused = make()
    fused_losses, fused_weights = train(fused, forge.fuse(fused, lr=1e-3, when=when))
    assert losses[-1] < 0.9 * losses[0]
    assert (fused_losses - losses).abs().max() <= 2 * (other_losses - losses).abs().max() + 1e-6
    assert (fused_weights - weights).norm() <= 2 * (other_weights - weights).norm()


def test_albert_style_sharing():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.blocks, self.out = nn.ModuleList([block] * 4), nn.Linear(8, 3)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.out(x)

    for when in ("backward", "step"):
        dense, dense_optimizer, fused, fused_optimizer = dense_and_fused(Shared, when=when)
        for i in range(3):
            for model, optimizer in ((dense, dense_optimizer), (fused, fused_optimizer)):
                optimizer.zero_grad()
                F.cross_entropy(model(data(i, 5, 8)), torch.arange(5) % 3).backward()
                optimizer.step()
        assert gap(dense, fused) < 1e-3 * LR * 3
        assert fused_optimizer.state[fused.blocks[0][0].weight]["step"] == 3
