"""States follow their parameter to another memory layout, and are refused when its shape has changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedOptimizer, _small

from .helpers import BOTH, LR, data, passes, ref, train

GATHERED = pytest.mark.parametrize("gathered", [False, True])


def to_channels_last(model):
    model.to(memory_format=torch.channels_last)


def to_contiguous(model):
    model.weight.data = model.weight.data.contiguous()


@BOTH
@pytest.mark.parametrize("first, then", [(to_contiguous, to_channels_last), (to_channels_last, to_contiguous)])
def test_a_convolution_changes_its_memory_format(when, first, then):
    a = nn.Conv2d(4, 4, 3, bias=False)
    first(a)
    b = copy.deepcopy(a)
    oa, ob = ref(a), forge.fuse(b, when=when, lr=LR, weight_decay=0.01)

    def loss(model, i):
        return model(data(i, 2, 4, 5, 5)).square().sum()

    train(a, oa, b, ob, loss, 2)
    then(a)
    then(b)
    train(a, oa, b, ob, lambda m, i: loss(m, i + 2), 2)
    assert passes(a, b, 4)
    for name in ("exp_avg", "exp_avg_sq"):
        wanted, got = oa.state[a.weight][name], ob.state[b.weight][name]
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6) and got.stride() == b.weight.stride()


@GATHERED
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_a_state_of_other_strides_is_updated(monkeypatch, gathered, shape):
    monkeypatch.setattr(_small, "pays", lambda device, dtype: gathered)
    p, q = (nn.Parameter(data(0, *shape)) for _ in range(2))
    mine, dense = FusedOptimizer([p], lr=LR, when="step"), torch.optim.AdamW([q], lr=LR)
    for i in range(4):
        p.grad, q.grad = data(i + 1, *shape), data(i + 1, *shape)
        mine.step()
        dense.step()
        if i == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                state = mine.state[p][name]
                mine.state[p][name] = state.transpose(0, 1).contiguous().transpose(0, 1)
    assert (p - q).abs().max() < 1e-3 * LR
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(mine.state[p][name], dense.state[q][name], rtol=1e-5, atol=1e-8)


def test_states_of_unchanged_layout_keep_their_memory():
    shapes = [(), (0, 3), (1, 1), (4, 1, 3, 3), (3, 4)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    parameters.append(nn.Parameter(torch.ones(3, 4).t()))
    parameters.append(nn.Parameter(torch.ones(4, 1, 3, 3).to(memory_format=torch.channels_last)))
    optimizer = FusedOptimizer(parameters, lr=LR, when="step")
    kept = []
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        kept.append([optimizer.state[p]["exp_avg"] for p in parameters])
    assert all(a is b is c for a, b, c in zip(*kept))


# -- other shapes ------------------------------------------------------------------------------------------------------


def two_parameters(monkeypatch, gathered, rule="adamw", when="step"):
    """Stepped once, in which their values are 1 and their gradients 1."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: gathered)
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = FusedOptimizer([("a", a), ("b", b)], rule, lr=LR, when=when)
    (a.sum() + b.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return a, b, optimizer


@GATHERED
@pytest.mark.parametrize("shape", [(6,), (2,), (3, 1)])
def test_a_gradient_of_another_shape_is_refused_before_anything_moves(monkeypatch, gathered, shape):
    a, b, optimizer = two_parameters(monkeypatch, gathered)
    before, kept = a.detach().clone(), torch.ones(shape)
    a.grad, b.grad = torch.ones(2), torch.ones(3)
    b.data = kept.clone()
    with pytest.raises(ValueError, match=r"gradient of b has shape \(3,\).*zero_grad"):
        optimizer.step()
    assert torch.equal(a, before) and torch.equal(b, kept)
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 1


@GATHERED
@pytest.mark.parametrize("shape", [(6,), (2,), (3, 1)])
def test_a_state_of_another_shape_is_refused_and_popped(monkeypatch, gathered, shape):
    _, b, optimizer = two_parameters(monkeypatch, gathered)
    states = copy.deepcopy(optimizer.state[b])
    b.data = torch.ones(shape)
    b.grad = torch.full(shape, 2.0)
    with pytest.raises(ValueError, match=r"exp_avg of b has shape \(3,\).*optimizer\.state\.pop"):
        optimizer.step()
    assert torch.equal(b, torch.ones(shape))
    assert all(torch.equal(states[n], optimizer.state[b][n]) for n in ("exp_avg", "exp_avg_sq"))
    assert optimizer.state[b]["step"] == 1
    optimizer.state.pop(b)
    optimizer.step()
    dense = nn.Parameter(torch.ones(shape))
    dense.grad = torch.full(shape, 2.0)
    torch.optim.AdamW([dense], lr=LR).step()
    assert torch.allclose(b, dense, rtol=0, atol=1e-3 * LR) and optimizer.state[b]["step"] == 1


@GATHERED
def test_a_parameter_without_states_takes_another_shape_in_backward(monkeypatch, gathered):
    _, b, optimizer = two_parameters(monkeypatch, gathered, "sgd", "backward")
    b.data = torch.zeros(6)
    (2 * b).sum().backward()
    optimizer.step()
    assert torch.allclose(b, torch.full((6,), -2 * LR)) and b.grad is None


# -- memory with gaps --------------------------------------------------------------------------------------------------

# shape of a tensor -> a view of it that no order of dimensions makes contiguous
GAPS = {
    "1-D": ((12,), lambda t: t[::2]),
    "2-D, every other column": ((4, 6), lambda t: t[:, ::2]),
    "2-D, part of the columns": ((4, 6), lambda t: t[:, :3]),
    "2-D, every other row": ((8, 3), lambda t: t[::2]),
    "2-D, transposed": ((6, 4), lambda t: t[::2].t()),
    "2-D, one row for all": ((1, 3), lambda t: t.expand(4, 3)),
    "3-D": ((4, 6, 5), lambda t: t[:, ::2]),
    "4-D": ((4, 6, 3, 3), lambda t: t[:, ::2]),
    "4-D, channels last": ((4, 6, 3, 3), lambda t: t.to(memory_format=torch.channels_last)[:, :3]),
}
WITH_GAPS = pytest.mark.parametrize("gaps", GAPS)


def memory_with_gaps(gaps):
    """`(memory, view of it)`, all 0."""
    shape, view = GAPS[gaps]
    seen = view(torch.zeros(shape))
    return torch.empty(0).set_(seen.untyped_storage()), seen


@GATHERED
@BOTH
@WITH_GAPS
def test_new_memory_with_gaps_is_refused_before_anything_moves(monkeypatch, gathered, when, gaps):
    monkeypatch.setattr(_small, "pays", lambda device, dtype: gathered)
    memory, seen = memory_with_gaps(gaps)
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(seen.shape))
    optimizer = FusedOptimizer([("a", a), ("b", b)], lr=LR, when=when)
    wanted = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(seen.shape))]
    dense = torch.optim.AdamW(wanted, lr=LR)

    def backward(x, y):
        (2 * x.sum() + (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()).backward()

    b.data = seen
    with pytest.raises(ValueError, match=r"b has strides .* leave gaps.*\.contiguous\(\)"):
        backward(a, b)
        optimizer.step()
    assert not memory.any() and not a.any() and not optimizer.state
    b.data = b.data.contiguous()
    for parameters, chosen in (((a, b), optimizer), (wanted, dense)):
        chosen.zero_grad()
        backward(*parameters)
        chosen.step()
    assert not memory.any()
    assert all((p - q).abs().max() <= 1e-3 * LR for p, q in zip((a, b), wanted))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("gaps", [*GAPS, "512 x 256"])
def test_gaps_on_a_gpu_are_refused_and_their_neighbours_stay(when, gaps):
    shape, view = GAPS.get(gaps, ((512, 512), lambda t: t[:, ::2]))
    seen = view(torch.zeros(shape, device="cuda"))
    b = nn.Parameter(torch.zeros(seen.shape, device="cuda"))
    optimizer = FusedOptimizer([("b", b)], lr=LR, when=when)
    for i in range(3):
        if i == 2:  # a plan is made by then
            b.data = seen
            with pytest.raises(ValueError, match=r"b has strides .*\.contiguous\(\)"):
                b.sum().backward()
                optimizer.step()
            break
        b.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.empty(0, device="cuda").set_(seen.untyped_storage()).any()


@BOTH
def test_a_parameter_with_gaps_that_is_not_stepped_is_left_alone(when):
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    optimizer = FusedOptimizer([a, b], "sgd", lr=1.0, when=when)
    b.data = torch.zeros(4, 6)[:, ::2]
    a.sum().backward()
    optimizer.step()
    assert torch.equal(a, torch.full((3,), -1.0))


BAD = {
    "gaps": lambda: torch.zeros(4, 6)[:, ::2],
    "complex": lambda: torch.zeros(4, 3, dtype=torch.complex64),
}


@BOTH
@pytest.mark.parametrize("bad", BAD)
def test_a_trainable_parameter_that_the_backward_does_not_come_to_stops_nothing(when, bad):
    a, b, c = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([("a", a), ("b", b), ("c", c)], "sgd", lr=1.0, when=when)
    b.data = BAD[bad]()
    for _ in range(2):
        (a.sum() + 2 * c.sum() + b.detach().abs().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.autograd.backward(a.sum() + b.abs().sum(), inputs=[a])
    optimizer.step()
    assert torch.equal(a, torch.full((3,), -3.0)) and torch.equal(c, torch.full((3,), -4.0)) and b.grad is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["first", "last"])
def test_gaps_inside_a_checkpoint_are_refused_and_nothing_is_lost(reentrant, where):
    """A reentrant segment that runs after other updates is seen too late to stop them: then `step()` names them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = forge.fuse(model, "sgd", lr=LR, when="backward")
    before = [p.detach().clone() for p in model.parameters()]
    x = data(0, 3, 4).requires_grad_()
    bad = model[1].weight
    bad.data = torch.stack([before[2], before[2]], 2)[..., 0]
    y = checkpoint(model[1], model[0](x), use_reentrant=reentrant)
    loss = model[2](y) if where == "first" else y
    with pytest.raises(ValueError, match=r"1\.weight has strides .*\.contiguous\(\)"):
        loss.square().sum().backward()
    moved = [n for (n, p), q in zip(model.named_parameters(), before) if not torch.equal(p, q)]
    assert "1.weight" not in moved and bad.grad is None
    if moved:
        assert reentrant and where == "first"
        with pytest.raises(RuntimeError, match="after it had updated") as caught:
            optimizer.step()
        assert all(name in str(caught.value) for name in moved)
    bad.data = bad.data.contiguous()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@BOTH
def test_a_linear_layer_with_gaps_is_refused(when):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = forge.fuse(model, lr=LR, when=when)
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.data = torch.stack([before[0], before[0]], 2)[..., 0]
    with pytest.raises(ValueError, match=r"0\.weight has strides .*\.contiguous\(\)"):
        model(data(0, 3, 6)).sum().backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)) and not optimizer.state


def test_a_manager_refuses_gaps_when_the_step_is_opened():
    layers = [forge.FusedLinear.from_linear(nn.Linear(4, 4), rule, lr=LR) for rule in ("adamw", "lion")]
    manager = forge.FusedOptimizerManager(nn.Sequential(*layers))
    layers[1].weight.data = torch.zeros(4, 8)[:, ::2]
    with pytest.raises(ValueError, match=r"1\.weight has strides .*\.contiguous\(\)"):
        manager.pre_step(lr=1.0)
    assert manager._groups["0"]["lr"] == LR


@BOTH
def test_a_dtype_that_is_not_offered_is_refused_before_anything_moves(when):
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([("a", a), ("b", b)], lr=LR, when=when)
    b.data = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"b: weights of dtype torch.complex64"):
        (a.sum() + b.abs().sum()).backward()
        optimizer.step()
    assert not a.any() and not optimizer.state


@GATHERED
@BOTH
@pytest.mark.parametrize("gaps", [name for name in GAPS if "one row" not in name])
def test_gradients_and_states_with_gaps_are_taken(monkeypatch, gathered, when, gaps):
    """A gradient keeps its strides where a hook or a user gave them; a state is moved to its parameter's."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: gathered)
    shape = memory_with_gaps(gaps)[1].shape
    p, q = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
    mine, dense = FusedOptimizer([p], lr=LR, when=when), torch.optim.AdamW([q], lr=LR)
    for i in range(3):
        strided = memory_with_gaps(gaps)[1]
        strided += data(i, *shape)
        if i == 1:
            for state in (mine.state[p], dense.state[q]):
                moved = memory_with_gaps(gaps)[1]
                state["exp_avg"] = moved.copy_(state["exp_avg"])
        q.grad = strided.clone()
        if when == "backward":
            handle = p.register_hook(lambda _, strided=strided: strided)
            p.sum().backward()
            handle.remove()
        else:
            p.grad = strided
        mine.step()
        dense.step()
    assert (p - q).abs().max() <= 1e-3 * LR * 3
    assert torch.allclose(mine.state[p]["exp_avg"], dense.state[q]["exp_avg"], rtol=1e-5, atol=1e-7)
