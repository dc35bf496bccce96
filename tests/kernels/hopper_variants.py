"""Compiles the Hopper kernel without a GPU, as it is launched, and reads registers, spills and shared memory.

    python -m tests.kernels.hopper_variants

Prints one line for each variant; one that spills in a loop or does not fit counts as failed. So does a control, if no
spill is seen in a variant with too few registers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton

from fused_grad_optimizer.kernels import wgrad_step_hopper as hopper
from fused_grad_optimizer.kernels.configs import CANDIDATES, HOPPER, HopperConfig, hopper_config
from fused_grad_optimizer.kernels.factors import Gradient, Target
from fused_grad_optimizer.ops import _stores
from fused_grad_optimizer.rules import UPDATES
from fused_grad_optimizer.storage import STORAGES
from tests.kernels.compile_only import FakeDriver, _hyper
from tests.kernels.sass import SHARED_MEMORY, measure

# Of weight and states.
STORAGE_PAIRS = (("bf16", "bf16"), ("bf16-nearest", "bf16-nearest"), ("bf16", "fp32"), ("fp32", "fp32"))
SPILLS = 0 if triton.__version__.startswith("3.6.") else 2  # 3.9 reads the number of the warp back, where none is left


def _tensor(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


def variants() -> Iterator[tuple[str, list, dict]]:
    """(label, arguments, constants) of launches: with few tokens and with many every rule, storages, pairs, odd sizes,
    orders of tiles, and without a rule."""
    adamw = UPDATES["adamw"]
    for tokens in (256, 4096):
        name = f"T = {tokens},"
        for update in UPDATES.values():
            several = tokens == 256 or update.name in ("adamw", "lion")  # wide tiles take seconds each
            for weight, state in STORAGE_PAIRS if several else STORAGE_PAIRS[:1]:
                yield _variant(f"{name} {update.name} {weight} {state}", update, weight, state, tokens)
        n = 272 if tokens == 256 else 256  # wide tiles are for even weights
        yield _variant(f"{name} adamw fp16 fp32", adamw, "fp16", "fp32", tokens)
        yield _variant(f"{name} adamw bf16 bf16, 3 pairs, scaled, {n}", adamw, "bf16", "bf16", tokens, n, 3)
        for changes in CANDIDATES[HOPPER][0 if tokens == 256 else -1 :]:
            yield _variant(f"{name} adamw bf16 bf16, {changes}", adamw, "bf16", "bf16", tokens, changes=changes)
        gradient = Gradient([_tensor(tokens, 256, torch.bfloat16)], [_tensor(tokens, 256, torch.bfloat16)])
        options = {"target": None, "out": _tensor(256, 256, torch.float32), "scalars": None, "keys": None, "flag": None}
        yield (
            f"{name} without a rule",
            *hopper.arguments(
                gradient, 256, 256, _config(4, tokens), update=None, stores=(), stochastic=False, **options
            ),
        )  # fmt: skip


def _config(element_bytes: int, tokens: int) -> HopperConfig:
    """That of a weight so large that many tokens take wide tiles."""
    return hopper_config(element_bytes, tokens, (4096, 4096))


def _variant(label, update, weight, state, tokens, n=256, pairs=1, changes=None) -> tuple[str, list, dict]:
    names = [weight] + [state] * len(update.states)
    tensors = [_tensor(n, n, STORAGES[name].dtype) for name in names]
    factors = [_tensor(tokens, n, torch.bfloat16) for _ in range(pairs)]
    stores, stochastic = _stores(names)
    positional, constants = hopper.arguments(
        Gradient(factors, factors, scale=torch.ones(()) if pairs > 1 else None), n, n,
        replace(_config(sum(t.element_size() for t in tensors), tokens), **(changes or {})),
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
        bad = found["in_loops"] > SPILLS or found["shared"] > SHARED_MEMORY[90] or not found["HGMMA"]
        failed += bool(bad)
        print(f"{label}: {found}{' FAILED' if bad else ''}", flush=True)
    few = _variant("too few registers", UPDATES["adamw"], "bf16", "bf16", 4096, changes={"mma_registers": 152})[1:]
    if not measure(hopper.wgrad_step_hopper_kernel.warmup(*few[0], grid=(1,), **few[1]))["in_loops"]:
        print("FAILED: spills are not seen")
        failed += 1
    print(f"triton {triton.__version__}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
