"""Kernel configurations, chosen from shape and dtype before the launch.

Nothing is autotuned in place: a trial launch of a kernel that updates weights would apply the update once per trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class GemmConfig:
    """Of `wgrad_step`: tile [block_n, block_k], block_t tokens a mainloop iteration, `group` row-tiles for L2 reuse.

    Attributes:
        piece: columns of the tile to which the rule is applied at a time, all rows of them or, with `halve_rows`, half.
        prefetch: load W and states of a piece while the piece before it is updated; takes registers.
        registers: limit for each thread, so that several blocks share a multiprocessor.
    """

    block_n: int
    block_k: int
    block_t: int
    group: int
    num_warps: int
    num_stages: int
    piece: int = 32
    halve_rows: bool = True
    prefetch: bool = False
    registers: int = 255


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


# `wgrad_step`. None of these spills registers, with any rule and storage, on sm_80 to sm_120; operand stages take at
# most 48 KiB of shared memory, so that two or three blocks fit where it is smallest (99 KiB).
_WIDE = GemmConfig(128, 128, 32, 8, 8, 3, registers=128)  # two blocks a multiprocessor
_MIDDLE = GemmConfig(64, 128, 32, 8, 4, 3, registers=168)  # three
_SMALL = GemmConfig(64, 64, 64, 8, 4, 3)
_ODD = GemmConfig(64, 64, 32, 8, 8, 3)  # element by element, which takes registers for addresses and masks
# Without tensor cores the products take registers too, and rows 8 apart are not in one thread.
_WIDE_FP32 = GemmConfig(128, 64, 16, 8, 8, 2, halve_rows=False)
_SMALL_FP32 = GemmConfig(64, 64, 16, 8, 8, 3, halve_rows=False)
_TILES = 200  # at least, so that a hundred multiprocessors or more have work


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def gemm_config(
    n: int,
    k: int,
    input_dtype: torch.dtype,
    *,
    aligned: bool = True,
    compute_capability: tuple[int, int] | None = None,
) -> GemmConfig:
    """Configuration of the portable `wgrad_step` for a weight [n, k].

    Args:
        n: rows of the weight.
        k: columns of the weight.
        input_dtype: of dY and X.
        aligned: whether their rows begin at multiples of 16 bytes.
        compute_capability: see `capability`; None for that of the current device.
    """
    if compute_capability is None:
        compute_capability = capability(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    odd = not aligned or n % 16 != 0 or k % 16 != 0
    if input_dtype == torch.float32:
        large, small = _WIDE_FP32, _SMALL_FP32
    else:
        large, small = (_WIDE if compute_capability[0] in (9, 10) else _MIDDLE), (_ODD if odd else _SMALL)
    if odd or -(-n // large.block_n) * -(-k // large.block_k) < _TILES:
        return small
    return large


PARAM_BLOCK = 1024
ROW_BLOCK = 1024
