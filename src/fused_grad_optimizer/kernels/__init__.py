"""Where a step runs: Triton kernels, and the same tiles on torch operations. The only files that see pointers.

Importing this package needs neither a GPU nor Triton; the kernel modules are imported when they are first used.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from fused_grad_optimizer.kernels.factors import Gradient, Target

__all__ = ["Gradient", "Target", "allows_tf32", "triton_reason"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreting() -> bool:
    """Whether Triton's interpreter is on (`TRITON_INTERPRET=1`), in which kernels run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def allows_tf32() -> bool:
    """Whether the user lets fp32 matrices on CUDA be multiplied in TF32, by torch's new setting or the old one.

    Reading the old one is an error in torch once the new one was used.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # from torch 2.9 on
    if precision == "none":
        precision = getattr(torch.backends, "fp32_precision", "none")
    return torch.backends.cuda.matmul.allow_tf32 if precision is None else precision == "tf32"


def triton_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """None when the Triton kernels can update a weight of this dtype on this device, else why they cannot."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreting():
        return f"no Triton kernels on device type {device.type!r}"
    if dtype not in _DTYPES:
        return f"no Triton kernels for {dtype}"
    return None
