"""Operations that need elements or memory, on a gradient that has none: a dense one's value, or an error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer import FactoredGrad

from .helpers import LR, data, pair, passes

N, K = 24, 16
pytestmark = pytest.mark.filterwarnings("ignore:.*needs the elements of a factored gradient")


def grad_of(i, tokens=2):
    return FactoredGrad((N, K), torch.float32, pairs=[(data(2 * i, tokens, N), data(2 * i + 1, tokens, K))])


def dense_of(i, tokens=2):
    return data(2 * i, tokens, N).t() @ data(2 * i + 1, tokens, K)


TWICE = {
    "mul_": lambda g: g.mul_(g),
    "mul_ by its alias": lambda g: g.mul_(g.detach()),
    "addcmul_": lambda g: g.addcmul_(g, g),
    "alias first": lambda g: g.detach().mul_(g),
    "lerp_": lambda g: g.lerp_(g, 0.3),
    "foreach": lambda g: torch._foreach_mul_([g], [g]),
    "sub_": lambda g: g.sub_(g, alpha=0.5),
    "add_": lambda g: g.add_(g),
}


@pytest.mark.parametrize("way", TWICE)
def test_a_gradient_twice_in_one_operation(way):
    grad, wanted = grad_of(0), dense_of(0)
    TWICE[way](grad)
    TWICE[way](wanted)
    assert torch.allclose(grad.to_dense(), wanted, rtol=1e-4, atol=1e-5)


DATA = {
    "scaled": lambda g: g.data * 0.5,
    "dense": lambda g: torch.full((N, K), 0.25),
    "another": lambda g: grad_of(3) if isinstance(g, FactoredGrad) else dense_of(3),
}


@pytest.mark.parametrize("way", DATA)
def test_data_can_be_set(way):
    a, b = pair(lambda: nn.Linear(K, N, bias=False))
    for model, optimizer in (
        (a, torch.optim.SGD(a.parameters(), lr=LR)),
        (b, forge.fuse(b, "sgd", lr=LR, when="step")),
    ):
        model(data(0, 2, K)).square().sum().backward()
        given = DATA[way](model.weight.grad)
        alias, before = model.weight.grad.detach(), model.weight.grad * 1.0
        model.weight.grad.data = given
        assert torch.equal(alias + torch.zeros(N, K), before + torch.zeros(N, K))
        optimizer.step()
    assert isinstance(b.weight.grad, FactoredGrad) and passes(a, b, 1)
    assert torch.allclose(b.weight.grad.to_dense(), a.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_with_gradients_changes_its_dtype(dtype):
    a, b = pair(lambda: nn.Linear(K, N))
    forge.fuse(b, "sgd", lr=LR, when="step")
    for model in (a, b):
        model(data(0, 2, K)).square().sum().backward()
        model.to(dtype)
    found = b.weight.grad
    assert found.dtype == dtype and torch.allclose(found.to_dense(), a.weight.grad, rtol=1e-2, atol=1e-5)


def test_data_of_another_shape():
    grad = grad_of(0)
    grad.data = torch.ones(3)
    assert grad.shape == (3,) and torch.equal(grad.to_dense(), torch.ones(3))


# In a process of its own: what is tested here ended the process.
MEMORY = """
import sys, warnings, copy, numpy, torch, fused_grad_optimizer as forge
from torch import nn
warnings.simplefilter("ignore")
torch.manual_seed(0)
a = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 8))
b = copy.deepcopy(a)
oa, ob = torch.optim.SGD(a.parameters(), lr=0.1), forge.fuse(b, "sgd", lr=0.1, when=sys.argv[1])
for model, optimizer in ((a, oa), (b, ob)):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 2])).sum().backward()
        model.share_memory()
        if sys.argv[1] == "step" or model is a:
            grad = model[1].weight.grad
            read = [torch.from_dlpack(grad).clone(), torch.from_numpy(numpy.from_dlpack(grad).copy())]
            assert torch.allclose(read[0], read[1])
            wanted = read[0] if model is a else wanted
        else:
            for function in (torch.from_dlpack, numpy.from_dlpack):
                try:
                    function(model[1].weight.grad)
                except RuntimeError as error:
                    assert "already applied" in str(error)
                else:
                    raise AssertionError(function)
        optimizer.step()
    assert all(p.is_shared() for p in model.parameters())
if sys.argv[1] == "step":
    assert torch.allclose(wanted, read[0], rtol=1e-5, atol=1e-6)
assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(a.parameters(), b.parameters()))
print("same")
"""


@pytest.mark.parametrize("when", ["backward", "step"])
def test_shared_memory_and_dlpack(when):
    pytest.importorskip("numpy")
    result = subprocess.run([sys.executable, "-c", MEMORY, when], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "same", (result.returncode, result.stderr)


def test_a_shared_gradient_goes_on_by_itself():
    grad = grad_of(0).fold()
    grad.share_memory_()
    shared, before = grad.dense, grad.dense.clone()
    grad.add_(grad_of(1)).fold()
    assert shared.is_shared() and torch.equal(shared, before)
    assert torch.allclose(grad.to_dense(), dense_of(0) + dense_of(1), rtol=1e-4, atol=1e-5)
