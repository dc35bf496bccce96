"""Many small parameters in one launch: the bits of `param_step` for each, and what is not finite stays untouched.

On the CPU this is the operator's loop; with TRITON_INTERPRET=1 (`test_interpreter.py`) the kernels run in Triton's
interpreter, and with `-m gpu` on the GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import library

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import Gradient, Target
from fused_grad_optimizer.rules import UPDATES
from fused_grad_optimizer.storage import STORAGES
from tests.kernels.steps import HYPER

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The second list has sizes and addresses that are no multiples of 16.
SHAPES = {"aligned": [(4096,), (16,), (3, 32), (2, 3, 8, 8)], "odd": [(), (1,), (7, 3), (1025,), (64,), (2050,)]}
STORED = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16-nearest", "bf16-nearest"), ("bf16", "fp32"), ("fp16", "fp32")]


class Small:
    """Weights, states and gradients of the given shapes; parameter i has index 5 i + 2."""

    def __init__(self, shapes, update, weight, state, gradient_dtype, device, offset=0):
        generator = torch.Generator().manual_seed(0)

        def random(shape, dtype, scale):
            count = torch.Size(shape).numel()
            values = torch.randn(count + offset, generator=generator)[offset:] * scale
            padded = torch.empty(count + offset, dtype=dtype, device=device)
            padded[offset:] = values.to(device, dtype)
            return padded[offset:].view(shape)

        self.update, self.storages = UPDATES[update], [weight] + [state] * len(UPDATES[update].states)
        self.weights = [random(s, STORAGES[weight].dtype, 1.0) for s in shapes]
        self.states = [
            [random(s, STORAGES[state].dtype, 0.1).abs() for _ in self.update.states] for s in shapes
        ]  # fmt: skip
        self.gradients = [random(s, gradient_dtype, 1.0) for s in shapes]
        self.indices = [5 * i + 2 for i in range(len(shapes))]
        for gradient in self.gradients:
            gradient.view(-1)[::7] = -0.0

    def scalars(self):
        weight = self.weights[0]
        return ops.make_scalars(self.update, HYPER, 3, False, 7, weight.device, weight.dtype)

    def together(self, flags=None):
        """Weights and states after one `multi_step` on copies."""
        weights = [w.clone() for w in self.weights]
        states = [[s.clone() for s in kept] for kept in self.states]
        scalars = self.scalars()
        torch.ops.forge.multi_step(
            weights, [s for kept in states for s in kept], self.gradients, scalars.values, scalars.keys, flags,
            self.update.name, self.storages, self.indices,
        )  # fmt: skip
        return [[w, *kept] for w, kept in zip(weights, states)]

    def one_by_one(self):
        """The same by one `param_step` for each."""
        found = []
        for weight, kept, gradient, index in zip(self.weights, self.states, self.gradients, self.indices):
            rows = weight.shape[0] if weight.dim() else 1
            tensors = [t.clone() for t in (weight, *kept)]
            matrices = [t.view(rows, -1) for t in tensors]
            target = Target(matrices[0], matrices[1:], self.storages, index)
            ops.step(target, Gradient([], [], dense=gradient.reshape(rows, -1)), self.update, self.scalars(), None)
            found.append(tensors)
        return found


def same(a, b):
    return all(torch.equal(x, y) for left, right in zip(a, b) for x, y in zip(left, right))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight, state", STORED)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("update", sorted(UPDATES))
def test_the_bits_of_param_step(update, shapes, weight, state, gradient_dtype, device):
    small = Small(SHAPES[shapes], update, weight, state, gradient_dtype, device, offset=1 if shapes == "odd" else 0)
    flags = torch.zeros(64, dtype=torch.int32, device=device)
    moved = small.together(flags)
    assert same(moved, small.one_by_one()) and not flags.any()
    assert not torch.equal(moved[-1][0], small.weights[-1])
    assert same(moved, small.together())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shapes", SHAPES)
def test_what_is_not_finite_stays_untouched(shapes, value, device):
    small = Small(SHAPES[shapes], "adamw", "bf16", "bf16", torch.bfloat16, device)
    wanted = small.one_by_one()
    for i in range(len(small.weights)):
        good = small.gradients[i].clone()
        small.gradients[i].view(-1)[-1] = value
        flags = torch.zeros(64, dtype=torch.int32, device=device)
        found = small.together(flags)
        small.gradients[i].copy_(good)
        assert flags.nonzero().flatten().tolist() == [small.indices[i]]
        assert same(found[i : i + 1], [[small.weights[i], *small.states[i]]])
        assert same(found[:i] + found[i + 1 :], wanted[:i] + wanted[i + 1 :])


@pytest.mark.parametrize("device", DEVICES)
def test_declares_what_it_mutates(device):
    small = Small([(16,), (3, 4)], "adamw", "fp32", "fp32", torch.float32, device)
    scalars = small.scalars()
    states = [s for kept in small.states for s in kept]
    versions = [t._version for t in (*small.weights, *states)]
    library.opcheck(
        torch.ops.forge.multi_step.default,
        (small.weights, states, small.gradients, scalars.values, scalars.keys,
         torch.zeros(64, dtype=torch.int32, device=device), "adamw", small.storages, small.indices),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    small.weights[0].requires_grad_()
    with torch.no_grad():
        torch.ops.forge.multi_step(
            small.weights, states, small.gradients, scalars.values, scalars.keys, None, "adamw", small.storages,
            small.indices,
        )  # fmt: skip
    assert all(t._version > v for t, v in zip((*small.weights, *states), versions))
