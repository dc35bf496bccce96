"""Ways to train that `forge bench step` compares. Each takes the model and returns what ends a step after backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fused_grad_optimizer as forge

Step = Callable[[], Any]
Method = Callable[[nn.Module, Any], Step]
METHODS: dict[str, Method] = {}


def method(name: str) -> Callable[[Method], Method]:
    def register(function: Method) -> Method:
        METHODS[name] = function
        return function

    return register


def _ending(optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _forge(model: nn.Module, settings: Any, when: str) -> Step:
    return _ending(forge.fuse(model, "adamw", when=when, state=settings.state, weight=settings.weight, lr=settings.lr))


@method("forge-backward")
def forge_backward(model: nn.Module, settings: Any) -> Step:
    """Here, updating in backward."""
    return _forge(model, settings, "backward")


@method("forge-step")
def forge_step(model: nn.Module, settings: Any) -> Step:
    """Here, updating in the step."""
    return _forge(model, settings, "step")


@method("torch-adamw-fused")
def torch_fused(model: nn.Module, settings: Any) -> Step:
    """torch.optim.AdamW(fused=True)."""
    return _ending(torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True))


@method("torch-adamw-foreach")
def torch_foreach(model: nn.Module, settings: Any) -> Step:
    """torch.optim.AdamW(foreach=True)."""
    return _ending(torch.optim.AdamW(model.parameters(), lr=settings.lr, foreach=True))


@method("torch-adamw-fused-hooks")
def torch_hooks(model: nn.Module, settings: Any) -> Step:
    """torch.optim.AdamW(fused=True) for each parameter as soon as its gradient is there: one gradient at a time."""
    for parameter in model.parameters():
        step = _ending(torch.optim.AdamW([parameter], lr=settings.lr, fused=True))
        parameter.register_post_accumulate_grad_hook(lambda _, step=step: step())
    return lambda: None


@method("torch-adamw-fused-compiled")
def torch_fused_compiled(model: nn.Module, settings: Any) -> Step:
    """torch.optim.AdamW(fused=True), decoder layers compiled."""
    _compile_layers(model)
    return torch_fused(model, settings)


@method("forward-backward")
def forward_backward(model: nn.Module, settings: Any) -> Step:
    """No optimizer: gradients are dropped."""
    return model.zero_grad


@method("forward-backward-compiled")
def forward_backward_compiled(model: nn.Module, settings: Any) -> Step:
    """No optimizer, decoder layers compiled."""
    _compile_layers(model)
    return model.zero_grad


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the model's longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def _compile_layers(model: nn.Module) -> None:
    layers = decoder_layers(model)
    if not layers:
        raise ValueError("the model holds no ModuleList of layers to compile")
    for layer in layers:
        layer.compile()
