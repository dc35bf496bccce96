"""A process forked while another thread folds, or is in a backward: the child goes on, or is told what moved."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

START = """
import os, sys, threading, time, warnings
import torch
from torch import nn
import fused_grad_optimizer as forge
from fused_grad_optimizer.factored_grad import FactoredGrad

torch.set_num_threads(1)
inside = threading.Event()

def wait_for(child):
    for _ in range(300):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("the child hangs", flush=True)
"""

FOLDS = (
    START
    + """
model = nn.Linear(32, 32)
optimizer = forge.fuse(model, "sgd", lr=0.1, when="step")
x = torch.randn(64, 32)
model(x).sum().backward()
gradient = model.weight.grad
wanted = gradient.to_dense() + 3.0
gradient.fold()

def slow_chunks(self, real=FactoredGrad._chunks):
    for piece in real(self):
        yield piece
        inside.set()
        time.sleep(0.3)

def work():
    gradient.fold()
    leave.wait()  # not inside torch when the process forks: torch's own locks are its own

leave = threading.Event()
gradient.add_(FactoredGrad((32, 32), torch.float32, pairs=[(torch.ones(3, 32), torch.ones(3, 32))]))
FactoredGrad._chunks = slow_chunks
thread = threading.Thread(target=work)
thread.start()
inside.wait()
child = os.fork()
FactoredGrad._chunks = slow_chunks.__defaults__[0]
if not child:
    print("child", torch.allclose(gradient.to_dense(), wanted, rtol=1e-5, atol=1e-5), flush=True)
    model(x).sum().backward()
    optimizer.step()
    optimizer.release()
    print("child done", flush=True)
    os._exit(0)
wait_for(child)
leave.set()
thread.join()
print("parent", torch.allclose(gradient.to_dense(), wanted, rtol=1e-5, atol=1e-5))
"""
)

BACKWARD = (
    START
    + """
class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        inside.set()
        leave.wait()
        return dy

leave = threading.Event()
first, last = nn.Linear(4, 4), nn.Linear(4, 4)
model = nn.Sequential(first, last)
optimizer = forge.fuse(model, lr=0.1, when="backward")
x = torch.randn(3, 4)
thread = threading.Thread(target=lambda: last(Wait.apply(first(x))).sum().backward())
thread.start()
inside.wait()
child = os.fork()
if not child:
    try:
        optimizer.step()
    except RuntimeError as error:
        print("child", "after it had updated" in str(error) and "1.weight" in str(error), flush=True)
    model(x).sum().backward()
    optimizer.step()
    print("child done", flush=True)
    os._exit(0)
wait_for(child)
leave.set()
thread.join()
optimizer.step()
print("parent", int(optimizer.state[first.weight]["step"]) == 1)
"""
)


DROPS = (
    START
    + """
from fused_grad_optimizer import _small

# Many, so that whatever order locks are kept in, some of these come wrongly
for _ in range(12):
    weight = nn.Parameter(torch.zeros(4))
    optimizer = forge.FusedOptimizer([weight], "sgd", lr=0.1, when="backward")
    optimizer._pass._queues.append(optimizer._queue)  # as after a backward that failed before anything moved
    inside.clear()

    def slow_drop(self, of=None, real=_small.SmallQueue.drop):
        inside.set()
        time.sleep(0.1)
        real(self, of)

    _small.SmallQueue.drop, real = slow_drop, _small.SmallQueue.drop
    thread = threading.Thread(target=lambda: weight.sum().backward(), daemon=True)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        os._exit(0)
    wait_for(child)
    thread.join(20)
    _small.SmallQueue.drop = real
    if thread.is_alive():
        print("deadlock", flush=True)
        os._exit(1)
print("child True", "child done", "parent True", sep=chr(10))
"""
)


@pytest.mark.parametrize("code", [FOLDS, BACKWARD, DROPS], ids=["folds", "backward", "drops"])
def test_a_child_goes_on(code):
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.split("\n")[:-1] == ["child True", "child done", "parent True"], result.stderr
