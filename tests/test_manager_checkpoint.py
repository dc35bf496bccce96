"""Updates in backward when layers sit in reentrant checkpoints, whose segments are backwards inside a backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedLinear, FusedOptimizerManager

from .cases.helpers import Explode

LR = 1e-2
ONE = ("fp32", "fp32", "fp32")  # one optimizer for all layers
TWO = ("fp32", None, "fp32")  # two optimizers; both keep fp32 states
# torch says so of a checkpoint in a checkpoint, whose first forward runs without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
KINDS = pytest.mark.parametrize("state_modes", [ONE, TWO], ids=["one optimizer", "two optimizers"])


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On a GPU the hooks run on a thread of autograd's engine, whose stack does not hold the outermost call."""
    with torch.device(request.param):
        yield


class Stack(nn.Module):
    """Three linears. `plan` says how each is run: c in a checkpoint, d directly; `nest` puts all into one more.

    `explode`: the layer whose output (inside its checkpoint, or after it) raises in backward.
    """

    def __init__(self, plan="ccc", nest=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.plan, self.nest, self.explode, self.inside = plan, nest, None, False

    def segment(self, i, x):
        y = self.layers[i](x).tanh()
        return Explode.apply(y) if self.explode == i and self.inside else y

    def run(self, x):
        for i, how in enumerate(self.plan):
            x = checkpoint(self.segment, i, x, use_reentrant=True) if how == "c" else self.segment(i, x)
            if self.explode == i and not self.inside:
                x = Explode.apply(x)
        return x

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=True) if self.nest else self.run(x)


def data(seed):
    x = torch.randn(4, 6, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device()).requires_grad_()


def managed(state_modes, **settings):
    """`(model, its manager, AdamW of the biases, a dense copy, AdamW of the copy)`."""
    model = Stack(**settings)
    dense = copy.deepcopy(model)
    for i, mode in enumerate(state_modes):
        model.layers[i] = FusedLinear.from_linear(model.layers[i], "adamw", mode)
    manager = FusedOptimizerManager(model)
    biases = torch.optim.AdamW(manager.get_non_fused_params(), lr=LR)
    return model, manager, biases, dense, torch.optim.AdamW(dense.parameters(), lr=LR)


def backward(model, seed, *optimizers):
    model(data(seed)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(model, layer, seed):
    checkpoint(model.segment, layer, data(seed), use_reentrant=True).square().sum().backward()


def snapshot(model):
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def gap(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))


@KINDS
@pytest.mark.parametrize("nest", [False, True])
@pytest.mark.parametrize("plan", ["ccc", "dcc", "cdc", "ccd", "dcd"])
def test_weights_equal_adamw(state_modes, plan, nest):
    model, manager, biases, dense, adamw = managed(state_modes, plan=plan, nest=nest)
    for i in range(4):
        manager.pre_step(lr=LR)
        backward(model, i, biases)
        backward(dense, i, adamw)
    assert gap(model, dense) <= 1e-3 * LR * 4


@KINDS
@pytest.mark.parametrize("nest", [False, True])
@pytest.mark.parametrize("plan", ["ccc", "dcc", "ccd"])
def test_a_forgotten_pre_step_is_an_error_before_anything_changes(state_modes, plan, nest):
    model, manager, biases, dense, adamw = managed(state_modes, plan=plan, nest=nest)
    for i in range(2):
        manager.pre_step(lr=LR)
        backward(model, i, biases)
        backward(dense, i, adamw)
        before = snapshot(model)
        for _ in range(2):  # and it stays forgotten
            with pytest.raises(RuntimeError, match="pre_step"):
                backward(model, 7)
        assert unchanged(model, before)
        biases.zero_grad()
    assert gap(model, dense) <= 1e-3 * LR * 2


@KINDS
def test_a_layer_that_the_first_backward_left_out_is_not_stepped_by_a_second_one(state_modes):
    model, manager, biases, *_ = managed(state_modes)
    for layer in (0, 1, 2):
        manager.pre_step(lr=LR)
        checkpointed(model, layer, seed=0)
        before = snapshot(model)
        for other in {0, 1, 2} - {layer}:
            with pytest.raises(RuntimeError, match=r"manager\.pre_step\(lr=.*nothing was changed"):
                checkpointed(model, other, seed=1)
        assert unchanged(model, before)


@KINDS
def test_a_forgotten_first_pre_step_is_an_error(state_modes):
    model, manager, biases, *_ = managed(state_modes)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"manager\.pre_step\(lr="):
        backward(model, 0)
    assert unchanged(model, before)
    biases.zero_grad()
    manager.pre_step(lr=LR)
    backward(model, 0, biases)
    assert not unchanged(model, before)


@KINDS
@pytest.mark.parametrize("inside", [False, True], ids=["between segments", "inside a segment"])
def test_an_exception_names_all_layers_that_moved(state_modes, inside):
    model, manager, biases, dense, adamw = managed(state_modes)
    model.explode, model.inside = 0, inside
    manager.pre_step(lr=LR)
    with pytest.raises(KeyError, match="boom"):
        backward(model, 0)
    with pytest.raises(RuntimeError, match=r"had updated layers\.2\.weight, layers\.1\.weight; the other"):
        manager.pre_step(lr=LR)
    model.explode = None
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"manager\.pre_step\(lr="):  # that pre_step opened nothing
        backward(model, 0)
    assert unchanged(model, before)
    biases.zero_grad()
    dense.load_state_dict(model.state_dict())
    manager.pre_step(lr=LR)  # said once; training goes on
    backward(model, 1, biases)
    assert not unchanged(model, before) and all(layer.weight.grad is not None for layer in model.layers)
    manager.pre_step()
    assert all(layer.weight.grad is None for layer in model.layers)


@KINDS
def test_an_exception_names_layers_of_every_optimizer_without_checkpoints_too(state_modes):
    model, manager, *_ = managed(state_modes, plan="ddd")
    model.explode = 0
    manager.pre_step(lr=LR)
    with pytest.raises(KeyError, match="boom"):
        backward(model, 0)
    with pytest.raises(RuntimeError, match=r"had updated layers\.2\.weight, layers\.1\.weight; the other"):
        manager.pre_step(lr=LR)


def test_a_backward_after_one_that_failed_is_refused_until_it_was_said():
    model, manager, *_ = managed(TWO)
    manager.pre_step(lr=LR)
    model.explode = 1
    with pytest.raises(KeyError, match="boom"):
        backward(model, 0)
    model.explode = None
    before = snapshot(model)
    for run in (lambda: backward(model, 1), lambda: checkpointed(model, 0, 1)):
        with pytest.raises(RuntimeError, match=r"had updated layers\.2\.weight; the other|already applied"):
            run()
    assert unchanged(model, before)
    with pytest.raises(RuntimeError, match=r"had updated layers\.2\.weight; the other"):
        manager.pre_step(lr=LR)


def test_a_branch_outside_the_checkpoint_is_part_of_the_same_backward():
    model, manager, biases, dense, adamw = managed(TWO)
    for i in range(3):
        manager.pre_step(lr=LR)
        for net, optimizer in ((model, biases), (dense, adamw)):
            x = data(i)
            direct = net.layers[0](x).square().sum()
            through = checkpoint(net.segment, 1, x, use_reentrant=True)
            through = checkpoint(net.segment, 2, through, use_reentrant=True)
            (direct + through.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gap(model, dense) <= 1e-3 * LR * 3


# -- the same for one optimizer of a whole model -------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["ccc", "dcc", "cdc", "ccd"])
def test_fuse_equals_adamw_and_refuses_a_second_backward(plan):
    model = Stack(plan)
    dense = copy.deepcopy(model)
    optimizer, adamw = forge.fuse(model, "adamw", lr=LR), torch.optim.AdamW(dense.parameters(), lr=LR)
    for i in range(3):
        backward(model, i)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=r"second backward before step\(\)"):
            backward(model, 7)
        assert unchanged(model, before)
        optimizer.step()
        optimizer.zero_grad()
        backward(dense, i, adamw)
    assert gap(model, dense) <= 1e-3 * LR * 3


def test_fuse_refuses_a_second_backward_through_a_layer_that_the_first_left_out():
    model = Stack()
    optimizer = forge.fuse(model, "adamw", lr=LR)
    for _ in range(2):
        checkpointed(model, 2, seed=0)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=r"second backward before step\(\): the gradients of layers\.2\."):
            checkpointed(model, 1, seed=1)
        assert unchanged(model, before)
        optimizer.step()


@pytest.mark.parametrize("inside", [False, True], ids=["between segments", "inside a segment"])
def test_fuse_says_that_a_backward_failed(inside):
    model = Stack()
    model.explode, model.inside = 0, inside
    optimizer = forge.fuse(model, "adamw", lr=LR)
    with pytest.raises(KeyError, match="boom"):
        backward(model, 0)
    with pytest.raises(RuntimeError, match=r"had updated .*layers\.1\.weight"):
        optimizer.step()
    model.explode = None
    backward(model, 0, optimizer)
