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


def gemm_config(n: int, k: int, input_dtype: torch.dtype) -> GemmConfig:
    """Configuration of the portable `wgrad_step`: 64x64 tiles, the largest whose epilogue does not spill."""
    if input_dtype == torch.float32:
        return GemmConfig(64, 64, 32, 8, 4, 2)
    return GemmConfig(64, 64, 64, 8, 4, 3)


PARAM_BLOCK = 1024
ROW_BLOCK = 1024
