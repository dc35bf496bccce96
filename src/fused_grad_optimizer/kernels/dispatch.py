"""Which path takes a gradient that has (dY, X) pairs, and why: a kernel that keeps it in registers, or chunks.

    wgrad_step_hopper   Hopper kernel, in registers
    wgrad_step          portable kernel, in registers
    chunked             the library's GEMM into a reused chunk, then a streaming step on it

Decided by the number of tokens T and the tables of `tuning`; the kernels' own reasons to decline come first.
`FORGE_KERNEL` in the environment, set to one of these names, overrides the choice, for debugging.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fused_grad_optimizer.kernels import tuning
from fused_grad_optimizer.kernels.configs import (
    CHUNKED,
    HOPPER,
    PORTABLE,
    ChunkConfig,
    HopperConfig,
    gemm_config,
    hopper_config,
    multiprocessors,
)
from fused_grad_optimizer.kernels.factors import Gradient

PATHS = (PORTABLE, HOPPER, CHUNKED)
MOST_GROUP = 1024  # row-tiles; numbers of tiles are int32
SHARED_MEMORY = 226 << 10  # bytes of a Hopper block, which may have 227 KiB, less its barriers


@cache
def hopper_kernel() -> ModuleType | None:
    """The module of the Hopper kernel; None, with one warning, where this Triton's Gluon lacks what it needs."""
    try:
        return _module(HOPPER)
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


class Plan(NamedTuple):
    """A path, the fields of its configuration that differ from what `configs.py` gives, and why it is taken.

    Attributes:
        crossover: the largest T that stays in registers for this weight; None where no T is chunked, or was not asked.
    """

    choice: tuning.Choice
    reason: str
    crossover: int | None = None


def choose(gradient: Gradient, n: int, k: int, targets: list[torch.Tensor], **options) -> tuple[str, str]:
    """`(path, reason)` of `plan`."""
    found = plan(gradient, n, k, targets, **options)
    return found.choice.path, found.reason


def plan(
    gradient: Gradient,
    n: int,
    k: int,
    targets: list[torch.Tensor],
    *,
    stochastic: bool = False,
    storing: bool = False,
    tokens: int | None = None,
) -> Plan:
    """How the step of `targets` [n, k], W first, is computed; with `storing`, by which kernel dW goes to `targets[0]`.

    Args:
        stochastic: whether one of the targets is rounded stochastically.
        tokens: T, where it is not that of the factors.

    Raises:
        ValueError: FORGE_KERNEL names no path, or one that cannot take this gradient; a table is damaged or foreign.
    """
    device = gradient.dys[0].device
    wanted = os.environ.get("FORGE_KERNEL")
    if wanted not in (None, *PATHS):
        raise ValueError(f"FORGE_KERNEL={wanted!r} is not a path; use one of {', '.join(PATHS)}, or unset it")
    if wanted == PORTABLE:
        return Plan(tuning.Choice(PORTABLE), "FORGE_KERNEL says so")
    against = reason_against_hopper(gradient, n, k, targets)
    if storing or wanted == HOPPER:
        if against is None:
            return Plan(tuning.Choice(HOPPER), "compute capability 9.0" if storing else "FORGE_KERNEL says so")
        if wanted == HOPPER:
            raise ValueError(f"FORGE_KERNEL={wanted}, but: {against}")
        return Plan(tuning.Choice(PORTABLE), against)
    against_chunks = reason_against_chunks(gradient)
    if wanted == CHUNKED:
        if against_chunks is not None:
            raise ValueError(f"FORGE_KERNEL={wanted}, but: {against_chunks}")
        return Plan(tuning.Choice(CHUNKED), "FORGE_KERNEL says so")
    inputs = gradient.dys[0].element_size()
    key = tuning.Key(tuple([t.element_size() for t in targets]), stochastic, inputs, n, k)
    found = tuning.ranges(_card(device), key, against is None)
    choice = found.at(sum([dy.shape[0] for dy in gradient.dys]) if tokens is None else tokens)
    if choice.path == CHUNKED and against_chunks is not None:
        return Plan(tuning.Choice(PORTABLE if against else HOPPER), against_chunks)
    reason = found.reason if against is None else f"{found.reason}; not {HOPPER}: {against}"
    return Plan(choice, reason, found.crossover)


def launcher(
    choice: tuning.Choice, n: int, k: int, targets: Sequence[torch.Tensor], tokens: int, inputs: torch.dtype
) -> tuple[Callable, dict[str, Any]]:
    """The launch function of a path, and its options that come from the choice."""
    launch = _module(choice.path).launch
    if choice.path == HOPPER:
        return launch, {"config": _hopper_config(n, k, *_bytes_and_card(targets), tokens, choice.config)}
    changes: dict[str, Any] = dict(choice.config)
    if choice.path == CHUNKED:
        return launch, {"config": ChunkConfig(**changes)} if changes else {}
    return launch, {"config": replace(gemm_config(n, k, inputs), **changes)} if changes else {}


def _bytes_and_card(targets: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes of a weight and its states a parameter, and the multiprocessors of their card."""
    return sum([t.element_size() for t in targets]), multiprocessors(targets[0].device)


@lru_cache(maxsize=1024)
def _hopper_config(
    n: int, k: int, element_bytes: int, multiprocessors: int, tokens: int, changes: tuple[tuple[str, int], ...]
) -> HopperConfig:
    """With the changes, or with none of them where the kernel might not compile or start so: training must go on.

    Tiles, warps and registers depend on each other: only the order of tiles and the lengths of rings are followed.
    """
    config = hopper_config(element_bytes, tokens, (n, k), multiprocessors)
    changed = replace(config, **dict(changes))
    followed = {"group", "stages", "slots", "state_slots"}.issuperset(name for name, _ in changes)
    rings = changed.stages >= 2 and changed.slots >= 1 and changed.state_slots >= 2 and changed.state_slots % 2 == 0
    order = 1 <= changed.group <= MOST_GROUP
    fitting = shared_memory(changed, element_bytes) <= SHARED_MEMORY
    return changed if followed and rings and order and fitting else config


def shared_memory(config: HopperConfig, element_bytes: int) -> int:
    """Bytes that the rings of the Hopper kernel take: operands in 16 bits, units in fp32, W and states."""
    operands = config.stages * config.block_t * (config.block_n + config.block_k) * 2
    return operands + config.slots * config.unit_bytes + config.state_slots * config.state_rows * 128 * element_bytes


def fits(choice: tuning.Choice, n: int, k: int, targets: Sequence[torch.Tensor], tokens: int) -> bool:
    """Whether a choice of the Hopper kernel is launched with the configuration it names: see `_hopper_config`."""
    config = _hopper_config(n, k, *_bytes_and_card(targets), tokens, choice.config)
    return all(getattr(config, name) == value for name, value in choice.config)


@cache
def _module(path: str) -> ModuleType:
    return importlib.import_module(f"fused_grad_optimizer.kernels.{path}")


@cache
def _card(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@cache
def _adds_in_fp32() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def reason_against_chunks(gradient: Gradient) -> str | None:
    """Why the chunked path cannot take this gradient, or None."""
    if len(gradient.dys) > 1 and gradient.dys[0].dtype != torch.float32 and not _adds_in_fp32():
        return "this torch cannot add products of 16-bit matrices to an fp32 one; torch 2.10 can"
    return None


def reason_against_hopper(gradient: Gradient, n: int, k: int, targets: list[torch.Tensor]) -> str | None:
    """Why the Hopper kernel cannot take this gradient on its device, or None."""
    if not _is_hopper(gradient.dys[0].device):
        return "compute capability is not 9.0"
    module = hopper_kernel()
    if module is None:
        return "this Triton's Gluon does not have what the Hopper kernel needs"
    return module.reason_to_decline(gradient, n, k, targets)
