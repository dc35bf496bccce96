"""`param_step` and the finite check before it for many small parameters, each in one launch.

A table on the device, one row of int64 for each parameter, says where everything is:

    address of W | address of its gradient | elements | index of the parameter | address of each state

Program (i, j) takes block j of parameter i. Elements, random bits and rounding are those of `param_step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels._device import load_scalars, step_tile
from fused_grad_optimizer.kernels.configs import CHECK_BLOCK, MULTI_BLOCK

FIXED = 4  # columns before the states'


def _repr(specialization):
    return f"forge_multi_{specialization.constants['RULE'].__name__}"


@triton.jit
def multi_nonfinite_kernel(
    table, gradient, flags, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """flags[index] = 1 for each parameter with NaN or inf in its gradient; `gradient` only gives the dtype."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    count = tl.load(row + 2).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    if start >= count:
        return
    pointer = tl.load(row + 1).to(gradient.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        count = tl.multiple_of(count, 16)
    offsets = start + tl.arange(0, BLOCK)
    value = tl.load(pointer + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    bad = tl.max(((value.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000).to(tl.int32), 0)
    if bad != 0:
        tl.store(flags + tl.load(row + 3) * STRIDE, 1)


@triton.jit(repr=_repr)
def multi_step_kernel(
    table,
    weight,
    states,
    gradient,
    scalars,
    keys,
    flags,
    STRIDE: tl.constexpr,
    RULE: tl.constexpr,
    STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALARS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """The rule for one block of one parameter; `weight`, `states` and `gradient` only give the dtypes.

    A parameter with flags[index] (int32) other than 0 stays untouched. ALIGNED: all addresses and all numbers of
    elements are multiples of 16.
    """
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    count = tl.load(row + 2).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    if start >= count:
        return
    parameter = tl.load(row + 3)
    if flags is not None:
        if tl.load(flags + parameter * STRIDE) != 0:
            return
    w = tl.load(row).to(weight.dtype)
    dense = tl.load(row + 1).to(gradient.dtype)
    if ALIGNED:
        w = tl.multiple_of(w, 16)
        dense = tl.multiple_of(dense, 16)
        count = tl.multiple_of(count, 16)
    kept = ()
    for i in tl.static_range(len(states)):
        pointer = tl.load(row + 4 + i).to(states[i].dtype)
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        kept = kept + (pointer,)  # type: ignore[assignment]
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < count
    g = tl.zeros((BLOCK,), dtype=tl.float32)  # as in param_step: 0 + -0 is 0
    g += tl.load(dense + offsets, mask=mask, other=0.0).to(tl.float32)
    h = load_scalars(scalars, SCALARS)
    step_tile(w, kept, offsets, offsets, mask, g, h, keys, parameter, RULE, STORES, STOCHASTIC, GROUPED)


def _table(weights, states, gradients, parameters, device) -> tuple[torch.Tensor, bool]:
    """The table on `device`, uploaded without waiting, and whether all it holds is aligned."""
    per_weight = len(states) // len(weights)
    flat: list[int] = []
    together = 0  # the lowest bits of all addresses and numbers of elements
    for i, (weight, gradient, parameter) in enumerate(zip(weights, gradients, parameters)):
        kept = [state.data_ptr() for state in states[i * per_weight : (i + 1) * per_weight]]
        w, g, count = weight.data_ptr(), gradient.data_ptr(), weight.numel()
        flat += (w, g, count, parameter, *kept)
        together |= w | g | count
        for address in kept:
            together |= address
    on_host = device.type == "cpu"
    table = torch.tensor(flat, dtype=torch.int64, device="cpu", pin_memory=not on_host)
    return table if on_host else table.to(device, non_blocking=True), together % 16 == 0


def launch(
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    gradients: list[torch.Tensor],
    parameters: list[int],
    *,
    scalars: torch.Tensor,
    keys: torch.Tensor,
    flags: torch.Tensor | None,
    update,
    stores: tuple,
    stochastic: bool,
) -> None:
    """Check all gradients, then step the parameters whose gradient is finite; without `flags`, step all unchecked.

    Args:
        weights, gradients: contiguous, not empty, of one device; one dtype for all weights, one for all gradients.
        states: those of the first weight in the order of the update, then those of the second, ...
        parameters: index of each parameter: chooses its random bits and its flag.
        flags: int32 [parameters] of any stride, 0 before; 1 after for a parameter whose gradient is not finite.
    """
    table, aligned = _table(weights, states, gradients, parameters, weights[0].device)
    largest = max(weight.numel() for weight in weights)
    columns = FIXED + len(states) // len(weights)
    if flags is not None:
        block = min(CHECK_BLOCK, triton.next_power_of_2(largest))
        multi_nonfinite_kernel[(len(weights), triton.cdiv(largest, block))](
            table, gradients[0], flags, STRIDE=flags.stride(0), COLUMNS=columns, ALIGNED=aligned, BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    multi_step_kernel[(len(weights), triton.cdiv(largest, MULTI_BLOCK))](
        table,
        weights[0],
        tuple(states[: columns - FIXED]),
        gradients[0],
        scalars,
        keys,
        flags,
        STRIDE=flags.stride(0) if flags is not None else 0,
        RULE=update.kernel,
        STORES=stores,
        STOCHASTIC=stochastic,
        SCALARS=scalars.numel(),
        COLUMNS=columns,
        ALIGNED=aligned,
        BLOCK=MULTI_BLOCK,
        GROUPED=True,
        num_warps=4,
        enable_fp_fusion=False,  # see wgrad_step
    )
