"""Portable Triton kernel: weight-gradient GEMM and optimizer rule in one pass, for any N, K, T.

    acc = sum_i dY_i^T X_i            [BLOCK_N, BLOCK_K] fp32, in registers
    g   = scale * (acc + R) + dense   R: embedding rows, dense: a gradient that is a tensor; both optional
    W, states = rule(W, g, states)    stored back; acc is dropped

The rule takes the tile piece by piece, so that one piece of W and states is in registers at a time; a piece goes once
through shared memory, from the layout of the matrix instruction to one in which W and states are read and written in
long runs of a row. dY [T, N] is read transposed in place. Several (dY, X) pairs are one longer mainloop over a table of
segments. Source of the scheme: arXiv 2606.22932. With `STORE_ONLY` the same mainloop writes g in fp32 instead: the
unfused reference, the gradient norm and `to_dense` use it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels import allows_tf32, interpreting, launcher
from fused_grad_optimizer.kernels._device import in_layout_of, load_scalars, load_tile, pieces_of, update_tile
from fused_grad_optimizer.kernels.configs import GemmConfig, capability, gemm_config
from fused_grad_optimizer.kernels.factors import Gradient, Target


@triton.jit
def _accumulate(
    acc, dy, x, tokens, dy_stride, x_stride, offs_n, offs_k, n, k, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr
):
    """acc += dY^T X over one segment. dY is read as its transpose, [BLOCK_N, BLOCK_T], contiguous along rows."""
    offs_t = tl.arange(0, BLOCK_T)
    dy_pointers = dy + offs_t[None, :].to(tl.int64) * dy_stride + offs_n[:, None]
    x_pointers = x + offs_t[:, None].to(tl.int64) * x_stride + offs_k[None, :]
    mask_n = offs_n[:, None] < n
    mask_k = offs_k[None, :] < k
    for start in range(0, tokens, BLOCK_T):
        inside = start + offs_t < tokens
        a = tl.load(dy_pointers, mask=inside[None, :] & mask_n, other=0.0)
        b = tl.load(x_pointers, mask=inside[:, None] & mask_k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        dy_pointers += BLOCK_T * dy_stride
        x_pointers += BLOCK_T * x_stride
    return acc


@triton.jit
def _tile_of(pid, tiles_n, tiles_k, GROUP: tl.constexpr):
    """Grouped order: GROUP row-tiles share the columns of X while they are in L2."""
    per_group = GROUP * tiles_k
    group = pid // per_group
    first = group * GROUP
    size = min(tiles_n - first, GROUP)
    return first + (pid % per_group) % size, (pid % per_group) // size


def _repr(specialization):
    constants = specialization.constants
    rule = getattr(constants.get("RULE"), "__name__", "store")
    return f"forge_wgrad_{rule}_{constants['BLOCK_N']}x{constants['BLOCK_K']}x{constants['BLOCK_T']}"


def _launch_metadata(grid, kernel, args):
    n, k, tokens = args["n"], args["k"], args["total_tokens"]
    tensors = [args["weight"], *args["states"]]
    moved = sum(2 * t.element_size() * n * k for t in tensors) + 2 * tokens * (n + k)
    return {"name": f"{kernel.name} <{n}x{k}, T={tokens}>", "flops": 2 * n * k * tokens, "bytes": moved}


@triton.jit
def _place(offs_n, start, n, k, row_start, WIDTH: tl.constexpr):
    """Of columns start : start + WIDTH: the columns, the int64 offset of each element in the weight, and the mask."""
    offs_k = start + tl.arange(0, WIDTH)
    offsets = (row_start + offs_n)[:, None].to(tl.int64) * k + offs_k[None, :]
    return offs_k, offsets, (offs_n < n)[:, None] & (offs_k < k)[None, :]


@triton.jit
def _rest_of_gradient(g, row_map, row_sums, dense, scale, offs_n, offs_k, offsets, mask, n, k, row_start):
    """scale * (g + R) + dense, for a piece `g` of the accumulator."""
    if row_map is not None:
        row = tl.load(row_map + row_start + offs_n, mask=offs_n < n, other=-1)
        found = (row >= 0)[:, None] & mask
        g += tl.load(row_sums + row[:, None].to(tl.int64) * k + offs_k[None, :], mask=found, other=0.0).to(tl.float32)
    if scale is not None:
        g = g * tl.load(scale).to(tl.float32)
    if dense is not None:
        g += tl.load(dense + offsets, mask=mask, other=0.0).to(tl.float32)
    return g


@triton.jit
def _store_pieces(
    pieces, out, row_map, row_sums, dense, scale, rows, start, n, k, row_start, WIDTH: tl.constexpr
):  # fmt: skip
    """The whole gradient of each piece to `out` (fp32), whose first row is `row_start`."""
    for i in tl.static_range(len(pieces)):
        offs_n = rows[i % len(rows)]
        offs_k, offsets, mask = _place(offs_n, start + i // len(rows) * WIDTH, n, k, row_start, WIDTH)
        g = _rest_of_gradient(
            pieces[i], row_map, row_sums, dense, scale, offs_n, offs_k, offsets, mask, n, k, row_start
        )
        tl.store(out + offs_n[:, None].to(tl.int64) * k + offs_k[None, :], g, mask=mask)


@triton.jit
def _step_pieces(
    pieces, weight, states, row_map, row_sums, dense, scale, scalars, keys, rows, start, n, k, row_start, parameter,
    RULE: tl.constexpr, STORES: tl.constexpr, STOCHASTIC: tl.constexpr, SCALARS: tl.constexpr, WIDTH: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """The rule on each piece."""
    for i in tl.static_range(len(pieces)):
        offs_n = rows[i % len(rows)]
        offs_k, offsets, mask = _place(offs_n, start + i // len(rows) * WIDTH, n, k, row_start, WIDTH)
        values = load_tile(weight, states, offsets, mask)
        g = in_layout_of(pieces[i], values[0].to(tl.float32))  # that of whole rows of the piece
        g = _rest_of_gradient(g, row_map, row_sums, dense, scale, offs_n, offs_k, offsets, mask, n, k, row_start)
        h = load_scalars(scalars, SCALARS)  # for each piece again: they come from L1, and free the registers between
        index = offsets.to(tl.int32)
        update_tile(
            weight, states, offsets, index, mask, values, g, h, keys, parameter, RULE, STORES, STOCHASTIC, GROUPED
        )


@triton.jit(
    repr=_repr,
    launch_metadata=_launch_metadata,
    do_not_specialize=["tokens", "total_tokens", "segments", "row_start", "parameter"],
)
def wgrad_step_kernel(
    weight,
    states,
    dy,
    x,
    tokens,
    dy_stride,
    x_stride,
    table,
    segments,
    total_tokens,
    row_map,
    row_sums,
    dense,
    scale,
    scalars,
    keys,
    flag,
    n,
    k,
    row_start,
    parameter,
    RULE: tl.constexpr,
    STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALARS: tl.constexpr,
    STORE_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    HALVE_ROWS: tl.constexpr,
):
    """One tile [BLOCK_N, BLOCK_K] of the weight. `n` counts the rows of this launch, which begin at `row_start`.

    `dy` points to column `row_start` of dY. `table` (int64 [segments, 5]: address of that column, address of X, tokens,
    row stride of dY, row stride of X) is None for a single segment. GROUPED: k is a multiple of 8. `flag`
    (int32): a value other than 0 leaves everything untouched.
    """
    if flag is not None:
        if tl.load(flag) != 0:
            return
    tile_n, tile_k = _tile_of(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), GROUP)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if table is None:
        acc = _accumulate(acc, dy, x, tokens, dy_stride, x_stride, offs_n, offs_k, n, k, BLOCK_T, PRECISION)
    else:
        for s in range(segments):
            entry = table + s * 5
            a = tl.load(entry).to(dy.dtype)
            b = tl.load(entry + 1).to(x.dtype)
            if ALIGNED:
                a = tl.multiple_of(a, 16)
                b = tl.multiple_of(b, 16)
            a_stride = tl.load(entry + 3)
            b_stride = tl.load(entry + 4)
            if ALIGNED:
                a_stride = tl.multiple_of(a_stride, 128 // dy.dtype.element_ty.primitive_bitwidth)
                b_stride = tl.multiple_of(b_stride, 128 // x.dtype.element_ty.primitive_bitwidth)
            acc = _accumulate(
                acc, a, b, tl.load(entry + 2).to(tl.int32), a_stride, b_stride, offs_n, offs_k, n, k, BLOCK_T, PRECISION
            )
    pieces, rows = pieces_of(acc, offs_n, BLOCK_N, BLOCK_K, PIECE, HALVE_ROWS)
    start = tile_k * BLOCK_K
    if STORE_ONLY:
        _store_pieces(pieces, weight, row_map, row_sums, dense, scale, rows, start, n, k, row_start, PIECE)
    else:
        _step_pieces(
            pieces, weight, states, row_map, row_sums, dense, scale, scalars, keys, rows, start, n, k, row_start,
            parameter, RULE, STORES, STOCHASTIC, SCALARS, PIECE, GROUPED,
        )  # fmt: skip


def _segment_table(gradient: Gradient, row_start: int) -> torch.Tensor | None:
    if len(gradient.dys) == 1:
        return None
    skipped = row_start * gradient.dys[0].element_size()
    rows = [
        (dy.data_ptr() + skipped, x.data_ptr(), dy.shape[0], dy.stride(0), x.stride(0))
        for dy, x in zip(gradient.dys, gradient.xs)
    ]
    host = torch.tensor(rows, dtype=torch.int64, device="cpu")
    device = gradient.dys[0].device
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _aligned(gradient: Gradient, row_start: int) -> bool:
    """Whether every row of dY (from `row_start`) and X begins at a multiple of 16 bytes."""
    tensors = gradient.dys + gradient.xs
    starts = all(t.data_ptr() % 16 == 0 and (t.stride(0) * t.element_size()) % 16 == 0 for t in tensors)
    return starts and row_start * gradient.dys[0].element_size() % 16 == 0


_ALL_REGISTERS = 255  # of a thread. Without any limit the compiler may spill a few to be below one of its own


def launch_options(config: GemmConfig, gradient: Gradient, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """The constants and compiler options of a configuration; `tensors`: W and its states, if any.

    The configuration's limit on registers is for a plain dY^T X and tensors of one dtype; the rest needs more.
    """
    options: dict[str, Any] = {
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "BLOCK_T": config.block_t, "GROUP": config.group,
        "PIECE": config.piece, "HALVE_ROWS": config.halve_rows,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
        "enable_fp_fusion": False,  # so that this kernel and param_step round alike, bit for bit
    }  # fmt: skip
    if torch.version.hip is None and not interpreting():
        plain = len(gradient.dys) == 1 and gradient.row_map is None and gradient.dense is None
        limited = plain and len({t.dtype for t in tensors}) <= 1
        options["maxnreg"] = config.registers if limited else _ALL_REGISTERS
    return options


def launch(
    gradient: Gradient,
    n: int,
    k: int,
    *,
    row_start: int = 0,
    target: Target | None = None,
    out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    flag: torch.Tensor | None = None,
    update=None,
    stores: tuple = (),
    stochastic: bool = False,
    config: GemmConfig | None = None,
    through=launcher.launch,
) -> None:
    """Launch on rows `row_start : row_start + n`: the fused step on `target`, or `out` (fp32 [n, k]) stores g.

    At least one (dY, X) pair is needed; inputs have a unit stride in their last dimension. `config` replaces the
    configuration chosen by size, dtype and device.
    """
    dy, x = gradient.dys[0], gradient.xs[0]
    aligned = _aligned(gradient, row_start)
    if config is None:
        config = gemm_config(n, k, dy.dtype, aligned=aligned, compute_capability=capability(dy.device))
    table = _segment_table(gradient, row_start)
    precision = "tf32" if dy.dtype == torch.float32 and allows_tf32() else "ieee"
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(k, config.block_k),)
    positional = (
        target.weight if target is not None else out,
        tuple(target.states) if target is not None else (),
        dy[:, row_start:] if row_start else dy,  # so that Triton sees how the address is aligned
        x,
        dy.shape[0],
        dy.stride(0),
        x.stride(0),
        table,
        len(gradient.dys),
        sum(d.shape[0] for d in gradient.dys),
        gradient.row_map,
        gradient.row_sums,
        gradient.dense,
        gradient.scale,
        scalars,
        keys,
        flag,
        n,
        k,
        row_start,
        target.parameter if target is not None else 0,
    )
    constants = {
        "RULE": update.kernel if update is not None else None,
        "STORES": stores,
        "STOCHASTIC": stochastic,
        "SCALARS": scalars.numel() if scalars is not None else 0,
        "STORE_ONLY": target is None,
        "PRECISION": precision,
        "ALIGNED": table is not None and aligned,
        "GROUPED": k % 8 == 0,
        **launch_options(config, gradient, [target.weight, *target.states] if target is not None else []),
    }
    through(wgrad_step_kernel, grid, positional, constants)
