"""PyTorch operators: one for each kernel, declaring what it mutates, and the choice of where it runs.

    forge::wgrad_step   weight and states, from factors (dY, X): the fused step
    forge::param_step   weight and states, from a gradient that is a tensor or embedding rows
    forge::multi_step   many small weights and their states, from gradients that are tensors, after a finite check
    forge::wgrad        rows of the gradient in fp32 (norms, `to_dense`, the unfused reference)
    forge::sum_rows     embedding gradients summed by row
    forge::check_finite NaN/inf in a gradient's operands

Operators made with `Library.define` cost about 2 us a call where `custom_op` costs 19.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import library

from fused_grad_optimizer.kernels import Gradient, Target, dispatch, tile_cpu, triton_reason, tuning
from fused_grad_optimizer.kernels.configs import HOPPER
from fused_grad_optimizer.rules import UPDATES, Update
from fused_grad_optimizer.storage import STORAGES
from fused_grad_optimizer.storage.rounding import step_keys

_LIBRARY = library.Library("forge", "DEF")
_GRADIENT = "Tensor[] dys, Tensor[] xs, Tensor? row_map, Tensor? row_sums, Tensor? scale, Tensor? dense"
_STEP = "Tensor scalars, Tensor keys, Tensor? flag, str update, str[] storages, int parameter"
_LIBRARY.define(f"wgrad_step(Tensor(a!) weight, Tensor(b!)[] states, {_GRADIENT}, {_STEP}) -> ()")
_LIBRARY.define(f"param_step(Tensor(a!) weight, Tensor(b!)[] states, {_GRADIENT}, {_STEP}) -> ()")
_LIBRARY.define(
    "multi_step(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor[] gradients, Tensor scalars, Tensor keys, "
    "Tensor(c!)? flags, str update, str[] storages, int[] parameters) -> ()"
)
_LIBRARY.define(f"wgrad({_GRADIENT}, int rows, int columns, int start, int end, ScalarType dtype) -> Tensor")
_LIBRARY.define("sum_rows(Tensor ids, Tensor dy, int num_rows, ScalarType dtype) -> (Tensor, Tensor)")
_LIBRARY.define("check_finite(Tensor[] tensors, Tensor(a!) flag) -> ()")


@dataclass(frozen=True)
class StepScalars:
    """The scalars of one rule at one step, where the kernels will read them.

    Attributes:
        values: `h` of the rule: fp32 on the GPU for kernels, fp64 on the CPU for the torch form.
        keys: the step's two int32 keys of stochastic rounding.
    """

    values: torch.Tensor
    keys: torch.Tensor


def make_scalars(
    update: Update, hyper, step: int, fresh: bool, seed: int, device: torch.device, dtype: torch.dtype
) -> StepScalars:
    """Scalars for a parameter on `device` with weight `dtype`; the upload does not wait for the device."""
    values = update.scalars(hyper, step, fresh)
    keys = torch.tensor(step_keys(seed, step), dtype=torch.int32, device="cpu")
    if triton_reason(device, dtype) is not None:
        return StepScalars(torch.tensor(values, dtype=torch.float64, device="cpu"), keys)
    host = torch.tensor(values, dtype=torch.float32, device="cpu")
    if device.type == "cpu":
        return StepScalars(host, keys)
    return StepScalars(host.pin_memory().to(device, non_blocking=True), keys.pin_memory().to(device, non_blocking=True))


def _stores(storages: list[str]) -> tuple[tuple, bool]:
    return _stores_of(tuple(storages))


@cache
def _stores_of(storages: tuple[str, ...]) -> tuple[tuple, bool]:
    from fused_grad_optimizer.kernels._device import store_nearest, store_stochastic_bf16

    stochastic = [STORAGES[name].stochastic for name in storages]
    return tuple(store_stochastic_bf16 if s else store_nearest for s in stochastic), any(stochastic)


def _h(scalars: torch.Tensor, keys: torch.Tensor) -> tuple[tuple[float, ...], tuple[int, int]]:
    first, second = keys.tolist()
    return tuple(scalars.tolist()), (first, second)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Autocast off in this block; entering it costs nothing where it is off already."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def on_device(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device: make it that of the tensors, where it is not."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def _launch_step(gradient: Gradient, target: Target, scalars, keys, flag, update: str, launch, **options) -> None:
    """Launch a Triton kernel that steps `target`."""
    stores, stochastic = _stores(target.storages)
    launch(
        gradient, *options.pop("shape", ()), target=target, scalars=scalars, keys=keys, flag=flag,
        update=UPDATES[update], stores=stores, stochastic=stochastic, **options,
    )  # fmt: skip


def _step(
    weight, states, dys, xs, row_map, row_sums, scale, dense, scalars, keys, flag, update, storages, parameter
) -> None:
    """Both step operators: with (dY, X) pairs a GEMM kernel, without them `param_step`."""
    gradient = Gradient(dys, xs, row_map, row_sums, scale, dense)
    target = Target(weight, states, storages, parameter)
    if triton_reason(weight.device, weight.dtype) is not None:
        with torch.no_grad(), without_autocast(weight.device):  # the step is fp32 whatever block it is called in
            tile_cpu.wgrad_step(target, gradient, UPDATES[update], *_h(scalars, keys))
    else:
        with on_device(weight.device):
            launch = partial(_launch_step, gradient, target, scalars, keys, flag, update)
            if dys:
                _launch_gemm(gradient, weight.shape, [weight, *states], launch, stochastic=_stores(storages)[1])
            else:
                launch(_dense_kernel())
    torch.autograd.graph.increment_version([weight, *states])


def _multi_step(weights, states, gradients, scalars, keys, flags, update, storages, parameters) -> None:
    """`param_step` for each of `weights`; `states`: all of the first weight's, then the second's, ...

    With `flags` (int32, by parameter index) gradients are checked first; those not finite set theirs and move nothing.
    """
    device = weights[0].device
    if triton_reason(device, weights[0].dtype) is None:
        from fused_grad_optimizer.kernels import multi_step

        stores, stochastic = _stores(storages)
        with on_device(device):
            multi_step.launch(
                weights, states, gradients, parameters, scalars=scalars, keys=keys, flags=flags,
                update=UPDATES[update], stores=stores, stochastic=stochastic,
            )  # fmt: skip
        torch.autograd.graph.increment_version([*weights, *states])
        return
    each = len(states) // len(weights)
    for i, (weight, gradient, parameter) in enumerate(zip(weights, gradients, parameters)):
        if flags is not None:
            _check_finite([gradient], flags[parameter])
            if int(flags[parameter]) != 0:
                continue
        matrices = [_as_matrix(t) for t in (weight, gradient, *states[i * each : (i + 1) * each])]
        _step(
            matrices[0], matrices[2:], [], [], None, None, None, matrices[1], scalars, keys, None, update, storages,
            parameter,
        )  # fmt: skip


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, not empty, as its rows."""
    tensor = tensor.detach()
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def _gemm_kernel(
    gradient: Gradient, n: int, k: int, targets: list[torch.Tensor], **options
) -> tuple[Callable, dict[str, Any]]:
    """The launch function of the path that is fastest, and its first arguments."""
    choice = dispatch.plan(gradient, n, k, targets, **options).choice
    return _launch_of(choice, gradient, n, k, targets)


def _launch_of(choice: tuning.Choice, gradient: Gradient, n: int, k: int, targets) -> tuple[Callable, dict[str, Any]]:
    tokens = sum(dy.shape[0] for dy in gradient.dys)
    launch, options = dispatch.launcher(choice, n, k, targets, tokens, gradient.dys[0].dtype)
    return launch, {"shape": (n, k), **options}


def _launch_gemm(gradient: Gradient, shape: torch.Size, targets, launch: Callable, **options) -> None:
    """`launch(function, **options)` for the path that is fastest. Where Triton cannot compile the Hopper kernel, which
    is before anything is written, for the portable one from then on."""
    n, k = shape
    choice = dispatch.plan(gradient, n, k, targets, **options).choice
    function, first = _launch_of(choice, gradient, n, k, targets)
    try:
        launch(function, **first)
    except Exception as error:
        if choice.path != HOPPER or dispatch.forced() is not None or not _is_from_triton(error):
            raise
        dispatch.give_up_hopper(error)
        function, first = _gemm_kernel(gradient, n, k, targets, **options)
        launch(function, **first)


def _is_from_triton(error: Exception) -> bool:
    """Whether the compiler refused a kernel, or the device the resources that it would take."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return "TritonError" in kinds or (isinstance(error, RuntimeError) and "PassManager" in str(error))


def _dense_kernel() -> Callable:
    from fused_grad_optimizer.kernels import param_step

    return param_step.launch


def _wgrad(dys, xs, row_map, row_sums, scale, dense, rows, columns, start, end, dtype) -> torch.Tensor:
    gradient = Gradient(dys, xs, row_map, row_sums, scale, dense)
    tensors = [t for t in (*dys, row_sums, dense) if t is not None]
    device = tensors[0].device if tensors else torch.device("cpu")
    out = torch.empty(end - start, columns, dtype=dtype, device=device)
    if dys and dtype == torch.float32 and out.numel() and triton_reason(device, dys[0].dtype) is None:
        with on_device(device):
            if (start, end) == (0, rows):

                def store(launch, shape, **options) -> None:
                    launch(gradient, *shape, out=out, **options)

                _launch_gemm(gradient, out.shape, [out], store, storing=True)
            else:
                from fused_grad_optimizer.kernels import wgrad_step

                wgrad_step.launch(gradient, end - start, columns, row_start=start, out=out)
    else:
        with torch.no_grad(), without_autocast(device):
            tile_cpu.wgrad(gradient, out, start, rows)
    return out


def _sum_rows(ids, dy, num_rows, dtype):
    if dtype == torch.float32 and triton_reason(dy.device, dy.dtype) is None:
        from fused_grad_optimizer.kernels import param_step as kernel

        with on_device(dy.device):
            return kernel.sum_rows(ids, dy, num_rows)
    return tile_cpu.sum_rows(ids, dy, num_rows, dtype)


def _check_finite(tensors, flag) -> None:
    floating = [t for t in tensors if t.is_floating_point()]
    if all(triton_reason(t.device, t.dtype) is None for t in floating) and flag.device.type != "cpu":
        from fused_grad_optimizer.kernels import finite

        with on_device(flag.device):
            finite.check(floating, flag)
    elif not tile_cpu.all_finite(floating):
        flag.fill_(1)


for _name, _function in {
    "wgrad_step": _step,
    "param_step": _step,
    "multi_step": _multi_step,
    "wgrad": _wgrad,
    "sum_rows": _sum_rows,
    "check_finite": _check_finite,
}.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@library.register_fake("forge::wgrad_step", lib=_LIBRARY)
@library.register_fake("forge::param_step", lib=_LIBRARY)
@library.register_fake("forge::multi_step", lib=_LIBRARY)
def _step_fake(*args) -> None:
    return None


@library.register_fake("forge::check_finite", lib=_LIBRARY)
def _check_finite_fake(tensors, flag) -> None:
    return None


@library.register_fake("forge::wgrad", lib=_LIBRARY)
def _wgrad_fake(dys, xs, row_map, row_sums, scale, dense, rows, columns, start, end, dtype):
    return next(t for t in (*dys, row_sums, dense) if t is not None).new_empty(end - start, columns, dtype=dtype)


@library.register_fake("forge::sum_rows", lib=_LIBRARY)
def _sum_rows_fake(ids, dy, num_rows, dtype):
    rows = min(ids.numel(), num_rows)
    return ids.new_empty(num_rows, dtype=torch.int32), dy.new_empty(rows, dy.shape[1], dtype=dtype)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
_modes = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled
_is_compiling = torch.compiler.is_compiling
_running_transform = torch._C._functorch.peek_interpreter_stack
_key_included = torch._C._dispatch_tls_is_dispatch_key_included


def observed() -> bool:
    """Whether operators must be called as such: a mode, a transform, torch.compile or the profiler is to see them."""
    return (
        _modes() != 0
        or _profiling()
        or _is_compiling()
        or _running_transform() is not None
        or _key_included(_FUNCTIONALIZE)
    )


def _callable_directly(*tensors: torch.Tensor | None) -> bool:
    """Whether an operator on these may be called as the function it is, which saves about 10 us."""
    return all(t is None or type(t) in _PLAIN for t in tensors) and not observed()


def step(target: Target, gradient: Gradient, update: Update, scalars: StepScalars, flag: torch.Tensor | None) -> None:
    """Update `target` from `gradient` by the kernel that fits: `wgrad_step` with (dY, X) pairs, else `param_step`."""
    tensors = (target.weight, *target.states, *gradient.dys, *gradient.xs, gradient.row_sums, gradient.dense)
    operator = torch.ops.forge.wgrad_step if gradient.dys else torch.ops.forge.param_step
    function: Callable = _step if _callable_directly(*tensors) else operator
    function(
        target.weight, target.states, gradient.dys, gradient.xs, gradient.row_map, gradient.row_sums,
        gradient.scale, gradient.dense, scalars.values, scalars.keys, flag, update.name, target.storages,
        target.parameter,
    )  # fmt: skip


def step_by(
    choice: tuning.Choice,
    target: Target,
    gradient: Gradient,
    update: Update,
    scalars: StepScalars,
    flag: torch.Tensor | None,
) -> None:
    """`step` with (dY, X) pairs by a given path and configuration, whichever is fastest: for measurements."""
    targets = [target.weight, *target.states]
    launch, options = _launch_of(choice, gradient, target.weight.shape[0], target.weight.shape[1], targets)
    with on_device(target.weight.device):
        _launch_step(gradient, target, scalars.values, scalars.keys, flag, update.name, launch, **options)


def check_finite(tensors: list[torch.Tensor], flag: torch.Tensor) -> None:
    """Set `flag` (int32, one element, zero before) to 1 if a floating tensor holds NaN or inf."""
    (_check_finite if _callable_directly(*tensors, flag) else torch.ops.forge.check_finite)(tensors, flag)


def bind_step(
    target: Target, gradient: Gradient, update: Update, scalars: StepScalars, flag: torch.Tensor
) -> tuple[Any, Any] | None:
    """`check_finite` and `step` of a gradient of (dY, X) pairs only, as launches that are made again cheaply.

    Returns:
        A `kernels.bound.BoundStep` of the moving tensors `dY, X, ...` of each pair, the scale if there is one, flag,
        scalars and keys, and of the fixed weight and states; and the `kernels.multi_finite.Operands` of all moving
        tensors but the last three, for `check_together`. None where Triton has to launch, or did not yet.
    """
    from fused_grad_optimizer.kernels import bound, finite, multi_finite

    operands = [t for pair in zip(gradient.dys, gradient.xs) for t in pair]
    operands += [] if gradient.scale is None else [gradient.scale]
    moving = [*operands, flag, scalars.values, scalars.keys]
    n, k = target.weight.shape
    stochastic = _stores(target.storages)[1]
    launch, options = _gemm_kernel(gradient, n, k, [target.weight, *target.states], stochastic=stochastic)
    if "through" not in signature(launch).parameters:
        return None

    def launch_step(through) -> None:
        _launch_step(
            gradient, target, scalars.values, scalars.keys, flag, update.name, launch, through=through, **options
        )

    launches = [lambda through: finite.check(operands, flag, through), launch_step]
    try:
        with on_device(target.weight.device):
            made = bound.BoundStep(launches, moving, [target.weight, *target.states])
        return made, multi_finite.Operands(operands, target.parameter)
    except bound.NotDirect:
        return None


def check_together(operands: list[Any], addresses: list[int], flags: torch.Tensor) -> None:
    """`check_finite` of many gradients with bound steps in one launch, see `kernels.multi_finite.check`."""
    from fused_grad_optimizer.kernels import multi_finite

    with on_device(flags.device):
        multi_finite.check(operands, addresses, flags)


def wgrad(gradient: Gradient, shape: torch.Size, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows `start:end` of a gradient of `shape` [N, K], in `dtype` (fp32 or fp64)."""
    return torch.ops.forge.wgrad(
        gradient.dys, gradient.xs, gradient.row_map, gradient.row_sums, gradient.scale, gradient.dense,
        shape[0], shape[1], start, end, dtype,
    )  # fmt: skip
