"""`forge bench kernel`: one weight update, fused, against the same update with a weight gradient in memory."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.cli.benchmarks import timing
from fused_grad_optimizer.cli.training.config import RULE_SETTINGS
from fused_grad_optimizer.kernels import Gradient, Target
from fused_grad_optimizer.rules import Update, get_rule
from fused_grad_optimizer.storage import STORAGES, state_storage, weight_storage

SHAPES = {
    "cuda": ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)),
    "cpu": ((1024, 512), (512, 1024)),
}
TOKENS = {"cuda": (128, 512, 2048), "cpu": (128, 512)}
RULES = ("adamw", "lion", "sgd")
CHECK_LR, TIMED_LR = 1e-2, 1e-5  # a move that the check can see; one that leaves the data as random as it was
ROW_BLOCK = 1 << 24  # elements of the reference computed at once
STEP = 3


@dataclass(frozen=True)
class KernelSettings:
    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    rules: tuple[str, ...]
    states: tuple[str | None, ...]
    weight: str | None
    dtype: torch.dtype
    device: torch.device
    rounds: int
    seed: int


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    tokens: int
    rule: str
    state: str | None


class WrongResult(Exception):
    """A path whose result is not within the tolerance: it is not timed."""


def hyper_of(case: Case) -> dict[str, Any]:
    return {**get_rule(case.rule).defaults, **RULE_SETTINGS.get(case.rule, {}), "maximize": False}


def storages_of(case: Case, settings: KernelSettings) -> list[str]:
    """Storage names of the weight and of each state."""
    states = get_rule(case.rule).select(hyper_of(case)).states
    kept = state_storage(settings.dtype, case.state).name
    return [weight_storage(settings.dtype, settings.weight).name, *[kept] * len(states)]


class Problem:
    """Random data of one case: factors, and as many weights with states as rotation needs."""

    def __init__(self, case: Case, settings: KernelSettings) -> None:
        self.case, self.device, self.dtype = case, settings.device, settings.dtype
        self.hyper = hyper_of(case)
        self.update: Update = get_rule(case.rule).select(self.hyper)
        self.kept = state_storage(settings.dtype, case.state)
        self.storages = storages_of(case, settings)
        self._generator = torch.Generator(settings.device).manual_seed(settings.seed)
        shrink = case.tokens**-0.5  # gradient elements of unit variance
        self.gradient = Gradient(
            [self._random(case.tokens, case.n, shrink, self.dtype)],
            [self._random(case.tokens, case.k, 1.0, self.dtype)],
        )
        self.state_bytes = case.n * case.k * sum(STORAGES[name].dtype.itemsize for name in self.storages)
        copies = timing.copies_needed(self.state_bytes, self.device)
        self.targets = [self._target(i) for i in range(copies)]
        self.flag = torch.zeros(1, dtype=torch.int32, device=self.device)

    def _random(self, rows: int, columns: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=self._generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(dtype)

    def _target(self, index: int) -> Target:
        n, k = self.case.n, self.case.k
        weight = self._random(n, k, 0.02, self.dtype)
        states = [self._random(n, k, 0.1, self.kept.dtype) for _ in self.update.states]
        for name, state in zip(self.update.states, states):
            if name.endswith("_sq"):
                state.abs_()
        return Target(weight, states, self.storages, index)

    @property
    def bytes_moved(self) -> int:
        """Weight and states read and written once, dY and X read once."""
        return 2 * self.state_bytes + self.case.tokens * (self.case.n + self.case.k) * self.dtype.itemsize

    def scalars(self, lr: float) -> ops.StepScalars:
        hyper = {**self.hyper, "lr": lr}
        return ops.make_scalars(self.update, hyper, STEP, False, 0, self.device, self.dtype)

    def dense_gradient(self) -> torch.Tensor:
        return torch.mm(self.gradient.dys[0].t(), self.gradient.xs[0])

    def step(self, target: Target, scalars: ops.StepScalars, gradient: Gradient | None = None) -> None:
        flag = self.flag if self.device.type != "cpu" else None
        ops.step(target, gradient or self.gradient, self.update, scalars, flag)

    def param_step(self, target: Target, scalars: ops.StepScalars) -> None:
        self.step(target, scalars, Gradient([], [], dense=self.dense_gradient()))


# -- correctness -------------------------------------------------------------------------------------------------------


def check(problem: Problem) -> dict[str, float]:
    """Compare one step on a copy with the formula in fp64; returns the largest error over its bound, by path.

    The bound is twice the error of unfused torch in the same dtypes (dW in the weight's dtype, the rule in fp32, stored
    to nearest), by norm, for the weight and each state. A floor of eps * sqrt(T) stands for fp32 sums in another order.

    Raises:
        WrongResult: an error is above its bound, or not a number.
    """
    right = reference_and_bounds(problem)
    steps = {"fused": problem.step, "dw_param_step": problem.param_step}
    return {path: error_over_bound(problem, path, step, *right) for path, step in steps.items()}


def error_over_bound(
    problem: Problem,
    path: str,
    step: Callable[[Target, ops.StepScalars], object],
    reference: list[torch.Tensor],
    bounds: list[float],
) -> float:
    """The largest error over its bound after `step` on a copy of the first weight; see `check`.

    Raises:
        WrongResult: an error is above its bound, or not a number.
    """
    first = problem.targets[0]
    copy = Target(first.weight.clone(), [s.clone() for s in first.states], first.storages, first.parameter)
    step(copy, problem.scalars(CHECK_LR))
    worst = 0.0
    names, values = ("weight", *problem.update.states), (copy.weight, *copy.states)
    for name, value, exact, bound in zip(names, values, reference, bounds):
        error = _relative_error(value, exact)
        if not error <= bound:
            raise WrongResult(f"{path}: the error of {name} is {error:.2e}, above {bound:.2e}")
        worst = max(worst, error / bound)
    return worst


def reference_and_bounds(problem: Problem) -> tuple[list[torch.Tensor], list[float]]:
    target, update = problem.targets[0], problem.update
    before = [target.weight, *target.states]
    h = update.scalars({**problem.hyper, "lr": CHECK_LR}, STEP, False)
    dy, x = problem.gradient.dys[0], problem.gradient.xs[0]
    dense = problem.dense_gradient()
    exact = [torch.empty(t.shape, dtype=torch.float64, device=t.device) for t in before]
    unfused = [torch.empty_like(t) for t in before]
    rows = max(1, ROW_BLOCK // problem.case.k)
    x64 = x.double()
    for start in range(0, problem.case.n, rows):
        part = slice(start, start + rows)
        weight, *states = (t[part] for t in before)
        g64 = dy[:, part].double().t() @ x64
        in64 = update.twin(h, weight.double(), g64, *(s.double() for s in states))
        in32 = update.twin(h, weight.float(), dense[part].float(), *(s.float() for s in states))
        for i, (value64, value32) in enumerate(zip(in64, in32)):
            exact[i][part] = value64
            unfused[i][part] = value32.to(before[i].dtype)
    floor = torch.finfo(torch.float32).eps * math.sqrt(problem.case.tokens)
    return exact, [max(2 * _relative_error(value, right), floor) for value, right in zip(unfused, exact)]


def _relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


# -- timing ------------------------------------------------------------------------------------------------------------


def paths(problem: Problem) -> dict[str, list[timing.Call]]:
    """What is timed: for each path, the same call on each of the problem's weights."""
    scalars = problem.scalars(TIMED_LR)
    operands = [*problem.gradient.dys, *problem.gradient.xs]

    def checked(target: Target) -> None:
        torch.ops.forge.check_finite(operands, problem.flag)
        problem.step(target, scalars)

    def nearest(target: Target) -> None:
        problem.step(replace(target, storages=to_nearest), scalars)

    to_nearest = [f"{name}-nearest" if STORAGES[name].stochastic else name for name in problem.storages]
    each: dict[str, Callable[[Target], object]] = {
        "fused": lambda target: problem.step(target, scalars),
        "fused_checked": checked,
        "dw_param_step": lambda target: problem.param_step(target, scalars),
        "dw": lambda target: problem.dense_gradient(),
    }
    if to_nearest != problem.storages:
        each["fused_nearest"] = nearest
    calls: dict[str, list[timing.Call]] = {
        name: [functools.partial(call, target) for target in problem.targets] for name, call in each.items()
    }
    if problem.kept.dtype == problem.dtype or not problem.update.states:
        with_torch = [_torch_step(problem, target) for target in problem.targets]
        if None not in with_torch:
            calls["dw_torch"] = [call for call in with_torch if call is not None]
    return calls


def _torch_step(problem: Problem, target: Target) -> timing.Call | None:
    """dW and the fused optimizer of torch.optim; None for a rule it lacks."""
    parameter = torch.nn.Parameter(target.weight)
    hyper = {**problem.hyper, "lr": TIMED_LR}
    rule = problem.case.rule
    optimizer: torch.optim.Optimizer
    if rule in ("adamw", "adam"):
        kind = torch.optim.AdamW if rule == "adamw" else torch.optim.Adam
        optimizer = kind([parameter], **hyper, fused=True, capturable=problem.device.type == "cuda")
    elif rule == "sgd":
        optimizer = torch.optim.SGD([parameter], **hyper, fused=True)
    else:
        return None

    def call() -> None:
        parameter.grad = problem.dense_gradient()
        optimizer.step()

    return call


def measure_case(case: Case, settings: KernelSettings, ceiling: float) -> dict[str, Any]:
    """One entry of the result: times in us by path, or a status that says why there are none."""
    kept = state_storage(settings.dtype, case.state).name
    entry: dict[str, Any] = {"n": case.n, "k": case.k, "tokens": case.tokens, "rule": case.rule, "state": kept}
    try:
        problem = Problem(case, settings)
        entry["error_over_bound"] = check(problem)
        timed = {name: timing.prepare(calls, settings.device) for name, calls in paths(problem).items()}
        timing.take(list(timed.values()), settings.rounds)
    except WrongResult as error:
        return {**entry, "status": f"wrong, not timed: {error}"}
    except torch.OutOfMemoryError:
        return {**entry, "status": "out of memory"}
    us = {name: one.median_us for name, one in timed.items()}
    return {
        **entry,
        "status": "ok",
        "us": us,
        "spread": {name: one.spread for name, one in timed.items()},
        "how": {name: one.how for name, one in timed.items()},
        "rotated": len(problem.targets),
        "bytes": problem.bytes_moved,
        "flops": 2 * case.n * case.k * case.tokens,
        "gb_s": problem.bytes_moved / us["fused"] / 1e3,
        "share": problem.bytes_moved / us["fused"] / 1e3 / ceiling,
    }


def cases(settings: KernelSettings) -> Iterator[Case]:
    for state in settings.states:
        for rule in settings.rules:
            for n, k in settings.shapes:
                for tokens in settings.tokens:
                    yield Case(n, k, tokens, rule, state)


@torch.no_grad()
def run(settings: KernelSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases; `say` is told each one as it begins."""
    ceiling = timing.copy_ceiling(settings.device, settings.rounds)
    say(f"copy: {ceiling:.0f} GB/s")
    entries = []
    for case in cases(settings):
        say(f"{case.n} x {case.k}, T={case.tokens}, {case.rule}, states {case.state or 'as the weight'}")
        entries.append(measure_case(case, settings, ceiling))
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "kind": "kernel",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "weight": settings.weight,
        "rounds": settings.rounds,
        "caches": timing.CACHES,
        "copy_gb_s": ceiling,
        "entries": entries,
    }
