"""What an optimizer keeps for each parameter, the checks at the door, and the views kernels work on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fused_grad_optimizer._applied_grad import AppliedGrad
from fused_grad_optimizer._messages import shown
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import Gradient, triton_reason
from fused_grad_optimizer.modules._registry import owner_of
from fused_grad_optimizer.rules import Rule, switch, whole
from fused_grad_optimizer.storage import weight_storage

_COMMON = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class ParameterRecord:
    """Per-parameter bookkeeping that is not optimizer state.

    Attributes:
        name: for messages.
        index: position among all parameters of the optimizer; chooses the random bits of stochastic rounding.
        applied: the sentinel put into `.grad` after an update in backward.
        hook: handle of the post-accumulate-grad hook.
        plan: how it was stepped last, if it can be stepped that way again (`_plans.Plan`).
    """

    name: str
    index: int
    applied: AppliedGrad | None = None
    hook: Any = None
    plan: Any = None
    said: set[str] = field(default_factory=set)


_SWITCHES = ("maximize", "nesterov", "decoupled_weight_decay")


def check_settings(rule: Rule, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group as they are to be kept: seed an int, switches bools, betas a tuple.

    Raises:
        ValueError: a hyper-parameter, seed or switch of another type or out of its range.
    """
    settings = {**hyper, "seed": whole(hyper["seed"])}
    if settings["seed"] is None:
        raise ValueError(f"seed={shown(hyper['seed'])}: an integer is needed")
    for name in _SWITCHES:
        if name in hyper:
            settings[name] = switch(hyper[name])
            if settings[name] is None:
                raise ValueError(f"{name}={shown(hyper[name])}: True or False is needed")
    rule.validate(settings)
    if "betas" in rule.defaults and not isinstance(settings["betas"], tuple):
        betas = settings["betas"]
        settings["betas"] = tuple(betas) if isinstance(betas, list) else tuple(float(beta) for beta in betas)
    return settings


def listed(values: Any, argument: str, *, ordered: bool = False) -> list[Any]:
    """`values` as a list of parameters, `(name, parameter)` or groups.

    As torch.optim takes them: a set of all parameters is taken, but not one in a group, where `ordered` is given.

    Raises:
        ValueError: it is not a collection of those; `argument` is what the caller calls it.
    """
    remedy = "give a list of parameters, (name, parameter) pairs or groups"
    if isinstance(values, nn.Module) and not isinstance(values, nn.ParameterList):
        raise ValueError(f"{argument} is a module ({type(values).__name__}): give its .parameters()")
    if isinstance(values, torch.Tensor):
        raise ValueError(f"{argument} is one tensor: give a list, [parameter]")
    if isinstance(values, (str, bytes, Mapping)) or (ordered and isinstance(values, (set, frozenset))):
        raise ValueError(f"{argument} is a {type(values).__name__}: {remedy}")
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{argument}={shown(values)}: {remedy}") from None


def group_of(values: Any, argument: str = "params") -> dict[str, Any]:
    """A copy of a parameter group, its "params" a list of `(name or None, parameter)`; raises `ValueError`."""
    if not isinstance(values, Mapping) or "params" not in values:
        raise ValueError(f"a group in {argument} must be a dict with 'params', not {shown(values)}")
    params = values["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    else:
        params = listed(params, f"'params' of a group in {argument}", ordered=True)
    named = []
    for value in params:
        name, parameter = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
        if not isinstance(parameter, torch.Tensor) or not isinstance(name, str | None):
            kind = f"a module ({type(parameter).__name__}): give its .parameters()"
            kind = kind if isinstance(parameter, nn.Module) else f"{shown(value)}: a tensor or (name, tensor) is needed"
            raise ValueError(f"one of {argument} is {kind}")
        named.append((name, parameter))
    return {**values, "params": named}


def check_parameter(parameter: torch.Tensor, name: str, weight: str | None, optimizer: Any) -> None:
    """Refuse what cannot be stepped, naming it.

    Raises:
        ValueError: an unsupported class, dtype or layout, a tensor with a history, or a parameter that another live
            optimizer here owns.
    """
    if not (parameter.is_leaf or parameter.retains_grad):
        raise ValueError(f"{name} was computed from other tensors (not a leaf): give those, or its .detach()")
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name} is not initialised yet: run a forward before making the optimizer")
    if parameter.requires_grad:
        check_trainable(parameter, name, weight)
    owner = owner_of(parameter)
    if owner is not None and owner is not optimizer:
        raise ValueError(
            f"{name} is already stepped by another FusedOptimizer; call release() on that one, or delete it, first"
        )


def check_trainable(parameter: torch.Tensor, name: str, weight: str | None) -> None:
    """Refuse what may be frozen, but cannot be stepped.

    Raises:
        ValueError: a tensor subclass that wraps others, or what `check_memory` refuses.
    """
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(parameter):
        raise ValueError(
            f"{name} is a {type(parameter).__name__}; plain tensors only (no DTensor, no quantised weights)"
        )
    check_memory(parameter, name, weight)


def check_memory(parameter: torch.Tensor, name: str, weight: str | None) -> None:
    """Refuse memory that cannot be stepped in place. `.data` may have been replaced since the parameter was added.

    Raises:
        ValueError: a layout, dtype, device or strides that are not offered, naming the parameter and the remedy.
    """
    strided = parameter.layout is torch.strided
    if strided and parameter.dtype in _COMMON and parameter.is_contiguous() and not parameter.is_meta:
        return
    if not strided:
        raise ValueError(f"{name} has layout {parameter.layout}; only strided parameters are offered")
    if parameter.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: give it memory (to_empty, load a checkpoint) first")
    if parameter.is_floating_point() or parameter.requires_grad:
        try:
            weight_storage(parameter.dtype, weight)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    order = storage_order(parameter)
    if order is not None and not parameter.permute(order).is_contiguous():
        raise ValueError(
            f"{name} has strides {parameter.stride()} that overlap or leave gaps: make it contiguous, "
            "p.data = p.data.contiguous()"
        )


def check_gradient(grad: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    """Raise `ValueError` if the parameter cannot be stepped with this gradient."""
    if type(grad) is not FactoredGrad and grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is {grad.layout}; set sparse=False on its module")
    if grad.shape != parameter.shape:
        raise ValueError(
            f"the gradient of {name} has shape {tuple(grad.shape)}, the parameter {tuple(parameter.shape)}: drop the "
            "gradient (zero_grad) and run the backward again"
        )


def check_state(name: str, state: torch.Tensor, parameter: torch.Tensor, parameter_name: str) -> None:
    """Raise `ValueError` if the state called `name` does not have the parameter's shape."""
    if state.shape != parameter.shape:
        raise ValueError(
            f"{name} of {parameter_name} has shape {tuple(state.shape)}, the parameter {tuple(parameter.shape)}: "
            "after a change of shape remove its state with optimizer.state.pop(parameter), or make a new optimizer"
        )


def storage_order(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation of dimensions that makes the parameter contiguous (channels_last weights), None if it is."""
    if parameter.is_contiguous():
        return None
    strides = parameter.stride()
    return tuple(sorted(range(parameter.dim()), key=lambda d: (-strides[d], d)))


def matrix_view(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A [rows, columns] view of a tensor that `order` makes contiguous."""
    if order is not None:
        tensor = tensor.permute(order)
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() == 0:
        return tensor.view(1, 1)
    return tensor.view(tensor.shape[0], -1 if tensor.numel() else 0)


def gradient_of(parameter: torch.Tensor, grad: torch.Tensor, order: tuple[int, ...] | None, maximize: bool) -> Gradient:
    """The gradient in the form kernels take; negated for `maximize`."""
    if maximize:
        grad = -grad
    if isinstance(grad, FactoredGrad):
        if order is None:
            return grad.gradient()
        grad = grad.to_dense(torch.float32 if grad.dtype != torch.float64 else None)
    if order is not None:
        grad = grad.permute(order)
    return Gradient([], [], dense=matrix_view(grad.contiguous(), None))


def stepped_on_device(parameter: torch.Tensor) -> bool:
    """Whether kernels step it on a device that the host does not wait for."""
    return parameter.device.type != "cpu" and triton_reason(parameter.device, parameter.dtype) is None


def finite_operands(grad: torch.Tensor) -> list[torch.Tensor]:
    return grad.operands() if isinstance(grad, FactoredGrad) else [grad.contiguous()]


def refuse_several_processes() -> None:
    """Raise `ValueError` if torch.distributed runs with more than one process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            "torch.distributed runs with several processes, which is not offered yet: factored gradients are not "
            "exchanged, and each process would train its own model"
        )


def warn_about_rounding(parameters: Iterable[torch.Tensor], weight: str | None) -> None:
    """Say what `weight="nearest"` costs, and when `weight` has no effect at all."""
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    if torch.bfloat16 in dtypes and weight == "nearest":
        warnings.warn(
            "weight='nearest': bf16 weights are rounded to nearest, so updates under half a unit in the last place "
            "are lost; weight='stochastic' keeps them on average",
            stacklevel=3,
        )
    if weight is not None and dtypes and torch.bfloat16 not in dtypes:
        warnings.warn(f"weight={weight!r} has no effect: no parameter is bf16", stacklevel=3)
