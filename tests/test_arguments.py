"""Wrong arguments: each is a `ValueError` that names the argument (and the remedy), and nothing has changed then."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedOptimizer, FusedOptimizerManager
from fused_grad_optimizer.memory import training_memory

from .cases.helpers import LR, mlp

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [
    None,
    "0.1",
    "x",
    NAN,
    INF,
    -INF,
    [],
    {},
    (1.0,),
    1j,
    object,
    torch.ones(2),
    torch.ones((), device="meta"),
]
SAYS = {"rule": "choose one of", "when": "choose", "state": "choose one of", "weight": "choose one of"}


def refused(make, message, error=ValueError):
    """`make(model)` raises, the model stays as it was, and can be fused afterwards."""
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(error, match=message):
        make(model)
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(p, before[name]) and not p._post_accumulate_grad_hooks for name, p in
               model.named_parameters())  # fmt: skip
    forge.fuse(model, lr=LR).release()


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1.0], ids=repr)
@pytest.mark.parametrize("rule, name", [("adamw", "lr"), ("adamw", "eps"), ("adam", "weight_decay"), ("lion", "lr"),
                                        ("sgd", "lr"), ("sgd", "momentum")])  # fmt: skip
def test_numbers(rule, name, value):
    for make in (
        lambda model: forge.fuse(model, rule, **{name: value}),
        lambda model: FusedOptimizer(model.parameters(), rule, **{name: value}),
        lambda model: FusedOptimizer([{"params": model.parameters(), name: value}], rule),
        lambda model: forge.FusedLinear.from_linear(model[0], rule, **{name: value}),
    ):
        refused(make, rf"Invalid {name} value.*at least 0")


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_dampening(value):
    refused(lambda model: forge.fuse(model, "sgd", momentum=0.9, dampening=value), "Invalid dampening value")


@pytest.mark.parametrize("rule", ["adamw", "adam", "lion"])
@pytest.mark.parametrize(
    "value",
    [None, 0.9, "ab", [], (0.9,), (0.9, 0.9, 0.9), (NAN, 0.9), (0.9, None), ("a", 0.9), (-0.1, 0.9), (0.9, 1.0),
     {0: 0.9, 1: 0.9}, torch.tensor(0.9), nn.Linear, {0.5, 0.9}, iter((0.9, 0.9)), b"ab", torch.ones(2),
     torch.ones(3), torch.ones(2, 2), torch.ones(2, device="meta"), np.array([0.9]), np.array([0.9, NAN])],
    ids=lambda value: repr(value).split(" object at ")[0],
)  # fmt: skip
def test_betas(rule, value):
    refused(lambda model: forge.fuse(model, rule, betas=value), r"betas.*\[0, 1\)")


@pytest.mark.parametrize("value", [None, "yes", 2, -1, 0.0, 1.0, [], torch.ones(2), np.ones(2, bool)], ids=repr)
def test_switches_and_seed(value):
    refused(lambda model: forge.fuse(model, maximize=value), "maximize=.*True or False")
    refused(lambda model: forge.fuse(model, "sgd", momentum=0.9, nesterov=value), "nesterov=.*True or False")
    if not isinstance(value, int):
        refused(lambda model: forge.fuse(model, seed=value), "seed=.*an integer")
        refused(lambda model: FusedOptimizer([{"params": model.parameters(), "seed": value}]), "seed=.*an integer")
    refused(lambda model: forge.fuse(model, seed=True), "seed=True.*an integer")
    refused(lambda model: forge.fuse(model, seed=np.bool_(True)), "seed=.*True.*an integer")


@pytest.mark.parametrize("name", SAYS)
@pytest.mark.parametrize("value", ["x", 1, True, ["step"], {}, torch.float32, nn.Linear(2, 2)], ids=repr)
def test_choices(name, value):
    refused(lambda model: forge.fuse(model, **{name: value}), f"{name}=.*{SAYS[name]}")


@pytest.mark.parametrize("name", ["rule", "when"])
def test_none_where_something_is_to_be_chosen(name):
    refused(lambda model: forge.fuse(model, **{name: None}), f"{name}=None.*{SAYS[name]}")


@pytest.mark.parametrize(
    "value", [1, True, "0", [1], [None], [nn.Linear(2, 2)], nn.Linear, nn.Linear(2, 2), 0.5], ids=repr
)
def test_exclude(value):
    refused(lambda model: forge.fuse(model, exclude=value), "exclude.*(list of module names|not a name or pattern)")
    refused(lambda model: forge.convert(model, value), "exclude.*(list of module names|not a name or pattern)")


@pytest.mark.parametrize("value", [None, "model", nn.Linear, [nn.Linear(2, 2)], torch.ones(2), 1], ids=repr)
@pytest.mark.parametrize("entry", [forge.fuse, forge.convert, FusedOptimizerManager])
def test_model(entry, value):
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, not"):
        entry(value)


PARAMS = {
    "a module": (lambda m: m, r"is a module \(Sequential\).*\.parameters\(\)"),
    "a module in a list": (lambda m: [m], r"is a module \(Sequential\).*\.parameters\(\)"),
    "a module in a group": (lambda m: [{"params": m}], r"is a module \(Sequential\).*\.parameters\(\)"),
    "a module in a group's list": (lambda m: [{"params": [m[0]]}], r"is a module \(Linear\).*\.parameters\(\)"),
    "a tensor": (lambda m: m[0].weight, r"is one tensor.*\[parameter\]"),
    "a name": (lambda m: "0.weight", "is a str: give a list"),
    "names": (lambda m: ["0.weight"], "'0.weight': a tensor"),
    "a number": (lambda m: 1, "=1: give a list"),
    "numbers": (lambda m: [m[0].weight, 1], "1: a tensor"),
    "None among them": (lambda m: [m[0].weight, None], "None: a tensor"),
    "a set in a group": (lambda m: [{"params": set(m.parameters())}], "'params' of a group.* is a set: give a list"),
    "one group": (lambda m: {"params": list(m.parameters())}, "is a dict: give a list"),
    "a dict of names": (lambda m: dict(m.named_parameters()), "is a dict: give a list"),
    "a group without params": (lambda m: [{"lr": 1.0}], "must be a dict with 'params'"),
    "params of a group None": (lambda m: [{"params": None}], "'params' of a group.*=None: give a list"),
    "a group and a tensor": (lambda m: [{"params": [m[0].weight]}, m[0].bias], "must be a dict with 'params'"),
    "triples": (lambda m: [("a", m[0].weight, 1)], r"a tensor or \(name, tensor\)"),
    "names that are none": (lambda m: [(1, m[0].weight)], r"a tensor or \(name, tensor\)"),
    "twice": (lambda m: [m[0].weight, m[2].weight, m[0].weight], "given twice, before as .*: leave one"),
    "twice by name": (lambda m: [("a", m[0].weight), ("b", m[0].weight)], "b is given twice, before as a"),
    "twice, two groups": (lambda m: [{"params": [m[0].weight]}, {"params": [m[0].weight]}], "given twice"),
    "not a leaf": (lambda m: [("a", m[0].weight), ("b", m[2].weight * 2)], r"b was computed.*\.detach\(\)"),
    "on meta": (lambda m: [m[0].weight, ("b", nn.Parameter(torch.ones(2, device="meta")))],
                "b is on the meta device: give it memory"),
    "complex": (lambda m: [("b", torch.ones(2, dtype=torch.complex64, requires_grad=True))], "b: weights of dtype"),
    "sparse": (lambda m: [("b", nn.Parameter(torch.eye(2).to_sparse()))], "b has layout torch.sparse_coo; only"),
    "gaps": (lambda m: [("b", torch.ones(4, 4)[:, ::2].requires_grad_())], r"b has strides.*\.contiguous\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", PARAMS)
def test_params(what):
    make, message = PARAMS[what]
    refused(lambda model: FusedOptimizer(make(model), lr=LR), message)
    refused(lambda model: forge.fuse(model, lr=LR, param_groups=make(model)), message)


def test_a_parameter_list_is_a_list():
    params = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
    for given in (params, [{"params": params}]):
        optimizer = FusedOptimizer(given, lr=LR)
        assert optimizer.param_groups[0]["params"] == list(params)
        optimizer.release()


def test_params_are_called_what_the_caller_calls_them():
    refused(lambda model: FusedOptimizer(model), "^params is a module")
    refused(lambda model: forge.fuse(model, param_groups=model), "^param_groups is a module")
    refused(lambda model: FusedOptimizer(None), "^params=None")


@pytest.mark.parametrize("what", [name for name in PARAMS if "group" in name and name != "one group"])
def test_add_param_group(what):
    make, message = PARAMS[what]
    model = mlp()
    optimizer = FusedOptimizer(mlp().parameters(), lr=LR)
    group = make(model)[-1]
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
        optimizer.add_param_group(group)
    assert len(optimizer._records) == sum(len(g["params"]) for g in optimizer.param_groups)


def test_a_model_on_meta_is_refused_with_the_name_of_its_weight():
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device: give it memory \(to_empty"):
        forge.fuse(model, lr=LR)
    assert type(model[0]) is nn.Linear


def test_groups_with_and_without_names_can_follow_each_other():
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    named, bare = FusedOptimizer([("a", a)], lr=LR), FusedOptimizer([b], lr=LR)
    named.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    bare.add_param_group({"params": [("c", c)]})
    assert named.param_groups[1]["param_names"] == ["parameter 1"] and bare.name_of(c) == "c"


# -- what messages show of a value -----------------------------------------------------------------------------------

LARGE = {
    "tensor": (lambda: torch.ones(100, 100), r"a Tensor of shape \(100, 100\)"),
    "list of tensors": (lambda: [torch.ones(100, 100)] * 300, "a list of length 300"),
    "tuple": (lambda: tuple(range(10_000)), "a tuple of length 10000"),
    "dict": (lambda: {"a": torch.ones(100, 100)}, "a dict of length 1"),
    "string": (lambda: "x" * 10_000, "a str of length 10000"),
    "int": (lambda: -(10**10_000), "an int"),
    "module": (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 100), "a Sequential of length 100"),
}
TAKES = {
    "rule": lambda value: FusedOptimizer(mlp().parameters(), value),
    "state": lambda value: FusedOptimizer(mlp().parameters(), state=value),
    "weight": lambda value: FusedOptimizer(mlp().parameters(), weight=value),
    "lr": lambda value: FusedOptimizer(mlp().parameters(), lr=value),
    "betas": lambda value: FusedOptimizer(mlp().parameters(), betas=(0.9, value)),
    "dampening": lambda value: FusedOptimizer(mlp().parameters(), "sgd", dampening=[value]),
    "maximize": lambda value: FusedOptimizer(mlp().parameters(), maximize=value),
    "seed": lambda value: FusedOptimizer(mlp().parameters(), seed=[value]),
    "params": lambda value: FusedOptimizer([[value], [value]]),
    "params of a group": lambda value: FusedOptimizer([{"params": [[value]]}]),
    "a group": lambda value: FusedOptimizer([{"params": [nn.Parameter(torch.ones(2))]}, {"lr": value}]),
    "exclude": lambda value: forge.convert(mlp(), [[value]]),
    "tokens": lambda value: training_memory(mlp(), when="step", tokens=[value]),
    "shape": lambda value: training_memory({"a": [value, "x"]}),
}


@pytest.mark.parametrize("what", TAKES)
@pytest.mark.parametrize("value", LARGE)
def test_messages_stay_short(what, value):
    with pytest.raises(ValueError) as caught:
        TAKES[what](LARGE[value][0]())
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", LARGE)
def test_messages_name_type_and_size(value):
    make, message = LARGE[value]
    refused(lambda model: forge.fuse(model, lr=make()), f"Invalid lr value: {message}")


@pytest.mark.parametrize("value", [-1.0, "0.1", None, (1.0, 2), torch.tensor(-1.0), torch.float32], ids=repr)
def test_short_values_are_shown_in_full(value):
    refused(lambda model: forge.fuse(model, lr=value), re.escape(f"Invalid lr value: {value!r};"))


def test_parameters_in_two_lists():
    params = [nn.Parameter(torch.ones(100, 100)) for _ in range(300)]
    with pytest.raises(ValueError, match="^one of params is a list of length 300: a tensor or"):
        FusedOptimizer([params, params])


# -- the manager -------------------------------------------------------------------------------------------------------


def managed():
    torch.manual_seed(0)
    layers = [forge.FusedLinear.from_linear(nn.Linear(4, 4), rule, "fp32", lr=LR) for rule in ("adamw", "lion")]
    model = nn.Sequential(*layers)
    return model, FusedOptimizerManager(model)


@pytest.mark.parametrize(
    "arguments, message",
    [({"lr": value}, "Invalid lr value.*at least 0") for value in [*NO_NUMBERS[1:], -1.0]]
    + [
        ({"betas": 0.9}, r"betas.*\[0, 1\)"),
        ({"maximize": "x"}, "maximize='x'.*True or False"),
        ({"seed": 0.5}, "seed=0.5.*integer"),
        ({"momentum": 0.9}, "momentum is not a hyper-parameter of adamw"),
        ({"per_layer": ["0"]}, "per_layer=.*dict"),
        ({"per_layer": {"0": 1e-3}}, "per_layer=.*dict"),
        ({"per_layer": "0"}, "per_layer=.*dict"),
        ({"per_layer": {"nothing": {"lr": 1e-3}}}, "per_layer: 'nothing'"),
        ({"per_layer": {"1": {"lr": None}}}, "Invalid lr value"),
    ],
    ids=repr,
)
def test_pre_step(arguments, message):
    _, manager = managed()
    before = {name: dict(group) for name, group in manager._groups.items()}
    with pytest.raises(ValueError, match=message):
        manager.pre_step(**{"weight_decay": 0.5, **arguments})
    assert all(group == before[name] for name, group in manager._groups.items())


@pytest.mark.parametrize("seed", [None, True, 0.5, "1"])
def test_a_manager_s_seed(seed):
    model, manager = managed()
    del manager
    with pytest.raises(ValueError, match="seed=.*integer"):
        FusedOptimizerManager(model, seed=seed)
    FusedOptimizerManager(model)  # nothing was claimed


@pytest.mark.parametrize("saved", [None, 1, [], {}, {"state": {}}, {"param_groups": []}], ids=repr)
def test_a_state_dict_that_is_none(saved):
    model, manager = managed()
    optimizer = forge.fuse(mlp(), lr=LR)
    with pytest.raises(ValueError, match="state_dict must have 'state' and 'param_groups'"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="state_dict"):
        manager.load_state_dict(saved)
    with pytest.raises(ValueError, match="state_dict must have"):
        manager.load_state_dict(dict.fromkeys(manager.state_dict(), saved))
    assert model is manager._model


@pytest.mark.parametrize("spoiled", ["adamw/fp32", "lion/fp32"])
def test_a_manager_loads_all_or_nothing(spoiled):
    model, manager = managed()
    for _ in range(2):
        manager.pre_step()
        model(torch.ones(2, 4)).sum().backward()
    saved = manager.state_dict()
    manager.pre_step()
    model(torch.ones(2, 4)).sum().backward()
    manager.pre_step(lr=0.5)
    bad = {**saved, spoiled: {**saved[spoiled], "state": {0: {"step": 1, "exp_avg": torch.ones(3)}}}}
    with pytest.raises(ValueError, match=re.escape("exp_avg of")):
        manager.load_state_dict(bad)
    now = manager.state_dict()
    assert all(int(s["state"][0]["step"]) == 3 and s["param_groups"][0]["lr"] == 0.5 for s in now.values())


def test_a_state_that_is_no_tensor_is_named():
    p = nn.Parameter(torch.zeros(2))
    optimizer = FusedOptimizer([("p", p)], lr=LR)
    bad = {**optimizer.state_dict(), "state": {0: {"step": 1, "exp_avg": 0.5}}}
    with pytest.raises(ValueError, match="exp_avg of p is a float"):
        optimizer.load_state_dict(bad)
    assert not optimizer.state
