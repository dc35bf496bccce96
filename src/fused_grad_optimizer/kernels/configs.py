"""Kernel configurations, chosen from shape and dtype before the launch.

Nothing is autotuned in place: a trial launch of a kernel that updates weights would apply the update once per trial.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GemmConfig:
    """Tile [block_n, block_k] of the weight, block_t tokens a mainloop iteration, `group` row-tiles for L2 reuse."""

    block_n: int
    block_k: int
    block_t: int
    group: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperConfig:
    """Of `wgrad_step_hopper`: tile [block_n, block_k], block_t tokens an operand stage, `group` row-tiles for L2 reuse.

    Attributes:
        stages: operand stages in shared memory.
        slots: units of the accumulator, [64, 64] fp32, in shared memory; at least one for each updater.
        state_slots: blocks of W and states, [state_rows, 64], in shared memory, for each updater.
        update_warps: of each updater; update_registers: of each of its threads. mma_registers: of the four mma warps.
        instruction: columns of one wgmma. 128 need fewer operand reads, but more registers than are left.
    """

    state_slots: int
    block_n: int = 128
    block_k: int = 128
    block_t: int = 32
    group: int = 8
    stages: int = 8
    slots: int = 3
    state_rows: int = 32
    update_warps: int = 8
    update_registers: int = 72
    mma_registers: int = 168
    instruction: int = 64


_STATE_BYTES = 48 << 10  # of shared memory, beside operand stages and accumulator units


def hopper_config(element_bytes: int) -> HopperConfig:
    """Configuration for a weight and states of `element_bytes` bytes a parameter (6 for AdamW all in bf16)."""
    return HopperConfig(state_slots=max(1, min(4, _STATE_BYTES // (2 * 32 * 64 * element_bytes))))


def gemm_config(n: int, k: int, input_dtype: torch.dtype) -> GemmConfig:
    """Configuration of the portable `wgrad_step`: 64x64 tiles, the largest whose epilogue does not spill."""
    if input_dtype == torch.float32:
        return GemmConfig(64, 64, 32, 8, 4, 2)
    return GemmConfig(64, 64, 64, 8, 4, 3)


@dataclass(frozen=True)
class StreamConfig:
    """Of `stream_step`: `block` elements at a time by `num_warps` warps, 8 or 16 a thread for loads of 16 bytes.

    Attributes:
        stages: 0: one block a program. 1: each program loops over many blocks. 2 or more: that loop loads blocks ahead
            of time, asynchronously, into `stages - 1` buffers in shared memory.
        programs: with `stages`, programs for each multiprocessor.
        eviction: policy of the loads in L2, "" or "evict_first" (nothing is read twice); without `stages`.
    """

    block: int
    num_warps: int
    stages: int = 0
    programs: int = 0
    eviction: str = ""


# `programs`: as many as fit with the registers of AdamW in bf16 on sm_90 (71, and 16 KB of buffers).
STREAM_CONFIGS = {
    "single": StreamConfig(1024, 4),
    "wide": StreamConfig(2048, 4),
    "evict": StreamConfig(2048, 8, eviction="evict_first"),
    "pipelined": StreamConfig(1024, 4, stages=3, programs=7),
}


def stream_config(count: int) -> StreamConfig | None:
    """Which configuration of `stream_step` takes a weight of `count` elements; None: `param_step` does."""
    return None if LARGE_CONFIG is None or count < LARGE_COUNT else STREAM_CONFIGS[LARGE_CONFIG]


LARGE_CONFIG: str | None = None
LARGE_COUNT = 1 << 22

PARAM_BLOCK = 1024
ROW_BLOCK = 1024
MULTI_BLOCK = 1024
CHECK_BLOCK = 2048
