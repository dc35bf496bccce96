"""Rules against independent oracles in fp64 over 50 steps, and their refusals."""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer.rules import RULES, UPDATES, get_rule
from tests.reference.lion import Lion

CASES = [
    ("adamw", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("adamw", torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.0}),
    ("adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    ("adam", torch.optim.Adam, {"lr": 1e-2}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    ("lion", Lion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ("lion", Lion, {"lr": 1e-2, "betas": (0.95, 0.98)}),
]


def gradients(steps=50, shape=(7, 5)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def twin_steps(name, hyper, weight, grads):
    rule = get_rule(name)
    hyper = {**rule.defaults, **hyper}
    update = rule.select(hyper)
    states = [torch.zeros_like(weight) for _ in update.states]
    for i, g in enumerate(grads):
        weight, *states = update.twin(update.scalars(hyper, i + 1, i == 0), weight, g, *states)
    return weight


@pytest.mark.parametrize("name, reference, hyper", CASES, ids=str)
def test_twin_against_an_ordinary_optimizer_in_fp64(name, reference, hyper):
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = reference([parameter], **hyper)
    for g in gradients():
        parameter.grad = g.clone()
        optimizer.step()
    result = twin_steps(name, hyper, start, gradients())
    assert (result - parameter.detach()).norm() <= 1e-12 * parameter.detach().norm()
    assert (result - start).norm() > 1e-3


def test_defaults_are_those_of_torch_optim():
    for name, reference in (("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        theirs = reference([torch.nn.Parameter(torch.zeros(1))]).defaults
        for key, value in RULES[name].defaults.items():
            assert theirs[key] == value, (name, key)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -1}, {"betas": (1.0, 0.9)}, {"betas": (0.9,)},
            {"eps": -1.0}, {"momentum": -0.1}, {"nesterov": True}], ids=str,
)  # fmt: skip
def test_bad_values_are_refused(name, bad):
    rule = RULES[name]
    if not set(bad) <= set(rule.defaults):
        pytest.skip("not a hyper-parameter of this rule")
    with pytest.raises(ValueError):
        rule.validate({**rule.defaults, **bad})


def test_unknown_rule_lists_the_known():
    with pytest.raises(ValueError, match="adam, adamw, lion, sgd"):
        get_rule("adamx")


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.0, 1e-3])
@pytest.mark.parametrize("name", [name for name in UPDATES if UPDATES[name].cpu is not None])
def test_torch_s_own_cpu_operator_is_the_same_update(name, lr, weight_decay):
    """In fp32 against the twin in fp64, over steps whose bias correction matters and ones where it is gone."""
    update = UPDATES[name]
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(37, 53, generator=generator) for _ in range(2))
    states = [torch.rand(37, 53, generator=generator) for _ in update.states]
    hyper = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
    for step in (1, 2, 10, 100_000):
        h = update.scalars(hyper, step, False)
        wanted = update.twin(h, p.double(), g.double(), *[s.double() for s in states])
        kept = g.clone()
        assert update.cpu(h, p, g, *states) == (lr > 0.0 or name == "adam")
        if lr > 0.0:
            for value, exact in zip([p, *states], wanted):
                assert (value - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert torch.equal(g, kept)
