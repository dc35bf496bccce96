"""Recorded element-wise functions: the same bits as eager torch, in place, in few buffers, on any operand order."""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer.kernels.elementwise import Elementwise
from fused_grad_optimizer.rules import UPDATES


def tensors(count, dtype=torch.float32, shape=(5, 7)):
    generator = torch.Generator().manual_seed(count)
    return [(torch.rand(shape, generator=generator) * 9 - 4).to(dtype) for _ in range(count)]


FUNCTIONS = {
    "number first": lambda h, a, b: 1.0 - a / (h[0] * a) + 2.0 / b - (3 * a),
    "numbers alone": lambda h, a, b: a * (1.0 - h[0]) + b * (h[0] * h[0]),
    "negated": lambda h, a, b: -a * -b,
    "chosen": lambda h, a, b: torch.where(a > b, a - b, torch.where(b >= 0.0, 1.0, -1.0)),
    "one value twice": lambda h, a, b: (a + b) * (a + b),
    "an integer and its float": lambda h, a, b: (a + 1) * 1.0,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 1])
def test_equals_eager_bit_for_bit(name, dtype, place):
    function, h = FUNCTIONS[name], (0.3,)
    a, b = tensors(2, dtype)
    wanted = function(h, a.clone(), b.clone())
    kept = [a.clone(), b.clone()]
    for _ in range(2):  # the second time in used buffers
        inputs = [a.clone(), b.clone()]
        Elementwise(function, 1, 2, [place])(h, inputs)
        for i, tensor in enumerate(inputs):
            assert torch.equal(tensor, wanted if i == place else kept[i])


def test_a_place_that_is_read_after_its_result_is_made():
    a, b = tensors(2)
    wanted = a + b, a * (a + b) - a
    run = Elementwise(lambda h, a, b: (a + b, a * (a + b) - a), 0, 2, [0, 1])
    run((), [a, b])
    assert torch.equal(a, wanted[0]) and torch.equal(b, wanted[1])


def test_results_that_are_inputs_are_left_alone():
    a, b = tensors(2)
    before = b.clone()
    Elementwise(lambda h, a, b: (a + b, b), 0, 2, [0, 1])((), [a, b])
    assert torch.equal(b, before)


def test_swapped_results():
    a, b = tensors(2)
    wanted = b.clone(), a.clone()
    Elementwise(lambda h, a, b: (b, a), 0, 2, [0, 1])((), [a, b])
    assert torch.equal(a, wanted[0]) and torch.equal(b, wanted[1])


@pytest.mark.parametrize("name", UPDATES)
def test_updates_equal_their_twins_bit_for_bit(name):
    update = UPDATES[name]
    p, g, *states = tensors(2 + len(update.states))
    states = [s.abs() for s in states]
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1}
    h = update.scalars({**hyper, "nesterov": False}, 3, False)
    wanted = update.twin(h, p.clone(), g.clone(), *[s.clone() for s in states])
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    kept = g.clone()
    run = Elementwise(update.twin, len(h), 2 + len(states), [0, *range(2, 2 + len(states))])
    run(h, [p, g, *states])
    for result, value in zip([p, *states], wanted):
        assert torch.equal(result, value)
    assert torch.equal(g, kept)


def test_a_state_that_moves_on_to_another():
    a, b = tensors(2)
    wanted = a * 2.0, a.clone()
    Elementwise(lambda h, a, b: (a * 2.0, a), 0, 2, [0, 1])((), [a, b])
    assert torch.equal(a, wanted[0]) and torch.equal(b, wanted[1])


def test_an_operation_that_is_not_listed_is_refused():
    with pytest.raises(ValueError, match="not an operation"):
        Elementwise(lambda h, a: a**2, 0, 1, [0])


def test_nothing_is_allocated_once_the_buffers_are_there():
    run = Elementwise(FUNCTIONS["one value twice"], 0, 2, [0])
    inputs = tensors(2, shape=(64, 64))
    run((), inputs)
    with torch.profiler.profile(profile_memory=True) as profile:
        run((), inputs)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 64 * 64 * 4
