"""Stochastic rounding: unbiased, counter-based, exact on representable numbers, safe on NaN and inf."""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer.storage import STORAGES, check_modes, state_storage, weight_storage
from fused_grad_optimizer.storage.rounding import (
    MULTIPLIERS,
    eight_index,
    hash_eights,
    parameter_keys,
    random_numbers,
    round_bits,
    step_keys,
    words_of_pairs,
)


def bits(count, seed=0, step=1, parameter=0, start=0, storages=4):
    """The 16 bits of elements start .. start + count - 1 for each storage."""
    eights = eight_index(start // 8, count // 8 + 2, torch.device("cpu"))
    word = hash_eights(eights, *parameter_keys(step_keys(seed, step), parameter))
    words = words_of_pairs(word, out=torch.empty(4 * len(word), dtype=torch.int32))
    random = [
        random_numbers(words, s, out=torch.empty(2 * len(words), dtype=torch.int32)) & 0xFFFF for s in range(storages)
    ]
    return [r[start % 8 : start % 8 + count] for r in random]


def round_stochastic_bf16(value, random):
    return round_bits(value.view(torch.int32), random).view(torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("value", [1.0 + 2**-9, 1.001, -3.14159, 1e-30, 1e30, 1e-39])
def test_mean_is_unbiased_over_a_million_draws(value):
    count = 1_000_000
    x = torch.full((count,), value)
    for word in bits(count):
        rounded = round_stochastic_bf16(x, word).double()
        spacing = (rounded.max() - rounded.min()).item()
        error = abs(rounded.mean().item() - float(torch.tensor(value).double()))
        assert error < 5 * 0.5 * spacing / count**0.5 + 1e-45  # five standard errors of a coin with two faces


def test_representable_numbers_stay():
    x = torch.randn(1000).bfloat16()
    assert torch.equal(round_stochastic_bf16(x.float(), bits(1000)[0]), x)


def test_nan_and_inf_stay():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(1000)
    rounded = round_stochastic_bf16(x, bits(3000)[0])
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded.isinf(), x.isinf())


def test_bits_of_outputs_steps_seeds_and_parameters_are_unrelated():
    count = 200_000
    words = [*bits(count), bits(count, step=2)[0], bits(count, seed=1)[0], bits(count, parameter=1)[0],
             bits(count, seed=1 << 40)[0]]  # fmt: skip
    table = torch.stack(words).double()
    correlation = torch.corrcoef(table) - torch.eye(len(words))
    assert correlation.abs().max() < 6 / count**0.5
    for word in words:  # uniform: mean and each bit
        assert abs(word.double().mean() / 65535 - 0.5) < 6 * 0.2887 / count**0.5
        for bit in range(16):
            assert abs(((word >> bit) & 1).double().mean() - 0.5) < 6 * 0.5 / count**0.5


def test_neighbours_are_unrelated():
    word = bits(200_000)[0].double()
    for lag in (1, 2, 3, 4, 16, 4096):
        pair = torch.stack([word[:-lag], word[lag:]])
        assert torch.corrcoef(pair)[0, 1].abs() < 6 / 200_000**0.5


def test_elements_of_an_eight_share_no_number_in_a_storage_nor_storages_in_an_element():
    """A Latin square: number e XOR s, by the halves of the words."""
    eight, *keys = torch.tensor([5], dtype=torch.int32), *parameter_keys(step_keys(0, 1), 0)
    word = int(hash_eights(eight, *keys))
    numbers = [(word * m >> 16 * half) & 0xFFFF for m in MULTIPLIERS for half in (0, 1)]
    assert len(set(numbers)) == 8
    found = bits(8, start=40, storages=8)
    for storage in range(8):
        assert found[storage].tolist() == [numbers[element ^ storage] for element in range(8)]


@pytest.mark.parametrize("apart", range(1, 8))
@pytest.mark.parametrize("one, other", [(0, 0), (1, 1), (0, 1), (1, 2), (0, 3)])
def test_pairs_of_an_eight_fill_the_square(one, other, apart):
    """Elements that share a hash, in two storages: no part of the square is hit more or less often than another.

    Points of a lattice are not as random as independent ones, but as even: 3% and chance, where 256 of them are
    expected in each of the 16 x 16 cells. Left out: those that take the same number.
    """
    count = 4_000_000
    random = bits(count)
    x, y = random[one][: count - apart], random[other][apart:]
    element = torch.arange(count - apart) % 8
    kept = (element + apart < 8) & (element ^ one != (element + apart) ^ other)
    cells = torch.bincount((x[kept] >> 12) * 16 + (y[kept] >> 12), minlength=256).double()
    expected = kept.sum().item() / 256
    assert (cells - expected).abs().max() < 0.03 * expected + 5 * expected**0.5


def shortest(ratio, modulus):
    """Length of the shortest vector of the lattice of the points (x, ratio x) modulo `modulus` (Gauss's reduction)."""
    a, b = (modulus, 0), (ratio % modulus, 1)
    while True:
        if a[0] ** 2 + a[1] ** 2 > b[0] ** 2 + b[1] ** 2:
            a, b = b, a
        times = round((a[0] * b[0] + a[1] * b[1]) / (a[0] ** 2 + a[1] ** 2))
        if times == 0:
            return (a[0] ** 2 + a[1] ** 2) ** 0.5
        b = (b[0] - times * a[0], b[1] - times * a[1])


@pytest.mark.parametrize("modulus", [1 << 16, 1 << 32])
def test_spectral_quality_of_the_multipliers(modulus):
    """Knuth, The Art of Computer Programming 2, 3.3.4, in two dimensions."""
    greatest = (2 / 3**0.5 * modulus) ** 0.5
    for i, one in enumerate(MULTIPLIERS):
        for other in MULTIPLIERS[:i]:
            assert shortest(other * pow(one, -1, modulus), modulus) > 0.68 * greatest


def test_bits_depend_on_the_flat_index_alone():
    whole = bits(1000)[0]
    parts = torch.cat([bits(300)[0], bits(700, start=300)[0]])
    assert torch.equal(whole, parts)
    wrapped = bits(10, start=(1 << 31) - 5)[0]
    assert torch.equal(wrapped[5:], bits(5, start=1 << 31)[0])
    assert torch.equal(bits(5, start=1 << 32)[0], bits(5)[0])


def test_storages_of_dtypes():
    assert weight_storage(torch.bfloat16, None).stochastic
    assert not weight_storage(torch.bfloat16, "nearest").stochastic
    assert state_storage(torch.float16, None).dtype == torch.float32
    assert state_storage(torch.bfloat16, "fp32") is STORAGES["fp32"]
    with pytest.raises(ValueError, match="int32"):
        weight_storage(torch.int32, None)
    with pytest.raises(ValueError, match="state='int3'"):
        check_modes("int3", None)
    with pytest.raises(ValueError, match="weight='up'"):
        check_modes(None, "up")
