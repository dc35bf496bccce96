"""FusedOptimizerManager: weights shared by layers, and saving."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_grad_optimizer import FusedLinear, FusedOptimizerManager

from .cases.helpers import data, gap, snapshot, unchanged
from .manager_helpers import LR, fused_layers, one_step

# -- shared weights ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two linears with one weight."""

    def __init__(self, fused, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        if fused:
            self.a = FusedLinear.from_linear(self.a, state_mode="fp32")
            self.b = FusedLinear.from_linear(self.b, state_mode=settings.get("state_mode", "fp32"))

    def forward(self, x):
        return self.b(self.a(x).tanh())


def test_two_layers_with_one_weight_are_stepped_once():
    dense, model = Tied(False), Tied(True)
    manager = FusedOptimizerManager(model)
    assert model.a.weight is model.b.weight
    other = torch.optim.AdamW(manager.get_non_fused_params(), lr=1e-2)
    theirs = torch.optim.AdamW(dense.parameters(), lr=1e-2)
    for i in range(3):
        one_step(model, manager, other, seed=i, lr=1e-2)
        theirs.zero_grad()
        dense(data(i, 4, 6)).square().sum().backward()
        theirs.step()
    assert gap(dense, model) <= 1e-3 * 1e-2 * 3
    (saved,) = manager.state_dict().values()
    assert len(saved["state"]) == 1 and saved["state"][0]["step"] == 3


def test_two_settings_for_one_weight_are_refused():
    with pytest.raises(ValueError, match="a and b share a weight"):
        FusedOptimizerManager(Tied(True, state_mode="bf16"))


def test_per_layer_takes_either_name_of_a_tied_weight():
    model = Tied(True)
    manager = FusedOptimizerManager(model)
    before = model.a.weight.detach().clone()
    one_step(model, manager, lr=1e-2, weight_decay=0.0, per_layer={"b": {"lr": 1e-4}})
    assert 0 < (model.a.weight - before).abs().max() <= 1.1e-4


@pytest.mark.parametrize("order", ["tie first", "tie after"])
def test_embedding_tied_to_a_fused_head(order):
    def make(fused):
        torch.manual_seed(0)
        model = nn.Module()
        model.embed, model.inner, model.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        if order == "tie first":
            model.head.weight = model.embed.weight
        if fused:
            model.inner, model.head = (FusedLinear.from_linear(m, state_mode="fp32") for m in (model.inner, model.head))
        model.head.weight = model.embed.weight
        model.forward = lambda ids: model.head(model.inner(model.embed(ids)).tanh())
        return model

    dense, model = make(False), make(True)
    manager = FusedOptimizerManager(model)
    others = manager.get_non_fused_params()
    assert [id(p) for p in others] == [id(model.inner.bias)]
    other, theirs = torch.optim.AdamW(others, lr=1e-2), torch.optim.AdamW(dense.parameters(), lr=1e-2)
    for i in range(3):
        ids = torch.tensor([0, 3, 3, i])
        manager.pre_step(lr=1e-2)
        for m, o in ((dense, theirs), (model, other)):
            o.zero_grad()
            F.cross_entropy(m.forward(ids), ids.flip(0)).backward()
            o.step()
    assert model.head.weight is model.embed.weight and gap(dense, model) <= 1e-3 * 1e-2 * 3


# -- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_mode", ["fp32", "bf16", "bf16-nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_is_bit_exact(state_mode, dtype):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(
            FusedLinear.from_linear(nn.Linear(6, 8, dtype=dtype), "adamw", state_mode),
            nn.Tanh(),
            FusedLinear.from_linear(nn.Linear(8, 3, dtype=dtype), "sgd", state_mode, momentum=0.9),
        )
        return model, FusedOptimizerManager(model, seed=3)

    def run(model, manager, first, n):
        for i in range(first, first + n):
            manager.pre_step(lr=1e-2)
            model(data(i, 4, 6).to(dtype)).square().sum().backward()

    model, manager = make()
    run(model, manager, 0, 4)
    file = io.BytesIO()
    manager.pre_step(lr=1e-2)
    torch.save((model.state_dict(), manager.state_dict()), file)
    file.seek(0)
    weights, states = torch.load(file)
    other, other_manager = make()
    other.load_state_dict(weights)
    other_manager.load_state_dict(states)
    run(model, manager, 4, 3)
    run(other, other_manager, 4, 3)
    assert unchanged(model, snapshot(other))
    mine, theirs = manager.state_dict(), other_manager.state_dict()
    assert mine.keys() == theirs.keys() == {f"adamw/{state_mode}", f"sgd/{state_mode}"}
    for key in mine:
        for index, values in mine[key]["state"].items():
            for name, value in values.items():
                loaded = theirs[key]["state"][index][name]
                assert loaded.dtype == value.dtype and torch.equal(loaded, value)


def test_loading_states_of_other_settings_is_refused():
    manager = FusedOptimizerManager(fused_layers("fp32"))
    for other in (fused_layers("bf16"), fused_layers("fp32", "sgd")):
        with pytest.raises(ValueError, match="state_dict holds"):
            manager.load_state_dict(FusedOptimizerManager(other).state_dict())
    smaller = nn.Sequential(FusedLinear.from_linear(nn.Linear(6, 8), state_mode="fp32"))
    with pytest.raises(ValueError, match="parameter groups"):
        manager.load_state_dict(FusedOptimizerManager(smaller).state_dict())


def test_skipped_updates_are_counted_by_name():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    before = snapshot(model)
    manager.pre_step(lr=LR)
    (model(data(0, 4, 6)).sum() * float("nan")).backward()
    with pytest.warns(RuntimeWarning, match="NaN or inf"):
        assert manager.skipped == {"0.weight": 1, "2.weight": 1}
    assert unchanged(model, before)
