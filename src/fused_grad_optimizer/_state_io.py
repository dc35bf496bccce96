"""Saving and loading optimizer state in torch.optim's layout, converting dtypes, checking all before changing any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fused_grad_optimizer._messages import shown
from fused_grad_optimizer._parameters import check_settings
from fused_grad_optimizer.storage import state_storage

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer


def _step_tensor(step) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def export_state(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """State with `step` as torch.optim keeps it: a float32 0-d tensor."""
    return {key: {k: _step_tensor(v) if k == "step" else v for k, v in values.items()} for key, values in state.items()}


def load_state(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> None:
    """Load a state_dict of this class or of torch.optim's optimizer of the same rule.

    Groups keep their identity, state tensors take the dtype this optimizer keeps them in.

    Raises:
        ValueError: groups, parameters, shapes or states do not fit; nothing has been changed then.
    """
    loaded = read_state(optimizer, state_dict)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        kept = {k: v for k, v in saved.items() if k not in ("params", "param_names") and k not in _FOREIGN}
        group.update(kept)
    optimizer.state.clear()
    optimizer.state.update(loaded)


def read_state(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state to load, by parameter, in the dtypes the optimizer keeps. Raises as `load_state`; changes nothing."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("state_dict must have 'state' and 'param_groups', as an optimizer's state_dict() gives them")
    saved_groups = state_dict["param_groups"]
    _check_groups(optimizer, saved_groups)
    loaded = {}
    for saved_id, parameter in _matched(optimizer, saved_groups):
        if saved_id in state_dict["state"]:
            values = state_dict["state"][saved_id]
            loaded[parameter] = _converted(optimizer, parameter, values, saved_id)
    return loaded


# Switches of torch.optim's implementations that mean nothing here.
_FOREIGN = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay")


def _check_groups(optimizer: FusedOptimizer, saved_groups: list[dict[str, Any]]) -> None:
    groups = optimizer.param_groups
    if len(groups) != len(saved_groups):
        raise ValueError(f"state_dict has {len(saved_groups)} parameter groups, the optimizer has {len(groups)}")
    for i, (group, saved) in enumerate(zip(groups, saved_groups)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"group {i} of state_dict has {len(saved['params'])} parameters, the optimizer's has "
                f"{len(group['params'])}"
            )
        if saved.get("amsgrad"):
            raise ValueError("state_dict was saved with amsgrad=True, which is not offered")
        check_settings(optimizer.rule, {**group, **{k: v for k, v in saved.items() if k not in _FOREIGN}})


def _matched(optimizer: FusedOptimizer, saved_groups: list[dict[str, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    for group, saved in zip(optimizer.param_groups, saved_groups):
        yield from zip(saved["params"], group["params"])


def _converted(optimizer: FusedOptimizer, parameter: torch.Tensor, values: dict[str, Any], saved_id) -> dict[str, Any]:
    name = optimizer.name_of(parameter)
    known = {state for update in optimizer.rule.updates for state in update.states}
    storage = state_storage(parameter.dtype, optimizer.state_mode)
    result: dict[str, Any] = {"step": int(values.get("step", 1))}
    for key, value in values.items():
        if key == "step" or value is None:
            continue
        if key not in known:
            raise ValueError(
                f"state_dict holds {shown(key)} for {name}; {optimizer.rule.name} has {sorted(known) or 'none'}"
            )
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{key} of {name} is a {type(value).__name__} in state_dict; a tensor is needed")
        if tuple(value.shape) != tuple(parameter.shape):
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in state_dict, the parameter {tuple(parameter.shape)}"
            )
        target = torch.empty_like(parameter, dtype=storage.dtype, requires_grad=False)
        result[key] = target.copy_(value)
    return result
