"""`param_step` for a large weight whose gradient is one tensor: the same elements, bits and rounding, in larger pieces.

    W, states = rule(W, dense, states)

A memory-bound pass: AdamW in bf16 moves 14 bytes a parameter (16 with a gradient in fp32) and takes some 55
instructions. A program takes one block; or many, with the scalars and keys read once and the loads of later blocks in
flight while one is computed.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels._device import load_scalars, parameter_keys, random_words
from fused_grad_optimizer.kernels.configs import StreamConfig
from fused_grad_optimizer.kernels.factors import Target


def _repr(specialization):
    constants = specialization.constants
    kind = f"_x{constants['STAGES']}" if constants["STAGES"] else ""
    return f"forge_stream_{constants['RULE'].__name__}_{constants['BLOCK']}{kind}"


def _launch_metadata(grid, kernel, args):
    count = args["count"]
    moved = sum(2 * t.element_size() * count for t in (args["weight"], *args["states"]))
    return {"name": f"{kernel.name} <{count}>", "bytes": moved + args["dense"].element_size() * count}


@triton.jit
def _inside(inside, count, base, EVEN: tl.constexpr):
    return tl.full(inside.shape, True, tl.int1) if EVEN else inside < count - base


@triton.jit
def _load(weight, states, dense, base, inside, mask, POLICY: tl.constexpr):
    """Gradient and stored values of the block at `base`, as they are in memory: `(g, (W, *states))`."""
    g = tl.load(dense + base + inside, mask=mask, other=0.0, eviction_policy=POLICY)
    values = (tl.load(weight + base + inside, mask=mask, other=0.0, eviction_policy=POLICY),)
    for i in tl.static_range(len(states)):
        kept = tl.load(states[i] + base + inside, mask=mask, other=0.0, eviction_policy=POLICY)
        values = values + (kept,)  # type: ignore[assignment]
    return g, values


@triton.jit
def _apply(
    weight, states, base, inside, mask, g, values, h, key0, key1, RULE: tl.constexpr, STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """The rule on the values of `_load`, stored with the random bits of `_device.step_tile`."""
    wide = ()
    for i in tl.static_range(len(values)):
        wide = wide + (values[i].to(tl.float32),)  # type: ignore[assignment]
    total = tl.zeros(inside.shape, dtype=tl.float32)  # as in param_step: 0 + -0 is 0
    total += g.to(tl.float32)
    results = RULE(h, wide[0], total, *wide[1:])  # type: ignore[misc]
    first = base.to(tl.int32) + inside
    second = first
    if STOCHASTIC:
        first, second = random_words(first, key0, key1)
    STORES[0](weight + base + inside, mask, results[0], first & 0xFFFF)
    for i in tl.static_range(len(states)):
        word = first if i == 0 else second
        bits = (word & 0xFFFF) if i == 1 else ((word >> 16) & 0xFFFF)
        STORES[i + 1](states[i] + base + inside, mask, results[i + 1], bits)


@triton.jit(repr=_repr, launch_metadata=_launch_metadata, do_not_specialize=["start", "parameter"])
def stream_step_kernel(
    weight,
    states,
    dense,
    scalars,
    keys,
    flag,
    start,
    count,
    parameter,
    RULE: tl.constexpr,
    STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    POLICY: tl.constexpr,
):
    """All `count` elements; the first has index `start` in its parameter. EVEN: BLOCK divides count, no masks.

    STAGES: see `StreamConfig`. Later blocks are loaded before earlier ones are stored, which are others.
    """
    inside = tl.arange(0, BLOCK)
    block = tl.program_id(0)
    size = tl.full((), BLOCK, tl.int64)
    if STAGES == 0:
        base = block * size
        mask = _inside(inside, count, base, EVEN)
        g, values = _load(weight, states, dense, base, inside, mask, POLICY)
        if flag is not None:
            mask = tl.where(mask, tl.load(flag), 1) == 0  # a branch would make the loads wait for the flag
        h = load_scalars(scalars, SCALARS)
        key0, key1 = parameter_keys(keys, parameter)
        key0 += start.to(tl.int32)  # random_words adds it to the index
        _apply(weight, states, base, inside, mask, g, values, h, key0, key1, RULE, STORES, STOCHASTIC)
    else:
        if flag is not None:
            if tl.load(flag) != 0:
                return
        h = load_scalars(scalars, SCALARS)
        key0, key1 = parameter_keys(keys, parameter)
        key0 += start.to(tl.int32)
        for current in tl.range(block, tl.cdiv(count, BLOCK), tl.num_programs(0), num_stages=STAGES):
            base = current * size
            mask = _inside(inside, count, base, EVEN)
            g, values = _load(weight, states, dense, base, inside, mask, POLICY)
            _apply(weight, states, base, inside, mask, g, values, h, key0, key1, RULE, STORES, STOCHASTIC)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def launch(
    target: Target,
    dense: torch.Tensor,
    config: StreamConfig,
    *,
    scalars: torch.Tensor,
    keys: torch.Tensor,
    flag: torch.Tensor | None,
    update,
    stores: tuple,
    stochastic: bool,
    start: int = 0,
) -> None:
    """Launch over the flat elements of `target` (contiguous) from `start` on, as many as `dense` (contiguous) has."""
    count = dense.numel()
    tensors = [target.weight, *target.states]
    if start != 0 or count != target.weight.numel():
        tensors = [t.view(-1)[start : start + count] for t in tensors]
    blocks = triton.cdiv(count, config.block)
    grid = min(blocks, config.programs * _multiprocessors(dense.device)) if config.stages else blocks
    stream_step_kernel[(grid,)](
        tensors[0],
        tuple(tensors[1:]),
        dense,
        scalars,
        keys,
        flag,
        start,
        count,
        target.parameter,
        RULE=update.kernel,
        STORES=stores,
        STOCHASTIC=stochastic,
        SCALARS=scalars.numel(),
        BLOCK=config.block,
        EVEN=count % config.block == 0,
        STAGES=config.stages,
        POLICY=config.eviction,
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # see wgrad_step
    )
