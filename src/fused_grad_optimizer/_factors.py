"""Questions about the tensors and scalars of which factored gradients are made."""

from __future__ import annotations

import math

import torch

from fused_grad_optimizer._no_memory import NoMemory

Pair = tuple[torch.Tensor, torch.Tensor]

# The version of a part that was modified in place, for ever: no tensor has it.
MODIFIED = -1


def version_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def versions_of(*parts: list[Pair]) -> list[tuple[torch.Tensor, int]]:
    """Every tensor of lists of pairs with its version now; inference tensors have none."""
    return [(t, t._version) for part in parts for pair in part for t in pair if not t.is_inference()]


def unit_stride(t: torch.Tensor) -> torch.Tensor:
    """`t` [T, features] with a unit last stride, as the kernels need it; a copy only for expanded or strided inputs."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 and t.is_contiguous() else t.contiguous()


def same_scale(a: float | torch.Tensor, b: float | torch.Tensor) -> bool:
    return a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b)


def is_scalar(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex() and not isinstance(value, NoMemory)
    return isinstance(value, (int, float))


def inverse(value):
    return 1.0 / value if isinstance(value, torch.Tensor) or value else math.copysign(math.inf, value)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a sum is of their common shape and dtype, on their common device, and strided."""
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout


def check_parts(
    shape: tuple[int, ...],
    device: torch.device,
    pairs: list[Pair],
    rows: list[Pair],
    dense: torch.Tensor | None,
) -> None:
    """Raise `ValueError` unless the parts are those of a gradient of this shape and device. Kernels check nothing."""
    if (pairs or rows) and len(shape) != 2:
        raise ValueError(f"pairs and rows are of a matrix [N, K]; the shape is {shape}")
    for dy, x in pairs:
        if dy.dim() != 2 or x.dim() != 2 or (*dy.shape, x.shape[1]) != (x.shape[0], *shape):
            raise ValueError(
                f"a pair for a gradient {shape} must be dY [T, {shape[0]}] and X [T, {shape[1]}], not "
                f"{tuple(dy.shape)} and {tuple(x.shape)}"
            )
    for ids, dy in rows:
        if tuple(dy.shape) != (ids.numel(), shape[1]) or ids.dim() != 1 or ids.dtype != torch.int64:
            raise ValueError(
                f"rows for a gradient {shape} must be ids [T] of int64 and dY [T, {shape[1]}], not "
                f"{tuple(ids.shape)} of {ids.dtype} and {tuple(dy.shape)}"
            )
    if dense is not None and tuple(dense.shape) != shape:
        raise ValueError(f"the dense part of a gradient {shape} has shape {tuple(dense.shape)}")
    found = [t for pair in (*pairs, *rows) for t in pair] + ([dense] if dense is not None else [])
    for tensor in found:
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            raise ValueError(f"a part of a gradient on {device} is on {tensor.device}")
