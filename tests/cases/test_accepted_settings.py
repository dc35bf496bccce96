"""Settings that torch.optim takes in other types than the usual ones: the same training, and plain values are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import fused_grad_optimizer as forge
from fused_grad_optimizer._parameters import check_settings
from fused_grad_optimizer.rules import get_rule

from .helpers import BOTH, LR, data, mlp, pair, passes, snapshot, train, unchanged

BETAS = (0.8, 0.97)


class Configured(Sequence):
    """A sequence that is no list, as configuration libraries have."""

    def __init__(self, *values):
        self._values = values

    def __len__(self):
        return len(self._values)

    def __getitem__(self, i):
        return self._values[i]


SEQUENCES = {
    "list": list(BETAS),
    "array": np.array(BETAS),
    "tensor": torch.tensor(BETAS, dtype=torch.float64),
    "tensors": (torch.tensor(BETAS[0]), torch.tensor(BETAS[1])),
    "sequence": Configured(*BETAS),
    "deque": deque(BETAS),
}


def loss(model, i):
    return model(data(i, 7, 6)).square().mean()


@BOTH
@pytest.mark.parametrize("what", SEQUENCES)
@pytest.mark.parametrize("live", [False, True])
def test_betas_of_any_sequence(when, what, live):
    a, b = pair(mlp)
    oa = torch.optim.AdamW(a.parameters(), lr=LR, betas=BETAS)
    ob = forge.fuse(b, when=when, lr=LR, **({} if live else {"betas": SEQUENCES[what]}))
    if live:
        ob.param_groups[0]["betas"] = SEQUENCES[what]
    assert passes(a, b, 3, train(a, oa, b, ob, loss))
    ob.load_state_dict(ob.state_dict())
    assert [float(beta) for beta in ob.param_groups[0]["betas"]] == pytest.approx(BETAS)
    assert passes(a, b, 6, train(a, oa, b, ob, loss))


@BOTH
@pytest.mark.parametrize("value", [True, np.bool_(True), 1, np.int64(1), False, np.bool_(False), 0], ids=repr)
def test_switches(when, value):
    a, b = pair(mlp)
    hyper = {"lr": LR, "momentum": 0.9}
    oa = torch.optim.SGD(a.parameters(), maximize=bool(value), nesterov=bool(value), **hyper)
    ob = forge.fuse(b, "sgd", when=when, maximize=value, nesterov=value, **hyper)
    assert passes(a, b, 3, train(a, oa, b, ob, loss))
    ob.load_state_dict(ob.state_dict())
    assert passes(a, b, 6, train(a, oa, b, ob, loss))


@pytest.mark.parametrize("seed", [np.int64(2**40 + 3), np.array(2**40 + 3), torch.tensor(2**40 + 3)], ids=repr)
def test_seeds(seed):
    found = []
    for given in (2**40 + 3, seed, 2**40 + 4):
        torch.manual_seed(0)
        model = mlp().bfloat16()
        optimizer = forge.fuse(model, when="step", lr=LR, seed=given)
        for i in range(2):
            optimizer.zero_grad()
            model(data(i, 7, 6).bfloat16()).square().mean().backward()
            optimizer.step()
        found.append((model, snapshot(model)))
    (_, plain), (same, _), (other, _) = found
    assert unchanged(same, plain) and not unchanged(other, plain)


def test_what_is_kept_is_plain():
    rule = get_rule("adamw")
    given = {**rule.defaults, "seed": np.int64(3), "maximize": np.bool_(True), "betas": np.array(BETAS), "layer": "0"}
    kept = check_settings(rule, given)
    assert kept == {**rule.defaults, "seed": 3, "maximize": True, "betas": BETAS, "layer": "0"}
    assert [type(kept[name]) for name in ("seed", "maximize", "betas")] == [int, bool, tuple]
    assert all(type(beta) is float for beta in kept["betas"])


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_all_parameters(kind):
    """torch.optim takes it too, but no set in a group."""
    a, b = pair(mlp)
    oa = torch.optim.AdamW(kind(a.parameters()), lr=LR)
    ob = forge.FusedOptimizer(kind(b.parameters()), lr=LR)
    assert passes(a, b, 3, train(a, oa, b, ob, loss))
    with pytest.raises(TypeError):
        torch.optim.AdamW([{"params": set(a.parameters())}])


def test_an_infinite_lr_is_refused_though_torch_takes_it():
    assert torch.optim.AdamW(mlp().parameters(), lr=float("inf")).defaults["lr"] == float("inf")
    with pytest.raises(ValueError, match="Invalid lr value: inf; it must be .* a finite number"):
        forge.fuse(mlp(), lr=float("inf"))


def test_a_manager_keeps_plain_values_too():
    """So that its state can be loaded with `weights_only`, and a seed be a key."""
    layer = forge.FusedLinear.from_linear(torch.nn.Linear(2, 2))
    manager = forge.FusedOptimizerManager(torch.nn.Sequential(layer))
    manager.pre_step(lr=LR, betas=np.array(BETAS), per_layer={"0": {"weight_decay": 0.1}})
    (optimizer,) = manager._optimizers.values()
    assert optimizer.param_groups[0]["betas"] == BETAS and type(optimizer.param_groups[0]["betas"]) is tuple
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("arrays", [(0, 1), (1, 0), (0, 0)], ids=["before", "after", "both"])
def test_tied_layers_with_settings_of_other_types(kind, arrays):
    """They are compared by value; a setting that is changed later by the caller does not change the layer's."""
    betas = [SEQUENCES[kind], BETAS]
    linear = torch.nn.Linear(4, 4)
    layers = [forge.FusedLinear.from_linear(linear, lr=torch.tensor(LR), betas=betas[i]) for i in arrays]
    manager = forge.FusedOptimizerManager(torch.nn.Sequential(*layers))
    assert tuple(float(b) for b in manager._groups["0"]["betas"]) == pytest.approx(BETAS)
    other = forge.FusedLinear.from_linear(linear, lr=LR, betas=np.array([0.8, 0.5]))
    with pytest.raises(ValueError, match="0 and 1 share a weight but were given different settings"):
        forge.FusedOptimizerManager(torch.nn.Sequential(layers[0], other))
