"""One kernel that looks for NaN and inf in a gradient's operands before the step reads them (they stay in L2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def nonfinite_kernel(x, flag, rows, columns, stride, BLOCK: tl.constexpr):
    """flag = 1 if any element of x [rows, columns] (row stride `stride`) is NaN or inf."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = offsets // columns
    value = tl.load(x + row * stride + (offsets - row * columns), mask=row < rows, other=0.0).to(tl.float32)
    bad = tl.max(((value.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000).to(tl.int32), 0)
    if bad != 0:
        tl.store(flag, 1)


def check(tensors: list[torch.Tensor], flag: torch.Tensor) -> None:
    """Set `flag` (int32, one element, zero before) to 1 if a tensor holds NaN or inf. No host synchronisation."""
    for tensor in tensors:
        count = tensor.numel()
        if count == 0:
            continue
        contiguous = tensor.is_contiguous()
        rows, columns = (1, count) if contiguous else (tensor.shape[0], tensor.shape[1])
        block = 4096
        nonfinite_kernel[(triton.cdiv(count, block),)](
            tensor,
            flag,
            rows,
            columns,
            count if contiguous else tensor.stride(0),
            BLOCK=block,
            num_warps=8,
            enable_fp_fusion=False,
        )
