"""Counter-based random bits and stochastic rounding, the same on every device.

The bits of an element are a function of (seed, step, parameter, flat element index) alone: they do not depend on tile
shapes or devices, replay exactly, and a resumed run needs nothing saved for them. Eight neighbours (flat indices 8i ..
8i + 7) share one hash. Times each of `MULTIPLIERS` it gives four words, and their lower and upper halves are the eight
numbers 0 .. 7 of 16 bits. Element e of the eight takes number e XOR s in storage s (weight 0, first state 1, .. 7): a
Latin square, so that no two elements share a number in a storage, and an element's storages share none.

The mixing function is a 32-bit multiply-xorshift hash. Everything is int32 arithmetic that wraps, so that the torch
form below and the Triton form in `kernels/` are the same operations.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


def _mix32(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def step_keys(seed: int, step: int) -> tuple[int, int]:
    """Two int32 keys for one step of one run."""
    seed = int(seed)  # NumPy's integers do not have the bits that this takes
    key0 = _mix32(_mix32(seed) + _mix32(seed >> 32) * _GOLDEN + step)
    key1 = _mix32(key0 ^ _mix32(step * _GOLDEN + 0x632BE5AB))
    return _signed(key0), _signed(key1)


def parameter_keys(keys: tuple[int, int], parameter: int) -> tuple[int, int]:
    """The step's keys, made different for each parameter (its index in the optimizer)."""
    key0 = _mix32((keys[0] & _MASK) + (parameter & _MASK) * _GOLDEN)
    key1 = _mix32((keys[1] & _MASK) ^ key0)
    return _signed(key0), _signed(key1)


def hash_eights(eight, key0, key1):
    """An int32 word for each eight elements, by their index. One code for int32 torch tensors and Triton tiles."""
    x = eight + key0
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 2146121005
    x = x ^ key1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


# All odd. For any two of them the points (a x, b x) modulo 2^16 and modulo 2^32 form lattices whose shortest vectors
# have 68% or more of the greatest possible length (spectral test).
MULTIPLIERS = (1, -2024979795, -989154905, -1195298061)


def eight_index(start: int, count: int, device: torch.device, out: torch.Tensor | None = None) -> torch.Tensor:
    """Indices of eights `start .. start + count - 1`, modulo 2^29, as int32 (in `out` [count] if given)."""
    out = torch.empty(count, dtype=torch.int32, device=device) if out is None else out
    start &= 0x1FFFFFFF
    if start + count <= 1 << 29:
        return torch.arange(start, start + count, dtype=torch.int32, device=device, out=out)
    return out.copy_(torch.arange(start, start + count, dtype=torch.int64, device=device) & 0x1FFFFFFF)


def words_of_pairs(words: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """For the words [eights], those of their pairs in `out` [4 * eights]."""
    for pair, multiplier in zip(out.view(-1, 4).unbind(1), MULTIPLIERS):
        torch.mul(words, multiplier, out=pair)
    return out


def random_numbers(words: torch.Tensor, storage: int, out: torch.Tensor) -> torch.Tensor:
    """For words [pairs], the 16 bits of each element in a storage as int32 [2 * pairs] in `out`; of an int32 the upper
    16 are not cleared."""
    if storage == 0:
        return out.copy_(words.view(torch.int16))
    period = 2 << (storage.bit_length() - 1)  # elements within which numbers change places
    numbers, wanted = (t.view(-1, period) for t in (words.view(torch.int16), out))
    for element in range(period):
        wanted[:, element].copy_(numbers[:, element ^ storage])
    return out


def round_bits(bits, random):
    """Stochastic rounding to bf16 on the int32 bits of an fp32: up with the probability of the discarded fraction.

    Of `random` the lower 16 bits count. The low 16 bits of the result are zero; NaN and inf stay as they are.
    """
    finite = (bits & 0x7F800000) != 0x7F800000
    return torch.where(finite, (bits + (random & 0xFFFF)) & -65536, bits)
