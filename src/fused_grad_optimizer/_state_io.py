"""Saving and loading optimizer state in torch.optim's layout, converting dtypes, checking all before changing any."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fused_grad_optimizer._messages import shown
from fused_grad_optimizer._parameters import check_settings
from fused_grad_optimizer.rules import Rule, number, switch
from fused_grad_optimizer.storage import state_storage

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer


def _step_tensor(step) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def export_state(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """State with `step` as torch.optim keeps it: a float32 0-d tensor."""
    return {key: {k: _step_tensor(v) if k == "step" else v for k, v in values.items()} for key, values in state.items()}


def load_state(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state_dict of this class or of torch.optim's optimizer of the same rule.

    Groups keep their identity, state tensors take the dtype this optimizer keeps them in; nothing is shared with
    `state_dict` afterwards.

    Raises:
        ValueError: groups, parameters, shapes or states do not fit; nothing has been changed then.
    """
    groups, state = read_state(optimizer, state_dict)
    for group, settings in zip(optimizer.param_groups, groups):
        group.update(settings)
    optimizer.state.clear()
    optimizer.state.update(state)


def read_state(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, dict[str, Any]]]:
    """The settings of each group and the state by parameter, to be loaded. Raises as `load_state`; changes nothing."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("state_dict must have 'state' and 'param_groups', as an optimizer's state_dict() gives them")
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    if not _is_list(saved_groups):
        raise ValueError(f"'param_groups' of state_dict is {shown(saved_groups)}; a list of groups is needed")
    if not isinstance(saved_state, Mapping):
        raise ValueError(f"'state' of state_dict is {shown(saved_state)}; a dict of states by parameter is needed")
    if len(optimizer.param_groups) != len(saved_groups):
        raise ValueError(
            f"state_dict has {len(saved_groups)} parameter groups, the optimizer has {len(optimizer.param_groups)}"
        )
    groups, state = [], {}
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups)):
        groups.append(_settings(optimizer.rule, i, group, saved))
        for saved_id, parameter in zip(saved["params"], group["params"]):
            if saved_id in saved_state:
                values = _converted(optimizer, parameter, saved_state[saved_id])
                if values:
                    state[parameter] = values
    _check_order(optimizer.param_groups, saved_groups)
    return copy.deepcopy(groups), state


# Switches of torch.optim's implementations that mean nothing here.
_FOREIGN = ("foreach", "fused", "capturable", "differentiable", "amsgrad")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _settings(rule: Rule, i: int, group: dict[str, Any], saved: Any) -> dict[str, Any]:
    """What the saved group, the `i`-th, changes in `group`."""
    if not isinstance(saved, Mapping) or not _is_list(saved.get("params")):
        raise ValueError(f"group {i} of state_dict must be a dict with a list 'params', not {shown(saved)}")
    if len(group["params"]) != len(saved["params"]):
        raise ValueError(
            f"group {i} of state_dict has {len(saved['params'])} parameters, the optimizer's has {len(group['params'])}"
        )
    for saved_id in saved["params"]:
        try:
            hash(saved_id)
        except TypeError:
            raise ValueError(f"'params' of group {i} of state_dict holds {shown(saved_id)}; ids are needed") from None
    names = saved.get("param_names")
    if names is not None and not _is_list(names):
        raise ValueError(f"'param_names' of group {i} of state_dict is {shown(names)}; a list of names is needed")
    amsgrad = saved.get("amsgrad", False)
    if amsgrad is not None and switch(amsgrad) is not False:
        raise ValueError(f"state_dict was saved with amsgrad={shown(amsgrad)}, which is not offered")
    changes = {k: v for k, v in saved.items() if k not in ("params", "param_names") and k not in _FOREIGN}
    settings = check_settings(rule, {**group, **changes})
    return {k: settings[k] for k in changes if k != "decoupled_weight_decay"}


def _check_order(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the same names in another order: states go by position. Other names are those of a wrapped model, say."""
    own, saved = _names(groups), _names(saved_groups)
    if own == saved or set(own) != set(saved) or len(own) != len(saved):
        return
    at = next(k for k, (a, b) in enumerate(zip(own, saved)) if a != b)
    raise ValueError(
        f"state_dict has the parameters in another order: {shown(saved[at])} where the optimizer has {shown(own[at])}. "
        "States are loaded by position: give the parameters in the order of the file"
    )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for group in groups for name in group.get("param_names") or () if isinstance(name, str)]


def _converted(optimizer: FusedOptimizer, parameter: torch.Tensor, values: Any) -> dict[str, Any]:
    """The saved states of a parameter as this optimizer keeps them, empty if none are saved."""
    name, rule = optimizer.name_of(parameter), optimizer.rule
    if not isinstance(values, Mapping):
        raise ValueError(f"the state of {name} is {shown(values)} in state_dict; a dict of states is needed")
    saved = {key: value for key, value in values.items() if key != "step" and value is not None}
    _check_states(rule, name, parameter, saved)
    step = _step_of(rule, name, values)
    whole_sets = [set(update.states) for update in rule.updates]
    if set(saved) not in whole_sets and (saved or step > 0):
        missing = sorted(set.union(*whole_sets) - set(saved))
        raise ValueError(
            f"state_dict holds no {', '.join(missing)} for {name} at step {step}; {rule.name} cannot continue without"
        )
    if not saved and step == 0:
        return {}
    storage = state_storage(parameter.dtype, optimizer.state_mode)
    result: dict[str, Any] = {"step": step}
    for key, value in saved.items():
        target = torch.empty_like(parameter, dtype=storage.dtype, requires_grad=False)
        result[key] = target.copy_(value)
    return result


def _step_of(rule: Rule, name: str, values: Mapping[str, Any]) -> int:
    """The saved step count. Without one: 0 where nothing is saved, 1 for a rule that does not depend on it."""
    if "step" not in values:
        if values and rule.needs_step:
            raise ValueError(f"state_dict holds no step for {name}; {rule.name} cannot continue without")
        return 1 if values else 0
    step = number(values["step"])
    if not (step >= 0.0 and step.is_integer()):
        raise ValueError(f"step of {name} is {shown(values['step'])} in state_dict; a whole number from 0 on is needed")
    return int(step)


def _check_states(rule: Rule, name: str, parameter: torch.Tensor, saved: Mapping[str, Any]) -> None:
    known = {state for update in rule.updates for state in update.states}
    for key, value in saved.items():
        if key not in known:
            raise ValueError(f"state_dict holds {shown(key)} for {name}; {rule.name} has {sorted(known) or 'none'}")
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{key} of {name} is a {type(value).__name__} in state_dict; a tensor is needed")
        if value.layout != torch.strided or value.is_meta or value.is_complex() or value.is_quantized:
            raise ValueError(
                f"{key} of {name} has layout {value.layout}, dtype {value.dtype} on {value.device} in state_dict; "
                "a strided tensor of real numbers with memory is needed"
            )
        if value.shape != parameter.shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in state_dict, the parameter {tuple(parameter.shape)}"
            )
