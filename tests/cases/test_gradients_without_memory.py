"""Gradients have no memory: what asks for an address gets the elements or one clear error, never a null pointer."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_grad_optimizer as forge
from fused_grad_optimizer.factored_grad import FactoredGrad

from .helpers import BOTH, LR, data, mlp, saved_and_loaded

DY, X = data(0, 3, 2), data(1, 3, 4)
WANTED = DY.double().t() @ X.double()
pytestmark = pytest.mark.filterwarnings("ignore:.*needs the elements of a factored gradient")


def factored(**parts) -> FactoredGrad:
    return FactoredGrad((2, 4), torch.float32, **(parts or {"pairs": [(DY.clone(), X.clone())]}))


def right(value) -> bool:
    return torch.allclose(torch.as_tensor(value).double(), WANTED, rtol=1e-6, atol=1e-6)


# Each of them ended the process, or gave a null pointer away.
NO_ADDRESS = """
import torch, warnings
warnings.simplefilter("ignore")
from fused_grad_optimizer import FusedLinear, fuse
from fused_grad_optimizer.factored_grad import FactoredGrad
def gradients():
    yield FactoredGrad((2, 4), torch.float32, pairs=[(torch.ones(3, 2), torch.ones(3, 4))])
    layer = FusedLinear(4, 2, bias=False)
    layer(torch.ones(3, 4)).sum().backward()
    yield layer.weight.grad
    model = torch.nn.Linear(4, 2, bias=False)
    optimizer = fuse(model, when="backward")
    model(torch.ones(3, 4)).sum().backward()
    yield model.weight.grad
    optimizer.step()
for g in gradients():
    try:
        value = CALL
        print("got", type(value).__name__)
    except RuntimeError as error:
        print("raised", error)
"""
CALLS = [
    "torch.utils.dlpack.to_dlpack(g)",
    "torch.utils.dlpack.to_dlpack(g.detach())",
    "torch._C._to_dlpack_versioned(g)",
    "torch.Tensor.data_ptr(g)",
    "torch.Tensor.apply_(g, abs)",
    "g.data_ptr()",
    "g.untyped_storage().data_ptr() or g.untyped_storage().share_memory_().nbytes() or g.data_ptr()",
    "torch.empty(0).set_(g.untyped_storage()).numel() or g.data_ptr()",
    "len(g.storage()) or g.data_ptr()",
]


@pytest.mark.parametrize("call", CALLS)
def test_an_address_is_a_clear_error(call):
    code = NO_ADDRESS.replace("CALL", call)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.strip().splitlines()
    raised = [line for line in lines if line.startswith("raised")]
    assert len(raised) == 3 and not any(line.startswith("got") for line in lines)
    for line in raised:
        assert any(part in line for part in ("data pointer", "has no memory", "already applied"))


ELEMENTS = {
    "from_dlpack": torch.from_dlpack,
    "numpy": lambda g: g.numpy(),
    "detach().numpy": lambda g: g.detach().numpy(),
    "numpy.asarray": np.asarray,
    "numpy.from_dlpack": np.from_dlpack,
    "tolist": lambda g: torch.tensor(g.tolist()),
    "apply_": lambda g: g.apply_(lambda v: v).to_dense(),
    "map_": lambda g: g.map_(torch.ones(2, 4), lambda a, b: a * b).to_dense(),
}


@pytest.mark.parametrize("way", ELEMENTS)
def test_elements_are_right(way):
    gradient = factored()
    assert right(ELEMENTS[way](gradient)) and right(gradient.to_dense())


@pytest.mark.parametrize("way", ELEMENTS)
def test_elements_of_an_applied_gradient_are_an_error(way):
    model = nn.Linear(4, 2)
    optimizer = forge.fuse(model, when="backward", lr=LR)
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match="'weight' was already applied"):
        ELEMENTS[way](model.weight.grad)
    optimizer.step()


@BOTH
def test_a_parameter_with_such_a_gradient_becomes_a_fake_one(when):
    """As torch.compile makes them."""
    model = nn.Linear(4, 2)
    optimizer = forge.fuse(model, when=when, lr=LR)
    model(X).sum().backward()
    fake = FakeTensorMode().from_tensor(model.weight)
    assert fake.grad.shape == (2, 4) and fake.grad.device.type == "cpu"
    optimizer.step()


def test_the_mark_of_an_applied_gradient_is_saved_as_one():
    model = nn.Linear(4, 2)
    optimizer = forge.fuse(model, when="backward", lr=LR)
    model(X).sum().backward()
    for again in (saved_and_loaded(model.weight.grad), pickle.loads(pickle.dumps(model.weight.grad))):
        assert again.shape == (2, 4) and "'weight'" in repr(again)
        with pytest.raises(RuntimeError, match="'weight' was already applied"):
            again.sum()
    optimizer.step()


def test_shared_memory_is_told():
    gradient = factored()
    assert not gradient.is_shared()
    assert gradient.share_memory_().is_shared() and right(gradient.to_dense())


IN_PLACE = {
    "resize_": lambda g: g.resize_(3, 3),
    "t_": lambda g: g.t_(),
    "unsqueeze_": lambda g: g.unsqueeze_(0),
    "as_strided_": lambda g: g.as_strided_((2,), (1,)),
    "set_": lambda g: g.set_(torch.ones(3)),
}


@pytest.mark.parametrize("way", IN_PLACE)
def test_another_shape_in_place_is_an_error_and_changes_nothing(way):
    gradient = factored()
    with pytest.raises(RuntimeError, match=r"shape or strides of a factored gradient of shape \(2, 4\) in place"):
        IN_PLACE[way](gradient)
    assert right(gradient.to_dense())


def test_set_to_memory_of_the_same_shape():
    gradient = factored()
    memory = torch.full((2, 4), 3.0)
    gradient.set_(memory)
    assert torch.equal(gradient.to_dense(), memory)


SCALARS = [0, 0.0, -0.0, 3, True, torch.tensor(0.0), torch.tensor(2), torch.tensor(1 + 2j), 1 + 2j]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
@pytest.mark.parametrize("operation", [torch.mul, torch.div])
def test_scalars_as_ordinary_gradients_take_them(operation, scalar):
    wanted = operation(WANTED.float(), scalar)
    value = operation(factored(), scalar)
    value = value.to_dense() if isinstance(value, FactoredGrad) else value
    assert value.dtype == wanted.dtype
    assert torch.allclose(value, wanted, rtol=1e-5, equal_nan=True)


def test_a_complex_scalar_in_place_is_an_error_as_for_ordinary_gradients():
    gradient = factored()
    with pytest.raises(RuntimeError, match="can't be cast"):
        gradient.mul_(torch.tensor(1j))
    assert right(gradient.to_dense())


@pytest.mark.parametrize("order", ["nuc", "fro", 2, 1, math.inf])
def test_norms_by_name(order):
    wanted = WANTED.norm(order)
    assert float(factored().norm(order)) == pytest.approx(float(wanted), rel=1e-5)


def test_a_sum_with_another_dtype_is_promoted_as_for_ordinary_gradients():
    other = torch.full((2, 4), 1e-12, dtype=torch.float64)
    value = factored() + other
    assert value.dtype == torch.float64 and right(value)


PARTS = {
    "tokens": ({"pairs": [(DY, X[:2])]}, r"dY \[T, 2\] and X \[T, 4\], not \(3, 2\) and \(2, 4\)"),
    "features": ({"pairs": [(DY, X[:, :3])]}, r"X \[T, 4\], not \(3, 2\) and \(3, 3\)"),
    "dimensions": ({"pairs": [(DY[0], X)]}, r"not \(2,\) and \(3, 4\)"),
    "ids": ({"rows": [(torch.tensor([0, 1]), X)]}, r"ids \[T\] of int64 and dY \[T, 4\], not \(2,\)"),
    "dtype of ids": ({"rows": [(torch.zeros(3), X)]}, r"of int64 .* torch.float32"),
    "dense": ({"dense": torch.ones(4, 2)}, r"dense part of a gradient \(2, 4\) has shape \(4, 2\)"),
    "device": ({"pairs": [(DY, X.to("meta"))]}, r"on cpu is on meta"),
}


@pytest.mark.parametrize("what", PARTS)
def test_parts_that_do_not_fit_are_refused(what):
    parts, message = PARTS[what]
    with pytest.raises(ValueError, match=message):
        FactoredGrad((2, 4), torch.float32, **parts)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_modified_gradient_is_modified(way):
    x = X.clone()
    gradient = FactoredGrad((2, 4), torch.float32, pairs=[(DY, x)])
    x.zero_()
    again = COPIES[way](gradient)
    with pytest.raises(RuntimeError, match="modified in place"):
        again.to_dense()
    with pytest.raises(RuntimeError, match="modified in place"):  # a fold may come first
        again.add_(torch.ones(2, 4)).to_dense()
    assert right(COPIES[way](factored()).to_dense())


def test_a_modified_gradient_of_an_embedding_is_an_error_before_anything_moves():
    model = nn.Sequential(nn.Embedding(5, 6), mlp())
    optimizer = forge.fuse(model, when="step", lr=LR)
    embedded = model[0](torch.tensor([1, 2]))
    dy = torch.ones(2, 6)
    embedded.backward(dy)
    before = model[0].weight.detach().clone()
    dy.zero_()
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight was modified in place"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
