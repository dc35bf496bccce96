"""How weights and states are kept: the dtype in memory and the rounding with which an fp32 result is written to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_grad_optimizer._messages import shown


@dataclass(frozen=True)
class Storage:
    """One way to keep a tensor. Its loads and stores are in `kernels/`: `_device.py` (Triton), `tile_cpu.py` (torch).

    Attributes:
        name: the name operators and kernels use.
        dtype: dtype in memory.
        stochastic: whether writing rounds stochastically (needs 16 random bits an element).
    """

    name: str
    dtype: torch.dtype
    stochastic: bool = False


STORAGES = {
    s.name: s
    for s in (
        Storage("fp32", torch.float32),
        Storage("fp64", torch.float64),
        Storage("fp16", torch.float16),
        Storage("bf16", torch.bfloat16, stochastic=True),
        Storage("bf16-nearest", torch.bfloat16),
    )
}
STATES = ("fp32", "bf16", "bf16-nearest")
WEIGHTS = ("stochastic", "nearest")
_WEIGHT_OF_DTYPE = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16"}
_STATE_OF_DTYPE = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp32", torch.bfloat16: "bf16"}


def check_modes(state: str | None, weight: str | None) -> None:
    """Raise `ValueError` unless both modes are offered."""
    if state is not None and state not in STATES:
        raise ValueError(f"state={shown(state)} is not offered; choose one of {', '.join(STATES)}")
    if weight is not None and weight not in WEIGHTS:
        raise ValueError(f"weight={shown(weight)} is not offered; choose one of {', '.join(WEIGHTS)}")


def weight_storage(dtype: torch.dtype, weight: str | None) -> Storage:
    """How a weight of this dtype is written: bf16 stochastically unless `weight="nearest"`; others to nearest.

    Raises:
        ValueError: the dtype is not a floating dtype this library updates.
    """
    if dtype == torch.bfloat16:
        return STORAGES["bf16-nearest" if weight == "nearest" else "bf16"]
    if dtype not in _WEIGHT_OF_DTYPE:
        raise ValueError(f"weights of dtype {dtype} are not offered; use float32, bfloat16, float16 or float64")
    return STORAGES[_WEIGHT_OF_DTYPE[dtype]]


def state_storage(dtype: torch.dtype, state: str | None) -> Storage:
    """How the states of a weight of this dtype are kept: as `state` says, or in the weight's dtype (fp32 for fp16)."""
    return STORAGES[state if state is not None else _STATE_OF_DTYPE[dtype]]
