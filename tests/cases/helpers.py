"""Pairs of a dense and a fused model, trained on the same data, and the rule by which their results are equal."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

LR = 1e-2
BOTH = pytest.mark.parametrize("when", ["backward", "step"])


class Explode(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise KeyError("boom")


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models: the first stays dense, the second is to be fused."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def ref(model: nn.Module, lr: float = LR, wd: float = 0.01, **hyper) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=wd, **hyper)


def both(make: Callable[[], nn.Module], when: str, state: str | None = None, **hyper):
    """`(dense, its AdamW, fused, its FusedOptimizer)` with the same hyper-parameters."""
    a, b = pair(make)
    hyper = {"lr": LR, "weight_decay": 0.01, **hyper}
    return a, torch.optim.AdamW(a.parameters(), **hyper), b, forge.fuse(b, "adamw", when=when, state=state, **hyper)


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny(model: nn.Module) -> list[torch.Tensor]:
    """Entries whose dense gradient is rounding noise (below 1e-7, not 0): early AdamW is a sign function there."""
    return [
        torch.zeros_like(p, dtype=torch.bool) if p.grad is None else (p.grad != 0) & (p.grad.abs() < 1e-7)
        for p in model.parameters()
    ]


def gap(a: nn.Module, b: nn.Module, ignore: Iterable[torch.Tensor] | None = None) -> float:
    """The largest difference of any two weights, leaving out the entries in `ignore`."""
    masks = list(ignore) if ignore is not None else [torch.zeros_like(p, dtype=torch.bool) for p in a.parameters()]
    found = [
        (p - q).detach().abs().masked_fill(mask, 0.0).max().item()
        for p, q, mask in zip(a.parameters(), b.parameters(), masks)
        if p.numel()
    ]
    return max(found)


def passes(a: nn.Module, b: nn.Module, steps: int, ignore=None, lr: float = LR) -> bool:
    """The rule for fp32 weights and states: no weight differs by more than a thousandth of its largest possible way."""
    return gap(a, b, ignore) <= 1e-3 * lr * steps


def train(a, oa, b, ob, loss: Callable[[nn.Module, int], torch.Tensor], n: int = 3) -> list[torch.Tensor]:
    """The same `n` steps on both models; returns the entries that `gap` should leave out."""
    masks = [torch.zeros_like(p, dtype=torch.bool) for p in a.parameters()]
    for i in range(n):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            loss(model, i).backward()
            if model is a:
                masks = [m | t for m, t in zip(masks, tiny(a))]
            optimizer.step()
    return masks


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss, n: int = 50) -> torch.Tensor:
    found = []
    for i in range(n):
        optimizer.zero_grad()
        value = loss(model, i)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return torch.tensor(found)


def same_curve(a, oa, b, ob, loss, n: int = 50) -> bool:
    """The rule for lossy states: the loss stays within 2% of dense training's after `n` steps."""
    dense, fused = losses_of(a, oa, loss, n)[-5:].mean(), losses_of(b, ob, loss, n)[-5:].mean()
    return bool((fused - dense).abs() <= 0.02 * dense.abs())


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
