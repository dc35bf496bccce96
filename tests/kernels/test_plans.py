"""Weights stepped by plans, on the fake driver: the launches of the general way, and never those of another weight."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from fused_grad_optimizer import FusedOptimizer, _plans, ops  # noqa: E402
from fused_grad_optimizer.kernels import launcher  # noqa: E402
from fused_grad_optimizer.rules import UPDATES  # noqa: E402
from tests.kernels import fake_training  # noqa: E402
from tests.kernels.compile_only import _hyper  # noqa: E402
from tests.kernels.fake_cuda import fake_cuda, passed_by_triton  # noqa: E402
from tests.kernels.fake_training import give_gradient, layers, pair  # noqa: E402

KEYS = torch.tensor([1, 2], dtype=torch.int32)


@cache
def scalars_of(update: str) -> ops.StepScalars:
    return ops.StepScalars(torch.ones(len(UPDATES[update].scalars(_hyper(), 1, True))), KEYS)


@pytest.fixture
def cuda(monkeypatch):
    with fake_cuda() as fake, monkeypatch.context() as patch:
        fake_training.take_the_gpus_way(patch)
        patch.setattr(
            FusedOptimizer, "_scalars_of", lambda self, group, update, *_: scalars_of(update.name)
        )  # so that two steps can be compared
        yield fake


@pytest.fixture
def general(monkeypatch):
    return fake_training.count_general_steps(monkeypatch)


def launched(cuda, opt, parameter, *pairs, scale=None) -> list[tuple[bytes, ...]]:
    """One step; the bytes of all parameters of each launch."""
    cuda.triton.clear()
    cuda.direct.clear()
    grad = give_gradient(parameter, *pairs)
    if scale is not None:
        grad.mul_(scale)
    opt.step()
    parameter.grad = None
    return [passed_by_triton(launch) for launch in cuda.triton] + [values for *_, values in cuda.direct]


def holds(launch: tuple[bytes, ...], tensor: torch.Tensor) -> bool:
    """Whether the tensor's address is among the parameters, by itself or at the start of a tensor map."""
    return any(value[:8] == tensor.data_ptr().to_bytes(8, "little") for value in launch)


def warm(cuda, opt, parameter, *pairs, **options) -> None:
    for _ in range(4):
        launched(cuda, opt, parameter, *pairs, **options)


CASES = {
    "one pair": ([(64, 256)], torch.bfloat16, False),
    "uneven, unaligned columns": ([(33, 136)], torch.bfloat16, False),
    "two pairs": ([(64, 256), (32, 256)], torch.bfloat16, False),
    "scaled": ([(64, 256)], torch.bfloat16, True),
    "fp32, portable": ([(64, 40)], torch.float32, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_launches_what_the_general_way_does(cuda, general, name):
    shapes, dtype, scaled = CASES[name]
    (parameter,) = layers(1, shapes[0][1], dtype)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    pairs = [pair(n, tokens, dtype) for tokens, n in shapes]
    scale = torch.full((), 0.5) if scaled else None
    warm(cuda, opt, parameter, *pairs, scale=scale)
    others = [pair(n, tokens, dtype) for tokens, n in shapes]
    general.clear()
    by_plan = launched(cuda, opt, parameter, *others, scale=scale)
    assert not general and not cuda.triton and len(by_plan) == 2
    opt._records[parameter].plan = None
    by_general_way = launched(cuda, opt, parameter, *others, scale=scale)
    assert len(general) == 1 and not cuda.triton
    if scaled:  # the product with the scale is a new tensor each time
        changed = [sum(a != b for a, b in zip(*both)) for both in zip(by_plan, by_general_way)]
        assert max(changed) <= 1
    else:
        assert by_plan == by_general_way
    assert all(holds(by_plan[0], t) and holds(by_plan[1], t) for p in others for t in p)


def test_counts_and_versions_go_up(cuda, general):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    state = opt.state[parameter]
    before = [t._version for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
    general.clear()
    launched(cuda, opt, parameter, factors)
    assert not general and state["step"] == 5
    assert [t._version for t in (parameter, state["exp_avg"], state["exp_avg_sq"])] == [v + 1 for v in before]


def new_data(opt, parameter):
    parameter.data = parameter.data.clone()


def new_states(opt, parameter):
    opt.state[parameter].update({k: v.clone() for k, v in opt.state[parameter].items() if k != "step"})


def moved_states(opt, parameter):
    for name in ("exp_avg", "exp_avg_sq"):
        opt.state[parameter][name].data = opt.state[parameter][name].data.clone()


def loaded(opt, parameter):
    saved = opt.state_dict()
    saved["state"] = {k: {n: v.clone() for n, v in s.items()} for k, s in saved["state"].items()}
    opt.load_state_dict(saved)


def other_dtype(opt, parameter):
    parameter.data = parameter.data.float()


@pytest.mark.parametrize("change", [new_data, new_states, moved_states, loaded, other_dtype])
def test_old_memory_is_never_used_again(cuda, general, change):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    warm(cuda, opt, parameter, pair())

    def tensors():
        state = opt.state[parameter]
        return parameter.data, state["exp_avg"], state["exp_avg_sq"]

    old = [t.detach() for t in tensors()]  # kept, so that no new tensor can lie there
    old_addresses = [t.data_ptr() for t in old]
    kept = [t.clone().set_(t) for t in old]
    change(opt, parameter)
    general.clear()
    for i in range(5):
        factors = pair(dtype=parameter.dtype)
        *_, step = launched(cuda, opt, parameter, factors)
        assert all(holds(step, t) for t in tensors())
        for address, now in zip(old_addresses, tensors()):
            assert address == now.data_ptr() or not any(v[:8] == address.to_bytes(8, "little") for v in step)
        assert opt.state[parameter]["step"] == 5 + i
    assert len(general) in (2, 3)  # general twice, then bound anew
    assert kept


def test_flags_that_move(cuda, general):
    parameters = layers(1) + [torch.nn.Parameter(torch.zeros(2)) for _ in range(80)]
    opt = FusedOptimizer(parameters[:1], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameters[0], factors)
    opt.add_param_group({"params": parameters[1:]})
    opt._flags.of(80, parameters[0].device)
    check, step = launched(cuda, opt, parameters[0], factors)
    flag = opt._flags.of(0, parameters[0].device)
    assert holds(check, flag) and holds(step, flag)


def test_another_update_is_selected(cuda, general):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], "sgd", lr=1e-3, momentum=0.9, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    opt.param_groups[0]["momentum"] = 0.0
    general.clear()
    *_, step = launched(cuda, opt, parameter, factors)
    assert len(general) == 1 and general[0][2].name == "sgd"
    assert not holds(step, opt.state[parameter]["momentum_buffer"])


def test_settings_that_choose_the_kernel(cuda, general, monkeypatch):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    monkeypatch.setenv("FORGE_KERNEL", "wgrad_step")
    launched(cuda, opt, parameter, factors)
    launched(cuda, opt, parameter, factors)
    assert {256 // 64 * 256 // 64} == {grid[0] for _, grid, threads, *_ in cuda.direct if threads == 128}


def test_lengths_are_bound_when_they_come_again_and_are_forgotten(cuda, general):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    for _ in range(3):
        for tokens in (16, 32, 48):
            step = launched(cuda, opt, parameter, pair(tokens=tokens))[-1]
            assert tokens.to_bytes(4, "little") in step
    assert len(general) == 4  # the first one makes the plan
    for tokens in range(1, 100):
        launched(cuda, opt, parameter, pair(tokens=tokens))
    assert len(opt._records[parameter].plan.bound) <= _plans._MOST_SHAPES


def test_what_a_plan_is_not_for_takes_the_general_way(cuda, general):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    wide = torch.zeros(64 * 256 + 8, dtype=torch.bfloat16)[1 : 1 + 64 * 256].view(64, 256)  # not aligned
    general.clear()
    launched(cuda, opt, parameter, (factors[0], wide))
    assert len(general) == 1
    parameter.grad = torch.zeros_like(parameter)
    opt.step()
    assert len(general) == 2
    opt.param_groups[0]["maximize"] = True
    launched(cuda, opt, parameter, factors)
    assert len(general) == 3
    opt.param_groups[0]["maximize"] = False
    launched(cuda, opt, parameter, factors, scale=0.5)  # a number, not a tensor
    assert len(general) == 4


def test_a_factor_that_was_modified_is_still_an_error(cuda):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    give_gradient(parameter, factors)
    factors[1].add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        opt.step()


def test_modes_see_operators(cuda, general):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    give_gradient(parameter, factors)
    with Mode():
        opt.step()
    assert {"forge.check_finite.default", "forge.wgrad_step.default"} <= set(seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        give_gradient(parameter, factors)
        opt.step()
    assert "forge::wgrad_step" in {event.key for event in profile.key_averages()}


def test_a_profiler_of_triton_and_back(cuda, general):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    warm(cuda, opt, parameter, factors)
    names = []
    hook = names.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launched(cuda, opt, parameter, factors)
        assert len(cuda.triton) == 2 and not cuda.direct
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    general.clear()
    warm(cuda, opt, parameter, factors)
    assert len(general) == 1 and not cuda.triton and launcher.refusals() == {}


def test_a_plan_keeps_no_memory(cuda):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="step")
    factors = pair()
    count = lambda t: torch._C._storage_Use_Count(t.untyped_storage()._cdata)  # noqa: E731
    before = [count(t) for t in (parameter, *factors)]
    warm(cuda, opt, parameter, factors)
    assert opt._records[parameter].plan.bound
    assert [count(t) for t in (parameter, *factors)] == before


def test_in_backward(cuda, general):
    (parameter,) = layers(1)
    opt = FusedOptimizer([parameter], lr=1e-3, when="backward")
    factors = pair()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.new_zeros(())

        @staticmethod
        def backward(ctx, grad):
            return fake_training.FactoredGrad(parameter.shape, parameter.dtype, pairs=[factors])

    for i in range(6):
        Product.apply(parameter).backward()
        opt.step()
        opt.zero_grad()
        assert opt.state[parameter]["step"] == i + 1
    assert len(general) == 2


@pytest.mark.parametrize("rule, hyper", [("adamw", {}), ("sgd", {"momentum": 0.9}), ("sgd", {})])
@pytest.mark.parametrize("how", ["load", "clear", "pop", "moments"])
def test_states_that_are_gone_are_made_anew_by_the_general_way(cuda, general, rule, hyper, how):
    (parameter,) = layers(1)
    optimizer = FusedOptimizer([parameter], rule, lr=1e-3, when="step", **hyper)
    blank, factors = optimizer.state_dict(), pair()
    warm(cuda, optimizer, parameter, factors)
    state = optimizer.state[parameter]
    if how == "load":
        optimizer.load_state_dict(blank)
    elif how == "clear":
        optimizer.state.clear()
    elif how == "pop":
        optimizer.state.pop(parameter)
    else:
        for name in [name for name in state if name != "step"]:
            del state[name]
    general.clear()
    launched(cuda, optimizer, parameter, factors)
    names = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",) if hyper else ()}[rule]
    assert len(general) == (0 if how == "moments" and not names else 1)
    assert all(torch.is_tensor(optimizer.state[parameter][name]) for name in names)


def test_another_rounding_of_the_weights_is_not_a_matter_of_the_old_plan(cuda, general):
    (parameter,) = layers(1)
    optimizer, factors = FusedOptimizer([parameter], lr=1e-3, when="step"), pair()
    warm(cuda, optimizer, parameter, factors)
    general.clear()
    optimizer.weight_mode = "nearest"
    launched(cuda, optimizer, parameter, factors)
    assert len(general) == 1
