"""Ways to train that `forge bench step` compares. Each takes the model and returns what ends a step after backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fused_grad_optimizer as forge


@dataclass(frozen=True)
class Training:
    """`step()` after each backward; `close()` at the end, so that nothing keeps the model alive."""

    step: Callable[[], Any]
    close: Callable[[], Any] = lambda: None


Method = Callable[[nn.Module, Any], Training]
METHODS: dict[str, Method] = {}


def method(name: str) -> Callable[[Method], Method]:
    def register(function: Method) -> Method:
        METHODS[name] = function
        return function

    return register


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _adamw(parameters: Iterable[nn.Parameter], settings: Any, kind: str) -> Callable[[], None]:
    return _step_of(torch.optim.AdamW(parameters, lr=settings.lr, fused=kind == "fused", foreach=kind == "foreach"))


def _forge(model: nn.Module, settings: Any, when: str) -> Training:
    optimizer = forge.fuse(model, "adamw", when=when, state=settings.state, weight=settings.weight, lr=settings.lr)
    return Training(_step_of(optimizer), optimizer.release)


@method("forge-backward")
def forge_backward(model: nn.Module, settings: Any) -> Training:
    """Here, updating in backward."""
    return _forge(model, settings, "backward")


@method("forge-backward-compiled")
def forge_backward_compiled(model: nn.Module, settings: Any) -> Training:
    """Here, updating in backward, decoder layers and loss compiled; the graph breaks at each factored layer."""
    _compile_layers(model)
    return _forge(model, settings, "backward")


@method("forge-step")
def forge_step(model: nn.Module, settings: Any) -> Training:
    """Here, updating in the step."""
    return _forge(model, settings, "step")


@method("torch-adamw-fused")
def torch_fused(model: nn.Module, settings: Any) -> Training:
    """torch.optim.AdamW(fused=True)."""
    return Training(_adamw(model.parameters(), settings, "fused"))


@method("torch-adamw-foreach")
def torch_foreach(model: nn.Module, settings: Any) -> Training:
    """torch.optim.AdamW(foreach=True)."""
    return Training(_adamw(model.parameters(), settings, "foreach"))


@method("torch-adamw-fused-hooks")
def torch_hooks(model: nn.Module, settings: Any) -> Training:
    """torch.optim.AdamW(fused=True) for each parameter as soon as its gradient is there: one gradient at a time."""
    handles = []
    for parameter in model.parameters():
        step = _adamw([parameter], settings, "fused")
        handles.append(parameter.register_post_accumulate_grad_hook(lambda _, step=step: step()))
    return Training(lambda: None, lambda: [handle.remove() for handle in handles])


@method("torch-adamw-fused-hooks-compiled")
def torch_hooks_compiled(model: nn.Module, settings: Any) -> Training:
    """The same in hooks, decoder layers and loss compiled."""
    _compile_layers(model)
    return torch_hooks(model, settings)


@method("torch-adamw-fused-compiled")
def torch_fused_compiled(model: nn.Module, settings: Any) -> Training:
    """torch.optim.AdamW(fused=True), decoder layers and loss compiled."""
    _compile_layers(model)
    return torch_fused(model, settings)


@method("forward-backward")
def forward_backward(model: nn.Module, settings: Any) -> Training:
    """No optimizer: gradients are dropped."""
    return Training(model.zero_grad)


@method("forward-backward-compiled")
def forward_backward_compiled(model: nn.Module, settings: Any) -> Training:
    """No optimizer, decoder layers and loss compiled."""
    _compile_layers(model)
    return forward_backward(model, settings)


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
    loss: Any = getattr(model, "loss_function", None)
    if loss is not None:
        setattr(model, "loss_function", torch.compile(loss))  # noqa: B010 (nn.Module's attributes have no such type)
