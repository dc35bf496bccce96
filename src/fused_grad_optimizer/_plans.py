"""Stepping a weight again as it was stepped before: what stays the same from step to step is worked out once.

A plan is for a weight on a GPU whose gradient is nothing but (dY, X) pairs. It keeps no memory alive: neither the
weight's nor that of a state that was replaced. In `step()` the gradients of all weights with plans are checked for NaN
and inf by one launch before the first of them moves, in backward each by its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fused_grad_optimizer import ops
from fused_grad_optimizer._parameters import ParameterRecord
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import Target, allows_tf32, dispatch, triton_reason
from fused_grad_optimizer.rules import Update

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer

_MOST_SHAPES = 8  # numbers of tokens, say, that one plan knows
_MOST_FAILURES = 3
_FEWEST = 8  # gradients for which making and uploading a table takes the host less than a launch for each of them
_increment_version = torch._C._increment_version  # what torch.autograd.graph.increment_version calls for a list

Entry = tuple[torch.Tensor, ParameterRecord, dict[str, Any], torch.Tensor]  # parameter, record, group, gradient
# What `ops.bind_step` made, addresses of the moving tensors, weight and states, the state and its count of steps, the
# factors with their versions.
Ready = tuple[tuple[Any, Any], list[int], list[torch.Tensor], dict[str, Any], int, list[tuple[torch.Tensor, int]]]


class Plan:
    """How one weight is stepped.

    Attributes:
        update: what the rule selected.
        dtype, shape, device: of the weight; `storages` as in `Target`; `states` by name, weakly.
        bound: by layout of the pairs what `ops.bind_step` made, or how often it made nothing. It is asked when a layout
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

    None if it has other parts.
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
    scale = grad._scale
    if type(scale) is torch.Tensor:
        tensors.append(scale)
        layout += (scale.dtype, scale.is_cuda)
    elif scale != 1.0:
        return None
    return tensors, tuple(layout)


def _ready(
    optimizer: FusedOptimizer,
    parameter: torch.Tensor,
    record: ParameterRecord,
    group: dict[str, Any],
    selected: Update,
    grad: FactoredGrad,
) -> Ready | None:
    """All that the plan's launches need; None: the general way is to be taken. Nothing of the parameter is changed."""
    plan: Plan = record.plan
    state = optimizer.state[parameter]
    targets = plan.targets(parameter, selected, state)
    if targets is None:
        record.plan = None
        return None
    operands = _operands(grad)
    if operands is None:
        return None
    tensors, layout = operands
    made, count = plan.bound.get(layout), state.get("step")
    if made is None:
        plan.has_seen(layout)
        return None
    if type(count) is not int or count < 1:
        return None
    if plan.generation != optimizer._flags.generation:
        plan.flag = optimizer._flags.of(record.index, parameter.device)
        plan.generation = optimizer._flags.generation
    scalars = optimizer._scalars_of(group, selected, count + 1, False, parameter)
    moving = (*tensors, plan.flag, scalars.values, scalars.keys)
    if type(made) is int:
        target = Target(parameter.detach(), targets[1:], plan.storages, record.index)
        made = _bind(plan, layout, made, target, grad, moving)
        if made is None:
            return None
    addresses = made[0].addresses(moving, targets)
    if addresses is None:
        record.plan = None
        return None
    return made, addresses, targets, state, count, grad._versions


def update(
    optimizer: FusedOptimizer,
    parameter: torch.Tensor,
    record: ParameterRecord,
    group: dict[str, Any],
    grad: torch.Tensor,
) -> bool:
    """Check the gradient and step the parameter by its plan. False: nothing was done, take the general way."""
    if type(grad) is not FactoredGrad or group["maximize"] or ops.observed():
        return False
    found = _ready(optimizer, parameter, record, group, optimizer.rule.select(group), grad)
    return found is not None and _launched(found, False)


def _launched(found: Ready, checked: bool) -> bool:
    """Make the launches, the check among them unless it is done. False: the general way is to be taken."""
    (launches, _), addresses, targets, state, count, versions = found
    for tensor, version in versions:
        if tensor._version != version:  # a factor that is not as backward left it
            return False
    if state["step"] != count:  # it was stepped since `found`
        return False
    launches.launch(addresses, checked)
    state["step"] = count + 1
    _increment_version(targets)
    return True


def update_all(optimizer: FusedOptimizer, entries: list[Entry]) -> None:
    """Step all parameters in order, by their plans or in the general way; with `when="backward"` drop the gradients.

    One launch for each device checks the gradients of all that have plans, before the first of them is stepped.
    """
    # a graph would read anew, at each replay, the memory that the table was uploaded from
    alone = ops.observed() or _is_capturing()
    ready, checked = ([None] * len(entries), False) if alone else _checked_together(optimizer, entries)
    drop = optimizer.when == "backward"
    tried = 0
    try:
        for (parameter, record, group, grad), found in zip(entries, ready):
            if found is not None:
                done = _launched(found, checked)
            else:
                done = alone and record.plan is not None and update(optimizer, parameter, record, group, grad)
            if not done:
                optimizer._update_generally(parameter, record, group, grad)
            if drop:
                parameter.grad = None
            tried += 1
    except BaseException:
        if checked:  # what was found in gradients that were not reached is no update that was skipped
            for (parameter, record, *_), found in zip(entries[tried:], ready[tried:]):
                if found is not None and found[3]["step"] == found[4]:
                    optimizer._flags.of(record.index, parameter.device).zero_()
        raise


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _checked_together(optimizer: FusedOptimizer, entries: list[Entry]) -> tuple[list[Any], bool]:
    """For each entry what its plan's launches need, or None; and whether the gradients of all of these are checked.

    They are not if they are too few.
    """
    ready: list[Ready | None] = []
    by_device: dict[torch.device, tuple[torch.Tensor, list[Any], list[int]]] = {}
    last: dict[str, Any] = {}
    selected: Any = None
    count = 0
    for parameter, record, group, grad in entries:
        plan, found = record.plan, None
        if plan is not None and type(grad) is FactoredGrad and not group["maximize"]:
            if group is not last:
                last, selected = group, optimizer.rule.select(group)
            check = by_device.get(plan.device)
            if check is None:  # with room for all flags: none of them moves from here on
                flags = optimizer._flags.all(len(optimizer._records) - 1, plan.device)
                check = by_device[plan.device] = flags, [], []
            found = _ready(optimizer, parameter, record, group, selected, grad)
            if found is not None:
                operands = found[0][1]
                check[1].append(operands)
                check[2].extend(found[1][: len(operands.blocks)])
                count += 1
        ready.append(found)
    if count < _FEWEST:
        return ready, False
    for flags, some, addresses in by_device.values():
        ops.check_together(some, addresses, flags)
    return ready, True


def _bind(plan: Plan, layout: tuple, failures: int, target: Target, grad: FactoredGrad, moving: tuple) -> Any:
    """Bind the launches, unless that failed too often; None if it cannot be done."""
    if failures >= _MOST_FAILURES or grad.shape != plan.shape:
        return None
    *_, flag, values, keys = moving
    made = ops.bind_step(target, grad.gradient(), plan.update, ops.StepScalars(values, keys), flag)
    plan.bound[layout] = failures + 1 if made is None else made
    return made


def check_forced(parameters: Iterable[torch.Tensor]) -> None:
    """Warn, once, if FORGE_KERNEL is set and Triton's kernels step none of these parameters.

    Raises:
        ValueError: it names no path.
    """
    if dispatch.forced() is not None:
        reasons = [triton_reason(p.device, p.dtype) for p in parameters]
        if reasons and None not in reasons:
            dispatch.say_if_ignored(reasons[0])


def forget_if_changed(records: Iterable[ParameterRecord], settings: Any, *modes: str | None) -> Any:
    """Drop all plans if what chooses kernels and storages is not as in `settings`; returns what it is now.

    `modes`: the optimizer's `weight_mode` and `state_mode`. The rest is of the process.
    """
    present = (dispatch.forced(), allows_tf32(), *modes)
    if present != settings:
        for record in records:
            record.plan = None
    return present
