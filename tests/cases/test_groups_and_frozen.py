"""Parameter groups as training scripts build them, and frozen parameters of kinds that cannot be stepped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedLinear, FusedOptimizer, FusedOptimizerManager
from fused_grad_optimizer._flags import SkipFlags


def model_of(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=bias), nn.Linear(4, 2, bias=bias))


@pytest.mark.parametrize("empty_first", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_split_by_weight_decay_may_leave_a_group_empty(empty_first, named):
    """A model without biases and norms, with the usual two groups; torch.optim.AdamW steps it."""
    model, other = model_of(), model_of()
    other.load_state_dict(model.state_dict())

    def groups(of):
        full = {"params": list(of.named_parameters() if named else of.parameters()), "weight_decay": 0.1}
        empty = {"params": [], "weight_decay": 0.0}
        return [empty, full] if empty_first else [full, empty]

    if named:  # torch refuses to mix groups with and without names, and an empty one has none
        right = torch.optim.AdamW([g for g in groups(other) if g["params"]], lr=1e-2)
    else:
        right = torch.optim.AdamW(groups(other), lr=1e-2)
    optimizer = FusedOptimizer(groups(model), lr=1e-2, state="fp32")
    for m, o in ((model, optimizer), (other, right)):
        m(torch.ones(3, 4)).sum().backward()
        o.step()
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert [len(g["params"]) for g in optimizer.param_groups] == ([0, 2] if empty_first else [2, 0])
    assert all(("param_names" in g) == named for g in optimizer.param_groups)
    assert len(optimizer.state_dict()["param_groups"]) == 2
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("empty_first", [False, True])
def test_fuse_with_an_empty_group(empty_first):
    model = model_of()
    groups = [{"params": list(model.parameters())}, {"params": []}]
    optimizer = forge.fuse(model, param_groups=groups[::-1] if empty_first else groups)
    assert optimizer.param_groups[empty_first]["param_names"] == ["0.weight", "1.weight"]
    optimizer.add_param_group({"params": [], "lr": 0.5})
    assert optimizer.param_groups[2]["param_names"] == []


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_parameter_put_into_a_group_by_hand_is_named(when):
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    optimizer = FusedOptimizer([a], "sgd", lr=1.0, when=when)
    optimizer.param_groups[0]["params"].append(b)
    with pytest.raises(ValueError, match=r"shape \(2, 2\) .*add_param_group"):
        (a.sum() + b.sum()).backward()
        optimizer.step()
    assert not a.any() and not b.any()


def test_a_manager_of_two_rules_does_not_wait_for_the_device_between_them(monkeypatch):
    """What the device skipped is asked for once a pass by each optimizer, when the next one begins."""
    layers = [FusedLinear.from_linear(nn.Linear(4, 4), rule) for rule in ("adamw", "lion")]
    model = nn.Sequential(*layers)
    manager = FusedOptimizerManager(model)
    calls: list[str] = []
    for name in ("end", "collect"):
        original = getattr(SkipFlags, name)

        def counted(self, original=original, name=name):
            calls.append(name)
            return original(self)

        monkeypatch.setattr(SkipFlags, name, counted)
    for _ in range(2):
        manager.pre_step(lr=1e-3)
        model(torch.ones(2, 4)).sum().backward()
    calls.clear()
    manager.pre_step(lr=1e-3)
    assert calls.count("end") == 2 and "collect" not in calls


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_layout_is_refused_by_name():
    for layout in ("to_sparse_csr", "to_sparse"):
        with pytest.raises(ValueError, match="weights has layout"):
            FusedOptimizer([("weights", nn.Parameter(getattr(torch.eye(4), layout)()))])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["meta", "gaps", "csr", "float8"])
def test_what_is_frozen_need_not_be_steppable(kind):
    """As in torch.optim; it is refused once it trains, before anything moves."""
    p = nn.Parameter(torch.ones(4))
    made = {
        "meta": lambda: torch.empty(4, 4, device="meta"),
        "gaps": lambda: torch.zeros(4, 8)[:, ::2],
        "csr": lambda: torch.eye(4).to_sparse_csr(),
        "float8": lambda: torch.zeros(4, 4).to(torch.float8_e4m3fn),
    }[kind]()
    frozen = nn.Parameter(made, requires_grad=False)
    optimizer = FusedOptimizer([("p", p), ("frozen", frozen)], "sgd", lr=1.0)
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p, torch.zeros(4))
    optimizer.zero_grad()
    if kind == "gaps":
        frozen.requires_grad_(True)
        with pytest.raises(ValueError, match="frozen has strides"):
            (frozen.sum() + p.sum()).backward()
            optimizer.step()
        assert torch.equal(p, torch.zeros(4))
