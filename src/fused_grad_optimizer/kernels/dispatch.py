"""Which kernel takes a gradient that has (dY, X) pairs: the Hopper kernel or the portable one, and why.

`FORGE_KERNEL=wgrad_step` or `FORGE_KERNEL=wgrad_step_hopper` in the environment overrides the choice, for debugging.
"""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import ModuleType

import torch

from fused_grad_optimizer.kernels.factors import Gradient

PORTABLE, HOPPER = "wgrad_step", "wgrad_step_hopper"


@cache
def hopper_kernel() -> ModuleType | None:
    """The module of the Hopper kernel; None, with one warning, where this Triton's Gluon lacks what it needs."""
    try:
        return importlib.import_module(f"fused_grad_optimizer.kernels.{HOPPER}")
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"the Hopper kernel cannot be used with this Triton ({error}); the portable kernel takes its place, which "
            "is slower. Triton 3.6 and 3.9 are known to work.",
            stacklevel=2,
        )
        return None


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def choose(gradient: Gradient, n: int, k: int, targets: list[torch.Tensor]) -> tuple[str, str]:
    """`(kernel, reason)` for the step of `targets` [n, k], W first, or for storing the gradient to `targets[0]`.

    Raises:
        ValueError: FORGE_KERNEL names no kernel, or one that cannot take this gradient.
    """
    device = gradient.dys[0].device
    wanted = os.environ.get("FORGE_KERNEL")
    if wanted not in (None, PORTABLE, HOPPER):
        raise ValueError(f"FORGE_KERNEL={wanted!r} is not a kernel; use {PORTABLE} or {HOPPER}, or unset it")
    if wanted == PORTABLE:
        return PORTABLE, "FORGE_KERNEL says so"
    reason = _reason_against_hopper(gradient, n, k, targets, device)
    if reason is None:
        return HOPPER, "compute capability 9.0"
    if wanted == HOPPER:
        raise ValueError(f"FORGE_KERNEL={wanted}, but: {reason}")
    return PORTABLE, reason


def _reason_against_hopper(gradient, n, k, targets, device) -> str | None:
    if not _is_hopper(device):
        return "compute capability is not 9.0"
    module = hopper_kernel()
    if module is None:
        return "this Triton's Gluon does not have what the Hopper kernel needs"
    return module.reason_to_decline(gradient, n, k, targets)
