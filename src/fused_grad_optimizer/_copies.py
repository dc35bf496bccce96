"""Copies of a factored gradient, changes behind its back, and what of it is shared with other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fused_grad_optimizer._factors import MODIFIED, version_of, versions_of

if TYPE_CHECKING:
    from fused_grad_optimizer.factored_grad import FactoredGrad


def is_modified(grad: FactoredGrad) -> bool:
    """Whether something of which the gradient consists was modified in place since it came."""
    if any(tensor._version != version for tensor, version in grad._versions):
        return True
    return grad._dense_version is not None and version_of(grad.dense) != grad._dense_version


def mark_modified(grad: FactoredGrad) -> None:
    """For a copy of a gradient that was: it stays so whatever is added."""
    grad._versions.append((next(t for t in _tensors(grad) if not t.is_inference()), MODIFIED))


def check_unmodified(grad: FactoredGrad, name: str = "a weight") -> None:
    """Raise `RuntimeError` if a tensor of which this gradient consists was modified in place since it came."""
    for tensor, version in grad._versions:
        if tensor._version != version:
            raise RuntimeError(
                f"a {tuple(tensor.shape)} tensor that backward saved for the gradient of {name} was modified in "
                "place before the optimizer used it; clone the tensor before modifying it, or use when='backward'"
            )
    if grad._dense_version is not None and version_of(grad.dense) != grad._dense_version:
        raise RuntimeError(
            f"a tensor that was given for the gradient of {name}, of shape {tuple(grad.shape)}, was modified in "
            "place before the optimizer used it; clone it before giving it away"
        )


def _tensors(grad: FactoredGrad) -> Iterator[torch.Tensor]:
    yield from grad.operands()
    for ids, _ in grad.rows:
        yield ids


def share_memory_(grad: FactoredGrad) -> FactoredGrad:
    """Move what it consists of to shared memory; what is added later is not in it."""
    grad._folded = None  # another process may hold the sum
    for tensor in _tensors(grad):
        tensor.share_memory_()
    return grad


def is_shared(grad: FactoredGrad) -> bool:
    return all(tensor.is_shared() for tensor in _tensors(grad))


def deepcopy(grad: FactoredGrad, memo: dict[int, Any]) -> FactoredGrad:
    """A copy that shares nothing. Of a gradient whose operands were modified it is modified too."""
    copy = grad._copy()
    copy.pairs = [(dy.clone(), x.clone()) for dy, x in grad.pairs]
    copy.rows = [(ids.clone(), dy.clone()) for ids, dy in grad.rows]
    copy.dense = grad.dense.clone() if grad.dense is not None else None
    copy._dense_version = None
    copy._scale = grad._scale.clone() if isinstance(grad._scale, torch.Tensor) else grad._scale
    copy._versions = versions_of(copy.pairs, copy.rows)
    if is_modified(grad):
        mark_modified(copy)
    memo[id(grad)] = copy
    return copy
