"""Compiles the Hopper kernel without a GPU, as it is launched, and reads registers, spills and shared memory.

    python -m tests.kernels.hopper_variants

Prints one line for each variant; a variant that spills or does not fit counts as failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton

from fused_grad_optimizer.kernels import wgrad_step_hopper as hopper
from fused_grad_optimizer.kernels.configs import CANDIDATES, HOPPER, hopper_config
from fused_grad_optimizer.kernels.factors import Gradient, Target
from fused_grad_optimizer.ops import _stores
from fused_grad_optimizer.rules import UPDATES
from fused_grad_optimizer.storage import STORAGES
from tests.kernels.compile_only import FakeDriver, _hyper
from tests.kernels.sass import measure, too_much

# Of weight and states.
STORAGE_PAIRS = (("bf16", "bf16"), ("bf16-nearest", "bf16-nearest"), ("bf16", "fp32"), ("fp32", "fp32"))


def _tensor(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


def variants() -> Iterator[tuple[str, list, dict]]:
    """(label, arguments, constants) of launches: every rule and storage, pairs, odd sizes, and without a rule."""
    for update in UPDATES.values():
        for weight, state in STORAGE_PAIRS:
            yield _variant(f"{update.name} {weight} {state}", update, weight, state, 256, 1)
    adamw = UPDATES["adamw"]
    yield _variant("adamw bf16 bf16, 3 pairs, scaled, uneven", adamw, "bf16", "bf16", 272, 3, torch.ones(()))
    for changes in CANDIDATES[HOPPER]:
        config = replace(hopper_config(6), **changes)
        yield _variant(f"adamw bf16 bf16, {changes}", adamw, "bf16", "bf16", 256, 1, config=config)
    gradient = Gradient([_tensor(128, 256, torch.bfloat16)], [_tensor(128, 256, torch.bfloat16)])
    options = {"target": None, "out": _tensor(256, 256, torch.float32), "scalars": None, "keys": None, "flag": None}
    yield (
        "without a rule",
        *hopper.arguments(
            gradient, 256, 256, hopper_config(6), update=None, stores=(), stochastic=False, **options
        ),
    )  # fmt: skip


def _variant(label, update, weight, state, n, pairs, scale=None, config=None) -> tuple[str, list, dict]:
    names = [weight] + [state] * len(update.states)
    tensors = [_tensor(n, n, STORAGES[name].dtype) for name in names]
    factors = [_tensor(128, n, torch.bfloat16) for _ in range(pairs)]
    stores, stochastic = _stores(names)
    positional, constants = hopper.arguments(
        Gradient(factors, factors, scale=scale), n, n,
        config or hopper_config(sum(t.element_size() for t in tensors)),
        target=Target(tensors[0], tensors[1:], names, 0), out=None,
        scalars=torch.empty(len(update.scalars(_hyper(), 1, True))), keys=torch.empty(2, dtype=torch.int32),
        flag=torch.zeros(1, dtype=torch.int32), update=update, stores=stores, stochastic=stochastic,
    )  # fmt: skip
    return label, positional, constants


def main() -> int:
    failed = 0
    triton.runtime.driver.set_active(FakeDriver(90))
    for label, positional, constants in variants():
        found = measure(hopper.wgrad_step_hopper_kernel.warmup(*positional, grid=(1,), **constants))
        bad = too_much(found, 90) or not found["HGMMA"]
        failed += bad
        print(f"{label}: {found}{' FAILED' if bad else ''}", flush=True)
    print(f"triton {triton.__version__}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
