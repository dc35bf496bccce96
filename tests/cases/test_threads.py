"""Backward passes of several threads on one model: every gradient arrives, and once."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import data, pair

THREADS, BACKWARDS, TOKENS, WIDTH = 4, 50, 7, 32


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_in_threads(model: nn.Module, device: str = "cpu") -> None:
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(first, THREADS * BACKWARDS, THREADS):
                model(data(i, TOKENS, WIDTH).to(device)).square().sum().backward()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failed and not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("attempt", range(3))
def test_threads_accumulate_into_one_gradient(attempt):
    a, b = pair(lambda: nn.Linear(WIDTH, WIDTH))
    optimizer = forge.fuse(b, "sgd", lr=0.1, when="step")
    for model in (a, b):
        run_in_threads(model)
    wanted = a.weight.grad
    assert (b.weight.grad.to_dense() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert torch.allclose(b.bias.grad, a.bias.grad, rtol=1e-4)
    optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.usefixtures("many_switches")
def test_threads_accumulate_into_one_gradient_on_a_gpu():
    a, b = pair(lambda: nn.Linear(WIDTH, WIDTH, device="cuda"))
    optimizer = forge.fuse(b, "sgd", lr=0.1, when="step")
    for model in (a, b):
        run_in_threads(model, "cuda")
    wanted = a.weight.grad
    assert (b.weight.grad.to_dense() - wanted).abs().max() <= 2e-3 * wanted.abs().max()  # TF32 perhaps
    optimizer.step()
