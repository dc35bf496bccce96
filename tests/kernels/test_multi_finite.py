"""The check of many gradients in one launch: it reads every element of every operand, and no other.

Runs in Triton's interpreter (`test_interpreter.py`), and with `-m gpu` on the GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fused_grad_optimizer.kernels import interpreting, multi_finite  # noqa: E402
from fused_grad_optimizer.kernels.finite import BLOCK  # noqa: E402
from fused_grad_optimizer.kernels.launch_layout import NotDirect  # noqa: E402

NEEDED = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 or a GPU")
DEVICES = [pytest.param("cpu", marks=NEEDED), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BAD = [float("nan"), float("inf"), -float("inf")]


def flagged(gradients: list[list[torch.Tensor]], stride: int = 4) -> list[int]:
    """Indices of the flags that one launch sets; gradient i has index 3 i + 2."""
    device = gradients[0][0].device
    flags = torch.zeros(3 * len(gradients) + 2, stride, dtype=torch.int32, device=device)
    operands = [multi_finite.Operands(tensors, 3 * i + 2) for i, tensors in enumerate(gradients)]
    addresses = [t.data_ptr() for tensors in gradients for t in tensors]
    multi_finite.check(operands, addresses, flags[:, 0])
    assert not flags[:, 1:].any()
    return flags[:, 0].nonzero().flatten().tolist()


def operands_of(dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Contiguous and strided, aligned and not, longer than a block and not; NaN and inf lie in the gaps of each."""

    def cut(rows: int, columns: int, width: int, start: int) -> torch.Tensor:
        wide = torch.full((rows, width), float("nan"), dtype=dtype, device=device)
        wide[::2] = float("inf")
        wide[:, start : start + columns] = largest
        return wide[:, start : start + columns]

    largest = -torch.finfo(dtype).max
    return {
        "one block": torch.full((64, 128), largest, dtype=dtype, device=device),
        "a tail of one": torch.full((BLOCK + 1,), largest, dtype=dtype, device=device),
        "a tail of seven": torch.full((3, 5), largest, dtype=dtype, device=device),
        "scalar": torch.full((), largest, dtype=dtype, device=device),
        "unaligned": torch.full((BLOCK + 100,), largest, dtype=dtype, device=device)[1:],
        "rows": cut(9, 200, 256, 16),
        "rows with a tail": cut(5, 203, 256, 16),
        "rows over two blocks": cut(3, BLOCK + 11, BLOCK + 64, 32),
        "unaligned rows": cut(7, 100, 129, 3),
        "equal rows": torch.full((40,), largest, dtype=dtype, device=device).expand(6, 40),
    }


def places(tensor: torch.Tensor) -> set[int]:
    """First, last, and both sides of the borders of vectors, blocks and rows."""
    count = tensor.numel()
    columns = tensor.shape[-1] if tensor.dim() else 1
    borders = [0, 8, BLOCK, columns // 8 * 8, columns, count // 2, count - columns, count]
    return {place for border in borders for place in (border - 1, border) if 0 <= place < count}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_place_of_every_operand(dtype, device):
    largest = operands_of(dtype, device)
    assert flagged([[t] for t in largest.values()]) == []
    scalar = torch.ones((), dtype=dtype, device=device)
    for name in largest:
        for number, place in enumerate(sorted(places(largest[name]))):
            bad = operands_of(dtype, device)[name]
            index = divmod(place, bad.shape[-1]) if bad.dim() == 2 else (place,) * bad.dim()
            bad[index] = BAD[number % 3]
            assert flagged([[scalar], [scalar, bad], [scalar]]) == [5], (name, place)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, value", zip(DTYPES, BAD), ids=str)
def test_one_of_many_gradients(dtype, value, device):
    """Factors of other dtypes and sizes before and after; empty ones among them."""

    def gradients():
        made = []
        for i in range(24):
            other = DTYPES[i % 3]
            pair = [torch.ones(i, 8, dtype=other, device=device), torch.ones(i, 40 + i, dtype=other, device=device)]
            made.append([*pair, torch.ones((), device=device)] if i % 2 else pair)
        made[10] = [torch.ones(5, 24, dtype=dtype, device=device), torch.ones(5, 3000, dtype=dtype, device=device)]
        return made

    assert flagged(gradients()) == [] == flagged(gradients(), stride=1)
    for which in (0, 1):
        bad = gradients()
        bad[10][which][-1, -1] = value
        assert flagged(bad) == [32]
    bad = gradients()
    bad[11][2].fill_(value)
    bad[23][0][0, 0] = value
    assert flagged(bad) == [35, 71]


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_read(device):
    assert flagged([[torch.empty(0, 4, device=device), torch.empty(0, 8, device=device)]] * 3) == []


def test_a_dtype_that_is_not_read():
    with pytest.raises(NotDirect, match="float64"):
        multi_finite.Operands([torch.ones(2, 2, dtype=torch.float64)], 0)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    large = torch.zeros((1 << 31) + 4096, dtype=torch.bfloat16, device="cuda").view(-1, 4096)
    other = [torch.ones(7, 9, device="cuda")]
    assert flagged([other, [large], other]) == []
    large[-1, -1] = float("nan")
    assert flagged([other, [large], other]) == [5]
    rows = large[:, :4095]  # strided rows, and the last element out of them
    assert flagged([other, [rows], other]) == []
    rows[-1, -1] = float("inf")
    assert flagged([other, [rows], other]) == [5]
