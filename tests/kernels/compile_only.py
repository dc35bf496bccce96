"""Compiles every Triton kernel for several GPU architectures on a machine without a GPU.

    python -m tests.kernels.compile_only [sm ...]

A fake driver tells Triton which target to compile for; nothing is launched. Prints one line for each kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget

from fused_grad_optimizer.kernels import finite, multi_step, param_step, wgrad_step
from fused_grad_optimizer.kernels.configs import gemm_config
from fused_grad_optimizer.ops import _stores
from fused_grad_optimizer.rules import UPDATES

ARCHITECTURES = (80, 90, 100, 120)


class FakeDriver:
    """Just what `JITFunction.warmup` asks of a driver."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def variants() -> Iterator[tuple[str, object, tuple, dict]]:
    """(label, kernel, arguments, constants) for each rule with bf16 and fp32 storage, and the other kernels."""
    n, k, t = 256, 512, 128
    for update in UPDATES.values():
        for name, dtype, storage in (("bf16", torch.bfloat16, "bf16"), ("fp32", torch.float32, "fp32")):
            weight = torch.empty(n, k, dtype=dtype)
            states = tuple(torch.empty(n, k, dtype=dtype) for _ in update.states)
            stores, stochastic = _stores([storage] * (1 + len(states)))
            scalars, keys = torch.empty(8), torch.empty(2, dtype=torch.int32)
            flag, scale = torch.zeros(1, dtype=torch.int32), torch.ones(())
            constants = {
                "RULE": update.kernel, "STORES": stores, "STOCHASTIC": stochastic,
                "SCALARS": len(update.scalars(_hyper(), 1, True)), "enable_fp_fusion": False,
            }  # fmt: skip
            row_map, row_sums = torch.empty(n, dtype=torch.int32), torch.empty(8, k)
            dy, x = torch.empty(t, n, dtype=dtype), torch.empty(t, k, dtype=dtype)
            config = gemm_config(n, k, dtype)
            tile = {
                "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "BLOCK_T": config.block_t,
                "GROUP": config.group, "num_warps": config.num_warps, "num_stages": config.num_stages,
                "PRECISION": "ieee", "STORE_ONLY": False, "PAIRED": True,
            }  # fmt: skip
            for label, table, rows, dense in (
                ("one pair", None, (None, None), None),
                ("all parts", torch.empty(2, 5, dtype=torch.int64), (row_map, row_sums), weight),
            ):
                yield (
                    f"wgrad_step {update.name} {name} {label}",
                    wgrad_step.wgrad_step_kernel,
                    (weight, states, dy, x, t, n, k, table, 2, t, *rows, dense, scale, scalars, keys, flag, n, k, 0, 0),
                    {**constants, **tile, "ALIGNED": table is not None},
                )
            for label, acc in (("", None), (" chunk", torch.empty(n, k))):
                yield (
                    f"param_step {update.name} {name}{label}",
                    param_step.param_step_kernel,
                    (weight, states, weight, row_map, row_sums, scale, scalars, keys, flag, n * k, k, 0, acc, 0),
                    {**constants, "BLOCK": 1024, "PAIRED": True},
                )
            addresses = torch.empty(3, 4 + len(states), dtype=torch.int64)
            for label, aligned in (("aligned", True), ("odd", False)):
                yield (
                    f"multi_step {update.name} {name} {label}",
                    multi_step.multi_step_kernel,
                    (addresses, weight, states, weight, scalars, keys, flag),
                    {**constants, "COLUMNS": addresses.shape[1], "ALIGNED": aligned, "BLOCK": 1024, "PAIRED": True},
                )
    floats = torch.empty(8, 64)
    longs, unfused = torch.empty(8, dtype=torch.int64), {"enable_fp_fusion": False}
    yield "sum_rows", param_step.sum_rows_kernel, (longs, floats, 64, longs, floats, 64), {"BLOCK": 64, **unfused}
    yield (
        "multi_nonfinite",
        multi_step.multi_nonfinite_kernel,
        (longs, floats, torch.zeros(1, dtype=torch.int32)),
        {"COLUMNS": 6, "ALIGNED": True, "BLOCK": 2048, **unfused},
    )
    mixed = [floats, torch.empty(9, 40, dtype=torch.bfloat16)[:, 1:20], torch.ones(())]
    _, positional, constants = finite.arguments(mixed, flag)
    yield "nonfinite", finite.nonfinite_kernel, positional, constants


def _hyper() -> dict:
    return {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0,
        "nesterov": False,
    }  # fmt: skip


def main(architectures: tuple[int, ...]) -> int:
    failures = 0
    for sm in architectures:
        triton.runtime.driver.set_active(FakeDriver(sm))
        for label, kernel, args, constants in variants():
            try:
                kernel.warmup(*args, grid=(1,), **constants)
                print(f"sm_{sm} {label}: compiled")
            except Exception as error:  # every failure is printed, and counted in the exit status
                failures += 1
                print(f"sm_{sm} {label}: FAILED {type(error).__name__}: {error}")
    print(f"triton {triton.__version__}: {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(tuple(int(a) for a in sys.argv[1:]) or ARCHITECTURES))
