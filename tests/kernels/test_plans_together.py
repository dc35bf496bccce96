"""`step()` of many weights with plans, on the fake driver: one check of all gradients, then one launch for each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from fused_grad_optimizer import FusedOptimizer, _flags, _plans  # noqa: E402
from fused_grad_optimizer.kernels import bound, dispatch, multi_finite  # noqa: E402
from tests.kernels.fake_training import give_gradient, layers, pair  # noqa: E402

COUNT = _plans._FEWEST + 2


@pytest.fixture
def tables(monkeypatch):
    """For each joint check `(first blocks, addresses, [columns, stride, exponent, aligned, index] of each, flags)`."""
    found = []
    original = multi_finite.launcher.launch

    def launch(kernel, grid, args, constants):
        table, flags, count = args
        numbers = table.tolist()
        places = [tuple(numbers[i : i + 5]) for i in range(2 * count, 7 * count, 5)]
        assert len(places) == count and len(numbers) == 7 * count
        found.append((numbers[:count], numbers[count : 2 * count], places, flags))
        original(kernel, grid, args, constants)

    monkeypatch.setattr(multi_finite.launcher, "launch", launch)
    return found


class Trained:
    """Layers with plans that are bound, and their factors."""

    def __init__(self, count: int = COUNT, when: str = "step", warm: int = 4, **options) -> None:
        self.parameters = layers(count, **options)
        self.optimizer = FusedOptimizer(self.parameters, lr=1e-3, when=when)
        self.pairs = [pair() for _ in range(count)]
        for _ in range(warm):
            self.step()

    def give(self) -> None:
        for parameter, factors in zip(self.parameters, self.pairs):
            give_gradient(parameter, factors)

    def step(self) -> None:
        self.give()
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def counts(self) -> list[int]:
        return [self.optimizer.state[p]["step"] for p in self.parameters]

    def versions(self) -> list[int]:
        return [self.optimizer.state[p]["exp_avg"]._version for p in self.parameters]


def holds(launch: tuple, tensor: torch.Tensor) -> bool:
    return any(value[:8] == tensor.data_ptr().to_bytes(8, "little") for value in launch[-1])


def test_one_check_and_one_launch_for_each(cuda, general, tables):
    trained = Trained()
    general.clear()
    cuda.direct.clear()
    cuda.triton.clear()
    tables.clear()
    trained.step()
    assert not general and not cuda.triton and len(tables) == 1
    check, *steps = cuda.direct
    assert len(steps) == COUNT
    (firsts, addresses, places, flags) = tables[0]
    assert addresses == [t.data_ptr() for factors in trained.pairs for t in factors]
    assert firsts == list(range(0, 2 * 2 * COUNT, 2)) and check[1] == (4 * COUNT, 1, 1)  # two blocks each
    assert places == [(64 * 256, 0, 0x7F80, 1, i // 2) for i in range(2 * COUNT)]
    assert flags.data_ptr() == trained.optimizer._flags.all(0, torch.device("cpu")).data_ptr()
    for i, (step, parameter, factors) in enumerate(zip(steps, trained.parameters, trained.pairs)):
        assert all(holds(step, t) for t in (parameter, *factors, trained.optimizer._flags.of(i, parameter.device)))
    assert trained.counts() == [5] * COUNT


def test_the_launches_of_steps_are_those_of_the_general_way(cuda, monkeypatch):
    trained = Trained()
    monkeypatch.setattr(trained.optimizer, "_scalars_of", lambda *_, made=trained.optimizer._scalars_of: kept)
    kept = next(iter(trained.optimizer._scalars.values()))
    found = []
    for plans in (True, False):
        for record in trained.optimizer._records.values() if not plans else ():
            record.plan = None
        cuda.direct.clear()
        cuda.triton.clear()
        trained.step()
        assert not cuda.triton
        found.append(cuda.direct[1:] if plans else cuda.direct[1::2])
    assert found[0] == found[1] and len(found[0]) == COUNT


def test_scaled_strided_and_other_dtypes(cuda, general, tables):
    """fp32 layers with a scale, whose factors are columns of wider tensors."""
    parameters = layers(COUNT, 40, torch.float32)
    optimizer = FusedOptimizer(parameters, lr=1e-3, when="step")
    wide = [[torch.zeros(64, 48 + i) for _ in range(2)] for i in range(COUNT)]
    for _ in range(4):
        grads = [
            give_gradient(p, tuple(t[:, 4:44] for t in both)).mul_(torch.full((), 0.5))
            for p, both in zip(parameters, wide)
        ]  # fmt: skip
        tables.clear()
        general.clear()
        optimizer.step()
    ((firsts, addresses, places, _),) = tables
    assert not general
    assert addresses == [t.data_ptr() for g in grads for t in g.operands()]
    assert [p[:3] for p in places[:3]] == [(40, 48, 0x7F800000)] * 2 + [(1, 0, 0x7F800000)]
    assert [p[3] for p in places[::3]] == [int(i % 4 == 0) for i in range(COUNT)]  # rows 16 bytes apart, or not
    assert firsts[:4] == [0, 64, 128, 129]


def test_few_gradients_are_checked_one_by_one(cuda, tables):
    trained = Trained(_plans._FEWEST - 1)
    cuda.direct.clear()
    trained.step()
    assert len(cuda.direct) == 2 * (_plans._FEWEST - 1) and not tables


def test_one_whose_plan_is_not_for_it_is_checked_and_stepped_in_general(cuda, general, tables):
    trained = Trained()
    dy, x = trained.pairs[2]
    trained.pairs[2] = dy, torch.zeros(64 * 256 + 8, dtype=torch.bfloat16)[1 : 1 + 64 * 256].view(64, 256)
    for cleared in (general, cuda.direct, cuda.triton, tables):
        cleared.clear()
    trained.step()
    assert [args[0].parameter for args in general] == [2]
    assert [t.data_ptr() for t in trained.pairs[2]] != tables[0][1][4:6]
    assert {place[4] for place in tables[0][2]} == {*range(COUNT)} - {2}
    names = [source.name for source, *_ in cuda.triton]
    assert "nonfinite_kernel" in names and len(cuda.direct) + len(cuda.triton) == 1 + (COUNT - 1) + 2
    assert trained.counts() == [5] * COUNT


def test_flags_that_move_before_the_check(cuda, general, tables):
    """The flag of a later parameter must not move those that the check was told of."""
    trained = Trained()
    before = trained.optimizer._flags.all(0, torch.device("cpu")).data_ptr()
    more = [nn.Parameter(torch.zeros(2)) for _ in range(80)] + layers(1)
    trained.optimizer.add_param_group({"params": more})
    trained.parameters.append(more[-1])
    trained.pairs.append(pair())
    for _ in range(3):
        trained.step()
    cuda.direct.clear()
    tables.clear()
    general.clear()
    trained.step()
    flags = trained.optimizer._flags.all(0, torch.device("cpu"))
    assert not general and flags.data_ptr() != before
    ((_, _, places, base),) = tables
    assert base.data_ptr() == flags.data_ptr() and {place[4] for place in places} == {*range(COUNT), COUNT + 80}
    for step, index in zip(cuda.direct[1:], (*range(COUNT), COUNT + 80)):
        assert holds(step, flags[index])


def test_in_a_captured_graph_each_has_its_check(cuda, general, tables, monkeypatch):
    trained = Trained()
    for cleared in (general, cuda.direct, cuda.triton, tables):
        cleared.clear()
    monkeypatch.setattr(_plans, "_is_capturing", lambda: True)
    trained.step()
    assert not tables and not general and len(cuda.direct) == 2 * COUNT and trained.counts() == [5] * COUNT


def test_gradients_that_backward_left_are_dropped(cuda, general, tables):
    trained = Trained(when="backward")
    general.clear()
    trained.give()
    trained.optimizer.step()
    assert len(tables) and not general and all(p.grad is None for p in trained.parameters)
    assert trained.counts() == [5] * COUNT


def test_a_factor_that_an_earlier_step_moves_is_an_error(cuda):
    """As in the general way; a later step may move it."""
    for late in (False, True):
        trained = Trained()
        weights = trained.parameters
        moved, reader = (weights[4], 1) if late else (weights[1], 4)
        trained.pairs[reader] = trained.pairs[reader][0], moved.detach()[:64]
        if late:
            trained.step()
            assert trained.counts() == [5] * COUNT
            continue
        with pytest.raises(RuntimeError, match="modified in place"):
            trained.step()
        assert trained.counts() == [5] * 4 + [4] * (COUNT - 4)


def test_a_parameter_that_is_listed_twice_is_stepped_twice(cuda, general):
    trained = Trained()
    trained.optimizer.param_groups[0]["params"].append(trained.parameters[0])
    general.clear()
    trained.step()
    assert trained.counts() == [6] + [5] * (COUNT - 1) and len(general) == 1


@pytest.mark.parametrize("failing", ["check", "third step"])
def test_a_launch_that_fails(cuda, monkeypatch, failing):
    trained = Trained()
    versions, calls = trained.versions(), []
    original = bound.BoundStep.launch

    def fail(self, addresses, checked=False):
        calls.append(checked)
        if len(calls) == 3:
            raise RuntimeError("CUDA error 700")
        original(self, addresses, checked)

    def fail_at_once(*_):
        raise RuntimeError("CUDA error 700")

    with monkeypatch.context() as patch:
        if failing == "check":
            patch.setattr(multi_finite, "check", fail_at_once)
        else:
            patch.setattr(bound.BoundStep, "launch", fail)
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            trained.step()
    moved = 0 if failing == "check" else 2
    assert trained.counts() == [5] * moved + [4] * (COUNT - moved)
    assert trained.versions() == [v + 1 for v in versions[:moved]] + versions[moved:]
    trained.step()
    assert trained.counts() == [6] * moved + [5] * (COUNT - moved)


@pytest.mark.parametrize("count", [COUNT, 3])
@pytest.mark.parametrize("hopper", [True, False])
def test_a_gradient_without_tokens_is_stepped(cuda, monkeypatch, count, hopper):
    """An expert that no token went to: there is nothing to check, and its moments decay all the same."""
    monkeypatch.setattr(dispatch, "_is_hopper", lambda device: hopper)
    trained = Trained(count, warm=0)
    trained.pairs[2] = pair(tokens=0)
    for step in range(1, 6):
        cuda.direct.clear()
        cuda.triton.clear()
        trained.step()
        weight = trained.parameters[2].data_ptr()
        directly = sum(holds(launch, trained.parameters[2]) for launch in cuda.direct)
        by_triton = sum(getattr(a, "data_ptr", int)() == weight for launch in cuda.triton for a in launch[4])
        assert directly + by_triton == 1 and trained.counts() == [step] * count


def test_a_failure_before_a_checked_gradient_is_reached_is_no_skip(cuda, monkeypatch):
    """NaN in layers 1 and 7, the launch of layer 4 fails: of 1 the update was skipped, 7 was not tried."""

    class Done:
        def synchronize(self):
            pass

    def end(self):  # as on a device
        self._pending += [(flags.clone(), Done()) for flags in self._flags.values()]

    monkeypatch.setattr(_flags.SkipFlags, "end", end)
    trained, calls = Trained(), []
    check, launch = multi_finite.check, bound.BoundStep.launch

    def find(operands, addresses, flags):
        check(operands, addresses, flags)
        flags[[1, 7]] = 1

    def fail(self, addresses, checked=False):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        launch(self, addresses, checked)

    with monkeypatch.context() as patch:
        patch.setattr(multi_finite, "check", find)
        patch.setattr(bound.BoundStep, "launch", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            trained.step()
    with pytest.warns(RuntimeWarning, match="NaN or inf in the gradients of parameter 1:"):
        assert trained.optimizer.skipped == {"parameter 1": 1}
    assert trained.counts() == [5, 4, 5, 5] + [4] * (COUNT - 4)
