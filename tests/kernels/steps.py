"""Shared by the kernel tests: random problems, one fused step, the same step unfused, and fp64 references."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import Gradient, Target
from fused_grad_optimizer.rules import UPDATES, twin

HYPER = {
    "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1,
    "nesterov": False,
}  # fmt: skip


@dataclass
class Problem:
    """A weight [n, k] with states in `storage`, and a gradient of the given parts."""

    weight: torch.Tensor
    states: list[torch.Tensor]
    storages: list[str]
    gradient: Gradient
    update: str

    def target(self) -> Target:
        return Target(self.weight.clone(), [s.clone() for s in self.states], self.storages, parameter=3)


def make_problem(
    n, k, tokens, *, update="adamw", storage="fp32", dtype=torch.float32, device="cpu", rows=0, dense=False, scale=None,
    seed=0,
) -> Problem:  # fmt: skip
    """`tokens`: a list, one (dY, X) pair for each entry; `rows`: number of embedding ids."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    kept = torch.float32 if storage == "fp32" else torch.bfloat16
    states = [random(n, k).mul(0.1).abs().to(device, kept) for _ in UPDATES[update].states]
    row_map = row_sums = None
    if rows:
        ids = torch.randint(0, n, (rows,), generator=generator)
        row_map, row_sums = torch.ops.forge.sum_rows(
            ids.to(device), random(rows, k).to(device, dtype), n, torch.float32
        )
    gradient = Gradient(
        [random(t, n).to(device, dtype) for t in tokens],
        [random(t, k).to(device, dtype) for t in tokens],
        row_map,
        row_sums,
        None if scale is None else torch.tensor(scale, device=device),
        random(n, k).to(device, dtype) if dense else None,
    )
    return Problem(random(n, k).to(device, kept), states, [storage] * (1 + len(states)), gradient, update)


def run_step(problem: Problem, gradient: Gradient | None = None, step: int = 3, **hyper) -> Target:
    """One step on a copy, from the problem's gradient or from another, by HYPER with these changes."""
    target = problem.target()
    update = UPDATES[problem.update]
    scalars = ops.make_scalars(update, {**HYPER, **hyper}, step, False, 7, target.weight.device, target.weight.dtype)
    ops.step(target, gradient or problem.gradient, update, scalars, None)
    return target


def run_unfused(problem: Problem) -> Target:
    """The same mainloop storing the gradient in fp32, then `param_step`."""
    stored = ops.wgrad(problem.gradient, problem.weight.shape, 0, problem.weight.shape[0], torch.float32)
    return run_step(problem, Gradient([], [], dense=stored))


def gradient_fp64(gradient: Gradient, n: int, k: int) -> torch.Tensor:
    """The formula in fp64 with torch's own matmul, on the CPU."""
    total = torch.zeros(n, k, dtype=torch.float64)
    for dy, x in zip(gradient.dys, gradient.xs):
        total += dy.cpu().double().t() @ x.cpu().double()
    if gradient.row_map is not None:
        for v, row in enumerate(gradient.row_map.tolist()):
            if row >= 0:
                total[v] += gradient.row_sums[row].cpu().double()
    if gradient.scale is not None:
        total *= gradient.scale.cpu().double()
    return total + gradient.dense.cpu().double() if gradient.dense is not None else total


def step_fp64(problem: Problem, step: int = 3) -> list[torch.Tensor]:
    """Weight and states after the step, in fp64."""
    n, k = problem.weight.shape
    update = UPDATES[problem.update]
    values = [t.cpu().double() for t in (problem.weight, *problem.states)]
    h = update.scalars(HYPER, step, False)
    return list(twin(update.function)(h, values[0], gradient_fp64(problem.gradient, n, k), *values[1:]))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.cpu().double() - reference).norm() / reference.norm().clamp_min(1e-30))


def same_bits(a: Target, b: Target) -> bool:
    return all(torch.equal(p, q) for p, q in zip((a.weight, *a.states), (b.weight, *b.states)))
