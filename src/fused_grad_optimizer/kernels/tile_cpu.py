"""The step on torch operations: CPU, and every device or dtype that has no Triton kernel.

The same tiles as the kernels: blocks of rows of the weight. A block's gradient is formed, used by the rule and dropped;
nothing of the weight's size is allocated. `gradient_block` is the mainloop, shared by the fused step and by `wgrad`, so
that both give the same bits.
"""

from __future__ import annotations

import torch

from fused_grad_optimizer.kernels.factors import Gradient, Target
from fused_grad_optimizer.rules import Update
from fused_grad_optimizer.storage import STORAGES
from fused_grad_optimizer.storage.rounding import flat_index, parameter_keys, random_words

# Elements of one block. Measured on a 50M-parameter Llama on two cores: smaller blocks slow the GEMM, larger ones
# push the rule's temporaries out of cache.
BLOCK_ELEMENTS = 1 << 19


def compute_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """fp64 weights are updated in fp64, all others in fp32."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


def block_rows(n: int, k: int) -> int:
    """Rows of a block for a weight [n, k]: at most half of them, so that no block is the whole gradient."""
    return max(1, min(BLOCK_ELEMENTS // max(k, 1), (n + 1) // 2))


def cast_factors(gradient: Gradient, dtype: torch.dtype) -> Gradient:
    """The factors in the compute dtype (a copy of size T (N + K) where they differ)."""
    return Gradient(
        [dy.to(dtype) for dy in gradient.dys],
        [x.to(dtype) for x in gradient.xs],
        gradient.row_map,
        gradient.row_sums,
        gradient.scale,
        gradient.dense,
    )


def gradient_block(
    gradient: Gradient, start: int, end: int, k: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Rows `start:end` of the gradient, [end - start, k] in `dtype`; factors must already be in `dtype`."""
    out = None
    for dy, x in zip(gradient.dys, gradient.xs):
        part = dy[:, start:end].t()
        out = part @ x if out is None else out.addmm_(part, x)
    if gradient.row_map is not None and gradient.row_sums is not None:
        rows = gradient.row_map[start:end]
        if len(gradient.row_sums):
            found = gradient.row_sums[rows.clamp_min(0)].to(dtype) * (rows >= 0).unsqueeze(1)
        else:
            found = torch.zeros(end - start, k, dtype=dtype, device=device)
        out = found if out is None else out.add_(found)
    if out is not None and gradient.scale is not None:
        out = out.mul_(gradient.scale.to(device=out.device, dtype=dtype))
    if gradient.dense is not None:
        block = gradient.dense[start:end].to(dtype)
        out = block if out is None else out.add_(block)
    if out is None:
        out = torch.zeros(end - start, k, dtype=dtype, device=device)
    return out


def step_block(
    target: Target, gradient: torch.Tensor, start: int, update: Update, h: tuple[float, ...], keys: tuple[int, int]
) -> None:
    """Apply the rule to rows `start : start + len(gradient)` of the target. `gradient` is in the compute dtype."""
    end, k = start + gradient.shape[0], gradient.shape[1]
    tensors = [target.weight[start:end], *(s[start:end] for s in target.states)]
    storages = [STORAGES[name] for name in target.storages]
    random = _random16(start * k, gradient, target.parameter, keys, storages)
    values = [s.read(t, gradient.dtype) for s, t in zip(storages, tensors)]
    results = update.twin(h, values[0], gradient, *values[1:])
    for storage, tensor, value, bits in zip(storages, tensors, results, random):
        storage.write(tensor, value, bits)


def _random16(start, like, parameter, keys, storages) -> list[torch.Tensor | None]:
    """16 random bits for each storage that needs them (int32 tensors shaped like the block)."""
    if not any(s.stochastic for s in storages):
        return [None] * len(storages)
    index = flat_index(start, like.numel(), like.device).view(like.shape)
    first, second = random_words(index, *parameter_keys(keys, parameter))
    words = (first & 0xFFFF, (first >> 16) & 0xFFFF, second & 0xFFFF, (second >> 16) & 0xFFFF)
    return list(words[: len(storages)])


def wgrad_step(target: Target, gradient: Gradient, update: Update, h: tuple[float, ...], keys: tuple[int, int]) -> None:
    """Fused step: for each block of rows, its gradient, then the rule, then the gradient is dropped."""
    n, k = target.weight.shape
    dtype = compute_dtype(target.weight.dtype)
    gradient = cast_factors(gradient, dtype)
    rows = block_rows(n, k)
    for start in range(0, n, rows):
        block = gradient_block(gradient, start, min(start + rows, n), k, dtype, target.weight.device)
        step_block(target, block, start, update, h, keys)


def wgrad(gradient: Gradient, out: torch.Tensor, start: int, n: int) -> None:
    """Store rows `start : start + len(out)` of a gradient of `n` rows to `out`, by the fused step's mainloop.

    Blocks are those of the fused step when `start` is a multiple of `block_rows(n, k)`.
    """
    k = out.shape[1]
    gradient = cast_factors(gradient, out.dtype)
    rows = block_rows(n, k)
    for first in range(0, out.shape[0], rows):
        last = min(first + rows, out.shape[0])
        out[first:last] = gradient_block(gradient, start + first, start + last, k, out.dtype, out.device)


def sum_rows(
    ids: torch.Tensor, dy: torch.Tensor, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding gradients summed by row: `(row_map int32 [num_rows], row_sums [U, K])`, see `Gradient`."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    row_map = torch.full((num_rows,), -1, dtype=torch.int32, device=ids.device)
    row_map[unique] = torch.arange(unique.numel(), dtype=torch.int32, device=ids.device)
    row_sums = torch.zeros(unique.numel(), dy.shape[1], dtype=dtype, device=ids.device)
    row_sums.index_add_(0, inverse, dy.to(dtype))
    return row_map, row_sums


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether every element is finite. A finite sum proves it without a temporary of the tensor's size."""
    for tensor in tensors:
        total = tensor.sum(dtype=torch.float32 if tensor.element_size() < 8 else None)
        if not torch.isfinite(total) and not torch.isfinite(tensor).all():
            return False
    return True
