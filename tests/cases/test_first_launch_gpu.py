"""The first launch for a new shape applies one step: nothing is tuned on the real weight."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
SHAPES = [(64, 64, 7), (512, 384, 130), (1024, 1000, 33), (33, 17, 1)]  # (in, out, tokens): a new key each time

# Run in a fresh process with an empty cache; prints one hash of all weights and states. eps = 1: with a small one the
# first AdamW step is the sign of the gradient where that is near 0, and depends on the order of summation.
CODE = """
import copy, hashlib, sys, torch
from torch import nn
import fused_grad_optimizer as forge
digest = hashlib.sha256()
for when in ("backward", "step"):
    for dtype in (torch.float32, torch.bfloat16):
        for fi, fo, tokens in SHAPES:
            torch.manual_seed(0)
            dense = nn.Linear(fi, fo).to("cuda", dtype)
            fused = copy.deepcopy(dense)
            exact = copy.deepcopy(dense).double()
            models = (dense, fused, exact)
            optimizers = (torch.optim.AdamW(dense.parameters(), lr=1e-2, eps=1.0),
                          forge.fuse(fused, lr=1e-2, eps=1.0, when=when, state="fp32"),
                          torch.optim.AdamW(exact.parameters(), lr=1e-2, eps=1.0))
            gaps = []
            for i in range(4):
                x = torch.randn(tokens, fi, generator=torch.Generator().manual_seed(i)).to("cuda", dtype)
                for model, optimizer in zip(models, optimizers):
                    optimizer.zero_grad()
                    y = model(x.to(model.weight.dtype))
                    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype))
                    optimizer.step()
                gaps.append((fused.weight.double() - exact.weight).abs().max().item())
                steps = {fused_step["step"].item() for fused_step in optimizers[1].state_dict()["state"].values()}
                assert steps == {i + 1}, (fi, fo, i, steps)
            ulp = 0.0 if dtype == torch.float32 else exact.weight.abs().max().item() * 2**-7
            for i, gap in enumerate(gaps):
                assert gap <= 1e-3 * 1e-2 * (i + 1) + (i + 1) * ulp, (when, dtype, fi, fo, gaps)
            for tensor in (fused.weight, fused.bias, *(s for p in fused.parameters()
                           for k, s in sorted(optimizers[1].state[p].items()) if torch.is_tensor(s))):
                digest.update(tensor.detach().float().cpu().numpy().tobytes())
print("digest", digest.hexdigest())
""".replace("SHAPES", repr(SHAPES))


def fresh_process(cache) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.split("digest ")[1].strip()


@pytest.fixture(scope="module")
def cache_and_first(tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton")
    return cache, fresh_process(cache)


def test_first_step_of_each_shape_equals_dense_in_a_fresh_process(cache_and_first):
    assert len(cache_and_first[1]) == 64


def test_a_process_with_a_warm_cache_has_the_same_bits(cache_and_first):
    cache, first = cache_and_first
    assert fresh_process(cache) == first


def test_a_second_process_with_an_empty_cache_has_the_same_bits(cache_and_first, tmp_path):
    assert fresh_process(tmp_path) == cache_and_first[1]


def test_no_kernel_is_autotuned():
    """An autotuner runs a kernel many times; on a kernel that updates in place each run is a step."""
    import triton

    from fused_grad_optimizer import kernels

    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(kernels.__name__):
            found += [n for n, v in vars(module).items() if isinstance(v, triton.runtime.Autotuner)]
    assert not found and torch.cuda.is_available()
