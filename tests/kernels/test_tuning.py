"""Tables of measurements: what is read and refused, what they choose, and the choice on a card that is made up."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import Gradient, dispatch, tuning
from fused_grad_optimizer.kernels.configs import CANDIDATES, CHUNKED, HOPPER, PORTABLE
from fused_grad_optimizer.kernels.tuning import Choice, Key, Ranges, choice, from_cells, nearest
from tests.kernels.test_hopper_config import STORAGES_OF, launched

ROOT = Path(__file__).parents[2]
CARD = "NVIDIA Test 9000"
BF16 = Key((2, 2, 2), True, 2, 4096, 4096)
H, P, C = Choice(HOPPER), Choice(PORTABLE), Choice(CHUNKED)
C32 = choice(CHUNKED, {"mib": 32})
GUESS = tuning.defaults(True)


@pytest.fixture(autouse=True)
def tables(monkeypatch, tmp_path):
    """No table but those a test writes; `tables(folder, data)` writes one for CARD."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "shipped_path", lambda card: tmp_path / "shipped" / tuning.file_name(card))
    monkeypatch.delenv("FORGE_KERNEL", raising=False)
    tuning.forget()
    tuning._say_how_to_measure.cache_clear()

    def write(kind, data):
        path = tuning.user_path(CARD) if kind == "user" else tuning.shipped_path(CARD)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    yield write
    tuning.forget()


def table(*entries, card=CARD):
    return {"format": 1, "card": card, "runs": [{"date": "today"}], "entries": list(entries)}


def entry(cells, key=BF16):
    """`cells`: {tokens: {Choice: us}}."""
    listed = [
        {
            "tokens": t,
            "run": 0,
            "candidates": [{"path": c.path, "config": dict(c.config), "us": u} for c, u in us.items()],
        }
        for t, us in cells.items()
    ]
    return {**key._asdict(), "cells": listed}


@pytest.fixture
def on_card(monkeypatch):
    """`on_card(hopper)`: CPU tensors pass for tensors on CARD."""

    def pretend(hopper=True):
        pytest.importorskip("triton")
        monkeypatch.setattr(dispatch, "_card", lambda device: CARD)
        monkeypatch.setattr(dispatch, "_is_hopper", lambda device: hopper)
        if hopper and dispatch.hopper_kernel() is None:
            pytest.skip("this Triton has no Gluon for the Hopper kernel")

    return pretend


def factors(n, k, tokens, dtype=torch.bfloat16):
    return Gradient([torch.zeros(t, n, dtype=dtype) for t in tokens], [torch.zeros(t, k, dtype=dtype) for t in tokens])


def plan(n, k, *tokens, dtype=torch.bfloat16, **options):
    targets = [torch.zeros(1, k, dtype=torch.bfloat16)] * 3
    return dispatch.plan(factors(n, k, tokens, dtype), n, k, targets, stochastic=True, **options)


# -- ranges of T -------------------------------------------------------------------------------------------------------


def test_the_path_changes_where_the_measured_times_cross():
    """Straight lines: 100 + T/10 against 200 + T/20 are equal at T = 2000."""
    cells = {t: {H: 100 + t / 10, C: 200 + t / 20} for t in (512, 1024, 4096, 16384)}
    found = from_cells(cells, True, GUESS, "here")
    assert found.choices == (H, C) and found.limits == (2000,)
    assert found.at(1) == H and found.at(2000) == H and found.at(2001) == C and found.at(10**6) == C
    assert found.crossover == 2000
    assert found.reason == f"here: {HOPPER} up to T=2000, {CHUNKED} above"


def test_where_only_one_was_measured_on_both_sides_it_changes_in_the_middle():
    found = from_cells({256: {H: 10.0}, 1024: {C: 30.0}}, True, GUESS, "here")
    assert found == Ranges((512,), (H, C), "here")


def test_a_path_is_kept_against_noise_but_not_against_more():
    us = {H: 100.0, C: 99.5}
    assert from_cells({512: {H: 50.0, C: 60.0}, 1024: us}, True, GUESS, "").at(1024) == H
    us[C] = 98.0
    assert from_cells({512: {H: 50.0, C: 60.0}, 1024: us}, True, GUESS, "").at(1024) == C


def test_without_the_hopper_kernel_the_others_times_decide():
    cells = {128: {H: 10.0, P: 20.0, C: 30.0}, 4096: {H: 50.0, P: 100.0, C: 40.0}}
    assert from_cells(cells, True, GUESS, "").at(128) == H
    found = from_cells(cells, False, tuning.defaults(False), "")
    assert found.choices == (P, C) and HOPPER not in found.reason
    only = {128: {H: 10.0}}
    assert from_cells(only, False, tuning.defaults(False), "") == tuning.defaults(False)


def test_far_beyond_what_was_measured_the_guess_serves():
    found = from_cells({128: {H: 1.0, C: 2.0}}, True, GUESS, "")
    assert found.at(256) == H and found.at(32768) == H and found.at(32769) == C
    found = from_cells({32768: {H: 1.0, C: 2.0}}, True, GUESS, "")
    assert found.at(65536) == H and found.at(65537) == C
    found = from_cells({128: {H: 2.0, C32: 1.0}}, True, GUESS, "")
    assert found == Ranges((), (C32,), "") and found.crossover == 0 and found.reason == f": {CHUNKED} at any T"


def test_beyond_what_was_measured_the_lines_go_on():
    """50 us ahead at 1024 and 10 at 2048: none at 2048 + 1024 / 4. Lines that part never meet."""
    found = from_cells({1024: {H: 100.0, C: 150.0}, 2048: {H: 200.0, C: 210.0}}, True, GUESS, "t")
    assert found == Ranges((2304,), (H, C), "t") and found.reason == f"t: {HOPPER} up to T=2304, {CHUNKED} above"
    found = from_cells({1024: {H: 100.0, C: 110.0}, 2048: {H: 200.0, C: 250.0}}, True, GUESS, "t")
    assert found == Ranges((), (H,), "t") and found.crossover is None and found.at(10**7) == H
    found = from_cells({1024: {H: 100.0, C: 150.0}, 2048: {H: 200.0}}, True, GUESS, "t")
    assert found.choices == (H, C) and found.limits == (32768,) and "larger T are a guess" in found.reason


def test_configurations_of_one_path_do_not_make_a_crossover():
    other = choice(HOPPER, {"group": 16})
    cells = {128: {H: 1.0, other: 2.0, C: 9.0}, 512: {H: 3.0, other: 2.0, C: 9.0}, 2048: {H: 9.0, other: 9.0, C: 5.0}}
    found = from_cells(cells, True, GUESS, "s")
    assert found.choices == (H, other, C) and found.crossover == found.limits[1]
    assert found.reason == f"s: {HOPPER} up to T={found.limits[1]}, {CHUNKED} above"
    assert Ranges((), (H,), "s").crossover is None


# -- prediction --------------------------------------------------------------------------------------------------------


def test_the_nearest_entry_predicts():
    entries = [BF16._replace(n=n, k=k) for n, k in ((14336, 4096), (4096, 14336), (4096, 4096), (128256, 4096))]

    def found(**changes):
        return nearest(BF16._replace(**changes), entries)

    assert found(n=4096, k=4096) == entries[2]
    assert found(n=11008, k=4096) == entries[0]
    assert found(n=5120, k=13824) == entries[1]
    assert found(n=152064, k=3584) == entries[3]
    assert found(n=64, k=64) == entries[2]
    assert found(n=0, k=5) in entries
    assert found(inputs=4) is None


def test_the_same_bytes_go_before_the_same_shape():
    lion, wide = BF16._replace(bytes=(2, 2), n=64), BF16._replace(bytes=(2, 4, 4))
    assert nearest(BF16._replace(bytes=(2, 2)), [BF16, lion, wide]) == lion
    assert nearest(BF16._replace(bytes=(4, 4, 4)), [BF16, lion, wide]) == wide
    assert nearest(BF16._replace(stochastic=False), [lion, BF16]) == BF16
    nearest_rounding = BF16._replace(stochastic=False, n=1 << 20)
    assert nearest(BF16._replace(stochastic=False), [BF16, nearest_rounding]) == nearest_rounding


@pytest.mark.parametrize("dtypes", STORAGES_OF, ids=lambda dtypes: "-".join(str(d.itemsize) for d in dtypes))
@pytest.mark.parametrize("changes", CANDIDATES[HOPPER], ids=str)
def test_what_one_storages_table_chooses_fits_every_other(changes, dtypes, tables, on_card):
    """A Hopper block may have 227 KiB of shared memory; some are for the barriers."""
    on_card()
    tuned = choice(HOPPER, changes)
    tables("user", table(entry({t: {tuned: 1.0, C32: 2.0} for t in (128, 512, 4096)})))
    key = BF16._replace(bytes=tuple(d.itemsize for d in dtypes))
    for tokens in (1, 128, 257, 512, 513, 4096):
        chosen = tuning.ranges(CARD, key, True).at(tokens)
        assert chosen == (tuned if key == BF16 else H)
        assert launched(chosen, dtypes, tokens)[1] <= (227 << 10) - 1024
        assert launched(tuned, dtypes, tokens)[1] <= (227 << 10) - 1024  # a table's own entry, whatever it says


def test_an_entry_of_other_bytes_gives_its_paths_and_their_least_times(tables):
    """Of the Hopper kernel 100 and 300 us, of the chunks 150 and 200: straight lines cross at T = 1024."""
    slow, tuned = choice(HOPPER, {"group": 4}), choice(HOPPER, {"stages": 8, "slots": 3})
    cells = {512: {tuned: 100.0, slow: 120.0, C: 170.0, C32: 150.0}, 2048: {tuned: 300.0, slow: 320.0, C32: 200.0}}
    tables("user", table(entry(cells)))
    found = tuning.ranges(CARD, BF16._replace(bytes=(2, 4, 4)), True)
    assert found == Ranges((1024,), (H, C), f"table for {CARD}, by its entry 4096x4096")
    assert tuning.ranges(CARD, BF16._replace(n=64), True) == dataclasses.replace(found, choices=(tuned, C32))


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_table_survives_being_written_and_read(tables):
    cells = {128: {H: 1.5, C32: 2.25, P: 9.0}, 512: {choice(HOPPER, {"group": 16, "stages": 4}): 3.0}}
    path = tables("user", table(entry(cells), entry({64: {P: 1.0}}, BF16._replace(bytes=(4,), stochastic=False))))
    read = tuning.read(path, CARD)
    assert {t: cell.us for t, cell in read.entries[BF16].items()} == cells and len(read.entries) == 2
    path.write_text(json.dumps(tuning.as_json(read)))
    assert tuning.read(path, CARD) == read
    assert tuning.as_json(read)["entries"][0]["cells"][0]["candidates"][0] == {"path": HOPPER, "config": {}, "us": 1.5}


def test_a_users_cell_goes_before_the_shipped_one(tables):
    tables("shipped", table(entry({512: {H: 1.0, C: 2.0}, 8192: {H: 2.0, C: 1.0}})))
    assert tuning.ranges(CARD, BF16, True).at(512) == H
    tables("user", table(entry({512: {H: 2.0, C: 1.0}})))
    assert tuning.ranges(CARD, BF16, True).at(512) == H  # read once
    tuning.forget()
    found = tuning.ranges(CARD, BF16, True)
    assert found.choices == (C,) and found.source == f"table for {CARD}"
    other = tuning.ranges(CARD, BF16._replace(n=2048), True)
    assert other.choices == (C,) and other.source == f"table for {CARD}, by its entry 4096x4096"


DAMAGES = {
    "cut off": lambda data: json.dumps(data)[:-20],
    "empty": lambda data: "",
    "a list": lambda data: [],
    "other format": lambda data: {**data, "format": 2},
    "no card": lambda data: {k: v for k, v in data.items() if k != "card"},
    "other card": lambda data: {**data, "card": "NVIDIA H100"},
    "unknown path": lambda data: json.dumps(data).replace(CHUNKED, "magic"),
    "too deep": lambda data: "[" * 100_000,
    "no format": lambda data: {**data, "format": True},
    "a word": lambda data: json.dumps(data).replace("4096", '"many"'),
    "negative": lambda data: json.dumps(data).replace("4096", "-4096"),
    "not a time": lambda data: json.dumps(data).replace("1.5", "NaN"),
    "no run": lambda data: {**data, "runs": []},
    "a result": lambda data: {"kind": "kernel", "entries": []},
}


@pytest.mark.parametrize("where", ["user", "shipped"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_table_is_an_error_that_names_it(tables, damage, where, on_card):
    on_card()
    right = table(entry({512: {H: 1.5, C32: 2.0}}))
    path = tables(where, right)
    assert plan(4096, 4096, 512).choice == H  # the right one is taken
    tuning.forget()
    tables(where, DAMAGES[damage](right))
    for _ in range(2):  # an error again, not only once
        with pytest.raises(ValueError, match="table") as caught:
            plan(4096, 4096, 512)
        assert str(path) in str(caught.value) and "remove it" in str(caught.value)


@pytest.mark.parametrize(
    "path, changes",
    [(PORTABLE, {"block_n": 100}), (PORTABLE, {"num_warps": 3}), (HOPPER, {"state_rows": 64}),
     (HOPPER, {"group": 1025}), (HOPPER, {"block_n": 64, "block_k": 256, "group": 4, "slots": 4}),
     (CHUNKED, {"gib": 1})],
    ids=str,
)  # fmt: skip
def test_candidates_of_another_version_are_left_out(tables, on_card, path, changes, caplog):
    """They might not compile, or give wrong results; the next best is taken, and it is said once."""
    on_card(hopper=path == HOPPER)
    known = Choice(path)
    tables("user", table(entry({512: {choice(path, changes): 1.0, known: 2.0}, 2048: {choice(path, changes): 1.0}})))
    for tokens in (512, 600, 512):
        found = plan(4096, 4096, tokens)
        assert found.choice == known and str(changes) not in found.reason
    assert [r.message for r in caplog.records if "2 candidates" in r.getMessage()] and len(caplog.records) == 1


@pytest.mark.parametrize("path", CANDIDATES)
def test_what_is_measured_may_stand_in_a_table(path):
    assert all(tuning._is_known(choice(path, changes)) for changes in CANDIDATES[path])


def test_nothing_changes_when_a_table_is_damaged(tables, on_card, monkeypatch):
    """The error comes before the launch."""
    on_card(hopper=False)
    monkeypatch.setattr(ops, "triton_reason", lambda device, dtype: None)
    tables("user", "{")
    weight, state = torch.ones(4, 4), torch.ones(4, 4)
    from fused_grad_optimizer.kernels import Target
    from fused_grad_optimizer.rules import UPDATES

    update = UPDATES["sgd_momentum"]
    hyper = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    scalars = ops.make_scalars(update, hyper, 1, False, 0, torch.device("cpu"), torch.float32)
    gradient = Gradient([torch.ones(2, 4)], [torch.ones(2, 4)])
    with pytest.raises(ValueError, match="not a tuning table"):
        ops.step(Target(weight, [state], ["fp32", "fp32"], 0), gradient, update, scalars, None)
    assert weight.eq(1).all() and state.eq(1).all() and weight._version == 0


@pytest.mark.parametrize("place", ["XDG_CACHE_HOME", "HOME"])
def test_a_home_that_is_no_folder_has_no_table(monkeypatch, tmp_path, place, tables):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(place, str(tmp_path / "file"))
    assert tuning.in_force(CARD) == {} and tuning.ranges(CARD, BF16, True) == GUESS
    tables("shipped", table(entry({512: {C: 1.0}})))
    tuning.forget()
    assert tuning.ranges(CARD, BF16, True).at(512) == C


@pytest.mark.parametrize("seen", [False, True])
def test_a_table_behind_a_closed_folder_is_none_and_one_that_is_closed_itself_an_error(monkeypatch, tables, seen):
    """The refusals are made up, so that root gets them too."""
    path = tables("user", table(entry({512: {C: 1.0}})))
    calls = {name: getattr(Path, name) for name in ("read_text", "stat")}

    def refuse(name):
        def call(self, *arguments, **options):
            if self == path and not (seen and name == "stat"):
                raise PermissionError(13, "Permission denied", str(self))
            return calls[name](self, *arguments, **options)

        monkeypatch.setattr(Path, name, call)

    refuse("read_text"), refuse("stat")
    if seen:
        with pytest.raises(ValueError, match="cannot be read.*give access"):
            tuning.in_force(CARD)
    else:
        assert tuning.in_force(CARD) == {}


def test_places(monkeypatch, tmp_path):
    assert tuning.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tuning.file_name("NVIDIA A100-SXM4-80GB") == "nvidia_a100_sxm4_80gb.json"
    assert tuning.user_path("A 1") == tmp_path / "cache/fused_grad_optimizer/tuned/a_1.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):  # as the XDG specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert tuning.user_path("A 1") == tmp_path / ".cache/fused_grad_optimizer/tuned/a_1.json"


def test_every_shipped_table_can_be_read():
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.json"):
        card = json.loads(path.read_text())["card"]
        assert path.name == tuning.file_name(card)
        assert tuning.read(path, card).entries


def test_a_wheel_carries_the_tables(tmp_path):
    """Built from a copy of the sources, with a table added to those that are there."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("this setuptools does not know the project's licence field")
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "src/fused_grad_optimizer/kernels/tuned/some_card.json").write_text("{}")
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True, timeout=200)
    (wheel,) = copy.glob("*.whl")
    assert "fused_grad_optimizer/kernels/tuned/some_card.json" in zipfile.ZipFile(wheel).namelist()


# -- the choice --------------------------------------------------------------------------------------------------------


def test_an_unknown_card_gets_a_guess_and_is_told_once(on_card, caplog):
    on_card()
    with caplog.at_level(logging.WARNING):
        for n in (128, 256):
            assert plan(n, 128, 32768).choice == H
            found = plan(n, 128, 32769)
            assert found.choice == C and found.crossover == 32768 and "guess" in found.reason
    (said,) = [record.getMessage() for record in caplog.records]
    assert CARD in said and "forge bench tune" in said and "\n" not in said


def test_an_unknown_card_that_is_not_hopper(on_card):
    on_card(hopper=False)
    assert plan(128, 128, 100, 924).choice == P
    found = plan(128, 128, 100, 925)
    assert found.choice == C and found.crossover == 1024 and "compute capability" in found.reason


def test_a_table_serves_and_says_so(tables, on_card, caplog):
    on_card()
    tuned = choice(HOPPER, {"group": 16})
    tables("shipped", table(entry({1024: {tuned: 100.0, C: 200.0}, 4096: {tuned: 400.0, C: 300.0}})))
    found = plan(4096, 4096, 2048)
    assert found.choice == tuned and found.crossover == 2560
    assert found.reason == f"table for {CARD}: {HOPPER} up to T=2560, {CHUNKED} above"
    assert plan(4096, 4096, 2561).choice == C and plan(4096, 4096, 10, tokens=2561).choice == C
    assert not caplog.records
    launch, options = dispatch.launcher(
        tuned, 4096, 4096, [torch.zeros(1, dtype=torch.bfloat16)] * 3, 1024, torch.bfloat16
    )
    assert options["config"].group == 16 and launch is dispatch.hopper_kernel().launch


def test_what_the_hopper_kernel_declines_goes_to_another_by_tokens(tables, on_card):
    on_card()
    found = plan(128, 120, 256)  # 120 columns are not a multiple of 16
    assert found.choice == P and f"not {HOPPER}: columns" in found.reason
    assert plan(128, 120, 1025).choice == C
    cells = {1024: {H: 1.0, P: 2.0, C: 3.0}, 4096: {H: 2.0, P: 9.0, C: 6.0}}
    tables("shipped", table(entry(cells)))
    tuning.forget()
    assert plan(128, 128, 4096).choice == H
    assert plan(128, 120, 1024).choice == P and plan(128, 120, 4096).choice == C


@pytest.mark.parametrize("expanded", ["dy", "x"])
def test_rows_that_lie_on_each_other_are_not_for_tma(expanded, on_card):
    """Every token has the same row, as in the backward of a sum over them."""
    on_card()
    rows = {name: torch.zeros(64, 128, dtype=torch.bfloat16) for name in ("dy", "x")}
    rows[expanded] = rows[expanded][:1].expand(64, 128)
    targets = [torch.zeros(128, 128, dtype=torch.bfloat16)] * 3
    chosen = dispatch.plan(Gradient([rows["dy"]], [rows["x"]]), 128, 128, targets)
    assert chosen.choice == P and "not on each other" in chosen.reason


def test_storing_a_gradient_keeps_to_the_kernels(on_card):
    on_card()
    assert plan(128, 128, 100_000, storing=True).choice == H
    assert plan(128, 120, 100_000, storing=True).choice == P


def test_the_environment_overrides(on_card, monkeypatch, tables):
    on_card()
    tables("user", "not read")
    for path in dispatch.PATHS:
        monkeypatch.setenv("FORGE_KERNEL", path)
        for tokens in (1, 50_000):
            assert plan(128, 128, tokens).choice == Choice(path)
    assert plan(128, 128, 64, storing=True).choice == H  # only a step can be chunked
    monkeypatch.setenv("FORGE_KERNEL", "fastest")
    with pytest.raises(ValueError, match="use one of wgrad_step, wgrad_step_hopper, chunked"):
        plan(128, 128, 64)


def test_what_the_path_of_the_environment_cannot_take_is_said_once_and_steps(on_card, monkeypatch):
    """An error would come between two layers of one step."""
    on_card()
    dispatch._say_once.cache_clear()
    monkeypatch.setenv("FORGE_KERNEL", HOPPER)
    with pytest.warns(RuntimeWarning, match=f"FORGE_KERNEL={HOPPER} is not followed for a weight of 128 x 120"):
        found = plan(128, 120, 64)
    assert found.choice == P and HOPPER in found.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(128, 120, 64).choice == P
        assert plan(128, 128, 64).choice == H


def test_a_torch_that_cannot_add_in_fp32_keeps_several_pairs_in_registers(on_card, monkeypatch):
    monkeypatch.setattr(dispatch, "_adds_in_fp32", lambda: False)
    on_card()
    assert plan(128, 128, 33_000).choice == C
    found = plan(128, 128, 16_500, 16_500)
    assert found.choice == H and "torch 2.10" in found.reason
    assert plan(128, 120, 4500, 4500).choice == P
    assert plan(128, 120, 4500, 4500, dtype=torch.float32).choice == C
    dispatch._say_once.cache_clear()
    monkeypatch.setenv("FORGE_KERNEL", CHUNKED)
    with pytest.warns(RuntimeWarning, match="torch 2.10"):
        assert plan(128, 128, 4500, 4500).choice == P
