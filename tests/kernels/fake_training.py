"""A `FusedOptimizer` on CPU tensors that takes the GPU's way, on the fake driver: nothing is computed."""

from __future__ import annotations

import torch
from torch import nn

from fused_grad_optimizer import _parameters, _plans, ops, optimizer
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import dispatch, finite


def take_the_gpus_way(monkeypatch, hopper: bool = True) -> None:
    """Patch what looks at devices, inside `fake_cuda()`."""
    monkeypatch.setattr(optimizer, "stepped_on_device", lambda parameter: True)
    for module in (_parameters, _plans, ops):
        monkeypatch.setattr(module, "triton_reason", lambda device, dtype: None)
    monkeypatch.setattr(ops, "_check_finite", finite.check)
    monkeypatch.setattr(dispatch, "_is_hopper", lambda device: hopper)


def count_general_steps(monkeypatch) -> list[tuple]:
    """The arguments of each step that is made the general way from now on, not by a plan."""
    calls: list[tuple] = []
    original = optimizer.step

    def step(*args):
        calls.append(args)
        original(*args)

    monkeypatch.setattr(optimizer, "step", step)
    return calls


def layers(count: int, n: int = 256, dtype=torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(n, n, dtype=dtype)) for _ in range(count)]


def pair(n: int = 256, tokens: int = 64, dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tokens, n, dtype=dtype), torch.zeros(tokens, n, dtype=dtype)


def give_gradient(parameter: nn.Parameter, *pairs) -> FactoredGrad:
    grad = FactoredGrad(parameter.shape, parameter.dtype, pairs=list(pairs))
    parameter.grad = grad
    return grad
