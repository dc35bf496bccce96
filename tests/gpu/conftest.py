"""Fixtures of the tests of direct launches."""

from __future__ import annotations

import pytest


@pytest.fixture
def directly(monkeypatch):
    """Names of the kernels that were launched directly, in order. No kernel was refused so far."""
    from fused_grad_optimizer.kernels import cuda_driver, launcher

    if cuda_driver.active() is None:
        pytest.skip("needs the CUDA driver")
    names = []
    monkeypatch.setattr(launcher, "_REFUSALS", {})
    original = launcher.DirectLaunch.run

    def run(self, *args):
        names.append(self.name)
        original(self, *args)

    monkeypatch.setattr(launcher.DirectLaunch, "run", run)
    return names
