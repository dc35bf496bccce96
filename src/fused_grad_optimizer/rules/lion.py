"""Lion (arXiv:2302.06675, Algorithm 2).

c = beta1 m + (1 - beta1) g        p = p (1 - lr weight_decay) - lr sign(c)        m = beta2 m + (1 - beta2) g
"""

from __future__ import annotations

from fused_grad_optimizer.rules._rule import (
    Hyper,
    Rule,
    check_at_least_zero,
    check_betas,
    fma,
    register_rule,
    tl,
    update,
)


def _scalars(hyper: Hyper, step: int, fresh: bool) -> tuple[float, ...]:
    beta1, beta2 = (float(b) for b in hyper["betas"])
    lr = float(hyper["lr"])
    return 1.0 - lr * float(hyper["weight_decay"]), lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2


@update(states=("exp_avg",), scalars=_scalars)
def lion(h, p, g, exp_avg):
    decay, lr, beta1, one_minus_beta1, beta2, one_minus_beta2 = h
    c = fma(g, one_minus_beta1, exp_avg * beta1)
    # sign(c), with sign(0) = 0
    c = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))
    p = fma(c, -lr, p * decay)
    exp_avg = fma(g, one_minus_beta2, exp_avg * beta2)
    return p, exp_avg


def _validate(hyper: Hyper) -> None:
    check_at_least_zero(hyper, "lr", "weight_decay")
    check_betas(hyper)


LION = register_rule(
    Rule(
        name="lion",
        defaults={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        validate=_validate,
        select=lambda hyper: lion,
        updates=(lion,),
        paper="arXiv:2302.06675",
    )
)
