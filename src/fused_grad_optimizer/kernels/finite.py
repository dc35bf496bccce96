"""One kernel that looks for NaN and inf in a gradient's operands before the step reads them (they stay in L2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels import launcher

BLOCK = 8192  # elements of a row that one program reads
MOST_OPERANDS = 12  # in one launch
_VECTOR = tl.constexpr(8)  # elements loaded at once: 16 bytes of a 16-bit dtype


@triton.jit
def _nonfinite(value):
    """1 if any element of the tile is NaN or inf."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.max(((bits & 0x7F800000) == 0x7F800000).to(tl.int32), 0)


@triton.jit
def _check_block(x, flag, block, blocks_per_row, columns, stride, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """One block of a row of x. The bulk is read in whole vectors, what is left of the row after them singly."""
    start = (block % blocks_per_row).to(tl.int64) * BLOCK
    row = (block // blocks_per_row).to(tl.int64) * stride
    if ALIGNED:
        row = tl.multiple_of(row, _VECTOR)
    whole = columns // _VECTOR * _VECTOR
    offsets = start + tl.arange(0, BLOCK)
    bad = _nonfinite(tl.load(x + row + offsets, mask=offsets < whole, other=0.0))
    if (start + BLOCK >= columns) & (whole < columns):
        rest = whole + tl.arange(0, _VECTOR)
        bad |= _nonfinite(tl.load(x + row + rest, mask=rest < columns, other=0.0))
    if bad != 0:
        tl.store(flag, 1)


@triton.jit(do_not_specialize=["rows", "columns", "strides"])
def nonfinite_kernel(flag, operands, rows, columns, strides, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """flag = 1 if any element of any operand i, [rows[i], columns[i]] with row stride strides[i], is NaN or inf.

    Tuples of one length. ALIGNED[i]: rows begin at multiples of 8 elements.
    """
    block = tl.program_id(0)
    for i in tl.static_range(len(operands)):
        blocks_per_row = tl.cdiv(columns[i], BLOCK)
        blocks = rows[i] * blocks_per_row
        if (block >= 0) & (block < blocks):
            _check_block(operands[i], flag, block, blocks_per_row, columns[i], strides[i], ALIGNED[i], BLOCK)
        block -= blocks


def layout(tensor: torch.Tensor) -> tuple[int, int, int]:
    """`(rows, columns, row stride)` in which the kernel reads a tensor: as one row where it is contiguous."""
    if tensor.is_contiguous():
        return 1, tensor.numel(), 0
    return tensor.shape[0], tensor.shape[1], tensor.stride(0)


def arguments(tensors: list[torch.Tensor], flag: torch.Tensor) -> tuple[int, tuple, dict]:
    """Blocks, positional arguments and constants of a launch over tensors that are not empty."""
    rows, columns, strides = zip(*[layout(t) for t in tensors])
    aligned = tuple(stride % _VECTOR.value == 0 for stride in strides)
    constants = {"ALIGNED": aligned, "BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
    blocks = sum(r * -(-c // BLOCK) for r, c in zip(rows, columns))
    return blocks, (flag, tuple(tensors), rows, columns, strides), constants


def check(tensors: list[torch.Tensor], flag: torch.Tensor, through=launcher.launch) -> None:
    """Set `flag` (int32, one element, zero before) to 1 if a tensor holds NaN or inf. No host synchronisation.

    Tensors are contiguous, or matrices with a unit stride in their last dimension.
    """
    tensors = [t for t in tensors if t.numel()]
    for start in range(0, len(tensors), MOST_OPERANDS):
        blocks, positional, constants = arguments(tensors[start : start + MOST_OPERANDS], flag)
        through(nonfinite_kernel, (blocks,), positional, constants)
