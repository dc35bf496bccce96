"""Tables of measurements on a Hopper GPU: what one storage's entry says is launched for every storage and T."""

from __future__ import annotations

import json

import pytest
import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import dispatch, tuning
from fused_grad_optimizer.kernels.configs import CANDIDATES, HOPPER
from fused_grad_optimizer.rules import UPDATES
from tests.gpu.steps import HYPER, copy_of, make_target
from tests.gpu.test_hopper import factors

pytestmark = pytest.mark.gpu
N, K = 512, 768


@pytest.fixture(autouse=True)
def no_tables(monkeypatch, tmp_path):
    if torch.cuda.get_device_capability() != (9, 0) or dispatch.hopper_kernel() is None:
        pytest.skip("needs a Hopper GPU and a Triton that the kernel compiles with")
    monkeypatch.delenv("FORGE_KERNEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "shipped_path", lambda card: tmp_path / "none.json")
    tuning.forget()
    yield
    tuning.forget()


def write_table(changes):
    """AdamW all in bf16, as if `changes` were the fastest at every T."""
    card = torch.cuda.get_device_name()
    key = tuning.Key((2, 2, 2), True, 2, N, K)
    us = {tuning.choice(HOPPER, changes): 1.0}
    cells = {tokens: tuning.Cell(0, us) for tokens in (128, 512, 4096)}
    path = tuning.user_path(card)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(tuning.as_json(tuning.Table(card, [{}], {key: cells}))))
    tuning.forget()


@pytest.mark.parametrize("tokens", [128, 512, 4096])
@pytest.mark.parametrize("rule, weight, state", [
    ("adamw", "bf16", "bf16"), ("adamw", "bf16", "fp32"), ("adamw", "fp32", "fp32"), ("lion", "bf16", "bf16"),
    ("sgd", "bf16", "bf16"), ("sgd_momentum", "fp32", "fp32"),
])  # fmt: skip
@pytest.mark.parametrize("changes", CANDIDATES[HOPPER], ids=str)
def test_a_table_of_bf16_serves_other_storages(changes, rule, weight, state, tokens, monkeypatch):
    """The same bits as with the default configuration: none changes the order of the sums."""
    write_table(changes)
    update, gradient = UPDATES[rule], factors(N, K, (tokens,))
    start = make_target(update, N, K, weight, state)
    tuned, default = copy_of(start), copy_of(start)
    scalars = ops.make_scalars(update, HYPER, 3, False, 0, start.weight.device, start.weight.dtype)
    found = dispatch.plan(gradient, N, K, [start.weight, *start.states], stochastic=weight == "bf16")
    assert found.choice.path == HOPPER and found.reason.startswith("table for")
    ops.step(tuned, gradient, update, scalars, None)
    monkeypatch.setenv("FORGE_KERNEL", HOPPER)
    ops.step(default, gradient, update, scalars, None)
    for a, b, before in zip(*([t.weight, *t.states] for t in (tuned, default, start))):
        assert torch.equal(a, b) and not torch.equal(a, before)


def test_every_candidate_that_is_said_to_fit_can_be_launched():
    """A launch that asks for more shared memory than there is fails: all fit with states in bf16, not all in fp32."""
    update, gradient = UPDATES["adamw"], factors(N, K, (512,))
    for state in ("bf16", "fp32"):
        one = make_target(update, N, K, "bf16", state)
        tensors = [one.weight, *one.states]
        scalars = ops.make_scalars(update, HYPER, 3, False, 0, one.weight.device, one.weight.dtype)
        candidates = [*CANDIDATES[HOPPER], {"stages": 7, "state_slots": 4}]
        fitting = [c for c in candidates if dispatch.fits(tuning.choice(HOPPER, c), N, K, tensors, 512)]
        assert {} in fitting and (len(fitting) == len(candidates)) == (state == "bf16")
        for changes in fitting:
            ops.step_by(tuning.choice(HOPPER, changes), one, gradient, update, scalars, None)
    torch.cuda.synchronize()
