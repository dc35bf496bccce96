"""A model on two GPUs: autograd calls hooks on one thread for each device, and their first updates may come together.

Here two threads stand for them. What begins a pass is held up where it would meet the other thread.
"""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import _backward_pass, _hooks
from fused_grad_optimizer._flags import SkipFlags

from .helpers import LR, data


class OneBackward:
    """Calls the hooks of two parameters from two threads, as those of one backward with the number `task`."""

    def __init__(self, monkeypatch) -> None:
        self.task = 1
        self.ends: list = []
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: self.task)
        monkeypatch.setattr(_backward_pass, "_at_end", self.ends.append)
        monkeypatch.setattr(_backward_pass, "is_nested", lambda: False)

    def run(self, optimizer: forge.FusedOptimizer, parameters: list[torch.Tensor]) -> list[BaseException]:
        barrier, failed = threading.Barrier(len(parameters)), []

        def hook(parameter: torch.Tensor) -> None:
            barrier.wait()
            try:
                with torch.no_grad():
                    _hooks._update_in_backward(weakref.ref(optimizer), parameter)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=hook, args=(p,)) for p in parameters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        for end in self.ends:
            end()
        self.ends.clear()
        self.task += 1
        return failed


def slowly(monkeypatch, owner, name: str) -> list[int]:
    """Calls of the function take long enough for the other thread to come; returns a list that counts them."""
    function, calls = getattr(owner, name), []

    def slow(*args, **kwargs):
        calls.append(1)
        time.sleep(0.05)
        result = function(*args, **kwargs)
        time.sleep(0.05)
        return result

    monkeypatch.setattr(owner, name, slow)
    return calls


PLACES = [(_backward_pass, "_refuse_scaled"), (_backward_pass.BackwardPass, "_watch"), (SkipFlags, "begin")]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_two_first_updates_are_one_pass(monkeypatch, place):
    parameters = [nn.Parameter(data(i, 5, 7)) for i in range(2)]
    theirs = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = forge.FusedOptimizer(parameters, "adamw", lr=LR, when="backward")
    reference = torch.optim.AdamW(theirs, lr=LR)
    backward = OneBackward(monkeypatch)
    calls = slowly(monkeypatch, *place)
    for step in range(4):
        for i, (p, q) in enumerate(zip(parameters, theirs)):
            p.grad, q.grad = data(10 * step + i, 5, 7), data(10 * step + i, 5, 7)
        assert backward.run(optimizer, parameters) == []
        assert sorted(optimizer._pass.moved) == ["parameter 0", "parameter 1"]
        assert len(calls) == step + 1
        optimizer.step()
        reference.step()
    for p, q in zip(parameters, theirs):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert optimizer.state[p]["step"] == 4


def test_one_backward_after_another_is_refused_on_both_threads(monkeypatch):
    parameters = [nn.Parameter(data(i, 5, 7)) for i in range(2)]
    optimizer = forge.FusedOptimizer(parameters, "sgd", lr=LR, when="backward")
    backward = OneBackward(monkeypatch)
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert backward.run(optimizer, parameters) == []
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    errors = backward.run(optimizer, parameters)
    assert len(errors) == 2 and all("a second backward before step()" in str(error) for error in errors)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before))
    optimizer.step()
