"""Kernel configurations, chosen from shape and dtype before the launch.

Nothing is autotuned in place: a trial launch of a kernel that updates weights would apply the update once per trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# The ways to take a gradient that has (dY, X) pairs; the names of their modules in `kernels/`.
PORTABLE, HOPPER, CHUNKED = "wgrad_step", "wgrad_step_hopper", "chunked"


@dataclass(frozen=True)
class GemmConfig:
    """Of `wgrad_step`: tile [block_n, block_k], block_t tokens a mainloop iteration, `group` row-tiles for L2 reuse.

    Attributes:
        piece: columns of the tile to which the rule is applied at a time, all rows of them or, with `halve_rows`, half.
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
    registers: int = 255


@dataclass(frozen=True)
class HopperConfig:
    """Of `wgrad_step_hopper`: tile [block_n, block_k], block_t tokens an operand stage, `group` row-tiles for L2 reuse.

    Attributes:
        stages: operand stages in shared memory.
        slots: units of the accumulator, [16 * mma_warps, 128] fp32, in shared memory.
        state_slots: blocks of W and states, [state_rows, 128], in shared memory; a multiple of the two updaters.
        update_warps: of each updater.
        update_registers: of a thread of the second updater; the first has what all others leave.
        load_registers: of a thread that loads.
        mma_warps: 4 or 8; mma_registers: of each of their threads.
        instruction: columns of one wgmma. 128 need a quarter fewer reads of operands than 64.
    """

    state_slots: int
    block_n: int = 128
    block_k: int = 128
    block_t: int = 32
    group: int = 8
    stages: int = 7
    slots: int = 2
    state_rows: int = 16
    update_warps: int = 4
    load_registers: int = 24
    update_registers: int = 136
    mma_warps: int = 4
    mma_registers: int = 216
    instruction: int = 128

    @property
    def unit_bytes(self) -> int:
        """Of shared memory."""
        return 16 * self.mma_warps * 128 * 4


@dataclass(frozen=True)
class ChunkConfig:
    """Of `chunked`: `mib`, MiB of fp32 that its buffer may have."""

    mib: int = 24


_SHARED_MEMORY = 224 << 10  # of a Hopper SM, less some KiB for barriers
_FEW_TOKENS, _SOME_TOKENS, _MANY_TOKENS = 256, 512, 4096


def hopper_config(
    element_bytes: int,
    tokens: int | None = None,
    shape: tuple[int, int] | None = None,
    multiprocessors: int = 132,
) -> HopperConfig:
    """Configuration for a weight and states of `element_bytes` bytes a parameter (6 for AdamW all in bf16).

    Shared memory goes to what bounds the launch, as measured on an H200. With few tokens that is the stream of W and
    states, and two blocks in flight for each updater are 5 to 20% faster than one; with many it is the operands, which
    wait where more of the stream is in flight (9% slower with two blocks than with one, AdamW at T = 1024). From 4096
    tokens on, tiles of twice the columns are up to 6% faster: they need a quarter fewer bytes of operands. They are for
    weights of `shape` [n, k] that they divide evenly, over the card's multiprocessors too.
    """
    tokens = tokens or _FEW_TOKENS
    if tokens >= _MANY_TOKENS and shape is not None and _is_for_wide_tiles(*shape, multiprocessors):
        return _wide_hopper_config(element_bytes)
    base = HopperConfig(state_slots=2)
    block = base.state_rows * 128 * element_bytes
    stage = base.block_t * (base.block_n + base.block_k) * 2
    rings = _SHARED_MEMORY - base.slots * base.unit_bytes
    if tokens <= _FEW_TOKENS:
        in_flight, fewest_stages = 48 << 10, 4
    elif tokens <= _SOME_TOKENS:
        in_flight, fewest_stages = 32 << 10, 5
    else:
        in_flight, fewest_stages = 16 << 10, 8
    state_slots = 2 * max(1, round(in_flight / (2 * block)))
    if tokens <= _SOME_TOKENS and rings - 4 * block >= fewest_stages * stage:
        state_slots = max(4, state_slots)
    return HopperConfig(state_slots=state_slots, stages=min(8, (rings - state_slots * block) // stage))


def _wide_hopper_config(element_bytes: int) -> HopperConfig:
    """Tiles of 128 x 256. Their accumulator leaves the updaters 64 registers a thread: blocks of half the rows.

    Masks of a weight that is not even would not fit into those.
    """
    block = 8 * 128 * element_bytes
    return HopperConfig(
        state_slots=2 * max(1, round((20 << 10) / (2 * block))), block_k=256, stages=5, slots=1, state_rows=8,
        load_registers=32, update_registers=64, mma_warps=8, mma_registers=160,
    )  # fmt: skip


def _is_for_wide_tiles(n: int, k: int, multiprocessors: int) -> bool:
    """Whether tiles of 128 x 256 cover [n, k] evenly, and would take 2% longer at most than those of 128 x 128 if all
    went at the same rate: a round of tiles is one for each multiprocessor."""
    tiles = n // 128 * (k // 256)
    even = n % 128 == 0 and k % 256 == 0
    return even and 2 * -(-tiles // multiprocessors) <= 1.02 * -(-2 * tiles // multiprocessors)


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


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 132, those of an H200, for what is prepared without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


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


# What a table may say of a path's configuration, and the largest value. Tiles, warps and registers depend on each
# other: of the GEMM kernels only the order of tiles and the lengths of rings. Numbers of tiles are int32.
TUNABLE: dict[str, dict[str, int]] = {
    HOPPER: {"group": 1024, "stages": 8, "slots": 8, "state_slots": 16},
    PORTABLE: {"group": 1024},
    CHUNKED: {"mib": 1024},
}

# What `forge bench tune` times: fields that differ from the configuration above, for each path. Of the Hopper kernel
# other rings, registers and tiles were never 1% faster where it was measured, only other orders of tiles.
CANDIDATES: dict[str, tuple[dict[str, int], ...]] = {
    HOPPER: (
        {},
        {"group": 1},
        {"group": 4},
        {"group": 16},
    ),
    PORTABLE: ({},),
    CHUNKED: ({},),
}

_GEMM_TILE = 128  # rows and columns of a tile of the GEMM library, about


def most_chunk_rows(n: int, k: int, config: ChunkConfig) -> int:
    """Rows of a weight [n, k] that a chunk may have: what `mib` holds, and never more than half of them.

    So no chunk is the whole gradient, unless the weight is a single row.
    """
    return max(1, min((config.mib << 20) // (4 * max(k, 1)), (n + 1) // 2))


@cache
def chunk_rows(n: int, k: int, multiprocessors: int, config: ChunkConfig) -> int:
    """Rows of a chunk for a weight [n, k] on a card of so many multiprocessors.

    The chunk is written by a GEMM and read back at once, so it should stay in the L2 cache (50 MiB on an H200, which
    dY, X, weight and states pass through as well): that is the limit in `config`. Under it, rows in multiples of 128,
    because the GEMM has tiles of 128 x 128 or so, which a card works on in waves of one for each multiprocessor: the
    number that needs the fewest waves for the whole weight wins, where each chunk costs half a wave more for its two
    launches and the tail between them; of equals the largest. Fewer than 128 rows where 128 do not fit.
    """
    most = most_chunk_rows(n, k, config)
    if most < _GEMM_TILE:
        return most

    def waves(rows: int) -> int:
        return -(-(-(-rows // _GEMM_TILE) * -(-k // _GEMM_TILE)) // multiprocessors)

    def cost(rows: int) -> tuple[float, int]:
        full, rest = divmod(n, rows)
        return full * (waves(rows) + 0.5) + (waves(rest) + 0.5 if rest else 0), -rows

    return min(range(_GEMM_TILE, most + 1, _GEMM_TILE), key=cost)


PARAM_BLOCK = 1024
ROW_BLOCK = 1024
MULTI_BLOCK = 1024
CHECK_BLOCK = 2048
