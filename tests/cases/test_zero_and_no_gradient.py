"""A gradient of zero is a step (decay, momentum, step count); no gradient is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .helpers import BOTH, LR, both, data, gap, mlp, passes, snapshot, unchanged


class Experts(nn.Module):
    """Two experts chosen by token, and a layer that is used in some steps only."""

    def __init__(self):
        super().__init__()
        self.e = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.u = nn.Linear(4, 4)

    def forward(self, x, route, use):
        total = sum(self.e[k](x[route == k]).pow(2).sum() for k in range(2))
        return total + (self.u(x).pow(2).sum() if use else 0)


def run_experts(when, **hyper):
    a, oa, b, ob = both(Experts, when, weight_decay=0.1, **hyper)
    moved = []
    for i in range(4):
        route = torch.arange(6) % 2 if i == 0 else torch.zeros(6, dtype=torch.long)
        before = [p.detach().clone() for p in (b.e[1].weight, b.u.weight)]
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(data(i, 6, 4), route, i in (0, 3)).backward()
            optimizer.step()
        moved.append([(p - q).abs().max().item() for p, q in zip((b.e[1].weight, b.u.weight), before)])
    return a, b, ob, moved


@BOTH
def test_empty_expert_steps_and_unused_layer_does_not(when):
    a, b, ob, moved = run_experts(when)
    assert passes(a, b, 4)
    assert all(expert > 1e-3 for expert, _ in moved)
    assert [unused > 0 for _, unused in moved] == [True, False, False, True]
    assert [ob.state[p]["step"] for p in (b.e[0].weight, b.e[1].weight, b.e[1].bias, b.u.weight)] == [4, 4, 4, 2]


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_the_same_with_lossy_states(when, state):
    a, b, ob, moved = run_experts(when, state=state)
    assert gap(a, b) < 0.02 * LR * 4 * 10
    assert [unused > 0 for _, unused in moved] == [True, False, False, True]
    assert [ob.state[p]["step"] for p in (b.e[1].weight, b.u.weight)] == [4, 2]


@BOTH
def test_an_expert_that_never_saw_a_token_decays(when):
    a, oa, b, ob = both(Experts, when, weight_decay=0.1)
    first = b.e[1].weight.detach().clone()
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(data(i, 6, 4), torch.zeros(6, dtype=torch.long), False).backward()
            optimizer.step()
    assert passes(a, b, 3)
    assert torch.allclose(b.e[1].weight, first * (1 - LR * 0.1) ** 3, rtol=1e-6)
    assert b.u.weight not in ob.state or not ob.state[b.u.weight]


@BOTH
def test_decay_alone_at_gradient_zero(when):
    a, oa, b, ob = both(mlp, when, weight_decay=0.1)
    first = b[0].weight.detach().clone()
    for model, optimizer in ((a, oa), (b, ob)):
        for i in range(3):
            optimizer.zero_grad()
            (model(data(i, 7, 6)).sum() * 0).backward()
            optimizer.step()
    assert passes(a, b, 3)
    assert torch.allclose(b[0].weight, first * (1 - LR * 0.1) ** 3, rtol=1e-6)


@BOTH
def test_steps_without_any_gradient_move_nothing(when):
    _, _, b, ob = both(mlp, when, weight_decay=0.1)
    before = snapshot(b)
    ob.step()
    ob.zero_grad()
    ob.step()
    assert unchanged(b, before)
    b(data(0, 4, 6)).sum().backward()
    ob.step()
    ob.zero_grad()
    before = snapshot(b)
    ob.step()
    assert unchanged(b, before) and ob.state[b[0].weight]["step"] == 1


@pytest.mark.parametrize("clear", ["optimizer", "by hand"])
def test_zeroed_gradients_are_gradients_of_zero(clear):
    """After zero_grad(set_to_none=False) dense steps every parameter that had a gradient; so does this."""
    a, oa, b, ob = both(mlp, "step", weight_decay=0.1)
    for model, optimizer in ((a, oa), (b, ob)):
        model(data(0, 4, 6)).square().sum().backward()
        optimizer.step()
        if clear == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        else:
            for p in model.parameters():
                p.grad.zero_()
        optimizer.step()
        model(data(1, 4, 6)).square().sum().backward()
        optimizer.step()
    assert passes(a, b, 3)
    assert ob.state[b[0].weight]["step"] == 3


@BOTH
def test_set_to_none_false_in_a_usual_loop(when):
    a, oa, b, ob = both(mlp, when)
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad(set_to_none=False)
            model(data(i, 4, 6)).square().sum().backward()
            optimizer.step()
    assert passes(a, b, 3)


@BOTH
def test_an_embedding_called_with_no_ids(when):
    a, oa, b, ob = both(lambda: nn.Embedding(5, 3), when, weight_decay=0.1)
    for ids in ([0, 1], [], [], [2]):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(torch.tensor(ids, dtype=torch.long)).square().sum().backward()
            optimizer.step()
    assert passes(a, b, 4) and ob.state[b.weight]["step"] == 4


@BOTH
def test_an_output_that_does_not_reach_the_loss(when):
    """Called, but its output is dropped: no gradient, so no decay."""
    a, oa, b, ob = both(Experts, when, weight_decay=0.1)
    for i in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model.u(data(i, 2, 4))
            model.e[0](data(i, 2, 4)).square().sum().backward()
            optimizer.step()
    assert passes(a, b, 3) and len(ob.state) == 2
