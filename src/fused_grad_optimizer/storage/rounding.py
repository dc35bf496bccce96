"""Counter-based random bits and stochastic rounding, the same on every device.

The bits of an element are a function of (seed, step, parameter, flat element index) alone: they do not depend on tile
shapes or devices, replay exactly, and a resumed run needs nothing saved for them. Two 32-bit words serve four storages
of an element, 16 bits each: weight and first state from the first word, the next two states from the second.

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
    key0 = _mix32(_mix32(seed) + _mix32(seed >> 32) * _GOLDEN + step)
    key1 = _mix32(key0 ^ _mix32(step * _GOLDEN + 0x632BE5AB))
    return _signed(key0), _signed(key1)


def parameter_keys(keys: tuple[int, int], parameter: int) -> tuple[int, int]:
    """The step's keys, made different for each parameter (its index in the optimizer)."""
    key0 = _mix32((keys[0] & _MASK) + (parameter & _MASK) * _GOLDEN)
    key1 = _mix32((keys[1] & _MASK) ^ key0)
    return _signed(key0), _signed(key1)


def random_words(index, key0, key1):
    """Two int32 words of random bits for each int32 element index. One code for torch tensors and Triton tiles."""
    x = index + key0
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 2146121005
    x = x ^ key1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    first = x ^ ((x >> 16) & 0xFFFF)
    y = first * -1640531535
    second = y ^ ((y >> 15) & 0x1FFFF)
    return first, second


def flat_index(start: int, count: int, device: torch.device, out: torch.Tensor | None = None) -> torch.Tensor:
    """Flat element indices `start .. start + count - 1`, modulo 2^32, as int32 (in `out` [count] if given)."""
    out = torch.empty(count, dtype=torch.int32, device=device) if out is None else out
    wrapped = _signed(start & _MASK)
    if wrapped + count < 1 << 31:
        return torch.arange(wrapped, wrapped + count, dtype=torch.int32, device=device, out=out)
    return out.copy_(torch.arange(start, start + count, dtype=torch.int64, device=device))


def random16(words, storage: int):
    """The 16 random bits, an int32 in [0, 65536), of the storage with this index, from `random_words`."""
    word = words[storage // 2]
    return (word >> 16) & 0xFFFF if storage % 2 else word & 0xFFFF


def round_bits(bits, random):
    """Stochastic rounding to bf16 on the int32 bits of an fp32: up with the probability of the discarded fraction.

    The low 16 bits of the result are zero; NaN and inf stay as they are.
    """
    finite = (bits & 0x7F800000) != 0x7F800000
    return torch.where(finite, (bits + random) & -65536, bits)


def round_stochastic_bf16(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16 with `round_bits`. `random` holds int32 values in [0, 65536)."""
    return round_bits(value.view(torch.int32), random).view(torch.float32).to(torch.bfloat16)
