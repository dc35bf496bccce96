"""Fixtures of the tests that train on the fake driver."""

from __future__ import annotations

import pytest


@pytest.fixture
def cuda(monkeypatch):
    """The fake driver, in a process that takes the GPU's way."""
    from tests.kernels import fake_training
    from tests.kernels.fake_cuda import fake_cuda

    with fake_cuda() as fake, monkeypatch.context() as patch:
        fake_training.take_the_gpus_way(patch)
        yield fake


@pytest.fixture
def general(monkeypatch):
    """The arguments of each step that is made the general way, not by a plan."""
    from tests.kernels import fake_training

    return fake_training.count_general_steps(monkeypatch)
