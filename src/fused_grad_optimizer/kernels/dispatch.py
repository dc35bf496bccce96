"""Which path takes a gradient that has (dY, X) pairs, and why: a kernel that keeps it in registers, or chunks.

    wgrad_step_hopper   Hopper kernel, in registers
    wgrad_step          portable kernel, in registers
    chunked             the library's GEMM into a reused chunk, then a streaming step on it

Decided by the number of tokens T and the tables of `tuning`; the kernels' own reasons to decline come first.
`FORGE_KERNEL` in the environment, set to one of these names, overrides the choice, for debugging; what that path cannot
take goes to the portable kernel, with a warning.
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
SHARED_MEMORY = 226 << 10  # bytes of a Hopper block, which may have 227 KiB, less its barriers
_HOPPER_KERNEL: list[ModuleType | None] = []  # what `hopper_kernel` gives, once it is known


def hopper_kernel() -> ModuleType | None:
    """The module of the Hopper kernel; None, with one warning, where this Triton's Gluon lacks what it needs."""
    if not _HOPPER_KERNEL:
        try:
            _HOPPER_KERNEL.append(_module(HOPPER))
        except (ImportError, AttributeError) as error:
            give_up_hopper(error)
    return _HOPPER_KERNEL[0]


def give_up_hopper(error: Exception) -> None:
    """The portable kernel takes the place of the Hopper kernel from now on, because of what Triton said about it."""
    _HOPPER_KERNEL[:] = [None]
    _say_once(
        f"the Hopper kernel cannot be used with this Triton ({type(error).__name__}: {str(error).strip()[-500:]}); the "
        "portable kernel takes its place, which is slower. Triton 3.6 and 3.9 are known to work."
    )


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def forced() -> str | None:
    """The path that FORGE_KERNEL names, None without it.

    Raises:
        ValueError: it names no path.
    """
    wanted = os.environ.get("FORGE_KERNEL")
    if wanted not in (None, *PATHS):
        raise ValueError(f"FORGE_KERNEL={wanted!r} is not a path; use one of {', '.join(PATHS)}, or unset it")
    return wanted


def say_if_ignored(why: str | None) -> None:
    """Warn, once, that nothing follows FORGE_KERNEL, if it is set."""
    wanted = forced()
    if wanted is not None:
        _say_once(f"FORGE_KERNEL={wanted} is not followed: {why}")


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
        ValueError: FORGE_KERNEL names no path; a table is damaged or foreign.
    """
    wanted = forced()
    if wanted == PORTABLE:
        return Plan(tuning.Choice(PORTABLE), "FORGE_KERNEL says so")
    against = reason_against_hopper(gradient, n, k, targets)
    against_chunks = reason_against_chunks(gradient)
    if wanted == HOPPER or (wanted == CHUNKED and not storing):
        return _as_forced(wanted, against if wanted == HOPPER else against_chunks, n, k)
    if storing:
        return Plan(tuning.Choice(PORTABLE if against else HOPPER), against or "compute capability 9.0")
    inputs, device = gradient.dys[0].element_size(), gradient.dys[0].device
    key = tuning.Key(tuple([t.element_size() for t in targets]), stochastic, inputs, n, k)
    found = tuning.ranges(_card(device), key, against is None)
    choice = found.at(sum([dy.shape[0] for dy in gradient.dys]) if tokens is None else tokens)
    if choice.path == CHUNKED and against_chunks is not None:
        return Plan(tuning.Choice(PORTABLE if against else HOPPER), against_chunks)
    reason = found.reason if against is None else f"{found.reason}; not {HOPPER}: {against}"
    return Plan(choice, reason, found.crossover)


def _as_forced(wanted: str, against: str | None, n: int, k: int) -> Plan:
    """The path that FORGE_KERNEL names, or the portable kernel if there is a reason against it. Raising in the middle
    of a step would leave the weights half updated."""
    if against is None:
        return Plan(tuning.Choice(wanted), "FORGE_KERNEL says so")
    _say_once(f"FORGE_KERNEL={wanted} is not followed for a weight of {n} x {k}, {PORTABLE} takes it: {against}")
    return Plan(tuning.Choice(PORTABLE), f"not {wanted}, which FORGE_KERNEL names: {against}")


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
    """With the changes, or with none of them where the kernel might not compile or start so: training must go on."""
    config = hopper_config(element_bytes, tokens, (n, k), multiprocessors)
    changed = replace(config, **dict(changes))
    rings = changed.stages >= 2 and changed.slots >= 1 and changed.state_slots >= 2 and changed.state_slots % 2 == 0
    return changed if rings and shared_memory(changed, element_bytes) <= SHARED_MEMORY else config


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
