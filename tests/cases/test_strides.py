"""Upstream gradients and inputs that are expanded, sliced, transposed or changed afterwards give the dense result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, LR, both, data, passes, ref, train

TERMS = {
    "sum": lambda y, z: y.sum() + 2 * z.sum(),
    "transposed": lambda y, z: torch.cat([y, z], -1).transpose(0, 1).contiguous().pow(2).sum(),
    "sliced": lambda y, z: y[..., ::2].sum() + z.pow(2).sum(),
    "expanded": lambda y, z: z[:1].expand(5, *z.shape[1:]).pow(3).sum() + y.pow(2).sum(),
    "mean": lambda y, z: y.mean() + z.mean(0).pow(2).sum(),
    "flipped": lambda y, z: (y.flip(0) * z).sum(),
    "strided": lambda y, z: (y.transpose(-1, -2).reshape(-1) * z.transpose(-1, -2).reshape(-1)).sum(),
}
TERMS["all"] = lambda y, z: sum(f(y, z) for n, f in TERMS.items() if n != "all")
INPUTS = {
    "plain": lambda i: data(i, 3, 5, 6),
    "transposed": lambda i: data(i, 3, 5, 6).transpose(0, 1),
    "feature-sliced": lambda i: data(i, 3, 5, 12)[..., ::2],
    "token-sliced": lambda i: data(i, 7, 6)[::2],
    "expanded-row": lambda i: data(i, 6).expand(7, 6),
    "expanded-feature": lambda i: data(i, 3, 5, 1).expand(3, 5, 6),
    "channels-last": lambda i: data(i, 2, 6, 3, 4).to(memory_format=torch.channels_last).permute(0, 2, 3, 1),
    "feature-first": lambda i: data(i, 6, 7).t(),
    "offset": lambda i: data(i, 4 * 6 + 1)[1:].view(4, 6),
    "one-token": lambda i: data(i, 6),
}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.r = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)


@BOTH
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("shape", INPUTS)
def test_every_gradient_with_every_input(when, term, shape):
    if shape == "one-token" and term in ("transposed", "strided", "all"):
        pytest.skip("one dimension cannot be transposed")
    a, oa, b, ob = both(Two, when)
    ignore = train(a, oa, b, ob, lambda m, i: TERMS[term](m.l(INPUTS[shape](i)), m.r(INPUTS[shape](i))), 2)
    assert passes(a, b, 2, ignore)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("shape", ["plain", "transposed", "feature-sliced", "expanded-row", "channels-last"])
def test_bf16_gradients_are_those_of_an_fp32_sum(term, shape):
    """The factored gradient of bf16 factors is at least as close to the exact one as the dense bf16 gradient."""
    torch.manual_seed(0)
    model = forge.convert(Two().bfloat16())
    x = INPUTS[shape](0).bfloat16()
    y, z = model.l(x), model.r(x)
    dy, dz = torch.autograd.grad(TERMS[term](y, z), [y, z], retain_graph=True)
    TERMS[term](y, z).backward()
    for weight, upstream in ((model.l.weight, dy), (model.r.weight, dz)):
        exact = upstream.double().reshape(-1, 4).t() @ x.double().reshape(-1, 6)
        assert torch.allclose(weight.grad.to_dense(torch.float32).double(), exact, rtol=1e-5, atol=1e-4)


@BOTH
def test_embedding_with_expanded_and_strided_gradients_and_ids(when):
    a, oa, b, ob = both(lambda: nn.Embedding(9, 4), when)

    def loss(m, i):
        ids = torch.randint(0, 9, (5, 6), generator=torch.Generator().manual_seed(i))
        return (
            m(ids.t()).sum() + m(ids[:, ::2]).transpose(0, 2).contiguous().pow(2).sum() + m(ids[0].expand(3, 6)).sum()
        )

    assert passes(a, b, 3, train(a, oa, b, ob, loss))


@BOTH
def test_an_output_changed_in_place_by_a_later_operation(when):
    """relu_, dropout-like masking and residual adds write into y; the gradient that reaches the layer is its own."""
    a, oa, b, ob = both(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), when)

    def loss(m, i):
        y = m(data(i, 4, 6))
        y += 1
        y[:, 0] = 0
        return y.mul_(2).square().sum()

    assert passes(a, b, 3, train(a, oa, b, ob, loss))


def test_a_gradient_changed_in_place_before_the_step_is_an_error_not_a_wrong_step():
    model = nn.Linear(6, 3, bias=False)
    optimizer = forge.fuse(model, lr=LR, when="step")
    upstream = data(1, 1, 3)  # one token: more would be folded into a dense gradient at once
    before = model.weight.detach().clone()
    model(data(0, 1, 6)).backward(upstream)
    upstream.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_an_upstream_gradient_changed_in_place_after_an_update_in_backward():
    a, b = Two(), Two()
    b.load_state_dict(a.state_dict())
    oa, ob = ref(a), forge.fuse(b, lr=LR)
    for model, optimizer in ((a, oa), (b, ob)):
        upstream = data(1, 4, 4)
        (model.l(data(0, 4, 6)) + model.r(data(2, 4, 6))).backward(upstream)
        upstream.zero_()
        optimizer.step()
    assert passes(a, b, 1)


@BOTH
def test_one_upstream_tensor_shared_by_several_layers_and_a_hook_that_scales_it(when):
    a, oa, b, ob = both(Two, when)

    def loss(m, i):
        y = m.l(data(i, 4, 6))
        y.register_hook(lambda g: g * 0.5)
        return (y + m.r(data(i, 4, 6))).square().sum()

    assert passes(a, b, 3, train(a, oa, b, ob, loss))
