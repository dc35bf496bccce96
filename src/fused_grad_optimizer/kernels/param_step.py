"""The rule for a gradient that is a tensor or rows of an embedding, in one streaming pass.

    g = scale * (acc + R) + dense    R[v] = row_sums[row_map[v]], or 0 where row_map[v] < 0; each part optional
    W, states = rule(W, g, states)

Elements are taken flat, all of them or those from `start` on, of which `acc` holds a part of the gradient; the random
bits are those `wgrad_step` uses for the same element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels import interpreting, launcher
from fused_grad_optimizer.kernels._device import load_scalars, step_tile
from fused_grad_optimizer.kernels.configs import PARAM_BLOCK, ROW_BLOCK
from fused_grad_optimizer.kernels.factors import Gradient, Target


def _repr(specialization):
    return f"forge_param_{specialization.constants['RULE'].__name__}_{specialization.constants['BLOCK']}"


def _launch_metadata(grid, kernel, args):
    count = args["count"]
    moved = sum(2 * t.element_size() * count for t in (args["weight"], *args["states"]))
    moved += args["dense"].element_size() * count if args["dense"] is not None else 0
    return {"name": f"{kernel.name} <{count}>", "bytes": moved}


@triton.jit(repr=_repr, launch_metadata=_launch_metadata, do_not_specialize=["parameter"])
def param_step_kernel(
    weight,
    states,
    dense,
    row_map,
    row_sums,
    scale,
    scalars,
    keys,
    flag,
    count,
    k,
    parameter,
    acc,
    start,
    RULE: tl.constexpr,
    STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    if flag is not None:
        if tl.load(flag) != 0:
            return
    local = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = local < count
    offsets = start + local
    g = tl.zeros((BLOCK,), dtype=tl.float32)
    if acc is not None:
        g = tl.load(acc + local, mask=mask, other=0.0)
    if row_map is not None:
        v = offsets // k
        row = tl.load(row_map + v, mask=mask, other=-1)
        g += tl.load(row_sums + row.to(tl.int64) * k + (offsets - v * k), mask=mask & (row >= 0), other=0.0).to(
            tl.float32
        )
    if scale is not None:
        g = g * tl.load(scale).to(tl.float32)
    if dense is not None:
        g += tl.load(dense + offsets, mask=mask, other=0.0).to(tl.float32)
    h = load_scalars(scalars, SCALARS)
    index = offsets.to(tl.int32)
    step_tile(weight, states, offsets, index, mask, g, h, keys, parameter, RULE, STORES, STOCHASTIC, GROUPED)


def launch_options() -> dict[str, Any]:
    """Warps and registers. Without a limit, even one that none reaches, ptxas spills a register of one variant."""
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}  # fusion: see wgrad_step
    if torch.version.hip is None and not interpreting():
        options["maxnreg"] = 128
    return options


def launch(
    gradient: Gradient,
    target: Target,
    *,
    scalars: torch.Tensor,
    keys: torch.Tensor,
    flag: torch.Tensor | None,
    update,
    stores: tuple,
    stochastic: bool,
    acc: torch.Tensor | None = None,
    start: int = 0,
) -> None:
    """Launch over all elements of `target` (contiguous), or over those that `acc` (fp32, contiguous) holds a sum for.

    The (dY, X) pairs of `gradient` are not looked at: `acc` is their sum for the flat elements from `start` on. Dense
    is contiguous.
    """
    count = target.weight.numel() if acc is None else acc.numel()
    block = min(PARAM_BLOCK, triton.next_power_of_2(count))
    positional = (
        target.weight,
        tuple(target.states),
        gradient.dense,
        gradient.row_map,
        gradient.row_sums,
        gradient.scale,
        scalars,
        keys,
        flag,
        count,
        gradient.row_sums.shape[1] if gradient.row_sums is not None else 1,
        target.parameter,
        acc,
        start,
    )
    constants = {
        "RULE": update.kernel,
        "STORES": stores,
        "STOCHASTIC": stochastic,
        "SCALARS": scalars.numel(),
        "BLOCK": block,
        "GROUPED": block >= 8 and start % 8 == 0,
        **launch_options(),
    }
    launcher.launch(param_step_kernel, (triton.cdiv(count, block),), positional, constants)


@triton.jit
def sum_rows_kernel(order, dy, dy_stride, starts, row_sums, k, BLOCK: tl.constexpr):
    """row_sums[u, :] = sum of dY rows order[starts[u]] .. order[starts[u + 1] - 1], in that order (deterministic)."""
    u = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < k
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.load(starts + u), tl.load(starts + u + 1)):
        row = tl.load(order + i)
        total += tl.load(dy + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(row_sums + u.to(tl.int64) * k + columns, total, mask=mask)


def sum_rows(ids: torch.Tensor, dy: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding gradients summed by row without a host synchronisation: see `Gradient.row_map`, `.row_sums`.

    ids [T] int64, dy [T, K]; `row_sums` is fp32 [min(T, num_rows), K], rows past the unique ids hold zeros.
    """
    tokens, k = dy.shape
    ordered, order = torch.sort(ids, stable=True)
    first = torch.ones(tokens, dtype=torch.bool, device=ids.device)
    first[1:] = ordered[1:] != ordered[:-1]
    slot = first.cumsum(0) - 1
    row_map = torch.full((num_rows,), -1, dtype=torch.int32, device=ids.device)
    row_map[ordered] = slot.to(torch.int32)
    slots = min(tokens, num_rows)
    starts = torch.full((slots + 1,), tokens, dtype=torch.int64, device=ids.device)
    starts.scatter_reduce_(0, slot, torch.arange(tokens, device=ids.device), "amin")
    row_sums = torch.empty(slots, k, dtype=torch.float32, device=ids.device)
    if slots and k:
        block = min(ROW_BLOCK, triton.next_power_of_2(k))
        launcher.launch(
            sum_rows_kernel,
            (slots, triton.cdiv(k, block)),
            (order, dy, dy.stride(0), starts, row_sums, k),
            {"BLOCK": block, "enable_fp_fusion": False},
        )
    return row_map, row_sums
