"""Device functions of the Triton kernels: scalars, random bits, storages, pieces of a tile, applying a rule to one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused_grad_optimizer.kernels import interpreting
from fused_grad_optimizer.storage import rounding

rounding.__dict__.setdefault("tl", tl)  # Triton's interpreter looks for it, used or not
_hash_eights = triton.jit(rounding.hash_eights)
_MULTIPLIERS = tl.constexpr(rounding.MULTIPLIERS)


@triton.jit
def load_scalars(pointer, COUNT: tl.constexpr):
    """The rule's scalars `h` (fp32) as a tuple."""
    h = (tl.load(pointer),)
    for i in tl.static_range(1, COUNT):
        h = h + (tl.load(pointer + i),)
    return h


@triton.jit
def _mix32(x):
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 2146121005
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def parameter_keys(keys, parameter):
    """`storage.rounding.parameter_keys` on the device; `keys` points to the step's two int32 keys."""
    key0 = _mix32(tl.load(keys) + parameter.to(tl.int32) * -1640531535)
    key1 = _mix32(tl.load(keys + 1) ^ key0)
    return key0, key1


@triton.jit
def words_of_eights(eight, key0, key1):
    """The words of the four pairs of each eight elements, by `rounding.eight_index`: a tuple of int32 tiles."""
    first = _hash_eights(eight & 0x1FFFFFFF, key0, key1)
    return first, first * _MULTIPLIERS[1], first * _MULTIPLIERS[2], first * _MULTIPLIERS[3]


@triton.jit
def words_in_storage(words, STORAGE: tl.constexpr):
    """The words in the order in which the pairs of an eight take them in a storage (0 .. 7)."""
    tl.static_assert(STORAGE < 8, "an eight has numbers for eight storages")
    if STORAGE & 4:
        words = (words[2], words[3], words[0], words[1])
    if STORAGE & 2:
        words = (words[1], words[0], words[3], words[2])
    return words


def _upper_by_prmt(word):
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4432;", "=r,r", [word], tl.int32, True, 1)


def _upper_by_shift(word):
    return (word >> 16) & 0xFFFF


# The upper 16 bits. After a shift the compiler makes one instruction of the shift and the addition of the bits, once
# for each storage, and loses that of the addition and the maximum (`_add_random`): more instructions in all.
_upper_half = triton.jit(_upper_by_shift if interpreting() or torch.version.hip else _upper_by_prmt)


@triton.jit
def random_halves(word, STORAGE: tl.constexpr):
    """The random bits of the even and of the odd elements of pairs with this word: two int32 in [0, 65536)."""
    low, high = word & 0xFFFF, _upper_half(word)
    if STORAGE & 1:
        low, high = high, low
    return low, high


@triton.jit
def store_nearest(pointers, mask, value, random16):
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


def _rounded_up(value, bits, random16):
    return tl.maximum(bits + random16, bits)


def _rounded_up_or_nan(value, bits, random16):
    return tl.where(value == value, bits + random16, 0x7FC00000)


# bits + random16, a NaN where `value` is one. Arithmetic on NVIDIA makes NaNs of the bits 0x7FFFFFFF only: the sum
# carries over the sign bit and is less than the bits were, which one instruction finds together with the sum.
_add_random = triton.jit(_rounded_up_or_nan if torch.version.hip else _rounded_up)


@triton.jit
def store_stochastic_bf16(pointers, mask, value, random16):
    """fp32 -> bf16, up with the probability of the discarded fraction; inf as it is, NaN as a NaN.

    `value` is the result of arithmetic. The upper half of the bits is stored as an int16, which needs no masking and no
    conversion.
    """
    bits = value.to(tl.int32, bitcast=True)
    rounded = _add_random(value, bits, random16) >> 16
    tl.store(pointers.to(tl.pointer_type(tl.int16), bitcast=True), rounded.to(tl.int16), mask=mask)


@triton.jit
def _every_second(tile):
    """[..., columns] -> [..., columns / 2]: elements 0, 2, 4, ... of the last dimension."""
    if len(tile.shape) == 1:
        kept, _odd = tl.split(tl.reshape(tile, (tile.shape[0] // 2, 2)))
    else:
        kept, _odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
    return kept


@triton.jit
def _interleaved(even, odd):
    """Two tiles [..., columns] -> [..., 2 * columns]."""
    if len(even.shape) == 1:
        both = tl.reshape(tl.join(even, odd), (2 * even.shape[0],))
    else:
        both = tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
    return both


@triton.jit
def _words(index, key0, key1, GROUPED: tl.constexpr):
    """The words of each element's eight; with GROUPED of each eight once, [..., columns / 8]."""
    if GROUPED:
        index = _every_second(_every_second(_every_second(index)))
    return words_of_eights(index >> 3, key0, key1)


@triton.jit
def _random16(words, index, STORAGE: tl.constexpr, GROUPED: tl.constexpr):
    """The 16 random bits of each element, from the words of its eight."""
    words = words_in_storage(words, STORAGE)
    if GROUPED:
        word = _interleaved(_interleaved(words[0], words[2]), _interleaved(words[1], words[3]))
        even, odd = random_halves(word, STORAGE)
        bits = _interleaved(even, odd)
    else:
        first = tl.where((index & 2) != 0, words[1], words[0])
        word = tl.where((index & 4) != 0, tl.where((index & 2) != 0, words[3], words[2]), first)
        even, odd = random_halves(word, STORAGE)
        bits = tl.where((index & 1) != 0, odd, even)
    return bits


@triton.jit
def pieces_of(tile, offs_n, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, HALVE_ROWS: tl.constexpr):
    """`tile` [N, K] cut into pieces of WIDTH columns, left to right, and the row numbers of the pieces.

    With HALVE_ROWS there are two pieces for each WIDTH columns: rows whose number has bit 3 clear, and the others.
    Pieces are made by reshape, permute and split. In the accumulator of an NVIDIA mma instruction a thread holds rows
    r and r + 8, and columns far apart; so it keeps what it holds, and nothing moves between threads.
    """
    columns = (tile,)
    for i in tl.static_range((K // WIDTH).bit_length() - 1):
        halves = ()
        for j in tl.static_range(2**i):
            left, right = tl.split(tl.permute(tl.reshape(columns[j], (N, 2, K // (2 << i))), (0, 2, 1)))
            halves = halves + (left, right)
        columns = halves
    if HALVE_ROWS:
        pieces = ()
        for j in tl.static_range(len(columns)):
            low, high = tl.split(tl.permute(tl.reshape(columns[j], (N // 16, 2, 8, WIDTH)), (0, 2, 3, 1)))
            pieces = pieces + (tl.reshape(low, (N // 2, WIDTH)), tl.reshape(high, (N // 2, WIDTH)))
        first, second = tl.split(tl.permute(tl.reshape(offs_n, (N // 16, 2, 8)), (0, 2, 1)))
        rows = (tl.reshape(first, (N // 2,)), tl.reshape(second, (N // 2,)))
    else:
        pieces = columns
        rows = (offs_n,)
    return pieces, rows


def _in_layout_of(tile, like):
    return tl.inline_asm_elementwise("", "=r,0,r", [tile, like], tl.float32, True, 1)


def _as_it_is(tile, like):
    return tile


# `in_layout_of(tile, like)`: `tile`, unchanged (both fp32). An operation of two operands, so the compiler gives `tile`
# the layout of `like`, by one conversion, where it would otherwise carry the layout of `tile` further and convert more
# values there. There is no instruction in it.
in_layout_of = triton.jit(_as_it_is if interpreting() or torch.version.hip else _in_layout_of)


@triton.jit
def load_tile(weight, states, offsets, mask):
    """W and states at `offsets` (int64 element offsets), as they are stored: a tuple, W first."""
    values = (tl.load(weight + offsets, mask=mask, other=0.0),)
    for i in tl.static_range(len(states)):
        values = values + (tl.load(states[i] + offsets, mask=mask, other=0.0),)
    return values


@triton.jit
def update_tile(
    weight,
    states,
    offsets,
    index,
    mask,
    values,
    g,
    h,
    keys,
    parameter,
    RULE: tl.constexpr,
    STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Apply the rule to gradient `g` and the `values` of `load_tile`, and store the results.

    `index` is the flat element index modulo 2^32 (int32), the counter of the random bits. GROUPED: along the last
    dimension elements 8i .. 8i + 7 always share a hash, which is then computed once.
    """
    wide = ()
    for i in tl.static_range(len(values)):
        wide = wide + (values[i].to(tl.float32),)
    results = RULE(h, wide[0], g, *wide[1:])
    bits = index
    words = (index, index, index, index)
    if STOCHASTIC:
        key0, key1 = parameter_keys(keys, parameter)
        words = _words(index, key0, key1, GROUPED)
        bits = _random16(words, index, 0, GROUPED)
    STORES[0](weight + offsets, mask, results[0], bits)
    for i in tl.static_range(len(states)):
        if STOCHASTIC:
            bits = _random16(words, index, i + 1, GROUPED)
        STORES[i + 1](states[i] + offsets, mask, results[i + 1], bits)


@triton.jit
def step_tile(
    weight,
    states,
    offsets,
    index,
    mask,
    g,
    h,
    keys,
    parameter,
    RULE: tl.constexpr,
    STORES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """`load_tile`, then `update_tile`."""
    values = load_tile(weight, states, offsets, mask)
    update_tile(weight, states, offsets, index, mask, values, g, h, keys, parameter, RULE, STORES, STOCHASTIC, GROUPED)
