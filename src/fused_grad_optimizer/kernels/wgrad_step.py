"""Portable Triton kernel: weight-gradient GEMM and optimizer rule in one pass, for any N, K, T.

    acc = sum_i dY_i^T X_i            [BLOCK_N, BLOCK_K] fp32, in registers
    g   = scale * (acc + R) + dense   R: embedding rows, dense: a gradient that is a tensor; both optional
    W, states = rule(W, g, states)    stored back; acc is dropped

dY [T, N] is read transposed in place. Several (dY, X) pairs are one longer mainloop over a table of segments. Source of
the scheme: arXiv 2606.22932. With `STORE_ONLY` the same mainloop writes g in fp32 instead: the unfused reference, the
gradient norm and `to_dense` use it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels import launcher
from fused_grad_optimizer.kernels._device import load_scalars, step_tile
from fused_grad_optimizer.kernels.configs import GemmConfig, gemm_config
from fused_grad_optimizer.kernels.factors import Gradient, Target


@triton.jit
def _accumulate(
    acc, dy, x, tokens, dy_stride, x_stride, offs_n, offs_k, n, k, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr
):
    """acc += dY^T X over one segment. dY is loaded as [BLOCK_T, BLOCK_N] and transposed in registers."""
    offs_t = tl.arange(0, BLOCK_T)
    dy_pointers = dy + offs_t[:, None].to(tl.int64) * dy_stride + offs_n[None, :]
    x_pointers = x + offs_t[:, None].to(tl.int64) * x_stride + offs_k[None, :]
    mask_n = offs_n[None, :] < n
    mask_k = offs_k[None, :] < k
    for start in range(0, tokens, BLOCK_T):
        inside = (start + offs_t)[:, None] < tokens
        a = tl.load(dy_pointers, mask=inside & mask_n, other=0.0)
        b = tl.load(x_pointers, mask=inside & mask_k, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
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
    PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile [BLOCK_N, BLOCK_K] of the weight. `n` counts the rows of this launch, which begin at `row_start`.

    `table` (int64 [segments, 5]: address of dY, address of X, tokens, row stride of dY, row stride of X) is None for a
    single segment. PAIRED: k is even. `flag` (int32): a value other than 0 leaves everything untouched.
    """
    if flag is not None:
        if tl.load(flag) != 0:
            return
    tile_n, tile_k = _tile_of(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), GROUP)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = row_start + offs_n
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if table is None:
        acc = _accumulate(acc, dy + row_start, x, tokens, dy_stride, x_stride, offs_n, offs_k, n, k, BLOCK_T, PRECISION)
    else:
        for s in range(segments):
            entry = table + s * 5
            a = tl.load(entry).to(dy.dtype) + row_start
            b = tl.load(entry + 1).to(x.dtype)
            if ALIGNED:
                a = tl.multiple_of(a, 16)
                b = tl.multiple_of(b, 16)
            a_stride = tl.load(entry + 3)
            b_stride = tl.load(entry + 4)
            if ALIGNED:
                a_stride = tl.multiple_of(a_stride, 8)
                b_stride = tl.multiple_of(b_stride, 8)
            acc = _accumulate(
                acc, a, b, tl.load(entry + 2).to(tl.int32), a_stride, b_stride, offs_n, offs_k, n, k, BLOCK_T, PRECISION
            )
    mask_n = offs_n < n
    mask = mask_n[:, None] & (offs_k < k)[None, :]
    if row_map is not None:
        row = tl.load(row_map + rows, mask=mask_n, other=-1)
        found = (row >= 0)[:, None] & mask
        acc += tl.load(row_sums + row[:, None].to(tl.int64) * k + offs_k[None, :], mask=found, other=0.0).to(tl.float32)
    if scale is not None:
        acc = acc * tl.load(scale).to(tl.float32)
    offsets = rows[:, None].to(tl.int64) * k + offs_k[None, :]
    if dense is not None:
        acc += tl.load(dense + offsets, mask=mask, other=0.0).to(tl.float32)
    if STORE_ONLY:
        tl.store(weight + offs_n[:, None].to(tl.int64) * k + offs_k[None, :], acc, mask=mask)
    else:
        h = load_scalars(scalars, SCALARS)
        index = (rows[:, None] * k + offs_k[None, :]).to(tl.int32)
        step_tile(weight, states, offsets, index, mask, acc, h, keys, parameter, RULE, STORES, STOCHASTIC, PAIRED)


def _segment_table(gradient: Gradient) -> torch.Tensor | None:
    if len(gradient.dys) == 1:
        return None
    rows = [
        (dy.data_ptr(), x.data_ptr(), dy.shape[0], dy.stride(0), x.stride(0))
        for dy, x in zip(gradient.dys, gradient.xs)
    ]
    host = torch.tensor(rows, dtype=torch.int64, device="cpu")
    device = gradient.dys[0].device
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _aligned(gradient: Gradient) -> bool:
    tensors = gradient.dys + gradient.xs
    return all(t.data_ptr() % 16 == 0 and (t.stride(0) * t.element_size()) % 16 == 0 for t in tensors)


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

    At least one (dY, X) pair is needed; inputs have a unit stride in their last dimension.
    """
    dy, x = gradient.dys[0], gradient.xs[0]
    config = config or gemm_config(n, k, dy.dtype)
    table = _segment_table(gradient)
    precision = "tf32" if dy.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(k, config.block_k),)
    positional = (
        target.weight if target is not None else out,
        tuple(target.states) if target is not None else (),
        dy,
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
        "ALIGNED": table is not None and _aligned(gradient),
        "PAIRED": k % 2 == 0,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_T": config.block_t,
        "GROUP": config.group,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,  # so that this kernel and param_step round alike, bit for bit
    }
    through(wgrad_step_kernel, grid, positional, constants)
