"""Stepping a weight again as it was stepped before: what stays the same from step to step is worked out once.

A plan is for a weight on a GPU whose gradient is nothing but (dY, X) pairs. It keeps no memory alive: neither the
weight's nor that of a state that was replaced.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fused_grad_optimizer import ops
from fused_grad_optimizer._parameters import ParameterRecord
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import Target, allows_tf32
from fused_grad_optimizer.rules import Update

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer

_MOST_SHAPES = 8  # numbers of tokens, say, that one plan knows
_MOST_FAILURES = 3
_increment_version = torch.autograd.graph.increment_version


class Plan:
    """How one weight is stepped.

    Attributes:
        update: what the rule selected.
        dtype, shape, device: of the weight; `storages` as in `Target`; `states` by name, weakly.
        bound: by layout of the pairs the launches, or how often they could not be bound. They are bound when a layout
            is seen for the second time: lengths that are seen once are not worth it.
        flag: of `SkipFlags`, of its `generation`.
        applied: the mark for `.grad` that is known to fit the weight, once there is one.
    """

    __slots__ = ("update", "dtype", "shape", "device", "storages", "states", "bound", "flag", "generation", "applied")

    def __init__(self, parameter: torch.Tensor, target: Target, update: Update, states: list[torch.Tensor]) -> None:
        self.update, self.storages = update, target.storages
        self.dtype, self.shape, self.device = parameter.dtype, parameter.shape, parameter.device
        self.states = [(name, weakref.ref(s)) for name, s in zip(update.states, states)]
        self.bound: dict[tuple, Any] = {}
        self.flag: torch.Tensor | None = None
        self.generation = -1
        self.applied: torch.Tensor | None = None

    def targets(self, parameter: torch.Tensor, update: Update, state: dict[str, Any]) -> list[torch.Tensor] | None:
        """The weight and its states; None if they are not those of the plan. The launch compares their addresses."""
        if update is not self.update or parameter.dtype is not self.dtype or parameter.shape != self.shape:
            return None
        found: list[Any] = [parameter]
        for name, kept in self.states:
            there = kept()
            if there is None or state.get(name) is not there:
                return None
            found.append(there)
        return found if parameter.is_contiguous() and parameter.device == self.device else None

    def has_seen(self, layout: tuple) -> None:
        """From the next time on launches are bound for this layout."""
        if len(self.bound) >= _MOST_SHAPES:
            del self.bound[next(iter(self.bound))]
        self.bound[layout] = 0


def make(
    parameter: torch.Tensor, grad: torch.Tensor, target: Target, update: Update, states: list[torch.Tensor]
) -> Plan | None:
    """A plan for a parameter on a GPU that was just stepped, or None if it is not of a kind that has plans."""
    plain = type(parameter) in (torch.Tensor, nn.Parameter) and all(type(s) is torch.Tensor for s in states)
    if not plain or type(grad) is not FactoredGrad or parameter.dim() != 2 or not parameter.is_contiguous():
        return None
    return Plan(parameter, target, update, states)


def _operands(grad: FactoredGrad) -> tuple[list[torch.Tensor], tuple] | None:
    """The tensors of a gradient of (dY, X) pairs only, `[dY, X, ..., scale if any]`, and their layout, for a key.

    None if it has other parts, or a factor that is not as backward left it.
    """
    if grad.rows or grad.dense is not None or not grad.pairs:
        return None
    tensors: list[torch.Tensor] = []
    layout: list[Any] = [grad.pairs[0][0].dtype]
    for dy, x in grad.pairs:
        if type(dy) is not torch.Tensor or type(x) is not torch.Tensor:
            return None
        if dy.dtype is not layout[0] or x.dtype is not layout[0]:
            return None
        tensors += (dy, x)
        layout += (dy.shape, dy.stride(), x.shape, x.stride())
    for tensor, version in grad._versions:
        if tensor._version != version:
            return None
    scale = grad._scale
    if type(scale) is torch.Tensor:
        tensors.append(scale)
        layout += (scale.dtype, scale.is_cuda)
    elif scale != 1.0:
        return None
    return tensors, tuple(layout)


def update(
    optimizer: FusedOptimizer,
    parameter: torch.Tensor,
    record: ParameterRecord,
    group: dict[str, Any],
    grad: torch.Tensor,
) -> bool:
    """Step the parameter by its plan. False: nothing was done, the general way is to be taken."""
    if type(grad) is not FactoredGrad or group["maximize"] or ops.observed():
        return False
    plan: Plan = record.plan
    state, selected = optimizer.state[parameter], optimizer.rule.select(group)
    targets = plan.targets(parameter, selected, state)
    if targets is None:
        record.plan = None
        return False
    operands = _operands(grad)
    if operands is None:
        return False
    tensors, layout = operands
    bound, count = plan.bound.get(layout), state.get("step")
    if bound is None:
        plan.has_seen(layout)
        return False
    if type(count) is not int or count < 1:
        return False
    if plan.generation != optimizer._flags.generation:
        plan.flag = optimizer._flags.of(record.index, parameter.device)
        plan.generation = optimizer._flags.generation
    scalars = optimizer._scalars_of(group, selected, count + 1, False, parameter)
    moving = (*tensors, plan.flag, scalars.values, scalars.keys)
    if type(bound) is int:
        target = Target(parameter.detach(), targets[1:], plan.storages, record.index)
        bound = _bind(plan, layout, bound, target, grad, moving)
        if bound is None:
            return False
    if not bound.run(moving, targets):
        record.plan = None
        return False
    state["step"] = count + 1
    _increment_version(targets)
    return True


def _bind(plan: Plan, layout: tuple, failures: int, target: Target, grad: FactoredGrad, moving: tuple) -> Any:
    """Bind the launches, unless that failed too often; None if it cannot be done."""
    if failures >= _MOST_FAILURES or grad.shape != plan.shape:
        return None
    *_, flag, values, keys = moving
    made = ops.bind_step(target, grad.gradient(), plan.update, ops.StepScalars(values, keys), flag)
    plan.bound[layout] = failures + 1 if made is None else made
    return made


def forget_if_changed(records: Iterable[ParameterRecord], settings: Any, *modes: str | None) -> Any:
    """Drop all plans if what chooses kernels and storages is not as in `settings`; returns what it is now.

    `modes`: the optimizer's `weight_mode` and `state_mode`. The rest is of the process.
    """
    present = (os.environ.get("FORGE_KERNEL"), allows_tf32(), *modes)
    if present != settings:
        for record in records:
            record.plan = None
    return present
