"""Compiles every Triton kernel for several GPU architectures on a machine without a GPU.

    python -m tests.kernels.compile_only [sm ...]

A fake driver tells Triton which target to compile for; nothing is launched. Prints one line for each kernel. A kernel
that spills registers or does not fit into shared memory counts as failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
import triton
from triton.backends.compiler import GPUTarget

from fused_grad_optimizer.kernels import finite, multi_finite, multi_step, param_step, wgrad_step
from fused_grad_optimizer.kernels.configs import gemm_config
from fused_grad_optimizer.kernels.factors import Gradient
from fused_grad_optimizer.ops import _stores
from fused_grad_optimizer.rules import UPDATES, Update
from fused_grad_optimizer.storage import STORAGES
from tests.kernels.sass import measure, too_much

ARCHITECTURES = (80, 90, 100, 120)
LARGE, SMALL, ODD = (4096, 4096), (256, 512), (4099, 4097)  # rows and columns of the weight


class FakeDriver:
    """Just what `JITFunction.warmup` asks of a driver."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return self.sm  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


def variants(sm: int) -> Iterator[tuple[str, object, tuple, dict]]:
    """(label, kernel, arguments, constants): rules, storages, parts of a gradient, sizes; and the other kernels."""
    adamw = UPDATES["adamw"]
    for update in UPDATES.values():
        for storage, parts in (("bf16", False), ("bf16", True), ("fp32", update is not adamw)):
            yield _wgrad_step(sm, update, storage, storage, STORAGES[storage].dtype, parts, LARGE)
        yield from _flat_steps(update, "bf16")
    for weight, state, inputs in (("bf16", "fp32", torch.bfloat16), ("fp16", "fp32", torch.float16)):
        yield _wgrad_step(sm, adamw, weight, state, inputs, False, LARGE)
    for storage in ("bf16", "fp32"):
        for parts, size in ((True, SMALL), (False, ODD), (True, ODD)):
            yield _wgrad_step(sm, adamw, storage, storage, STORAGES[storage].dtype, parts, size)
        yield _wgrad(sm, STORAGES[storage].dtype)
    yield from _flat_steps(adamw, "fp32")
    floats, flag = torch.empty(8, 64), torch.zeros(1, dtype=torch.int32)
    longs, unfused = torch.empty(8, dtype=torch.int64), {"enable_fp_fusion": False}
    yield "sum_rows", param_step.sum_rows_kernel, (longs, floats, 64, longs, floats, 64), {"BLOCK": 64, **unfused}
    yield (
        "multi_nonfinite",
        multi_step.multi_nonfinite_kernel,
        (longs, floats, torch.zeros(1, dtype=torch.int32)),
        {"STRIDE": 4, "COLUMNS": 6, "ALIGNED": True, "BLOCK": 2048, **unfused},
    )
    yield "multi_finite", multi_finite.multi_finite_kernel, (longs, flag, 450), multi_finite.constants(flag)
    mixed = [floats, torch.empty(9, 40, dtype=torch.bfloat16)[:, 1:20], torch.ones(())]
    _, positional, constants = finite.arguments(mixed, flag)
    yield "nonfinite", finite.nonfinite_kernel, positional, constants


def _rule(update: Update, weight: str, state: str) -> tuple[tuple, dict]:
    """(weight, states, scalars, keys, flag) and the constants; what a tensor's shape is does not matter here."""
    names = [weight] + [state] * len(update.states)
    tensors = [torch.empty(64, dtype=STORAGES[name].dtype) for name in names]
    stores, stochastic = _stores(names)
    count = len(update.scalars(_hyper(), 1, True))
    constants = {"RULE": update.kernel, "STORES": stores, "STOCHASTIC": stochastic, "SCALARS": count}
    keys, flag = torch.empty(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return (tensors[0], tuple(tensors[1:]), torch.empty(count), keys, flag), constants


def _gradient(dtype: torch.dtype, parts: bool) -> Gradient:
    """One pair; or two pairs, rows of an embedding, a scale and a dense gradient."""
    pair = torch.empty(2, 64, dtype=dtype)
    if not parts:
        return Gradient([pair], [pair])
    return Gradient(
        [pair] * 2, [pair] * 2, torch.empty(64, dtype=torch.int32), torch.empty(8, 64), torch.ones(()), pair
    )  # fmt: skip


def _wgrad_kernel(sm: int, gradient: Gradient, size: tuple[int, int], rule: tuple, constants: dict) -> tuple:
    weight, states, scalars, keys, flag = rule
    n, k = size
    pair, parts = gradient.dys[0], len(gradient.dys) > 1
    config = gemm_config(n, k, pair.dtype, compute_capability=divmod(sm, 10))
    table = torch.empty(2, 5, dtype=torch.int64) if parts else None
    arguments = (
        weight, states, pair, pair, 512, n, k, table, len(gradient.dys), 1024, gradient.row_map, gradient.row_sums,
        gradient.dense, gradient.scale, scalars, keys, flag, n, k, 0, 0,
    )  # fmt: skip
    aligned = parts and n % 8 == 0 and k % 8 == 0
    options = {"PRECISION": "ieee", "ALIGNED": aligned, "GROUPED": k % 8 == 0}
    tile = {**options, **wgrad_step.launch_options(config, gradient, [weight, *states])}
    return wgrad_step.wgrad_step_kernel, arguments, {**constants, **tile}


def _wgrad_step(sm, update, weight, state, inputs, parts, size) -> tuple[str, object, tuple, dict]:
    label = f"wgrad_step {update.name} {weight} {state} {size[0]}x{size[1]} {'all parts' if parts else 'one pair'}"
    rule, constants = _rule(update, weight, state)
    return label, *_wgrad_kernel(sm, _gradient(inputs, parts), size, rule, {**constants, "STORE_ONLY": False})


def _wgrad(sm: int, dtype: torch.dtype) -> tuple[str, object, tuple, dict]:
    constants = {"RULE": None, "STORES": (), "STOCHASTIC": False, "SCALARS": 0, "STORE_ONLY": True}
    rule = (torch.empty(64), (), None, None, None)
    return f"wgrad {dtype}", *_wgrad_kernel(sm, _gradient(dtype, False), LARGE, rule, constants)


def _flat_steps(update: Update, storage: str) -> Iterator[tuple[str, object, tuple, dict]]:
    (weight, states, scalars, keys, flag), constants = _rule(update, storage, storage)
    parts = _gradient(weight.dtype, True)
    arguments = (weight, states, parts.dense, parts.row_map, parts.row_sums, parts.scale, scalars, keys, flag)
    constants |= {"BLOCK": 1024, "GROUPED": True, "enable_fp_fusion": False}
    for label, acc in (("", None), (" chunk", torch.empty(64))):
        kernel = param_step.param_step_kernel
        options = {**constants, **param_step.launch_options()}
        yield f"param_step {update.name} {storage}{label}", kernel, (*arguments, 4096, 64, 0, acc, 0), options
    addresses = torch.empty(3, 4 + len(states), dtype=torch.int64)
    for label, aligned in (("aligned", True), ("odd", False)):
        more = {"COLUMNS": addresses.shape[1], "ALIGNED": aligned, "STRIDE": 4}
        kernel, arguments = multi_step.multi_step_kernel, (addresses, weight, states, weight, scalars, keys, flag)
        yield f"multi_step {update.name} {storage} {label}", kernel, arguments, {**constants, **more}


def _hyper() -> dict:
    return {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0,
        "nesterov": False,
    }  # fmt: skip


def check(sm: int) -> list[str]:
    """One line for each kernel on this architecture; those that failed have FAILED in it."""
    triton.runtime.driver.set_active(FakeDriver(sm))
    lines = []
    for label, kernel, args, constants in variants(sm):
        try:
            found = measure(kernel.warmup(*args, grid=(1,), **constants))
            outcome = f"FAILED {found}" if too_much(found, sm) else f"compiled, shared {found['shared']}"
        except Exception as error:  # every failure is printed, and counted in the exit status
            outcome = f"FAILED {type(error).__name__}: {error}"
        lines.append(f"sm_{sm} {label}: {outcome}")
    return lines


def main(architectures: tuple[int, ...]) -> int:
    failures = 0
    with ProcessPoolExecutor(min(len(architectures), os.cpu_count() or 1)) as pool:
        for lines in pool.map(check, architectures):
            print("\n".join(lines), flush=True)
            failures += sum("FAILED" in line for line in lines)
    print(f"triton {triton.__version__}: {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(tuple(int(a) for a in sys.argv[1:]) or ARCHITECTURES))
