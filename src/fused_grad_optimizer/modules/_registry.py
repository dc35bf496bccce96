"""Which parameters get factored gradients, and which optimizer owns them.

Keyed by the Parameter object, weakly: a deep copy of a converted module, a replaced weight or a tensor substituted by
`functional_call` is not registered, takes the ordinary path and has an ordinary gradient.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd import forward_ad

_is_grad_enabled = torch.is_grad_enabled
_running_transform = torch._C._functorch.peek_interpreter_stack
_FACTORED: dict[int, weakref.ref] = {}
_OWNERS: dict[int, tuple[weakref.ref, weakref.ref]] = {}


def register_factored(parameter: torch.Tensor) -> None:
    """From now on the modules of this package give this parameter factored gradients."""
    key = id(parameter)
    _FACTORED[key] = weakref.ref(parameter, lambda _: _FACTORED.pop(key, None))


def is_factored(parameter: torch.Tensor) -> bool:
    found = _FACTORED.get(id(parameter))
    return found is not None and found() is parameter


def claim(parameter: torch.Tensor, owner: Any) -> None:
    key = id(parameter)
    _OWNERS[key] = (weakref.ref(parameter, lambda _: _OWNERS.pop(key, None)), weakref.ref(owner))


def owner_of(parameter: torch.Tensor) -> Any | None:
    """The live optimizer that owns the parameter, or None."""
    found = _OWNERS.get(id(parameter))
    return found[1]() if found is not None and found[0]() is parameter else None


def give_up(parameter: torch.Tensor, owner: Any) -> None:
    if owner_of(parameter) is owner:
        del _OWNERS[id(parameter)]


def factors_wanted(weight: torch.Tensor) -> bool:
    """Whether this use of the weight should give a factored gradient."""
    found = _FACTORED.get(id(weight))
    return (
        found is not None
        and found() is weight
        and weight.requires_grad
        and _is_grad_enabled()
        and weight.numel() > 0
        and weight.is_contiguous()
        and _running_transform() is None  # inside torch.func transforms: the ordinary path
        and forward_ad._current_level < 0  # and with dual numbers
    )
