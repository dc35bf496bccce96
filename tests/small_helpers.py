"""A model with small dense parameters, and a count of the launches that step them together."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from fused_grad_optimizer import _small

LR = 1e-2


class Calls:
    """Counts launches of `multi_step`, and how many parameters each took."""

    def __init__(self, monkeypatch):
        self.sizes = []
        launch = _small._launch

        def counted(optimizer, buckets):
            self.sizes.append(sum(len(bucket) for _, bucket in buckets))
            launch(optimizer, buckets)

        monkeypatch.setattr(_small, "_launch", counted)


def gather(monkeypatch) -> Calls:
    """Switch gathering on for the CPU."""
    monkeypatch.setattr(_small, "pays", lambda device, dtype: True)
    return Calls(monkeypatch)


def groups_of(model, **groups_by_name):
    """Parameter groups that cover the model: those named, then all others."""
    made = dict(model.named_parameters())
    groups = [{"params": [made.pop(n) for n in names], **hyper} for names, hyper in groups_by_name.values()]
    return [*groups, {"params": list(made.values())}]


def model_of(dtype=torch.float32):
    """Four linears with biases and two norms: 8 small dense parameters, 4 factored weights, an embedding."""
    torch.manual_seed(0)
    block = [nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)]
    return nn.Sequential(
        nn.Embedding(7, 8), *copy.deepcopy(block), *copy.deepcopy(block)[:2], nn.Tanh(), nn.Linear(12, 3)
    ).to(dtype)  # fmt: skip


DENSE = [name for name, p in model_of().named_parameters() if p.dim() == 1]
IDS = torch.tensor([[0, 1, 2, 6], [3, 3, 4, 0]])


def loss_of(model, i, scale=1.0):
    return (model((IDS + i) % 7).float() * scale).square().mean()


def result(model, optimizer):
    """Everything that training leaves: weights, states, step counts, skips."""
    state = optimizer.state_dict()["state"]
    tensors = [p.detach().clone() for p in model.parameters()]
    for key in sorted(state):
        tensors += [torch.as_tensor(state[key][name]) for name in sorted(state[key])]
    return tensors, optimizer.skipped


def assert_both_ways(monkeypatch, run):
    """`run()` gives the same bits, skips and warnings with each stepped at once and with gathering."""
    found = []
    for on in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(_small, "pays", lambda device, dtype, on=on: on)
            calls = Calls(patch)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tensors, *others = run()
            assert bool(calls.sizes) == on
            found.append((tensors, [*others, sorted(str(w.message) for w in caught)]))
    assert len(found[0][0]) == len(found[1][0]) > 1
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def trained(make_optimizer, steps=3, dtype=torch.float32, after=lambda model, optimizer, i: None, loss=loss_of):
    model = model_of(dtype)
    optimizer = make_optimizer(model)
    for i in range(steps):
        loss(model, i).backward()
        after(model, optimizer, i)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)
