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


def flat_index(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Flat element indices `start .. start + count - 1`, modulo 2^32, as int32."""
    wrapped = _signed(start & _MASK)
    if wrapped + count < 1 << 31:
        return torch.arange(wrapped, wrapped + count, dtype=torch.int32, device=device)
    return torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)


def round_stochastic_bf16(value: torch.Tensor, random16: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, up with the probability of the discarded fraction. `random16` holds int32 values in [0, 65536)."""
    bits = (value.view(torch.int32) + random16) & -65536
    rounded = bits.view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value).to(torch.bfloat16)
