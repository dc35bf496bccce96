"""Layouts of the Hopper kernel: units of the accumulator, and blocks of W and states, in shared memory and registers.

unit     [64 or 128, 128] fp32, from the mma warps to the updaters
block    [rows, 128] of W or of a state, and the part of a unit that goes with it
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fused_grad_optimizer.kernels._gluon import SharedLinearLayout

UNIT_COLUMNS = gl.constexpr(128)  # of a unit, and of a block: 256 bytes of a bf16 row


@gluon.constexpr_function
def unit_layout(rows):
    """Where row r, column c of a unit is, by bits of the address: the 16-byte pieces of a row change places, so that
    stores from wgmma's layout (8 bytes of four neighbouring rows) and loads of 32 bytes a thread meet on no bank."""
    low = [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32], [0, 12], [1, 16], [2, 32], [0, 64]]
    high = [[4, 0], [8, 0], [16, 0], [32, 0], [64, 0]]
    return SharedLinearLayout([*low, *high[: 4 if rows == 64 else 5]])


@gluon.constexpr_function
def block_layout(elements, warps):
    """Of a block of 128 columns in the updaters' registers, and of numbers that belong to two, four or eight
    neighbours of it: with the same threads."""
    return gl.BlockedLayout([1, 8 // elements], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def interleaved(even, odd, LAYOUT: gl.constexpr):
    """Two tiles [rows, columns] -> [rows, 2 * columns]. Nothing moves between threads."""
    both = gl.join(even, odd).reshape((even.shape[0], 2 * even.shape[1]))
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def block_offsets(stride, ROWS: gl.constexpr, ELEMENTS: gl.constexpr):
    """Numbers of rows and columns of a block, counted in ELEMENTS neighbours, and offsets by a row stride."""
    LAYOUT: gl.constexpr = block_layout(ELEMENTS, gl.num_warps())
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, UNIT_COLUMNS // ELEMENTS, layout=gl.SliceLayout(0, LAYOUT))
    return rows, columns, rows[:, None] * (stride // ELEMENTS) + columns[None, :]


@gluon.jit
def _widened(block):
    """bf16 -> fp32 of pairs that share a register: two instructions. The compiler needs three."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [block], gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def read_block(block, LAYOUT: gl.constexpr):
    """A block of W or a state in fp32; in shared memory it is [rows, columns], or folded as in
    `wgrad_step_hopper._blocks`."""
    if len(block.shape) == 3:
        LANE: gl.constexpr = block.shape[2]
        folded: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [2, UNIT_COLUMNS // LANE, LANE // 8], [gl.num_warps(), 1, 1], [2, 1, 0]
        )
        found = block.load(folded).reshape((block.shape[0], UNIT_COLUMNS))
        value = gl.convert_layout(found, LAYOUT, assert_trivial=True)
    else:
        value = block.load(LAYOUT)
    if value.dtype == gl.bfloat16:
        wide = _widened(value)
    else:
        wide = value.to(gl.float32)
    return wide
