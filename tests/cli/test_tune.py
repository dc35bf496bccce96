"""`forge bench tune` with made-up times: what it writes, skips, resumes, reports and refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from fused_grad_optimizer.cli.benchmarks import kernel, tune  # noqa: E402
from fused_grad_optimizer.cli.training.config import UsageError  # noqa: E402
from fused_grad_optimizer.kernels import configs, dispatch, tuning  # noqa: E402
from fused_grad_optimizer.kernels.configs import CHUNKED, HOPPER, PORTABLE  # noqa: E402
from fused_grad_optimizer.kernels.tuning import Choice, Key, choice  # noqa: E402

CARD = "NVIDIA Test 9000"
H, P, C = Choice(HOPPER), Choice(PORTABLE), Choice(CHUNKED)
ENVIRONMENT = {
    "card": CARD, "date": "2020-01-01", "command": "forge bench tune", "revision": "abc", "driver": "1.0",
    "versions": {"torch": "2.11", "triton": "3.6"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "shipped_path", lambda card: tmp_path / "shipped" / tuning.file_name(card))
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def settings() -> kernel.KernelSettings:
    return kernel.KernelSettings(
        shapes=((256, 128), (128, 512)), tokens=(128, 1024, 8192), rules=("adamw",), states=(None,), weight=None,
        dtype=torch.bfloat16, device=torch.device("cpu"), rounds=1, seed=0,
    )  # fmt: skip


class FakeTimer:
    """Times that cross at 2000 tokens. `stop_at`: Ctrl-C during that call."""

    def __init__(self, stop_at=None, dropped=(), without=()):
        self.calls, self.stop_at, self.dropped, self.without = [], stop_at, list(dropped), without

    def __call__(self, case, settings):
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append((case.n, case.k, case.tokens))
        us = {H: 100 + case.tokens / 10, C: 200 + case.tokens / 20, P: 300.0 + case.tokens}
        return tune.Measured({c: t for c, t in us.items() if c not in self.without}, self.dropped)


def run(settings, path, timer, **options):
    said: list[str] = []
    return tune.run(settings, path, ENVIRONMENT, said.append, measure=timer, **options), said


def test_what_it_writes_is_what_is_chosen(settings):
    path = tuning.user_path(CARD)
    code, said = run(settings, path, FakeTimer())
    assert code == 0 and "0 are in" in said[0] and str(path) in said[-1]
    key = Key((2, 2, 2), True, 2, 256, 128)
    found = tuning.ranges(CARD, key, True)
    assert found.choices == (H, C) and found.crossover == 2000
    data = json.loads(path.read_text())
    assert data["card"] == CARD and len(data["entries"]) == 2
    assert data["runs"] == [
        {
            "date": "2020-01-01", "command": "forge bench tune", "revision": "abc", "driver": "1.0", "torch": "2.11",
            "triton": "3.6",
        }
    ]  # fmt: skip
    times = [c["us"] for c in data["entries"][0]["cells"][2]["candidates"]]
    assert times == sorted(times) and len(times) == 3


@pytest.mark.parametrize("stop_at", [0, 1, 4])
def test_an_interrupted_run_leaves_a_table_and_is_gone_on_with(settings, tmp_path, stop_at):
    path, whole = tmp_path / "a" / "table.json", tmp_path / "whole.json"
    first = FakeTimer(stop_at)
    code, said = run(settings, path, first)
    assert code == 130 and f"Stopped after {stop_at} of 6 cells" in said[-1]
    assert path.exists() == (stop_at > 0)
    assert sum(len(cells) for cells in (tuning.read(path, CARD) or tuning.Table(CARD)).entries.values()) == stop_at
    second = FakeTimer()
    code, said = run(settings, path, second)
    assert code == 0 and f"{6 - stop_at} cells to measure, {stop_at} are in" in said[0]
    run(settings, whole, everything := FakeTimer())
    assert first.calls + second.calls == everything.calls and len(everything.calls) == 6
    assert json.loads(path.read_text()) == json.loads(whole.read_text())


def test_a_finished_table_is_left_alone_unless_told(settings, tmp_path):
    path = tmp_path / "table.json"
    run(settings, path, FakeTimer())
    before = path.read_bytes()
    code, _ = run(settings, path, timer := FakeTimer())
    assert code == 0 and not timer.calls and path.read_bytes() == before
    code, _ = run(settings, path, timer := FakeTimer(without=(C,)), again=True)
    assert len(timer.calls) == 6
    us = [cell.us for cells in tuning.read(path, CARD).entries.values() for cell in cells.values()]
    assert all(C not in one for one in us)


def test_more_cells_join_those_of_an_earlier_run(settings, tmp_path):
    path = tmp_path / "table.json"
    run(settings, path, FakeTimer())
    later = {**ENVIRONMENT, "date": "2021-01-01", "versions": {"torch": "2.13", "triton": "3.9"}}
    more = dataclasses.replace(settings, tokens=(128, 64), rules=("adamw", "adam", "lion"))
    said: list[str] = []
    timer = FakeTimer()
    assert tune.run(more, path, later, said.append, measure=timer) == 0
    assert any("torch 2.11, triton 3.6" in line and "--again" in line for line in said)
    # adam keeps what adamw keeps: one measurement serves both
    assert sorted(timer.calls) == sorted([(256, 128, 64), (128, 512, 64)] * 2 + [(256, 128, 128), (128, 512, 128)])
    table = tuning.read(path, CARD)
    assert [record["torch"] for record in table.runs] == ["2.11", "2.13"]
    cells = table.entries[Key((2, 2, 2), True, 2, 256, 128)]
    assert {tokens: cell.run for tokens, cell in cells.items()} == {128: 0, 1024: 0, 8192: 0, 64: 1}
    assert Key((2, 2), True, 2, 256, 128) in table.entries


def test_it_prints_what_changes_against_the_table_in_force(settings, tmp_path):
    one = dataclasses.replace(settings, shapes=((256, 128),), tokens=(128, 8192))
    tuned = choice(HOPPER, {"group": 4})

    def other(case, settings):
        return tune.Measured({H: 50.0, C: 60.0, tuned: 40.0} if case.tokens == 128 else {H: 50.0, C: 60.0}, [])

    run(one, tuning.user_path(CARD), other)
    code, said = run(one, tmp_path / "new.json", FakeTimer())
    assert f"T=128, adamw bfloat16, states as the weight: {tuned} (not measured) -> {H} (112.8 us)" in said[1]
    assert f"{H} (919.2 us) -> {CHUNKED} (609.6 us)" in said[2]
    assert "2 choices changed" in said[3] and str(tuning.user_path(CARD)) in said[4]
    run(one, tuning.user_path(CARD), FakeTimer(), again=True)
    code, said = run(one, tmp_path / "same.json", FakeTimer())
    assert f"{H} stays, 112.8 us" in said[1] and "0 choices changed" in said[3]


def test_wrong_candidates_are_named_and_a_cell_without_any_is_not_written(settings, tmp_path):
    path = tmp_path / "table.json"
    code, said = run(settings, path, FakeTimer(dropped=["wrong: chunked: the error of weight is 1"]))
    assert code == 0 and "left out: wrong: chunked" in said[1]
    nothing = tmp_path / "nothing.json"
    code, said = run(settings, nothing, FakeTimer(dropped=["out of memory"], without=(H, C, P)))
    assert code == 1 and not nothing.exists() and "not measured" in said[1] and "out of memory" in said[1]


def test_a_damaged_or_foreign_table_is_refused_and_kept(settings, tmp_path):
    path = tmp_path / "table.json"
    for text in ("{", '{"format": 1, "card": "other", "runs": [], "entries": []}', "[]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="table.json"):
            run(settings, path, timer := FakeTimer())
        assert not timer.calls and path.read_text() == text
    with pytest.raises(UsageError, match="folder"):
        run(settings, tmp_path, FakeTimer())
    in_use = tuning.user_path(CARD)
    in_use.parent.mkdir(parents=True)
    in_use.write_text("{")
    with pytest.raises(UsageError, match=str(in_use)):
        run(settings, tmp_path / "new.json", FakeTimer())


def test_a_cell_is_checked_then_timed(settings, monkeypatch):
    """On the CPU, with steps that stand in for the kernels: a right one, a wrong one, one that does not compile."""
    right = kernel.ops.step
    tried = []

    def step_by(chosen, target, gradient, update, scalars, flag):
        tried.append(chosen)
        if chosen == H:
            raise RuntimeError("does not fit\non this card")
        if chosen == P:
            gradient = dataclasses.replace(gradient, dys=[dy * 0.9 for dy in gradient.dys])
        right(target, gradient, update, scalars, None)

    monkeypatch.setattr(tune.ops, "step_by", step_by)
    monkeypatch.setattr(tune, "candidates", lambda problem: [P, H, C])
    with monkeypatch.context() as m:
        m.setitem(kernel.timing.TARGET_SECONDS, "cpu", 1e-4)
        us, dropped = tune.measure_cell(kernel.Case(65, 33, 100, "adamw", None), settings)
    assert list(us) == [C] and us[C] > 0
    assert dropped[0].startswith("wrong: wgrad_step: the error of") and dropped[1] == f"{H}: RuntimeError: does not fit"
    assert tried.count(P) == 1 and tried.count(H) == 1 and tried.count(C) > 2


@pytest.mark.parametrize("declines", [None, "not this one"])
def test_candidates(settings, monkeypatch, declines):
    monkeypatch.setattr(dispatch, "reason_against_hopper", lambda *arguments: declines)
    problem = kernel.Problem(kernel.Case(256, 128, 16, "adamw", None), settings)
    found = tune.candidates(problem)
    assert len(set(found)) == len(found)
    assert [c for c in found if c.path == CHUNKED] == [C]  # all sizes give half of so small a weight
    hopper = [c for c in found if c.path == HOPPER]
    assert len(hopper) == (len(configs.CANDIDATES[HOPPER]) if declines is None else 0)
    monkeypatch.setattr(problem, "case", kernel.Case(4096, 14336, 16, "adamw", None))
    assert len([c for c in tune.candidates(problem) if c.path == CHUNKED]) == len(configs.CANDIDATES[CHUNKED])


class Meanwhile(FakeTimer):
    """Calls `act` while the cell of that index is measured."""

    def __init__(self, index, act):
        super().__init__()
        self.index, self.act = index, act

    def __call__(self, case, settings):
        if len(self.calls) == self.index:
            self.act()
        return super().__call__(case, settings)


@pytest.mark.parametrize("again", [False, True])
def test_two_runs_on_one_table_keep_each_others_cells(settings, tmp_path, again):
    path = tmp_path / "table.json"
    other = dataclasses.replace(settings, shapes=((64, 32), (256, 128)), tokens=(16, 128))
    environment = {**ENVIRONMENT, "date": "2021-01-01"}

    def another_run():
        assert tune.run(other, path, environment, lambda line: None, measure=FakeTimer(), again=again) == 0

    code, _ = run(settings, path, timer := Meanwhile(1, another_run), again=again)
    assert code == 0 and len(timer.calls) == 6
    table = tuning.read(path, CARD)
    dates = {
        (key.n, key.k, tokens): table.runs[cell.run]["date"]
        for key, cells in table.entries.items()
        for tokens, cell in cells.items()
    }
    first, second = ENVIRONMENT["date"], environment["date"]
    expected = {(n, k, tokens): first for n, k in settings.shapes for tokens in settings.tokens}
    expected |= {(64, 32, 16): second, (64, 32, 128): second, (256, 128, 16): second}
    assert dates == expected


DAMAGES = {
    "removed": lambda path: path.unlink(),
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "damaged": lambda path: path.write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_table_lost_while_it_grows_is_written_anew(settings, tmp_path, damage):
    path, whole = tmp_path / "a" / "table.json", tmp_path / "whole.json"
    run(settings, whole, FakeTimer())
    code, said = run(settings, path, Meanwhile(3, lambda: DAMAGES[damage](path)))
    assert code == 0 and ("written anew" in said[4]) == (damage == "damaged")
    assert json.loads(path.read_text()) == json.loads(whole.read_text())


def test_a_place_that_cannot_be_written_is_refused_before_the_first_cell(settings, monkeypatch, tmp_path):
    """The refusal is made up, so that root gets it too."""
    opened = os.open

    def refuse(file, flags, *arguments, **options):
        if flags & os.O_CREAT and os.path.dirname(os.path.abspath(file)) == str(tmp_path):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, flags, *arguments, **options)

    with monkeypatch.context() as m:
        m.setattr(os, "open", refuse)
        with pytest.raises(UsageError, match="--out .*table.json cannot be written: Permission denied"):
            run(settings, tmp_path / "table.json", timer := FakeTimer())
    assert not timer.calls
    run(settings, tmp_path / "new" / "table.json", FakeTimer())
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["table.json"]  # nothing is left of the trial


def test_what_does_not_fit_the_card_is_no_candidate(settings, monkeypatch):
    """Seven stages leave no room for four blocks of W in bf16 and two states in fp32."""

    monkeypatch.setattr(dispatch, "reason_against_hopper", lambda *arguments: None)
    wide = {"stages": 7, "state_slots": 4}
    monkeypatch.setitem(configs.CANDIDATES, HOPPER, ({}, wide, {"group": 4}))
    for state, tried in ((None, True), ("fp32", False)):
        found = tune.candidates(kernel.Problem(kernel.Case(256, 128, 16, "adamw", state), settings))
        assert (choice(HOPPER, wide) in found) == tried
        assert H in found and choice(HOPPER, {"group": 4}) in found


def test_the_command_refuses_a_cpu_and_wrong_arguments(invoke, monkeypatch, tmp_path):
    done = invoke("bench", "tune", "--device", "cpu", "--out", tmp_path / "a.json")
    assert done.exit_code == 2 and "tuning needs a CUDA device" in done.output and not (tmp_path / "a.json").exists()


def test_the_command_measures_the_weights_of_an_8b_model_by_default(invoke, monkeypatch, tmp_path):
    from fused_grad_optimizer.cli import bench

    seen = []
    monkeypatch.setattr(bench, "find_device", lambda device: "cuda")
    monkeypatch.setattr(bench.results, "environment", lambda device, command, _: {**ENVIRONMENT, "command": command})
    monkeypatch.setattr(tune, "run", lambda *arguments, **options: seen.append((arguments, options)) or 0)
    assert invoke("bench", "tune").exit_code == 0
    assert invoke("bench", "tune", "--shape", "8x16", "--tokens", 5, "--rule", "lion", "--again", "--state", "fp32",
                  "--rounds", 3, "--out", tmp_path / "a.json").exit_code == 0  # fmt: skip
    (chosen, path, environment, _), options = seen[0]
    assert chosen.shapes == ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096))
    assert chosen.tokens == (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert chosen.rules == ("adamw",) and chosen.dtype == torch.bfloat16 and options == {"again": False}
    assert path == tuning.user_path(CARD) and environment["command"] == "forge bench tune"
    (chosen, path, environment, _), options = seen[1]
    assert (chosen.shapes, chosen.tokens, chosen.rules, chosen.states, chosen.rounds) == (
        ((8, 16),), (5,), ("lion",), ("fp32",), 3,
    )  # fmt: skip
    assert options == {"again": True} and path == tmp_path / "a.json"
    expected = "forge bench tune --shape 8x16 --tokens 5 --rule lion --state fp32 --rounds 3"
    assert environment["command"] == expected
    assert invoke("bench", "tune", "--rule", "adagrad").exit_code == 2
