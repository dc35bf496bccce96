"""Configurations of the Hopper kernel: what fits and runs, which tiles a weight gets, what of a table is followed."""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer.kernels import dispatch
from fused_grad_optimizer.kernels.configs import HOPPER, hopper_config
from fused_grad_optimizer.kernels.tuning import choice

STORAGES_OF = [
    (torch.bfloat16,),
    (torch.bfloat16,) * 3,
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32,) * 2,
    (torch.float32,) * 3,
]


def launched(chosen, dtypes, tokens):
    """The Hopper configuration of a launch, and the bytes of shared memory that its rings take."""
    targets = [torch.zeros(1, dtype=dtype) for dtype in dtypes]
    config = dispatch.launcher(chosen, 4096, 4096, targets, tokens, torch.bfloat16)[1]["config"]
    rings = config.stages * config.block_t * (config.block_n + config.block_k) * 2
    rings += config.slots * config.mma_warps * 16 * 128 * 4
    rings += config.state_slots * config.state_rows * 128 * sum(dtype.itemsize for dtype in dtypes)
    return config, rings


@pytest.mark.parametrize("element_bytes", [2, 4, 6, 8, 10, 12, 16])
@pytest.mark.parametrize("tokens", [None, 1, 256, 257, 512, 513, 4095, 4096, 16384])
def test_every_updater_has_as_many_state_slots_as_the_other(element_bytes, tokens):
    """TMA may complete loads out of order: an updater may wait only for slots whose last round it has waited for."""
    config = hopper_config(element_bytes, tokens, (4096, 4096))
    assert config.block_k == (256 if (tokens or 0) >= 4096 else 128)
    assert config.state_slots >= 2 and config.state_slots % 2 == 0 and config.stages >= 4
    assert dispatch.shared_memory(config, element_bytes) <= dispatch.SHARED_MEMORY


@pytest.mark.parametrize(
    "n, k, wide",
    [(14336, 4096, True), (4096, 14336, True), (4096, 4096, True), (1024, 4096, True), (128256, 4096, True),
     (1024, 1024, False),  # 32 wide tiles leave 100 of 132 multiprocessors without work
     (1024, 2048, False),  # 64 tiles, which would take twice the time of 128 narrow ones
     (1024, 2304, True),  # 72, and of 144 narrow ones there are two rounds
     (4096, 4224, False), (4160, 4096, False)],  # not even
)  # fmt: skip
def test_wide_tiles_are_for_weights_that_fill_the_card(n, k, wide):
    assert (hopper_config(6, 4096, (n, k)).block_k == 256) == wide
    assert hopper_config(6, 4096).block_k == 128  # nothing is known of the weight
    targets = [torch.zeros(1, dtype=torch.bfloat16)] * 3
    config = dispatch.launcher(choice(HOPPER, {"group": 4}), n, k, targets, 4096, torch.bfloat16)[1]["config"]
    assert (config.mma_warps, config.group) == (8 if wide else 4, 4)


@pytest.mark.parametrize("changes", [{"state_slots": 3, "group": 2}, {"stages": 1}, {"slots": 0}], ids=str)
def test_rings_that_the_kernel_cannot_follow(changes):
    """It would hang, or pass over what is not there yet."""
    config, _ = launched(choice(HOPPER, changes), (torch.bfloat16,) * 2, 512)
    assert config == hopper_config(4, 512)


def test_a_configuration_that_cannot_fit_is_left_out_of_the_launch():
    wide = (torch.bfloat16, torch.float32, torch.float32)
    targets = [torch.zeros(1, dtype=dtype) for dtype in wide]
    large, small = choice(HOPPER, {"stages": 8, "slots": 3}), choice(HOPPER, {"group": 16, "stages": 4})
    assert launched(large, wide, 512)[0] == hopper_config(10, 512)
    assert not dispatch.fits(large, 4096, 4096, targets, 512)
    config = launched(small, wide, 512)[0]
    assert (config.group, config.stages) == (16, 4) and dispatch.fits(small, 4096, 4096, targets, 512)
