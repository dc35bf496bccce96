"""SGD with momentum, dampening and Nesterov's variant, the formulas of `torch.optim.SGD` (Sutskever et al., ICML 2013).

    g = g + weight_decay p
    b = momentum b + (1 - dampening) g          (b = g at the first step)
    p = p - lr (g + momentum b   with nesterov, else b)

Without momentum there is no state at all.
"""

from __future__ import annotations

from fused_grad_optimizer.rules._rule import (
    Hyper,
    Rule,
    Update,
    check_at_least_zero,
    check_finite_numbers,
    check_not_offered,
    fma,
    register_rule,
    update,
)


def _plain_scalars(hyper: Hyper, step: int, fresh: bool) -> tuple[float, ...]:
    return float(hyper["weight_decay"]), float(hyper["lr"])


def _momentum_scalars(hyper: Hyper, step: int, fresh: bool) -> tuple[float, ...]:
    momentum = float(hyper["momentum"])
    from_gradient, from_buffer = (1.0, momentum) if hyper["nesterov"] else (0.0, 1.0)
    kept = 1.0 if fresh else 1.0 - float(hyper["dampening"])
    return float(hyper["weight_decay"]), float(hyper["lr"]), momentum, kept, from_gradient, from_buffer


@update(states=(), scalars=_plain_scalars)
def sgd(h, p, g):
    weight_decay, lr = h
    p = fma(fma(p, weight_decay, g), -lr, p)
    return (p,)


@update(states=("momentum_buffer",), scalars=_momentum_scalars)
def sgd_momentum(h, p, g, momentum_buffer):
    weight_decay, lr, momentum, kept, from_gradient, from_buffer = h
    g = fma(p, weight_decay, g)
    momentum_buffer = fma(g, kept, momentum_buffer * momentum)
    p = fma(fma(momentum_buffer, from_buffer, g * from_gradient), -lr, p)
    return p, momentum_buffer


def _validate(hyper: Hyper) -> None:
    check_at_least_zero(hyper, "lr", "momentum", "weight_decay")
    check_finite_numbers(hyper, "dampening")
    if hyper["nesterov"] and (float(hyper["momentum"]) <= 0.0 or float(hyper["dampening"]) != 0.0):
        raise ValueError("nesterov=True requires a momentum above 0 and zero dampening")
    check_not_offered(hyper, "differentiable")


def _select(hyper: Hyper) -> Update:
    return sgd_momentum if float(hyper["momentum"]) != 0.0 else sgd


SGD = register_rule(
    Rule(
        name="sgd",
        defaults={"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        validate=_validate,
        select=_select,
        updates=(sgd, sgd_momentum),
        paper="Sutskever et al., ICML 2013",
    )
)
