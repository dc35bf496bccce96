"""Where `FusedLinear` takes a short cut it equals `nn.Linear`: the attributes it reads, and its bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fused_grad_optimizer as forge
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.modules import FusedLinear
from fused_grad_optimizer.modules.linear import factored_linear


def two(bias: bool = True) -> tuple[nn.Linear, FusedLinear]:
    """A plain layer and a fused one with the same values."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 4, bias=bias)
    fused = copy.deepcopy(plain)
    forge.convert(fused)
    assert type(fused) is FusedLinear
    return plain, fused


def a_property(layer):
    class Doubled(type(layer)):
        @property
        def weight(self):
            return 2 * self._parameters["weight"]

        @property
        def bias(self):
            return 3 * self._parameters["bias"]

    layer.__class__ = Doubled


def in_its_dictionary(layer):
    layer.__dict__["weight"] = torch.full((4, 6), 0.5)
    layer.__dict__["bias"] = torch.full((4,), 0.25)


def a_buffer(layer):
    weight = layer.weight.detach() * 2
    del layer.weight
    layer.register_buffer("weight", weight)


def no_bias(layer):
    layer.bias = None


def a_bias_that_is_a_buffer(layer):
    bias = layer.bias.detach() * 2
    del layer.bias
    layer.register_buffer("bias", bias)


def weight_normed(layer):
    nn.utils.parametrizations.weight_norm(layer)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)


CHANGES = [a_property, in_its_dictionary, a_buffer, no_bias, a_bias_that_is_a_buffer, weight_normed, pruned]


@pytest.mark.parametrize("change", CHANGES)
def test_the_attributes_that_nn_linear_would_read(change):
    plain, fused = two()
    for layer in (plain, fused):
        change(layer)
    x = torch.randn(3, 6)
    assert torch.equal(plain(x), fused(x))


SHAPES = [(6,), (1, 6), (5, 6), (2, 3, 6), (2, 0, 6), (2, 2, 2, 6)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_as_nn_linear(shape, bias):
    results = []
    for layer in two(bias):
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn(y.shape))
        results.append([y.detach(), x.grad] + ([layer.bias.grad] if bias else []))
    for theirs, ours in zip(*results):
        assert torch.equal(theirs, ours)


def expanded(shape):
    return torch.ones(()).expand(shape)


def transposed(shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape[::-1]).permute(*reversed(range(len(shape))))


@pytest.mark.parametrize("dy", [expanded, transposed])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_gradients_of_any_strides(dy, shape):
    plain, fused = two()
    results = []
    for layer in (plain, fused):
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.backward(dy(tuple(y.shape)))
        grad = layer.weight.grad
        results.append([x.grad, grad.to_dense() if isinstance(grad, FactoredGrad) else grad])
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_transposed_weight(shape, bias):
    """GPT-2's layout: y = x W + b, against the product by autograd."""
    torch.manual_seed(0)
    weight, b = torch.randn(6, 4), torch.randn(4) if bias else None
    results = []
    for ours in (False, True):
        w = nn.Parameter(weight.clone())
        own = nn.Parameter(b.clone()) if b is not None else None
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if ours:
            y = factored_linear(x, w, own, True)
        else:
            y = x @ w if own is None else x @ w + own
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
        assert isinstance(w.grad, FactoredGrad) == ours
        grad = w.grad.to_dense() if ours else w.grad
        results.append([y.detach(), x.grad, grad] + ([own.grad] if own is not None else []))
    for theirs, mine in zip(*results):
        torch.testing.assert_close(theirs, mine)


def test_what_a_finished_transform_has_left_behind_is_an_input_like_any_other():
    plain, fused = two()
    kept = []
    torch.func.grad(lambda x: (kept.append(x * 2), x.sum())[1])(torch.ones(3, 6))
    for layer in (plain, fused):
        layer(kept[0]).sum().backward()
    torch.testing.assert_close(plain.weight.grad, fused.weight.grad.to_dense())
    assert not any(torch._C._functorch.is_gradtrackingtensor(t) for t in fused.weight.grad.pairs[0])


def test_a_backward_in_inference_mode_s_gradients():
    """Tensors made in inference mode have no version; the factors are taken all the same."""
    plain, fused = two()
    x = torch.randn(3, 6)
    for layer in (plain, fused):
        y = layer(x)
        with torch.inference_mode():
            dy = torch.full((3, 4), 2.0)
        y.backward(dy)
    torch.testing.assert_close(plain.weight.grad, fused.weight.grad.to_dense())
