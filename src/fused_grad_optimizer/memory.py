"""Bytes a training keeps for its parameters, counted from shapes alone: nothing is allocated and no device is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fused_grad_optimizer._messages import shown
from fused_grad_optimizer._parameters import check_settings
from fused_grad_optimizer._small import SMALL, WAITING
from fused_grad_optimizer.kernels.configs import ChunkConfig, most_chunk_rows
from fused_grad_optimizer.kernels.tile_cpu import compute_dtype
from fused_grad_optimizer.optimizer import WHEN
from fused_grad_optimizer.rules import Update, get_rule
from fused_grad_optimizer.storage import check_modes, state_storage, weight_storage

if TYPE_CHECKING:
    from fused_grad_optimizer.convert import Exclude

_ADAMW_STATES = 2
_ID_BYTES = torch.int64.itemsize
_FLAG_BYTES = 16


@dataclass(frozen=True)
class TrainingMemory:
    """What one training keeps, in bytes. Activations, buffers and what a running kernel takes are not counted.

    Attributes:
        parameters: number of parameters (elements), frozen ones included, tied ones once.
        weights: bytes of all parameters.
        states: bytes of the rule's state tensors.
        gradients: bytes of gradients kept at the end of backward. With `when="backward"` each is freed as soon as it is
            applied: the largest one that is formed as a tensor, and on a GPU the small ones (65,536 elements at most),
            which wait for the end of backward, but never more than 4 million elements of them.
        adamw: bytes `torch.optim.AdamW` would keep: all weights, and two states and the gradient of every trained one,
            in the weight's dtype.
        workspace: bytes that a GPU keeps from step to step besides these, at most: the chunk for many tokens (of one
            stream; 24 MiB unless a tuning table says otherwise), and flags of gradients that are not finite.
    """

    parameters: int
    weights: int
    states: int
    gradients: int
    adamw: int
    workspace: int = 0

    @property
    def total(self) -> int:
        """Bytes of weights, states, gradients and workspace."""
        return self.weights + self.states + self.gradients + self.workspace


@dataclass
class _Tensor:
    """One parameter and how the model uses it.

    Attributes:
        factored: for each module that gives it a factored gradient, whether that is an embedding.
        dense: whether anything gives it an ordinary gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    factored: list[bool] = field(default_factory=list)
    dense: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


def training_memory(
    model_or_named_shapes: nn.Module | Mapping[str, Sequence[int]],
    rule: str = "adamw",
    *,
    state: str | None = None,
    weight: str | None = None,
    when: str = "backward",
    tokens: int | None = None,
    dtype: torch.dtype | None = None,
    exclude: Exclude = None,
    device: torch.device | str | None = None,
    **hyper: Any,
) -> TrainingMemory:
    """Count what `fuse(model, rule, ...)` would keep for weights, states and gradients, and what AdamW of torch would.

    With `when="step"` a weight [N, K] keeps its factors, T (N + K) elements of its dtype (for an embedding T K elements
    and T ids), or an fp32 sum of N K elements where that is smaller (9/8 of it with more than two uses). An input that
    several layers share counts in each, so this is a bound from above; a layer that runs several times counts once.

    Args:
        model_or_named_shapes: a model, on any device ("meta" too: no memory is needed), converted or not; or shapes by
            name, of which those with two dimensions are taken for weights of linear layers.
        rule, state, weight, when, exclude, **hyper: as for `fuse`.
        tokens: T, tokens of one step (batch x sequence); needed for `when="step"`.
        dtype: of the weights, for named shapes only; default torch's default dtype.
        device: that the training is for; default that of the model. "cuda" counts what only a GPU keeps.

    Raises:
        ValueError: an argument or parameter that is not offered, naming it.

    Example:
        >>> kept = training_memory({"w": (8, 4), "b": (8,)}, "adamw", dtype=torch.bfloat16)
        >>> kept.parameters, kept.weights, kept.states, kept.gradients, kept.adamw
        (40, 80, 160, 16, 320)
        >>> training_memory({"w": (8, 4)}, "lion", when="step", tokens=2, dtype=torch.bfloat16).gradients
        48
    """
    check_modes(state, weight)
    update = _update(rule, hyper)
    _check_arguments(when, tokens)
    gpu = _is_gpu(model_or_named_shapes, device)
    if isinstance(model_or_named_shapes, nn.Module):
        if dtype is not None:
            raise ValueError(f"dtype={dtype} is for named shapes; a model's parameters have their own")
        tensors = _of_model(model_or_named_shapes, exclude, weight)
    else:
        if exclude is not None:
            raise ValueError("exclude is for a model; leave it out with named shapes")
        tensors = _of_shapes(model_or_named_shapes, dtype or torch.get_default_dtype(), weight)
    counted = _count(tensors, len(update.states), state, weight, tokens if when == "step" else None)
    if not gpu:
        return counted
    waiting = _waiting(tensors) if when == "backward" else counted.gradients
    return replace(counted, gradients=waiting, workspace=_workspace(tensors))


def _update(rule: str, hyper: dict[str, Any]) -> Update:
    found = get_rule(rule)
    defaults = {**found.defaults, "maximize": False, "seed": 0}
    for name in hyper:
        if name not in defaults:
            raise ValueError(f"{name} is not a hyper-parameter of {rule}; it takes {', '.join(defaults)}")
    check_settings(found, {**defaults, **hyper})
    return found.select({**defaults, **hyper})


def _check_arguments(when: str, tokens: int | None) -> None:
    if when not in WHEN:
        raise ValueError(f"when={shown(when)} is not offered; choose 'backward' or 'step'")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ValueError(f"tokens={shown(tokens)}: a whole number of at least 1 is needed")
    if tokens is None and when == "step":
        raise ValueError("tokens is needed for when='step': the factors kept until step() grow with it")


def _is_gpu(model: Any, device: torch.device | str | None) -> bool:
    if device is None:
        first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        return first is not None and first.device.type == "cuda"
    try:
        return torch.device(device).type == "cuda"
    except (RuntimeError, TypeError):
        raise ValueError(f"device={shown(device)} is not a device; 'cuda' or 'cpu', say") from None


def _on_kernels(tensor: _Tensor) -> bool:
    return tensor.trained and tensor.elements > 0 and tensor.dtype != torch.float64


def _is_small(tensor: _Tensor) -> bool:
    return _on_kernels(tensor) and not tensor.factored and tensor.elements <= SMALL


def _waiting(tensors: list[_Tensor]) -> int:
    """Bytes of gradients on a GPU with `when="backward"`: of the small ones that wait and the largest other one."""
    small = [t for t in tensors if _is_small(t)]
    others = [t.dense_bytes for t in tensors if t.trained and t.dense and not _is_small(t)]
    most = (WAITING + SMALL) * max((t.dtype.itemsize for t in small), default=0)
    return min(sum(t.dense_bytes for t in small), most) + max(others, default=0)


def _workspace(tensors: list[_Tensor]) -> int:
    chunks = [_chunk(*t.shape) for t in tensors if _on_kernels(t) and not all(t.factored)]
    return max(chunks, default=0) + _FLAG_BYTES * max(64, 2 * len(tensors))


def _chunk(n: int, k: int) -> int:
    """The most bytes of the buffer that takes rows of the gradient of a weight [n, k]."""
    return 4 * k * most_chunk_rows(n, k, ChunkConfig())


def _of_model(model: nn.Module, exclude: Exclude, weight: str | None) -> list[_Tensor]:
    """Every parameter once, with each of its uses."""
    from fused_grad_optimizer.convert import convertible

    factored = {id(module) for module in convertible(model, exclude)}
    tensors: dict[int, _Tensor] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"{name} is not initialised yet: run a forward first")
            if parameter.requires_grad:
                _check_dtype(name, parameter.dtype, weight)
            tensor = tensors.setdefault(
                id(parameter), _Tensor(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            )
            if key == "weight" and id(module) in factored:
                tensor.factored.append(isinstance(module, nn.Embedding))
            else:
                tensor.dense = True
    if not tensors:
        raise ValueError("model has no parameters")
    return list(tensors.values())


def _of_shapes(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, weight: str | None) -> list[_Tensor]:
    if not isinstance(shapes, Mapping):
        raise ValueError(f"model_or_named_shapes must be a torch.nn.Module or a mapping, not {type(shapes).__name__}")
    if not shapes:
        raise ValueError("model_or_named_shapes is empty")
    tensors = []
    for name, shape in shapes.items():
        if not isinstance(shape, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"the shape of {name} must be a tuple of whole numbers, not {shown(shape)}")
        _check_dtype(name, dtype, weight)
        matrix = len(shape) == 2 and prod(shape) > 0
        tensors.append(_Tensor(tuple(shape), dtype, True, [False] if matrix else [], not matrix))
    return tensors


def _check_dtype(name: str, dtype: torch.dtype, weight: str | None) -> None:
    try:
        weight_storage(dtype, weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _count(
    tensors: Iterable[_Tensor], states: int, state: str | None, weight: str | None, tokens: int | None
) -> TrainingMemory:
    """Sum up. `states`: state tensors of a parameter; `tokens`: T if gradients wait for `step()`, else None."""
    elements = weight_bytes = state_bytes = kept = largest = adamw = 0
    for tensor in tensors:
        elements += tensor.elements
        if not tensor.trained:
            weight_bytes += tensor.dense_bytes
            adamw += tensor.dense_bytes
            continue
        weight_bytes += tensor.elements * weight_storage(tensor.dtype, weight).dtype.itemsize
        state_bytes += states * tensor.elements * state_storage(tensor.dtype, state).dtype.itemsize
        adamw += (1 + _ADAMW_STATES + 1) * tensor.dense_bytes
        if tokens is not None:
            kept += _kept_until_step(tensor, tokens)
        elif tensor.dense:
            largest = max(largest, tensor.dense_bytes)
    return TrainingMemory(elements, weight_bytes, state_bytes, kept if tokens is not None else largest, adamw)


def _kept_until_step(tensor: _Tensor, tokens: int) -> int:
    """Factors, or the fp32 sum (fp64 for fp64) into which a `FactoredGrad` folds them when that is smaller."""
    if not tensor.factored:
        return tensor.dense_bytes
    n, k = tensor.shape
    size = tensor.dtype.itemsize
    factors = sum(tokens * (_ID_BYTES + k * size if embedding else (n + k) * size) for embedding in tensor.factored)
    folded = tensor.elements * compute_dtype(tensor.dtype).itemsize
    most = folded + folded // 8  # with a dense part, which the sum of the first factors is for those after it
    kept = factors + (tensor.dense_bytes if tensor.dense else 0)
    if factors <= folded and (not tensor.dense or kept <= most):
        return kept
    return folded if len(tensor.factored) + tensor.dense <= 2 else min(kept, most)
