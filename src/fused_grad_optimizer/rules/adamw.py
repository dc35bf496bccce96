"""AdamW (arXiv:1711.05101) and Adam (arXiv:1412.6980), the formulas of `torch.optim.AdamW` and `torch.optim.Adam`.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr weight_decay) - lr / (1 - beta1^t)  m / (sqrt(v / (1 - beta2^t)) + eps)

Adam adds `weight_decay p` to the gradient instead of shrinking the weight. The second bias correction is folded into
the step size and eps, which saves a division for each element.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from fused_grad_optimizer.rules._rule import (
    Hyper,
    Rule,
    check_at_least_zero,
    check_betas,
    check_not_offered,
    divide,
    fma,
    register_rule,
    tl,
    update,
)


def _moments(hyper: Hyper, step: int) -> tuple[float, ...]:
    beta1, beta2 = (float(b) for b in hyper["betas"])
    correction = math.sqrt(1.0 - beta2**step)
    step_size = float(hyper["lr"]) / (1.0 - beta1**step) * correction
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, step_size, correction * float(hyper["eps"])


def _adamw_scalars(hyper: Hyper, step: int, fresh: bool) -> tuple[float, ...]:
    return (1.0 - float(hyper["lr"]) * float(hyper["weight_decay"]), *_moments(hyper, step))


def _adam_scalars(hyper: Hyper, step: int, fresh: bool) -> tuple[float, ...]:
    return (float(hyper["weight_decay"]), *_moments(hyper, step))


# With the bias corrections folded into step_size and eps, torch's operators are to see none: they are of step infinity.
_NO_CORRECTION = torch.tensor(math.inf, device="cpu")


def _run_on_cpu(operator, p, g, states, step_size, weight_decay, beta1, beta2, eps) -> bool:
    exp_avg, exp_avg_sq = states
    operator(
        [p], [g], [exp_avg], [exp_avg_sq], [], [_NO_CORRECTION],
        lr=step_size, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    return True


def _adamw_on_cpu(h, p, g, *states) -> bool:
    decay, beta1, _, beta2, _, step_size, eps = h
    if step_size == 0.0:
        return False
    return _run_on_cpu(torch._fused_adamw_, p, g, states, step_size, (1.0 - decay) / step_size, beta1, beta2, eps)


def _adam_on_cpu(h, p, g, *states) -> bool:
    weight_decay, beta1, _, beta2, _, step_size, eps = h
    return _run_on_cpu(torch._fused_adam_, p, g, states, step_size, weight_decay, beta1, beta2, eps)


@update(states=("exp_avg", "exp_avg_sq"), scalars=_adamw_scalars, cpu=_adamw_on_cpu)
def adamw(h, p, g, exp_avg, exp_avg_sq):
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = h
    exp_avg = fma(g, one_minus_beta1, exp_avg * beta1)
    exp_avg_sq = fma(g * g, one_minus_beta2, exp_avg_sq * beta2)
    p = fma(divide(exp_avg, tl.sqrt(exp_avg_sq) + eps), -step_size, p * decay)
    return p, exp_avg, exp_avg_sq


@update(states=("exp_avg", "exp_avg_sq"), scalars=_adam_scalars, cpu=_adam_on_cpu)
def adam(h, p, g, exp_avg, exp_avg_sq):
    weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = h
    g = fma(p, weight_decay, g)
    exp_avg = fma(g, one_minus_beta1, exp_avg * beta1)
    exp_avg_sq = fma(g * g, one_minus_beta2, exp_avg_sq * beta2)
    p = fma(divide(exp_avg, tl.sqrt(exp_avg_sq) + eps), -step_size, p)
    return p, exp_avg, exp_avg_sq


def _validate(hyper: Hyper, decoupled: bool) -> None:
    check_at_least_zero(hyper, "lr", "eps", "weight_decay")
    check_betas(hyper)
    check_not_offered(hyper, "amsgrad", "differentiable")
    asked = hyper.get("decoupled_weight_decay", decoupled)
    if asked != decoupled and float(hyper["weight_decay"]) != 0.0:
        one, other = ("adamw", "adam") if decoupled else ("adam", "adamw")
        raise ValueError(f"decoupled_weight_decay={asked} is not what rule {one!r} computes; use rule {other!r}")


_COMMON = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}

ADAMW = register_rule(
    Rule(
        name="adamw",
        defaults={**_COMMON, "weight_decay": 1e-2},
        validate=partial(_validate, decoupled=True),
        select=lambda hyper: adamw,
        updates=(adamw,),
        paper="arXiv:1711.05101",
        needs_step=True,
        stated={"decoupled_weight_decay": True},
    )
)
ADAM = register_rule(
    Rule(
        name="adam",
        defaults={**_COMMON, "weight_decay": 0.0},
        validate=partial(_validate, decoupled=False),
        select=lambda hyper: adam,
        updates=(adam,),
        paper="arXiv:1412.6980",
        needs_step=True,
        stated={"decoupled_weight_decay": False},
    )
)
