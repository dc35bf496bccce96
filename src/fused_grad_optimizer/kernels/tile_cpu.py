"""The step on torch operations: CPU, and every device or dtype that has no Triton kernel.

The same tiles as the kernels: blocks of rows of the weight. A block's gradient is formed, used by the rule and dropped;
nothing of the weight's size is allocated. `gradient_block` is the mainloop, shared by the fused step and by `wgrad`, so
that both give the same bits.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from fused_grad_optimizer.kernels.elementwise import WORKSPACE, Elementwise
from fused_grad_optimizer.kernels.factors import Gradient, Target
from fused_grad_optimizer.rules import Update
from fused_grad_optimizer.storage import STORAGES
from fused_grad_optimizer.storage.rounding import (
    eight_index,
    hash_eights,
    parameter_keys,
    random_numbers,
    round_bits,
    words_of_pairs,
)

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


def gradient_block(gradient: Gradient, start: int, out: torch.Tensor) -> torch.Tensor:
    """Rows of the gradient from `start` on, written to `out` [rows, K]; factors must already be in its dtype."""
    end = start + out.shape[0]
    if not gradient.dys:
        out.zero_()
    for i, (dy, x) in enumerate(zip(gradient.dys, gradient.xs)):
        part = dy[:, start:end].t()
        if i == 0:
            torch.mm(part, x, out=out)
        else:
            out.addmm_(part, x)
    if gradient.row_map is not None and gradient.row_sums is not None and len(gradient.row_sums):
        rows = gradient.row_map[start:end]
        present = (rows >= 0).nonzero().flatten()
        out.index_add_(0, present, gradient.row_sums[rows[present]].to(out.dtype))
    if gradient.scale is not None:
        out.mul_(gradient.scale.to(device=out.device, dtype=out.dtype))
    if gradient.dense is not None:
        out.add_(gradient.dense[start:end])
    return out


@cache
def _rule(update: Update, scalars: int) -> Elementwise:
    return Elementwise(update.twin, scalars, 2 + len(update.states), [0, *range(2, 2 + len(update.states))])


_HASH = Elementwise(lambda keys, eight: hash_eights(eight, *keys), 2, 1, [0])
_ROUND = Elementwise(lambda _, bits, random: round_bits(bits, random), 0, 2, [0])


def step_block(
    target: Target, gradient: torch.Tensor, start: int, update: Update, h: tuple[float, ...], keys: tuple[int, int]
) -> None:
    """Apply the rule to rows `start : start + len(gradient)` of the target. `gradient` is in the compute dtype.

    In fp32 on the CPU by torch's own fused operator, where the update has one.
    """
    end, dtype = start + gradient.shape[0], gradient.dtype
    stored = [target.weight[start:end], *(s[start:end] for s in target.states)]
    plain = dtype == torch.float32 and gradient.device.type == "cpu" and all(t.dtype == dtype for t in stored)
    if plain and update.cpu is not None and update.cpu(h, stored[0], gradient, *stored[1:]):
        return
    values = [t if t.dtype == dtype else _take_like(gradient).copy_(t) for t in stored]
    _rule(update, len(h))(h, [values[0], gradient, *values[1:]])
    first = start * gradient.shape[1]
    words = _hash(first, gradient, target, keys)
    for i, (name, tensor, value) in enumerate(zip(target.storages, stored, values)):
        if value is tensor:
            continue
        if words is not None and STORAGES[name].stochastic:
            single = value if dtype == torch.float32 else value.to(torch.float32)
            _round(single, words, i, first % 8)
            tensor.copy_(single)
        else:
            tensor.copy_(value)
        WORKSPACE.give(value)
    if words is not None:
        WORKSPACE.give(words)


def _take_like(block: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return WORKSPACE.take(block.shape, dtype or block.dtype, block.device)


def _hash(first: int, like: torch.Tensor, target: Target, keys: tuple[int, int]) -> torch.Tensor | None:
    """Words of all pairs of the eights that a block from element `first` on touches, where a storage needs them."""
    if not any(STORAGES[name].stochastic for name in target.storages):
        return None
    count = (first + like.numel() + 7) // 8 - first // 8
    eights = WORKSPACE.take((count,), torch.int32, like.device)
    _HASH(parameter_keys(keys, target.parameter), [eight_index(first // 8, count, like.device, out=eights)])
    words = words_of_pairs(eights, out=WORKSPACE.take((4 * count,), torch.int32, like.device))
    WORKSPACE.give(eights)
    return words


def _round(block: torch.Tensor, words: torch.Tensor, storage: int, skip: int) -> None:
    """Round an fp32 block stochastically to bf16 values, in place; `skip`: elements of the first eight before it."""
    random = random_numbers(words, storage, out=WORKSPACE.take((2 * words.numel(),), torch.int32, words.device))
    _ROUND((), [block.view(torch.int32), random[skip : skip + block.numel()].view(block.shape)])
    WORKSPACE.give(random)


def wgrad_step(target: Target, gradient: Gradient, update: Update, h: tuple[float, ...], keys: tuple[int, int]) -> None:
    """Fused step: for each block of rows, its gradient, then the rule, then the gradient is dropped."""
    n, k = target.weight.shape
    dtype = compute_dtype(target.weight.dtype)
    gradient = cast_factors(gradient, dtype)
    rows = block_rows(n, k)
    ready = gradient.dense if not gradient.dys and gradient.row_map is None else None
    if ready is not None and ready.dtype != dtype:
        ready = None
    for start in range(0, n, rows):
        count = min(rows, n - start)
        if ready is not None:
            step_block(target, ready[start : start + count], start, update, h, keys)
            continue
        block = WORKSPACE.take((count, k), dtype, target.weight.device)
        step_block(target, gradient_block(gradient, start, block), start, update, h, keys)
        WORKSPACE.give(block)


def wgrad(gradient: Gradient, out: torch.Tensor, start: int, n: int) -> None:
    """Store rows `start : start + len(out)` of a gradient of `n` rows to `out`, by the fused step's mainloop.

    Blocks are those of the fused step when `start` is a multiple of `block_rows(n, k)`.
    """
    gradient = cast_factors(gradient, out.dtype)
    rows = block_rows(n, out.shape[1])
    for first in range(0, out.shape[0], rows):
        gradient_block(gradient, start + first, out[first : first + rows])


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
        total = float(tensor.sum(dtype=torch.float32 if tensor.element_size() < 8 else None))
        if not math.isfinite(total) and not torch.isfinite(tensor).all():
            return False
    return True
