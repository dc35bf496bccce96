"""On a GPU: gradients without memory, where C++ code, other streams and files meet them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge

pytestmark = pytest.mark.gpu
BOTH = pytest.mark.parametrize("when", ["backward", "step"])


def model_with(when):
    torch.manual_seed(0)
    model = nn.Linear(64, 96, bias=False, device="cuda")
    optimizer = forge.fuse(model, "sgd", lr=0.1, when=when)
    model(torch.ones(5, 64, device="cuda")).sum().backward()
    return model, optimizer


@BOTH
def test_an_address_is_an_error(when):
    model, optimizer = model_with(when)
    grad = model.weight.grad
    for call in (torch.utils.dlpack.to_dlpack, torch.Tensor.data_ptr):
        with pytest.raises(RuntimeError, match="data pointer"):
            call(grad)
    with pytest.raises(RuntimeError, match="no memory|already applied"):
        grad.data_ptr()
    storage = grad.untyped_storage()
    assert storage.nbytes() == 0 and storage.device == grad.device
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*needs the elements of a factored gradient")
def test_elements_are_right():
    model, optimizer = model_with("step")
    assert torch.equal(torch.from_dlpack(model.weight.grad), torch.full((96, 64), 5.0, device="cuda"))
    optimizer.step()


def test_a_gradient_loads_on_the_cpu():
    model, optimizer = model_with("step")
    buffer = io.BytesIO()
    torch.save(model.weight.grad, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False, map_location="cpu")
    assert loaded.device.type == "cpu" and torch.equal(loaded.to_dense(), torch.full((96, 64), 5.0))
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*stream")  # torch says that the two differ
@BOTH
def test_a_weight_used_on_two_streams(when):
    """Autograd adds its gradients across streams, and records them on both."""
    torch.manual_seed(0)
    dense = nn.Linear(64, 64, device="cuda", dtype=torch.float64)
    fused = copy.deepcopy(dense)
    theirs = torch.optim.SGD(dense.parameters(), lr=0.01)
    ours = forge.fuse(fused, "sgd", lr=0.01, when=when)
    side = torch.cuda.Stream()
    for i in range(20):
        x = torch.randn(32, 64, device="cuda", dtype=torch.float64, generator=torch.Generator("cuda").manual_seed(i))
        for model, optimizer in ((dense, theirs), (fused, ours)):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                first = model(x).square().mean()
            second = model(x.flip(0)).abs().mean()
            torch.cuda.current_stream().wait_stream(side)
            (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(dense.parameters(), fused.parameters()):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)
