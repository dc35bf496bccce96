"""Random factors, weights and states on the GPU, and one step of them."""

from __future__ import annotations

import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import Target
from fused_grad_optimizer.storage import STORAGES

HYPER = {
    "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0,
    "nesterov": False,
}  # fmt: skip


def noise(seed, *shape, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def make_target(update, n, k, weight="bf16", state="bf16"):
    w = (noise(100, n, k, dtype=torch.float32) * 0.02).to(STORAGES[weight].dtype)
    states = [(noise(101 + i, n, k).abs() * 0.01).to(STORAGES[state].dtype) for i in range(len(update.states))]
    return Target(w, states, [weight] + [state] * len(states), 3)


def copy_of(t):
    return Target(t.weight.clone(), [s.clone() for s in t.states], t.storages, t.parameter)


def take_step(t, gradient, update, flag=None):
    scalars = ops.make_scalars(update, HYPER, 3, False, 0, t.weight.device, t.weight.dtype)
    ops.step(t, gradient, update, scalars, flag)
