"""Operations on lists of gradients, factored and ordinary ones together: each is done to one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
HANDLERS: dict[Any, Callable] = {}


def _handles(*operations):
    def register(function: Callable) -> Callable:
        HANDLERS.update(dict.fromkeys(operations, function))
        return function

    return register


def _each(function: Callable, grads: list, *others) -> list:
    spread = [o if isinstance(o, (list, tuple)) else [o] * len(grads) for o in others]
    return [function(*values) for values in zip(grads, *spread)]


@_handles(aten._foreach_norm.Scalar)
def _foreach_norm(func, grads, ord=2, dtype=None):
    return _each(lambda g: torch.linalg.vector_norm(g, ord, dtype=dtype), grads)


@_handles(aten._foreach_zero_.default)
def _foreach_zero(func, grads):
    _each(lambda g: g.zero_(), grads)


@_handles(aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_mul_.ScalarList, aten._foreach_mul_.List)
def _foreach_mul(func, grads, other):
    _each(lambda g, o: g.mul_(o), grads, other)


@_handles(aten._foreach_div_.Tensor, aten._foreach_div_.Scalar, aten._foreach_div_.ScalarList, aten._foreach_div_.List)
def _foreach_div(func, grads, other):
    _each(lambda g, o: g.div_(o), grads, other)


@_handles(aten._foreach_add_.List)
def _foreach_add(func, grads, others, *, alpha=1):
    _each(lambda g, o: g.add_(o, alpha=alpha), grads, others)
