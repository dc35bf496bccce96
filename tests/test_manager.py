"""The paper's API: from_linear layers stepped by a FusedOptimizerManager, the rest by an ordinary optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedLinear, FusedOptimizerManager

from .cases.helpers import Explode, data, gap, snapshot, unchanged
from .manager_helpers import LR, fused_layers, one_step, plain_layers

# -- the quick start -----------------------------------------------------------------------------------------------


class Output:
    def __init__(self, loss):
        self.loss = loss


class LM(nn.Module):
    """Embedding, two blocks of linears with norms, a head; `model(**batch).loss`."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return Output(F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def batches(n):
    return [{"ids": torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(i))} for i in range(n)]


def get_lr(step):
    return 1e-2 / (1 + step)


def dense_run(model, hyper):
    optimizer = torch.optim.AdamW(model.parameters(), **hyper)
    losses = []
    for step, batch in enumerate(batches(5)):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        losses.append(model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("state_mode", ["fp32", "bf16"])
def test_the_quick_start_equals_dense_adamw(state_mode):
    torch.manual_seed(0)
    model = LM()
    dense = copy.deepcopy(model)
    names, weights = list(model.state_dict()), list(model.parameters())
    dataloader, losses = batches(5), []

    for _name, module in model.named_modules():
        for child_name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, child_name, FusedLinear.from_linear(child, optimizer_type="adamw"))
                if state_mode == "fp32":
                    getattr(module, child_name).fused_config["state_mode"] = "fp32"
    manager = FusedOptimizerManager(model)
    optimizer = torch.optim.AdamW(manager.get_non_fused_params(), lr=1e-4)
    for step, batch in enumerate(dataloader):
        manager.pre_step(lr=get_lr(step))
        for group in optimizer.param_groups:  # the other half follows the same schedule
            group["lr"] = get_lr(step)
        loss = model(**batch).loss
        loss.backward()  # fused layers are updated here
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    expected = dense_run(dense, {"lr": 1e-4})
    assert list(model.state_dict()) == names and all(p is q for p, q in zip(model.parameters(), weights))
    assert losses == pytest.approx(expected, rel=1e-5 if state_mode == "fp32" else 2e-2)
    if state_mode == "fp32":
        assert gap(dense, model) <= 1e-3 * 1e-2 * 5
    moved = [not torch.equal(p, q) for p, q in zip(LM().parameters(), model.parameters())]
    assert all(moved)


def test_bf16_states_are_the_default_and_are_bf16():
    model = nn.Sequential(FusedLinear.from_linear(nn.Linear(6, 3)))
    manager = FusedOptimizerManager(model)
    one_step(model, manager, lr=LR)
    (saved,) = manager.state_dict().values()
    assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16 and saved["state"][0]["step"] == 1


def test_the_weight_moves_in_backward_and_has_no_gradient_left_for_others():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    others = manager.get_non_fused_params()
    before = snapshot(model)
    manager.pre_step(lr=1e-2)
    model(data(0, 4, 6)).square().sum().backward()
    assert not torch.equal(model[0].weight, before[0]) and not torch.equal(model[2].weight, before[2])
    assert torch.equal(model[0].bias, before[1]) and others[0].grad is not None
    with pytest.raises(RuntimeError, match="already applied"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_norm_(others, 1.0)


def test_the_other_parameters_are_the_rest_exactly_once():
    torch.manual_seed(0)
    model = LM()
    model.alias = model.embed
    model.blocks[0][1] = FusedLinear.from_linear(model.blocks[0][1])
    model.head = FusedLinear.from_linear(model.head)
    manager = FusedOptimizerManager(model)
    others = manager.get_non_fused_params()
    fused = [model.blocks[0][1].weight, model.head.weight]
    assert len({id(p) for p in others}) == len(others)
    assert {id(p) for p in others} | {id(p) for p in fused} == {id(p) for p in model.parameters()}
    assert not {id(p) for p in others} & {id(p) for p in fused}


# -- pre_step ------------------------------------------------------------------------------------------------------


def test_a_forgotten_first_pre_step_is_an_error_before_anything_changes():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"manager\.pre_step\(lr=.*nothing was changed"):
        model(data(0, 4, 6)).square().sum().backward()
    assert unchanged(model, before)
    assert not any(saved["state"] for saved in manager.state_dict().values())


def test_a_forgotten_first_pre_step_can_be_made_up_for():
    model, dense = fused_layers(), plain_layers()
    manager = FusedOptimizerManager(model)
    with pytest.raises(RuntimeError, match="pre_step"):
        model(data(0, 4, 6)).square().sum().backward()
    model.zero_grad()
    other = torch.optim.AdamW(manager.get_non_fused_params(), lr=LR)
    one_step(model, manager, other, lr=LR)
    theirs = torch.optim.AdamW(dense.parameters(), lr=LR)
    dense(data(0, 4, 6)).square().sum().backward()
    theirs.step()
    assert gap(dense, model) <= 1e-3 * LR


def test_a_refused_backward_leaves_no_gradient_for_the_next_step():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="pre_step"):
        model(data(0, 4, 6)).square().sum().backward()
    assert model[2].weight.grad is None
    manager.pre_step(lr=LR)
    assert unchanged(model, before)


@pytest.mark.parametrize("optimizer_types", [("adamw", "adamw"), ("adamw", "sgd")])
def test_a_second_backward_without_pre_step_is_an_error_before_anything_changes(optimizer_types):
    torch.manual_seed(0)
    first, second = optimizer_types
    model = nn.Sequential(
        FusedLinear.from_linear(nn.Linear(6, 8), first), nn.Tanh(), FusedLinear.from_linear(nn.Linear(8, 3), second)
    )
    manager = FusedOptimizerManager(model)
    for i in range(2):
        one_step(model, manager, seed=i, lr=LR)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match="pre_step|second backward before"):
            model(data(5, 4, 6)).square().sum().backward()
        assert unchanged(model, before)


def test_the_error_about_a_second_backward_names_pre_step():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    one_step(model, manager, lr=LR)
    with pytest.raises(RuntimeError, match="pre_step"):
        model(data(1, 4, 6)).square().sum().backward()


def test_reentrant_checkpointing_with_two_kinds_of_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(
        FusedLinear.from_linear(nn.Linear(6, 6), "sgd", "fp32"),
        FusedLinear.from_linear(nn.Linear(6, 6), state_mode=None),
    )
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    plain.load_state_dict(model.state_dict())
    manager = FusedOptimizerManager(model)
    for i in range(2):
        manager.pre_step(lr=1e-2)
        x = data(i, 4, 6).requires_grad_()
        for layer in model:
            x = checkpoint(lambda t, layer=layer: layer(t).tanh(), x, use_reentrant=True)
        x.square().sum().backward()
    assert not torch.equal(model[0].weight, plain[0].weight) and not torch.equal(model[1].weight, plain[1].weight)


def test_a_layer_that_the_first_backward_left_out_is_not_stepped_by_a_second_one():
    torch.manual_seed(0)
    model = nn.ModuleList([FusedLinear.from_linear(nn.Linear(6, 6), kind) for kind in ("sgd", "adamw")])
    manager = FusedOptimizerManager(model)
    manager.pre_step(lr=LR)
    model[0](data(0, 4, 6)).sum().backward()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="pre_step"):
        model[1](data(1, 4, 6)).sum().backward()
    assert unchanged(model, before)
    manager.pre_step(lr=LR)
    model[1](data(1, 4, 6)).sum().backward()
    assert not torch.equal(model[1].weight, before[2])


def test_an_exception_in_the_middle_of_backward_is_said_by_the_next_pre_step():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    manager.pre_step(lr=LR)
    with pytest.raises(KeyError, match="boom"):
        model[2](Explode.apply(model[0](data(0, 4, 6)))).sum().backward()
    with pytest.raises(RuntimeError, match=r"exception after it had updated 2\.weight"):
        manager.pre_step(lr=LR)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="pre_step"):  # that pre_step opened nothing
        model(data(0, 4, 6)).sum().backward()
    assert unchanged(model, before)
    model.zero_grad()
    one_step(model, manager, lr=LR)  # said once; training can go on


def test_pre_step_again_without_backward_is_fine():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    manager.pre_step(lr=1.0)
    before = snapshot(model)
    one_step(model, manager, lr=1e-3)
    assert 0 < (model[0].weight - before[0]).abs().max() <= 1.1e-3


def test_pre_step_without_any_learning_rate_is_refused():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    with pytest.raises(ValueError, match=r"pre_step needs lr="):
        manager.pre_step()
    with pytest.raises(RuntimeError, match="pre_step"):
        model(data(0, 4, 6)).sum().backward()
    one_step(model, manager, lr=LR)
    one_step(model, manager)  # the last one stays in force


def test_a_learning_rate_given_to_the_layers_is_enough():
    model = fused_layers(lr=1e-3, weight_decay=0.0)
    manager = FusedOptimizerManager(model)
    before = snapshot(model)
    one_step(model, manager)
    assert (model[0].weight - before[0]).abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def test_per_layer_settings():
    model, dense = fused_layers(), plain_layers()
    manager = FusedOptimizerManager(model)
    other = torch.optim.AdamW(manager.get_non_fused_params(), lr=1e-3)
    theirs = torch.optim.AdamW(
        [
            {"params": [dense[0].weight], "lr": 1e-2, "weight_decay": 0.5},
            {"params": [dense[2].weight], "lr": 1e-3, "weight_decay": 0.1},
            {"params": [dense[0].bias, dense[2].bias], "lr": 1e-3},
        ]
    )
    for i in range(3):
        per_layer = {"0": {"lr": 1e-2, "weight_decay": 0.5}}
        one_step(model, manager, other, seed=i, lr=1e-3, weight_decay=0.1, per_layer=per_layer)
        theirs.zero_grad()
        dense(data(i, 4, 6)).square().sum().backward()
        theirs.step()
    assert gap(dense, model) <= 1e-3 * 1e-2 * 3


def test_layers_keep_their_own_hyper_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(
        FusedLinear.from_linear(nn.Linear(6, 8), "sgd", "fp32", momentum=0.9, lr=0.1),
        nn.Tanh(),
        FusedLinear.from_linear(nn.Linear(8, 3), "adamw", "fp32", betas=(0.5, 0.9), lr=0.01, eps=1e-4),
    )
    dense = plain_layers()
    manager = FusedOptimizerManager(model)
    sgd = torch.optim.SGD([dense[0].weight], lr=0.1, momentum=0.9)
    adamw = torch.optim.AdamW([dense[2].weight], lr=0.01, betas=(0.5, 0.9), eps=1e-4)
    for i in range(3):
        one_step(model, manager, seed=i)
        dense.zero_grad()
        dense(data(i, 4, 6)).square().sum().backward()
        sgd.step()
        adamw.step()
        model.zero_grad() if i == 2 else [p.grad.zero_() for p in manager.get_non_fused_params()]
    assert gap(dense, model) <= 1e-3 * 0.1 * 3


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lr": LR, "per_layer": {"1": {"lr": 1.0}}}, "per_layer: '1' is not a fused layer; there are 0, 2"),
        ({"lr": LR, "per_layer": {"0.weight": {}}}, "per_layer: '0.weight'"),
        ({"lr": LR, "momentum": 0.9}, "momentum is not a hyper-parameter of adamw"),
        ({"lr": LR, "per_layer": {"0": {"learning_rate": 1.0}}}, "learning_rate is not a hyper-parameter"),
        ({"lr": -1.0}, "lr"),
        ({"lr": LR, "per_layer": {"2": {"lr": -1.0}}}, "lr"),
        ({"lr": LR, "betas": (0.9, 1.5)}, "beta"),
    ],
)
def test_pre_step_refuses_what_it_does_not_know_and_changes_nothing(arguments, message):
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    one_step(model, manager, lr=0.5)
    before, groups = snapshot(model), copy.deepcopy([s["param_groups"] for s in manager.state_dict().values()])
    with pytest.raises(ValueError, match=message):
        manager.pre_step(**arguments)
    assert unchanged(model, before)
    assert [s["param_groups"] for s in manager.state_dict().values()] == groups
    with pytest.raises(RuntimeError, match="pre_step|second backward before"):  # the refused call opened nothing
        model(data(0, 4, 6)).sum().backward()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"optimizer_type": "adamx"}, "adamx"),
        ({"state_mode": "int9"}, "int9"),
        ({"momentum": 0.9}, "momentum is not a hyper-parameter of adamw"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_from_linear_refuses_unknown_settings(arguments, message):
    linear = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=message):
        FusedLinear.from_linear(linear, **arguments)


class Half(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.Embedding(3, 2), "it is a Embedding"),
        (lambda: nn.Conv1d(2, 2, 1), "it is a Conv1d"),
        (lambda: Half(3, 2), "Half is a subclass"),
        (lambda: nn.Linear(0, 2), "no elements"),
        (lambda: nn.LazyLinear(2), "subclass|not initialised"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_from_linear_needs_a_plain_linear(make, message):
    with pytest.raises(ValueError, match=message):
        FusedLinear.from_linear(make())


def test_a_model_without_fused_layers_is_refused():
    with pytest.raises(ValueError, match="from_linear"):
        FusedOptimizerManager(plain_layers())
    with pytest.raises(ValueError, match="from_linear"):
        FusedOptimizerManager(forge.convert(plain_layers()))


def test_a_second_manager_or_fuse_on_the_same_model_is_refused():
    model = fused_layers()
    manager = FusedOptimizerManager(model)
    with pytest.raises(ValueError, match=r"0\.weight is already stepped"):
        FusedOptimizerManager(model)
    with pytest.raises(ValueError, match=r"0\.weight is already stepped"):
        forge.fuse(model, lr=LR)
    one_step(model, manager, lr=LR)
