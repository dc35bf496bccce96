"""Stepping a weight again as it was stepped before: what stays the same from step to step is worked out once.

A plan is for a weight on a GPU whose gradient is one (dY, X) pair. It holds no memory alive: neither the weight's nor
that of a state that was replaced.
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
from fused_grad_optimizer.kernels import Target
from fused_grad_optimizer.rules import Update

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer

_MOST_SHAPES = 8  # numbers of tokens, say, that one plan knows
_MOST_FAILURES = 3


class Plan:
    """How one weight is stepped.

    Attributes:
        update: what the rule selected.
        dtype, shape: of the weight; `storages` as in `Target`; `states` weakly.
        bound: by layout of the pair the launches, or how often they could not be bound. They are bound when a layout
            is seen for the second time: lengths that are seen once are not worth it.
        flag: of `SkipFlags`, of its `generation`.
    """

    __slots__ = ("update", "dtype", "shape", "storages", "states", "bound", "flag", "generation")

    def __init__(self, parameter: torch.Tensor, target: Target, update: Update, states: list[torch.Tensor]) -> None:
        self.update, self.storages = update, target.storages
        self.dtype, self.shape = parameter.dtype, parameter.shape
        self.states = [weakref.ref(s) for s in states]
        self.bound: dict[tuple, Any] = {}
        self.flag: torch.Tensor | None = None
        self.generation = -1

    def fits(self, parameter: torch.Tensor, update: Update, states: list[torch.Tensor]) -> bool:
        """Whether this is the weight and these are the states of the plan; addresses are compared at the launch."""
        if update is not self.update or parameter.dtype is not self.dtype or parameter.shape != self.shape:
            return False
        same = [kept() is s for kept, s in zip(self.states, states)]
        return all(same) and parameter.is_contiguous()

    def launches(self, key: tuple) -> Any:
        """The launches bound for this layout, or how often that failed; None when it is seen for the first time."""
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) >= _MOST_SHAPES:
                del self.bound[next(iter(self.bound))]
            self.bound[key] = 0
        return found


def make(parameter: torch.Tensor, target: Target, update: Update, states: list[torch.Tensor]) -> Plan | None:
    """A plan for a parameter on a GPU that was just stepped, or None if it is not of a kind that has plans."""
    plain = type(parameter) in (torch.Tensor, nn.Parameter) and all(type(s) is torch.Tensor for s in states)
    if not plain or parameter.dim() != 2 or not parameter.is_contiguous():
        return None
    return Plan(parameter, target, update, states)


def _only_pair(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """`(dY, X, scale)` of a gradient that is nothing else, with factors as backward left them; None otherwise."""
    if type(grad) is not FactoredGrad or len(grad.pairs) != 1 or grad.rows or grad.dense is not None:
        return None
    scale = grad._scale
    if not isinstance(scale, torch.Tensor):
        if scale != 1.0:
            return None
        scale = None
    elif type(scale) is not torch.Tensor:
        return None
    (dy, x) = grad.pairs[0]
    if type(dy) is not torch.Tensor or type(x) is not torch.Tensor or dy.dtype is not x.dtype:
        return None
    for tensor, version in grad._versions:
        if tensor._version != version:
            return None
    return dy, x, scale


def update(
    optimizer: FusedOptimizer, parameter: torch.Tensor, record: ParameterRecord, group: dict[str, Any], grad: torch.Tensor
) -> bool:
    """Step the parameter by its plan. False: nothing was done, the general way is to be taken."""
    plan: Plan = record.plan
    operands = _only_pair(grad)
    if operands is None or group["maximize"] or ops.observed():
        return False
    state, selected = optimizer.state[parameter], optimizer.rule.select(group)
    states = [state.get(name) for name in selected.states]
    if not plan.fits(parameter, selected, states):
        record.plan = None
        return False
    dy, x, scale = operands
    kind = None if scale is None else scale.dtype
    key = (dy.shape, x.shape, dy.stride(), x.stride(), dy.dtype, kind)
    bound, count = plan.launches(key), state["step"]
    if bound is None or bound is _MOST_FAILURES or type(count) is not int or count < 1:
        return False
    if plan.generation != optimizer._flags.generation:
        plan.flag = optimizer._flags.of(record.index, parameter.device)
        plan.generation = optimizer._flags.generation
    flag = plan.flag
    assert flag is not None
    scalars = optimizer._scalars_of(group, selected, count + 1, False, parameter)
    if type(bound) is int:
        target = Target(parameter.detach(), states, plan.storages, record.index)
        made = ops.bind_step(target, grad.gradient(), selected, scalars, flag)  # type: ignore[attr-defined]
        plan.bound[key] = bound = bound + 1 if made is None else made
        if made is None:
            return False
    moving = (dy, x, flag, scalars.values, scalars.keys, *(() if scale is None else (scale,)))
    fixed = (parameter, *states)
    if not bound.run(moving, fixed):
        record.plan = None
        return False
    state["step"] = count + 1
    torch.autograd.graph.increment_version(fixed)
    return True


def forget_if_changed(records: Iterable[ParameterRecord], settings: Any) -> Any:
    """Drop all plans if the settings of the process that choose kernels are not `settings`; returns the present ones."""
    present = (os.environ.get("FORGE_KERNEL"), torch.backends.cuda.matmul.allow_tf32)
    if present != settings:
        for record in records:
            record.plan = None
    return present
