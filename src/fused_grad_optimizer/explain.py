"""`explain`: which path updates a weight, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fused_grad_optimizer._messages import shown
from fused_grad_optimizer.kernels import Gradient, dispatch, tile_cpu, triton_reason
from fused_grad_optimizer.kernels.configs import HOPPER
from fused_grad_optimizer.rules import get_rule
from fused_grad_optimizer.rules._rule import whole
from fused_grad_optimizer.storage import check_modes, state_storage, weight_storage


class Explanation(NamedTuple):
    """Attributes:
    path: "wgrad_step_hopper", "wgrad_step", "chunked" or "tile_cpu".
    crossover: the largest T that stays in registers; above it all is chunked. None where no T is.
    """

    path: str
    reason: str
    crossover: int | None = None


def explain(
    n: int,
    k: int,
    t: int,
    *,
    device: torch.device | str,
    weight_dtype: torch.dtype,
    input_dtype: torch.dtype | None = None,
    rule: str = "adamw",
    state: str | None = None,
    weight: str | None = None,
    uses: int = 1,
    embedding: bool = False,
) -> Explanation:
    """Which path updates a weight [n, k] from t tokens, why, and from which T on another: `(path, reason, crossover)`.

    Args:
        n, k: out and in features.
        t: tokens of each use, batch times sequence length.
        weight_dtype, input_dtype: of the weight, and of dY and X (default: the same).
        rule, state, weight: as in `fuse`.
        uses: how many linear layers have this weight.
        embedding: whether it is an embedding's weight as well.

    Raises:
        ValueError: an argument is not one of those; there is no such device here.

    Example:
        >>> explain(4096, 4096, 512, device="cpu", weight_dtype=torch.float32)[0]
        'tile_cpu'
    """
    inputs = weight_dtype if input_dtype is None else input_dtype
    device = _checked(n, k, t, uses, device, weight_dtype, inputs)
    check_modes(state, weight)
    chosen = get_rule(rule)
    storage = weight_storage(weight_dtype, weight)
    kept = state_storage(weight_dtype, state)
    about = f"{rule}, states in {kept.name}"
    reason = triton_reason(device, weight_dtype)
    if reason is not None:
        dispatch.say_if_ignored(reason)
        blocks = f"torch operations on blocks of {tile_cpu.block_rows(n, k)} rows"
        return Explanation("tile_cpu", f"{reason}; {blocks}; {about}")
    dys, xs = [_sample(t, n, inputs, device)] * uses, [_sample(t, k, inputs, device)] * uses
    gradient = Gradient(dys, xs)
    if embedding:
        gradient = Gradient(dys, xs, _sample(1, 1, torch.int32, device), _sample(1, k, torch.float32, device))
    states = len(chosen.select({**chosen.defaults, "maximize": False}).states)
    storages = [storage, *[kept] * states]
    targets = [_sample(1, k, s.dtype, device) for s in storages]
    stochastic = any(s.stochastic for s in storages)
    tokens = uses * t
    choice, reason, crossover = dispatch.plan(gradient, n, k, targets, stochastic=stochastic, tokens=tokens)
    if choice.path == HOPPER and not dispatch.fits(choice, n, k, targets, tokens):
        reason += f"; {choice} does not fit here, so the default configuration runs"
    return Explanation(choice.path, f"{reason}; T={tokens}; {about}", crossover)


def _checked(n: int, k: int, t: int, uses: int, device: torch.device | str, *dtypes: torch.dtype) -> torch.device:
    """The device. Raises `ValueError` for a number below 1, a device that is not here, or a dtype that is none."""
    for name, value in (("n", n), ("k", k), ("t", t), ("uses", uses)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"{name}={shown(value)} must be a whole number from 1 on")
    for name, dtype in zip(("weight_dtype", "input_dtype"), dtypes):
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{name}={shown(dtype)} must be a floating torch.dtype")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={shown(device)} is no device of torch: {error}") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={shown(device)}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return found


def _sample(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Two rows (or fewer) of a contiguous tensor: enough to see its strides and alignment."""
    return torch.empty(min(rows, 2), columns, dtype=dtype, device=device)
