"""Inputs of linear layers that are no plain matrices train as without this package; other arguments are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, mlp, train

INPUTS = {
    "sparse": lambda i: data(i, 5, 6).relu().to_sparse(),
    "csr": lambda i: data(i, 5, 6).relu().to_sparse_csr(),
    "nested": lambda i: torch.nested.nested_tensor([data(i, 2, 6), data(i + 9, 3, 6)]),
    "jagged": lambda i: torch.nested.nested_tensor([data(i, 2, 6), data(i + 9, 3, 6)], layout=torch.jagged),
}


def plain(y: torch.Tensor) -> torch.Tensor:
    if not y.is_nested:
        return y
    return y.values() if y.layout is torch.jagged else y.to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:.*got a dense gradient", "ignore:.*(prototype|beta)")
@BOTH
@pytest.mark.parametrize("kind", INPUTS)
def test_sparse_and_nested_inputs(when, kind):
    a, oa, b, ob = both(lambda: nn.Linear(6, 4), when)
    ignore = train(a, oa, b, ob, lambda m, i: plain(m(INPUTS[kind](i))).square().sum())
    for p, q, mask in zip(a.parameters(), b.parameters(), ignore):
        assert (p - q).abs().masked_fill(mask, 0.0).max() <= 1e-3 * LR * 3
    assert ob.state[b.weight]["step"] == 3


class Queries(nn.Module):
    """Learned queries: a layer's input is a parameter (or a view of one), which is updated too."""

    def __init__(self, viewed: bool) -> None:
        super().__init__()
        self.queries = nn.Parameter(data(5, 3, 6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)
        self.viewed = viewed

    def forward(self) -> torch.Tensor:
        queries = self.queries[None].expand(2, 3, 6) if self.viewed else self.queries
        return self.second(self.first(queries).tanh()).square().sum()


@BOTH
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.filterwarnings("ignore:.*got a dense gradient")
def test_an_input_that_is_a_parameter(when, order, viewed):
    plain, fused = Queries(viewed), Queries(viewed)
    fused.load_state_dict(plain.state_dict())
    forge.convert(fused)
    torch_optimizer = torch.optim.AdamW(list(plain.parameters())[::order], lr=LR)
    optimizer = forge.FusedOptimizer(list(fused.parameters())[::order], "adamw", lr=LR, when=when)
    for _ in range(3):
        for model, stepped in ((plain, torch_optimizer), (fused, optimizer)):
            stepped.zero_grad()
            model().backward()
            stepped.step()
    for p, q in zip(plain.parameters(), fused.parameters()):
        assert (p - q).abs().max() <= 1e-3 * LR * 3
    assert type(fused.second.weight) is nn.Parameter and optimizer.state[fused.first.weight]["step"] == 3


@BOTH
def test_a_state_dict_with_the_same_names_in_another_order(when):
    """Equal shapes would take each other's states, silently."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = forge.fuse(model, when=when, lr=LR)
    model(data(0, 3, 6)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    group = saved["param_groups"][0]
    names = group["param_names"]
    group["param_names"] = [names[2], names[3], names[0], names[1]]
    group["lr"] = 0.5
    with pytest.raises(ValueError, match=r"another order: '1\.weight' where the optimizer has '0\.weight'"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == LR
    group["param_names"] = [f"module.{name}" for name in names]  # of a wrapper: the order is the same
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["param_names"] == names


def test_a_manager_s_state_of_layers_in_another_order():
    def made(order):
        layers = {name: forge.FusedLinear.from_linear(nn.Linear(4, 4), lr=LR) for name in order}
        return forge.FusedOptimizerManager(nn.ModuleDict(layers))

    saved = made("ab").state_dict()
    made("ab").load_state_dict(saved)
    with pytest.raises(ValueError, match=r"another order: 'a\.weight' where the optimizer has 'b\.weight'"):
        made("ba").load_state_dict(saved)


def test_other_things_than_models_and_parameters_are_refused():
    optimizer = forge.fuse(mlp(), lr=LR)
    for call in (lambda: forge.conversion_report(5), lambda: optimizer.watch(5)):
        with pytest.raises(ValueError, match="model must be a torch.nn.Module, not int"):
            call()
    for value in (torch.ones(2), "0.weight"):
        with pytest.raises(ValueError, match="not a parameter of this optimizer"):
            optimizer.name_of(value)
