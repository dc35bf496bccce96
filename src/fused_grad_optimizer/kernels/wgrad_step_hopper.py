"""Hopper kernel: weight-gradient GEMM and optimizer rule in one persistent, warp-specialised kernel (Gluon).

    acc = sum_i dY_i^T X_i                    [BLOCK_N, BLOCK_K] fp32, by wgmma
    W, states = rule(W, scale * acc, states)  or, without a rule, out = scale * acc

Roles, which meet at mbarriers in shared memory:

    load        1 warp      TMA loads of dY [BLOCK_T, BLOCK_N] and X [BLOCK_T, BLOCK_K] into a ring of operand stages
    state       1 warp      TMA loads of W and states, a block of [STATE_ROWS, 128] at a time, into a ring
    mma         4, 8 warps  wgmma over the tokens; hands the accumulator over in units [16 a warp, 128] through a ring
    update (2)  4 warps     every other block each: g and the states from the rings, rule, stores in whole lines

So the tensor cores work on the next tile while the memory system streams the states of this one. A state slot is free
again as soon as its values are in registers, before the stores. Measurements and limits: `docs/hopper_kernel.md`.

Traps: TMA may complete loads out of order, and a wait for a parity passes early on a slot that has not been filled in
the round before; so each updater has slots of its own: their number is a multiple of the updaters'. A single operand
stage is never free. Reads of a state slot must be fenced before TMA may overwrite it.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fused_grad_optimizer.kernels import launcher
from fused_grad_optimizer.kernels._device import (
    load_scalars,
    parameter_keys,
    random_halves,
    words_in_storage,
    words_of_eights,
)
from fused_grad_optimizer.kernels._gluon import role_barrier, tma_load
from fused_grad_optimizer.kernels.configs import HopperConfig, multiprocessors
from fused_grad_optimizer.kernels.factors import Gradient, Target
from fused_grad_optimizer.kernels.hopper_layouts import (
    UNIT_COLUMNS,
    block_layout,
    block_offsets,
    interleaved,
    read_block,
    unit_layout,
)

UPDATERS = gl.constexpr(2)
MOST_PAIRS = 4  # (dY, X)
MOST_STATES = 3


@gluon.jit
def _divide(a, b):
    """a // b and a % b of numbers that are not negative: unsigned division takes half the instructions."""
    quotient = (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)
    return quotient, a - quotient * b


@gluon.jit
def _tile_of(tile, tiles, GROUP: gl.constexpr):
    """Grouped order: GROUP row-tiles share the columns of X while they are in L2."""
    tiles_n, tiles_k = tiles
    group, rest = _divide(tile, GROUP * tiles_k)
    first = group * GROUP
    column, row = _divide(rest, min(tiles_n - first, GROUP))
    return first + row, column


@gluon.jit
def _next(slot, phase, COUNT: gl.constexpr):
    """The slot of a ring after `slot`, and the parity of its round."""
    wraps = slot == COUNT - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load_segment(stage, phase, dy, x, tokens, row, column, stages):
    """All operand stages of one (dY, X) pair for one tile, from `stage` on; returns the next one."""
    operands_dy, operands_x, full, empty = stages
    BLOCK_T: gl.constexpr = operands_dy.shape[1]
    for t in range(0, tokens, BLOCK_T):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BLOCK_T * (operands_dy.shape[2] + operands_x.shape[2]) * 2)
        tma_load(dy, [t, row], full.index(stage), operands_dy.index(stage))
        tma_load(x, [t, column], full.index(stage), operands_x.index(stage))
        stage, phase = _next(stage, phase, operands_dy.shape[0])
    return stage, phase


@gluon.jit
def _load_role(dys, xs, tokens, stages, tiles, GROUP: gl.constexpr, PAIRS: gl.constexpr):
    operands_dy, operands_x, full, empty = stages
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        tile_n, tile_k = _tile_of(tile, tiles, GROUP)
        row, column = tile_n * operands_dy.shape[2], tile_k * operands_x.shape[2]
        for s in gl.static_range(PAIRS):
            stage, phase = _load_segment(stage, phase, dys[s], xs[s], tokens[s], row, column, stages)


@gluon.jit
def _hand_over(acc, u, ring):
    """The accumulator into the ring, unit by unit; halved again and again, which moves no data between threads."""
    units, full, empty = ring
    UNIT_ROWS: gl.constexpr = units.shape[1]
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    if M > UNIT_ROWS:
        upper, lower = gl.split(acc.reshape((2, M // 2, N)).permute((1, 2, 0)))
        _hand_over(upper, u, ring)
        _hand_over(lower, u + M * N // (2 * UNIT_ROWS * UNIT_COLUMNS), ring)
    elif N > UNIT_COLUMNS:
        left, right = gl.split(acc.reshape((M, 2, N // 2)).permute((0, 2, 1)))
        _hand_over(left, u, ring)
        _hand_over(right, u + N // (2 * UNIT_COLUMNS), ring)
    else:
        slot = u % units.shape[0]
        mbarrier.wait(empty.index(slot), ((u // units.shape[0]) & 1) ^ 1)
        units.index(slot).store(acc)
        role_barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _mma_role(stages, ring, tiles, stages_of_tile, INSTRUCTION: gl.constexpr):
    operands_dy, operands_x, full, empty = stages
    STAGES: gl.constexpr = operands_dy.shape[0]
    BLOCK_N: gl.constexpr = operands_dy.shape[2]
    BLOCK_K: gl.constexpr = operands_x.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, INSTRUCTION, 16])
    stage = 0
    phase = 0
    before = 0
    u = 0
    for _ in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        acc = gl.zeros((BLOCK_N, BLOCK_K), gl.float32, layout)
        for t in range(stages_of_tile):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                operands_dy.index(stage).permute((1, 0)), operands_x.index(stage), acc, use_acc=t > 0, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # the product before this one is done: its stage is free
            mbarrier.arrive(empty.index(before), count=1, pred=t > 0)
            before = stage
            stage, phase = _next(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        _hand_over(acc, u, ring)
        u += _units(BLOCK_N, BLOCK_K, ring[0].shape[1])


@gluon.constexpr_function
def _units(block_n, block_k, unit_rows):
    """Of a tile."""
    return block_n // unit_rows * (block_k // UNIT_COLUMNS)


@gluon.jit
def _place(tile_n, tile_k, unit, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, UNIT_ROWS: gl.constexpr):
    """First row and column of a unit of a tile, in the order in which they are handed over."""
    COLUMNS: gl.constexpr = BLOCK_K // UNIT_COLUMNS
    return tile_n * BLOCK_N + unit // COLUMNS * UNIT_ROWS, tile_k * BLOCK_K + unit % COLUMNS * UNIT_COLUMNS


@gluon.constexpr_function
def _bytes_of_slot(slots):
    bits = 0
    for s in slots:
        elements = s.dtype.primitive_bitwidth
        for size in s.shape[1:]:
            elements *= size
        bits += elements
    return bits // 8


@gluon.jit
def _load_block(source, row, column, full, block):
    if len(block.shape) == 3:
        tma_load(source, [row, column // block.shape[2], 0], full, block)
    else:
        tma_load(source, [row, column], full, block)


@gluon.jit
def _state_role(
    sources, states, tiles, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, UNIT_ROWS: gl.constexpr
):
    """W and states of this program's tiles, block by block."""
    slots, full, empty = states
    if len(slots) > 0:
        COUNT: gl.constexpr = slots[0].shape[0]
        ROWS: gl.constexpr = slots[0].shape[1]
        BYTES: gl.constexpr = _bytes_of_slot(slots)
        slot = 0
        phase = 0
        for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
            tile_n, tile_k = _tile_of(tile, tiles, GROUP)
            for unit in range(_units(BLOCK_N, BLOCK_K, UNIT_ROWS)):
                row, column = _place(tile_n, tile_k, unit, BLOCK_N, BLOCK_K, UNIT_ROWS)
                for b in gl.static_range(UNIT_ROWS // ROWS):
                    mbarrier.wait(empty.index(slot), phase ^ 1)
                    mbarrier.expect(full.index(slot), BYTES)
                    for s in gl.static_range(len(slots)):
                        _load_block(sources[s], row + b * ROWS, column, full.index(slot), slots[s].index(slot))
                    slot, phase = _next(slot, phase, COUNT)


@gluon.jit
def _store(targets, offsets, mask, results, eight, key0, key1, STORES: gl.constexpr, STOCHASTIC: gl.constexpr):
    """Results to memory, with the random bits of `_device.update_tile` for the same elements."""
    LAYOUT: gl.constexpr = block_layout(1, gl.num_warps())
    OF_FOURS: gl.constexpr = block_layout(4, gl.num_warps())
    OF_PAIRS: gl.constexpr = block_layout(2, gl.num_warps())
    bits = eight
    words = (eight, eight, eight, eight)
    if STOCHASTIC:
        words = words_of_eights(eight, key0, key1)
    for s in gl.static_range(len(targets)):
        if STOCHASTIC:
            taken = words_in_storage(words, s)
            first = interleaved(taken[0], taken[2], OF_FOURS)
            second = interleaved(taken[1], taken[3], OF_FOURS)
            even, odd = random_halves(interleaved(first, second, OF_PAIRS), s)
            bits = interleaved(even, odd, LAYOUT)  # type: ignore[assignment]
        STORES[s](targets[s] + offsets, mask, results[s], bits)


@gluon.jit
def _read_states(states, i, LAYOUT: gl.constexpr):
    """The i-th block in fp32, and its slot."""
    slots, full, empty = states
    COUNT: gl.constexpr = slots[0].shape[0]
    slot = i % COUNT
    mbarrier.wait(full.index(slot), (i // COUNT) & 1)
    values = ()
    for s in gl.static_range(len(slots)):
        values = values + (read_block(slots[s].index(slot), LAYOUT),)  # type: ignore[assignment]
    return values, slot


@gluon.jit
def _update_role(
    targets, scale, scalars, keys, states, ring, n, k, tiles, parameter, UPDATER: gl.constexpr, RULE: gl.constexpr,
    STORES: gl.constexpr, STOCHASTIC: gl.constexpr, SCALARS: gl.constexpr, EVEN: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The rule (None: store g as it is) on every UPDATERS-th block of this program's tiles."""
    units, full, empty = ring
    SLOTS: gl.constexpr = units.shape[0]
    UNIT_ROWS: gl.constexpr = units.shape[1]
    BLOCKS: gl.constexpr = UNIT_ROWS // ROWS
    LAYOUT: gl.constexpr = block_layout(1, gl.num_warps())
    rows, columns, local = block_offsets(k, ROWS, 1)
    _, _, eights = block_offsets(k, ROWS, 8)
    factor = gl.load(scale).to(gl.float32) if scale is not None else 1.0
    key0, key1 = 0, 0
    if RULE is not None:
        h = load_scalars(scalars, SCALARS)
    if STOCHASTIC:
        key0, key1 = parameter_keys(keys, parameter)
    u = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        tile_n, tile_k = _tile_of(tile, tiles, GROUP)
        for unit in range(_units(BLOCK_N, BLOCK_K, UNIT_ROWS)):
            row, column = _place(tile_n, tile_k, unit, BLOCK_N, BLOCK_K, UNIT_ROWS)
            mbarrier.wait(full.index(u % SLOTS), (u // SLOTS) & 1)
            for b in gl.static_range(UPDATER, BLOCKS, UPDATERS):
                if RULE is not None:
                    values, slot = _read_states(states, u * BLOCKS + b, LAYOUT)
                g = units.index(u % SLOTS).slice(b * ROWS, ROWS, dim=0).load(LAYOUT)
                if RULE is not None:
                    fence_async_shared()  # the reads are done, not only issued, before TMA may overwrite the slot
                role_barrier()
                if RULE is not None:
                    mbarrier.arrive(states[2].index(slot), count=1)
                if b >= BLOCKS - UPDATERS:
                    mbarrier.arrive(empty.index(u % SLOTS), count=1)
                if scale is not None:
                    g = g * factor
                r = row + b * ROWS
                base = r.to(gl.int64) * k + column
                # of an even weight all is inside: a condition that is known to hold leaves no predicates
                mask = (rows >= 0)[:, None] & (columns >= 0)[None, :]
                if not EVEN:
                    mask = (r + rows < n)[:, None] & (column + columns < k)[None, :]
                if RULE is not None:
                    results = RULE(h, values[0], g, *values[1:])
                    eight = (base >> 3).to(gl.int32) + eights
                    _store(targets, base + local, mask, results, eight, key0, key1, STORES, STOCHASTIC)
                else:
                    gl.store(targets[0] + base + local, g, mask=mask)
            u += 1


def _repr(specialization):
    constants = specialization.constants
    rule = getattr(constants.get("RULE"), "__name__", "store")
    return f"forge_wgrad_hopper_{rule}_{constants['BLOCK_N']}x{constants['BLOCK_K']}x{constants['BLOCK_T']}"


def _launch_metadata(grid, kernel, args):
    n, k, tokens = args["n"], args["k"], sum(args[f"t{i}"] for i in range(MOST_PAIRS))
    moved = sum(2 * t.element_size() * n * k for t in args["targets"]) + 2 * tokens * (n + k)
    return {"name": f"{kernel.name} <{n}x{k}, T={tokens}>", "flops": 2 * n * k * tokens, "bytes": moved}


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """`COUNT` mbarriers, each of ARRIVALS a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _state_ring(sources, COUNT: gl.constexpr, SLOTS: gl.constexpr):
    """Slots for a block of each of the first COUNT of W and states."""
    slots = ()
    for s in gl.static_range(COUNT):
        slot = gl.allocate_shared_memory(sources[s].dtype, [SLOTS] + sources[s].block_type.shape, sources[s].layout)
        slots = slots + (slot,)  # type: ignore[assignment]
    return slots


@gluon.jit(repr=_repr, launch_metadata=_launch_metadata, do_not_specialize=["t0", "t1", "t2", "t3", "parameter"])
def wgrad_step_hopper_kernel(
    targets, w, s0, s1, s2, dy0, x0, t0, dy1, x1, t1, dy2, x2, t2, dy3, x3, t3, scale, scalars, keys, flag, n, k,
    parameter, RULE: gl.constexpr, STORES: gl.constexpr, STOCHASTIC: gl.constexpr, SCALARS: gl.constexpr,
    EVEN: gl.constexpr, PAIRS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, STATE_SLOTS: gl.constexpr,
    STATE_ROWS: gl.constexpr, MMA_WARPS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, MMA_REGISTERS: gl.constexpr,
    UPDATE_REGISTERS: gl.constexpr, INSTRUCTION: gl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of a weight [n, k]. `targets`: pointers of W and states, which `w`, `s0` .. `s2`
    describe for TMA. Up to four (dY, X) pairs by descriptors, of t0 .. t3 tokens. A `flag` other than 0: no update."""
    UNIT_ROWS: gl.constexpr = 16 * MMA_WARPS
    gl.static_assert(STATE_SLOTS % UPDATERS == 0 and STAGES > 1 and UNIT_ROWS % (UPDATERS * STATE_ROWS) == 0, "traps")
    if flag is not None:
        if gl.load(flag) != 0:
            return
    tiles = ((n + BLOCK_N - 1) // BLOCK_N, (k + BLOCK_K - 1) // BLOCK_K)
    operands_dy = gl.allocate_shared_memory(dy0.dtype, [STAGES, BLOCK_T, BLOCK_N], dy0.layout)
    operands_x = gl.allocate_shared_memory(x0.dtype, [STAGES, BLOCK_T, BLOCK_K], x0.layout)
    stages = (operands_dy, operands_x, _barriers(STAGES), _barriers(STAGES))
    units = gl.allocate_shared_memory(gl.float32, [SLOTS, UNIT_ROWS, UNIT_COLUMNS], unit_layout(UNIT_ROWS))
    ring = (units, _barriers(SLOTS), _barriers(SLOTS, UPDATERS))
    sources = (w, s0, s1, s2)
    slots = _state_ring(sources, len(targets) if RULE is not None else 0, STATE_SLOTS)
    states = (slots, _barriers(STATE_SLOTS), _barriers(STATE_SLOTS))
    tokens = (t0, t1, t2, t3)
    count = 0
    for s in gl.static_range(PAIRS):
        count += (tokens[s] + BLOCK_T - 1) // BLOCK_T
    dys = (dy0, dy1, dy2, dy3)
    xs = (x0, x1, x2, x3)
    gl.warp_specialize(
        [
            (_update_role, (targets, scale, scalars, keys, states, ring, n, k, tiles, parameter, gl.constexpr(0), RULE,
                            STORES, STOCHASTIC, SCALARS, EVEN, BLOCK_N, BLOCK_K, GROUP, STATE_ROWS)),
            (_update_role, (targets, scale, scalars, keys, states, ring, n, k, tiles, parameter, gl.constexpr(1), RULE,
                            STORES, STOCHASTIC, SCALARS, EVEN, BLOCK_N, BLOCK_K, GROUP, STATE_ROWS)),
            (_mma_role, (stages, ring, tiles, count, INSTRUCTION)),
            (_load_role, (dys, xs, tokens, stages, tiles, GROUP, PAIRS)),
            (_state_role, (sources, states, tiles, BLOCK_N, BLOCK_K, GROUP, UNIT_ROWS)),
        ],
        [gl.num_warps(), MMA_WARPS, 1, 1],
        [UPDATE_REGISTERS, MMA_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def reason_to_decline(gradient: Gradient, n: int, k: int, targets: list[torch.Tensor]) -> str | None:
    """Why this kernel cannot step these targets [n, k] (the portable one can), or None. Does not look at the device."""
    if gradient.row_map is not None or gradient.dense is not None:
        return "the gradient has rows of an embedding or a dense part"
    if len(gradient.dys) > MOST_PAIRS:
        return f"more than {MOST_PAIRS} (dY, X) pairs"
    inputs = [*gradient.dys, *gradient.xs]
    if inputs[0].dtype not in (torch.bfloat16, torch.float16):
        return f"inputs are {inputs[0].dtype}, and wgmma takes 16-bit ones in this layout"
    if n == 0 or k == 0 or any(t.shape[0] == 0 for t in inputs):
        return "there is no token, or no weight"
    if k % 16:
        return "columns not in multiples of 16 are not stored in whole vectors"
    rows_apart = all(t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] and t.data_ptr() % 16 == 0 for t in inputs)
    if not rows_apart or any(t.data_ptr() % 16 for t in targets):
        return "TMA needs rows that begin at multiples of 16 bytes, and not on each other"
    if len(targets) > 1 + MOST_STATES or any(t.dtype not in _DTYPES for t in targets):
        return "the storage of the states"
    return None


_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def _descriptor(tensor: torch.Tensor, stride: int, rows: int, columns: int) -> TensorDescriptor:
    layout = _shared_layout(rows, columns, dtype=tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], [rows, columns], layout)


def _blocks(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Blocks of [rows, 128], folded to [rows, 128 / lane, lane] with lanes of 128 bytes, the most that TMA swizzles: so
    a row's bytes are asked for together. Where the last lane would not be whole they come lane by lane."""
    columns, lane = UNIT_COLUMNS.value, 128 // tensor.element_size()
    n, k = tensor.shape
    if k % lane:
        return _descriptor(tensor, k, rows, columns)
    layout = _shared_layout(rows, columns // lane, lane, dtype=tensor.dtype)
    return TensorDescriptor(tensor, [n, k // lane, lane], [k, lane, 1], [rows, columns // lane, lane], layout)


@cache
def _shared_layout(*shape: int, dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for(list(shape), _DTYPES[dtype])


def arguments(
    gradient: Gradient,
    n: int,
    k: int,
    config: HopperConfig,
    *,
    target: Target | None = None,
    out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    flag: torch.Tensor | None = None,
    update=None,
    stores: tuple = (),
    stochastic: bool = False,
) -> tuple[list, dict]:
    """Positional arguments and constants of a launch."""
    pairs: list = []
    for dy, x in zip(gradient.dys, gradient.xs):
        pairs.append(_descriptor(dy, dy.stride(0), config.block_t, config.block_n))
        pairs += [_descriptor(x, x.stride(0), config.block_t, config.block_k), dy.shape[0]]
    pairs += [None, None, 0] * (MOST_PAIRS - len(gradient.dys))
    targets = [target.weight, *target.states] if target is not None else []
    sources = [_blocks(t, config.state_rows) for t in targets]
    sources += [None] * (1 + MOST_STATES - len(sources))
    parameter = target.parameter if target is not None else 0
    constants = {
        "RULE": update.kernel if update is not None else None, "STORES": stores, "STOCHASTIC": stochastic,
        "SCALARS": scalars.numel() if scalars is not None else 0, "PAIRS": len(gradient.dys),
        "EVEN": n % config.block_n == 0 and k % config.block_k == 0, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "BLOCK_T": config.block_t, "GROUP": config.group, "STAGES": config.stages,
        "SLOTS": config.slots, "STATE_SLOTS": config.state_slots, "STATE_ROWS": config.state_rows,
        "MMA_WARPS": config.mma_warps, "LOAD_REGISTERS": config.load_registers,
        "MMA_REGISTERS": config.mma_registers, "UPDATE_REGISTERS": config.update_registers,
        "INSTRUCTION": config.instruction, "num_warps": config.update_warps,
        "enable_fp_fusion": False,  # see wgrad_step
    }  # fmt: skip
    return [tuple(targets) or (out,), *sources, *pairs, gradient.scale, scalars, keys, flag, n, k, parameter], constants


def launch(gradient: Gradient, n: int, k: int, config: HopperConfig, through=launcher.launch, **options) -> None:
    """Launch over a whole weight [n, k]: the fused step on `target`, or `out` (fp32 [n, k]) stores the gradient.

    Options are those of `arguments`.
    """
    positional, constants = arguments(gradient, n, k, config, **options)
    tiles = -(-n // config.block_n) * -(-k // config.block_k)
    grid = (min(tiles, multiprocessors(gradient.dys[0].device)),)
    through(wgrad_step_hopper_kernel, grid, positional, constants)
