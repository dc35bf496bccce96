"""`forge bench host` on a CPU and tiny sizes: what it measures and refuses, its file, its table."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from fused_grad_optimizer.cli.benchmarks import host, results  # noqa: E402
from fused_grad_optimizer.cli.benchmarks.sheets import markdown, sheet  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--layers", 2, "--width", 8, "--tokens", 3, "--rounds", 2, "--device", "cpu"]
BACKWARD = [
    "forward and backward, plain layers",
    "forward and backward, factored gradients",
    "forward and backward, when='step', without step()",
    "forward and backward, when='backward'",
]
STEPS = {
    "float32": ["step(), fp32 weights", "step(), fp32 weights used twice"],
    "bfloat16": ["step(), bf16 weights", "step(), fp32 weights", "step(), bf16 weights used twice"],
}


@pytest.fixture
def settings() -> host.HostSettings:
    return host.HostSettings(layers=2, width=8, tokens=3, rounds=3, dtype=torch.float32, device=torch.device("cpu"))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_saves_a_reproducible_result(invoke, tmp_path, dtype):
    out = tmp_path / "new" / "host.json"
    done = invoke("bench", "host", *TINY, "--dtype", dtype, "--out", out, "--revision", "abc")
    assert done.exit_code == 0, done.output
    assert "9th decile" in done.output and str(out) in done.output.replace("\n", "")
    result = json.loads(out.read_text())
    names = [*BACKWARD, *STEPS[dtype]]
    assert [entry["name"] for entry in result["entries"]] == names
    for entry in result["entries"]:
        assert set(entry) == {"name", "status", "us", "least", "ninth_decile"} and entry["status"] == "ok"
        assert 0 < entry["least"] <= entry["us"] <= entry["ninth_decile"]
    about = {key: result[key] for key in ("kind", "layers", "width", "tokens", "rounds", "dtype", "refusals")}
    assert about == {
        "kind": "host", "layers": 2, "width": 8, "tokens": 3, "rounds": 2, "dtype": dtype, "refusals": {},
    }  # fmt: skip
    env = result["environment"]
    expected = f"forge bench host --layers 2 --width 8 --tokens 3 --rounds 2 --device cpu --dtype {dtype}"
    assert env["command"] == expected and env["revision"] == "abc" and env["card"] == env["processor"]
    shown = sheet(result)
    assert shown.columns == ["what", "us a layer", "least", "9th decile"] and [row[0] for row in shown.rows] == names
    assert "2 layers 8 x 8" in shown.notes[0] and "3 tokens" in shown.notes[0] and "2 rounds" in shown.notes[0]
    assert "On a CPU updates are computed" in shown.notes[1] and expected in shown.notes[-1] and len(shown.notes) == 3


def test_defaults_are_not_in_the_command(invoke, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(host, "run", lambda settings, say: seen.append(settings) or _result([_entry("a")]))
    out = tmp_path / "a.json"
    assert invoke("bench", "host", "--device", "cpu", "--out", out).exit_code == 0
    assert json.loads(out.read_text())["environment"]["command"] == "forge bench host --device cpu"
    assert seen == [host.HostSettings(64, 256, 64, 60, torch.float32, torch.device("cpu"))]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", 0),
        ("width", 0),
        ("tokens", -1),
        ("rounds", 0),
        ("rounds", "many"),
        ("dtype", "int8"),
        ("device", "abacus"),
        ("device", "meta"),
        ("out", "."),
    ],
)
def test_a_wrong_argument_is_named_before_measuring(invoke, monkeypatch, name, value):
    monkeypatch.setattr(host, "run", lambda *arguments: pytest.fail("measured"))
    done = invoke("bench", "host", *(() if name == "device" else ("--device", "cpu")), f"--{name}", value)
    assert done.exit_code == 2 and f"--{name}" in done.output, done.output
    if value != "many":  # typer's own check of numbers is a box
        assert done.output.startswith("forge bench host: ") and done.output.count("\n") == 1


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_rounds_are_prepared_and_counted_after_the_warm_up(settings, monkeypatch):
    now, order = [0.0], []
    lengths = iter([9.0] * host.WARMUP + [2.0, 6.0, 4.0])  # seconds that each run takes by a made-up clock
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run():
        assert not gc.isenabled()
        order.append("run")
        now[0] += next(lengths)

    def prepare():
        order.append("prepare")
        now[0] += 100

    times = host.microseconds(host.Case(run, prepare), settings)
    assert order == ["prepare", "run"] * (host.WARMUP + 3)
    assert times == pytest.approx((2e6, 1e6, 2.8e6))  # of two layers


def test_one_round_is_enough(settings):
    us, least, ninth_decile = host.microseconds(host.Case(lambda: None), dataclasses.replace(settings, rounds=1))
    assert us == least == ninth_decile > 0


def test_garbage_is_collected_again_after_an_error(settings):
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        host.microseconds(host.Case(lambda: 1 / 0), settings)
    assert gc.isenabled()
    gc.disable()
    try:
        host.microseconds(host.Case(lambda: None), settings)
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()


def test_plain_layers_get_ordinary_gradients(settings):
    layers = host.model(settings)
    before = [p.detach().clone() for p in layers.parameters()]
    case = host.forward_backward(layers, settings)  # as `plain` does
    case.run()
    assert all(type(p.grad) is torch.Tensor for p in layers.parameters())
    case.prepare()
    assert all(p.grad is None for p in layers.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, layers.parameters()))


@pytest.mark.parametrize(("make", "moves"), [(host.factored, False), (host.collecting, False), (host.updating, True)])
def test_only_updates_in_backward_move_weights(settings, monkeypatch, make, moves):
    made = []
    build = host.model
    monkeypatch.setattr(host, "LR", 1e-2)
    monkeypatch.setattr(host, "model", lambda settings: made.append(build(settings)) or made[0])
    case = make(settings)
    before = [p.detach().clone() for p in made[0].parameters()]
    case.run()
    kept = [isinstance(p.grad, host.FactoredGrad) and bool(p.grad.pairs) for p in made[0].parameters()]
    assert kept == [not moves] * settings.layers
    assert [torch.equal(a, b) for a, b in zip(before, made[0].parameters())] == [not moves] * settings.layers


@pytest.mark.parametrize("uses", [1, 2])
def test_step_moves_each_weight_by_all_its_factors(settings, monkeypatch, uses):
    made = []
    build = host.weights
    monkeypatch.setattr(host, "LR", 1e-2)
    monkeypatch.setattr(host, "weights", lambda *arguments: made.extend(build(*arguments)) or made)
    case = host.stepping(settings, torch.float32, uses)
    case.prepare()
    before = [p.detach().clone() for p in made]
    assert [len(p.grad.pairs) for p in made] == [uses] * settings.layers
    case.run()
    assert not any(torch.equal(a, b) for a, b in zip(before, made))


def test_running_out_of_memory_is_an_entry(settings, monkeypatch):
    def full(settings):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(host, "factored", full)
    result = {**host.run(settings, lambda text: None), "environment": _environment()}
    assert [entry["status"] for entry in result["entries"]] == ["ok", "out of memory", "ok", "ok", "ok", "ok"]
    shown = sheet(result)
    assert shown.rows[1] == [BACKWARD[1], "-", "-", "-"] and shown.failed == [f"{BACKWARD[1]}: out of memory"]


def test_launches_by_the_driver_and_by_triton(settings, monkeypatch):
    pytest.importorskip("triton")
    from tests.kernels.fake_cuda import fake_cuda

    monkeypatch.setattr(host, "triton_reason", lambda *arguments: None)
    said: list[str] = []
    with fake_cuda() as cuda:
        result = host.run(settings, said.append)
    launches = ["one launch, arguments in place", "one launch by Triton", "an empty torch operation"]
    assert [entry["name"] for entry in result["entries"]] == [*BACKWARD, *STEPS["float32"], *launches] == said
    runs = (host.WARMUP + settings.rounds) * settings.layers
    assert len(cuda.direct) == runs and len(cuda.triton) == 1 + runs
    assert {(one[1], one[4]) for one in cuda.direct} == {((2, 1, 1), cuda.direct[0][4])}
    assert {one[2] for one in cuda.triton} == {(2, 1, 1)}  # one block for each operand


def test_a_kernel_left_to_triton_has_no_direct_launch(settings, monkeypatch):
    pytest.importorskip("triton")
    from tests.kernels.fake_cuda import fake_cuda

    from fused_grad_optimizer.kernels import launcher

    def refuse(*arguments):
        raise launcher.NotDirect("an unknown layout")

    monkeypatch.setattr(launcher, "layout_of", refuse)
    with fake_cuda():
        assert host.IN_PLACE not in host.launches(settings)
        cuda = dataclasses.replace(settings, device=torch.device("cuda"))
        assert host.refusals(cuda) == {"nonfinite_kernel": "an unknown layout"}
    monkeypatch.setattr(host, "triton_reason", lambda *arguments: "Triton is not installed")
    assert host.refusals(cuda) == {"": "Triton is not installed"}


# -- the table ---------------------------------------------------------------------------------------------------------


def _environment() -> dict:
    return results.environment(torch.device("cpu"), "forge bench host", "abc")


def _entry(name: str, us: float = 1.0) -> dict:
    return {"name": name, "status": "ok", "us": us, "least": 0.9 * us, "ninth_decile": 1.2 * us}


def _result(entries: list[dict], **changed) -> dict:
    about = {"kind": "host", "layers": 64, "width": 256, "tokens": 64, "rounds": 60, "warmup": 5, "dtype": "bfloat16"}
    return {**about, "refusals": {}, "entries": entries, **changed}


def test_the_readme_has_a_table_of_a_host_result(tmp_path):
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    env = {**_environment(), "device": "cuda", "card": "Some card", "driver": "1.2", "processor": "Some processor"}
    entries = [_entry(BACKWARD[0], 80.0), _entry(BACKWARD[3], 160.0), _entry(host.IN_PLACE, 5.0)]
    (tmp_path / "host_h200.json").write_text(json.dumps(_result(entries, environment=env)))
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- table:host_h200 -->\n<!-- /table:host_h200 -->\nb\n")
    arguments = ["--readme", str(readme), "--results", str(tmp_path)]
    assert tables.main([*arguments, "--check"]) == 1
    assert tables.main(arguments) == 0 and tables.main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert "| what | us a layer | least | 9th decile |\n|---|---:|---:|---:|\n" in text
    assert "| forward and backward, plain layers | 80.0 | 72.0 | 96.0 |" in text
    assert "| forward and backward, when='backward' | 160 | 144 | 192 |" in text
    assert "| one launch, arguments in place | 5.00 | 4.50 | 6.00 |" in text
    assert "64 layers 256 x 256" in text and "64 tokens" in text and "median of 60 rounds" in text
    assert "on Some processor" in text and "Some card, driver 1.2" in text and "Command: `forge bench host`." in text
    assert "one a layer" in text and "On a CPU" not in text and "Not launched directly" not in text


def test_the_table_says_what_was_not_launched_directly():
    reasons = {"": "the CUDA driver is not used here", "some_kernel": "an unknown layout"}
    text = markdown(sheet(_result([_entry("a")], refusals=reasons, environment=_environment())))
    assert "all kernels (the CUDA driver is not used here); some_kernel (an unknown layout)." in text
