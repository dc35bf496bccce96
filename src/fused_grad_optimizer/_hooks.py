"""What happens to a gradient as soon as a backward has accumulated it: the post-accumulate-grad hooks."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fused_grad_optimizer import _plans
from fused_grad_optimizer._applied_grad import AppliedGrad
from fused_grad_optimizer._parameters import ParameterRecord, check_gradient, check_memory
from fused_grad_optimizer._small import is_small
from fused_grad_optimizer.factored_grad import FactoredGrad

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer


def register(optimizer: FusedOptimizer, parameter: torch.Tensor) -> Any:
    """The handle of the hook that belongs to the optimizer's `when`.

    It holds the optimizer weakly: the collector cannot see a cycle through a tensor's hooks, and the model would never
    be freed.
    """
    if optimizer.when == "backward":
        return parameter.register_post_accumulate_grad_hook(partial(_update_in_backward, weakref.ref(optimizer)))
    return parameter.register_post_accumulate_grad_hook(_fold_if_larger)


def _update_in_backward(reference: weakref.ref[FusedOptimizer], parameter: torch.Tensor) -> None:
    """Post-accumulate-grad hook: autograd has summed every contribution to this parameter."""
    optimizer = reference()
    if optimizer is None:
        return
    if not torch.is_grad_enabled():
        _apply_gradient(optimizer, parameter)
    else:  # create_graph=True
        with torch.no_grad():
            _apply_gradient(optimizer, parameter)


def _apply_gradient(optimizer: FusedOptimizer, parameter: torch.Tensor) -> None:
    try:
        optimizer._pass.enter()
        if not optimizer._began or optimizer._number != optimizer._pass.number:
            optimizer._begin()
    except BaseException:
        parameter.grad = None  # a refused gradient must not reach the next step
        raise
    found, grad = optimizer._stepped.get(id(parameter)), parameter.grad
    if found is None or grad is None:
        return
    group, record = found
    if record.plan is not None and _applied_by_plan(optimizer, parameter, record, group, grad):
        return
    check_gradient(grad, parameter, record.name)
    parameter.grad = None
    check_memory(parameter, record.name, optimizer.weight_mode)  # a reentrant checkpoint may hide it when a pass begins
    if is_small(parameter, grad):
        optimizer._queue.add(parameter, group, grad)
    else:
        optimizer._pass.moved.append(record.name)
        optimizer._update_generally(parameter, record, group, grad)
    parameter.grad = _mark_of(parameter, record)


def _applied_by_plan(
    optimizer: FusedOptimizer, parameter: torch.Tensor, record: ParameterRecord, group: dict[str, Any], grad: Any
) -> bool:
    """Step by the plan and leave the mark in `.grad`. False: nothing was done."""
    plan, moved = record.plan, optimizer._pass.moved
    moved.append(record.name)
    try:
        done = _plans.update(optimizer, parameter, record, group, grad)
    except BaseException:
        parameter.grad = None
        raise
    if not done:
        moved.remove(record.name)  # not the last one: another device's thread may have added its own
        return False
    if plan.applied is not record.applied or plan.applied is None:
        plan.applied = _mark_of(parameter, record)
    parameter.grad = plan.applied
    return True


def _mark_of(parameter: torch.Tensor, record: ParameterRecord) -> AppliedGrad:
    """The mark that stands in `.grad` after an update, of the parameter's present dtype, device and shape."""
    applied = record.applied
    if (
        applied is None
        or applied.dtype != parameter.dtype
        or applied.device != parameter.device
        or applied.shape != parameter.shape
    ):
        applied = record.applied = AppliedGrad(parameter, record.name)
    return applied


def remove_all(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _fold_if_larger(parameter: torch.Tensor) -> None:
    """Post-accumulate-grad hook of `when="step"`: factors never hold more than a dense gradient would."""
    if isinstance(parameter.grad, FactoredGrad):
        parameter.grad.fold_if_larger()
