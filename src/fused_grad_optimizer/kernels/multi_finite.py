"""One launch that looks for NaN and inf in the operands of many gradients, before any of them is used.

A table of int64 on the device says where the n operands are:

    n times     number of the operand's first block
    n times     its address
    n times 5   columns | row stride | exponent's bits | whether aligned | index of the parameter

An operand of R rows and C columns has `R * ceil(C / BLOCK)` blocks. Program b takes block b of all of them, and finds
the operand that it belongs to by bisection: no program is idle, however unequal the operands are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels import launcher
from fused_grad_optimizer.kernels.finite import BLOCK, layout
from fused_grad_optimizer.kernels.launch_layout import NotDirect

_PLACES = tl.constexpr(5)  # numbers of an operand that do not change with its address
_VECTOR = tl.constexpr(8)  # elements loaded at once: 16 bytes of a 16-bit dtype
_EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # all ones in NaN and inf


@triton.jit
def _has_all(bits, exponent):
    """1 if an element of the tile has all bits of `exponent`."""
    return tl.max(((bits & exponent) == exponent).to(tl.int32), 0)


@triton.jit
def _nonfinite(address, count, exponent, aligned, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """1 if one of the `count` <= BLOCK elements at `address`, read as integers of type WORD, is NaN or inf."""
    exponent = exponent.to(WORD)
    offsets = tl.arange(0, BLOCK)
    pointer = address.to(tl.pointer_type(WORD))
    if aligned != 0:  # the bulk in whole vectors, what is left after them singly
        vectors = tl.multiple_of(pointer, 16)
        whole = count // _VECTOR * _VECTOR
        bad = _has_all(tl.load(vectors + offsets, mask=offsets < whole, other=0), exponent)
        if whole < count:
            rest = whole + tl.arange(0, _VECTOR)
            bad |= _has_all(tl.load(pointer + rest, mask=rest < count, other=0), exponent)
    else:
        bad = _has_all(tl.load(pointer + offsets, mask=offsets < count, other=0), exponent)
    return bad


@triton.jit(do_not_specialize=["count"])
def multi_finite_kernel(table, flags, count, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """flags[index * STRIDE] = 1 for each parameter with NaN or inf in one of the `count` operands of the table."""
    block = tl.program_id(0)
    low, high = count * 0, count
    while high - low > 1:
        middle = (low + high) // 2
        at_or_after = tl.load(table + middle) <= block
        low = tl.where(at_or_after, middle, low)
        high = tl.where(at_or_after, high, middle)
    place = table + 2 * count + low * _PLACES
    columns, stride, exponent = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    own = block - tl.load(table + low)
    per_row = tl.cdiv(columns, BLOCK)
    start = own % per_row * BLOCK
    offset = own // per_row * stride + start
    left = tl.minimum(columns - start, BLOCK).to(tl.int32)
    address, aligned = tl.load(table + count + low), tl.load(place + 3)
    if exponent > 0xFFFF:
        bad = _nonfinite(address + 4 * offset, left, exponent, aligned, tl.int32, BLOCK)
    else:
        bad = _nonfinite(address + 2 * offset, left, exponent, aligned, tl.int16, BLOCK)
    if bad != 0:
        tl.store(flags + tl.load(place + 4) * STRIDE, 1)


class Operands:
    """What the table says about the operands of one gradient, but for their addresses.

    Args:
        tensors: fp32, bf16 or fp16; contiguous, or matrices with a unit stride in their last dimension.
        parameter: index of the flag that is set if one of them is not finite.

    Attributes:
        blocks: for each operand.
        places: five numbers for each operand, see above.

    Raises:
        NotDirect: a dtype that the kernel does not read.
    """

    __slots__ = ("blocks", "places")

    def __init__(self, tensors: Iterable[torch.Tensor], parameter: int) -> None:
        self.blocks: list[int] = []
        self.places = array("q")
        for tensor in tensors:
            exponent = _EXPONENTS.get(tensor.dtype)
            if exponent is None:
                raise NotDirect(f"the check of many gradients does not read {tensor.dtype}")
            rows, columns, stride = layout(tensor)
            aligned = tensor.data_ptr() % 16 == 0 and stride * tensor.itemsize % 16 == 0
            self.blocks.append(rows * -(-columns // BLOCK))
            self.places.extend((columns, stride, exponent, aligned, parameter))


def constants(flags: torch.Tensor) -> dict:
    return {"STRIDE": flags.stride(0), "BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}


def check(operands: Iterable[Operands], addresses: list[int], flags: torch.Tensor) -> None:
    """Set the flag of each parameter with an operand that holds NaN or inf to 1. No host synchronisation.

    Args:
        operands: of each gradient, all on the current device.
        addresses: of all operands in order, aligned as those that `Operands` were made of.
        flags: int32 [parameters] of any stride, by index, on that device; 0 before, for the others after too.
    """
    blocks: list[int] = []
    places = array("q")
    for some in operands:
        blocks += some.blocks
        places += some.places
    numbers = array("q", accumulate(blocks, initial=0))
    total = numbers.pop()
    if not total:
        return
    table = torch.frombuffer(numbers + array("q", addresses) + places, dtype=torch.int64)
    if flags.device.type != "cpu":
        table = table.pin_memory().to(flags.device, non_blocking=True)
    launcher.launch(multi_finite_kernel, (total,), (table, flags, len(blocks)), constants(flags))
