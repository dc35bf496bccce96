"""`forge bench` on a CPU and tiny sizes: what it measures, what it refuses, its files and the README's tables."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from fused_grad_optimizer.cli.benchmarks import kernel, results, step, timing  # noqa: E402
from fused_grad_optimizer.cli.benchmarks.methods import METHODS, decoder_layers  # noqa: E402
from fused_grad_optimizer.cli.benchmarks.sheets import markdown, sheet  # noqa: E402
from fused_grad_optimizer.rules import RULES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
EAGER = [name for name in METHODS if "compiled" not in name]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(timing.TARGET_SECONDS, "cpu", 1e-4)


@pytest.fixture
def kernel_settings() -> kernel.KernelSettings:
    return kernel.KernelSettings(
        shapes=((24, 40),),
        tokens=(7,),
        rules=("adamw",),
        states=(None,),
        weight=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        rounds=2,
        seed=0,
    )


@pytest.fixture
def step_settings(tiny) -> step.StepSettings:
    return step.StepSettings(
        model=str(tiny[1]), batch=1, seq=8, dtype="float32", device="cpu", state=None, weight=None, lr=1e-3, warmup=1,
        steps=2, seed=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tables():
    path = ROOT / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _environment() -> dict:
    return results.environment(torch.device("cpu"), "forge bench", "abc")


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_kernel_command_saves_a_reproducible_result(invoke, tmp_path):
    out = tmp_path / "new" / "kernel.json"
    options = ["--shape", "24x40", "--shape", "9x5", "--tokens", 7, "--rule", "adamw", "--rule", "lion", "--rounds", 2]
    done = invoke("bench", "kernel", *options, "--device", "cpu", "--out", out, "--revision", "abc")
    assert done.exit_code == 0, done.output
    assert "24 x 40" in done.output and "lion" in done.output and str(out) in done.output.replace("\n", "")
    result = json.loads(out.read_text())
    assert [(e["n"], e["k"], e["rule"]) for e in result["entries"]] == [
        (24, 40, "adamw"), (9, 5, "adamw"), (24, 40, "lion"), (9, 5, "lion"),
    ]  # fmt: skip
    first = result["entries"][0]
    assert first["status"] == "ok" and all(us > 0 for us in first["us"].values())
    assert {"fused", "fused_checked", "dw", "dw_torch", "dw_param_step"} == set(first["us"])
    assert "dw_torch" not in result["entries"][2]["us"]  # torch has no Lion
    assert first["bytes"] == 2 * 3 * 4 * 24 * 40 + 4 * 7 * (24 + 40)
    assert first["gb_s"] == pytest.approx(first["bytes"] / first["us"]["fused"] / 1e3)
    assert first["share"] == pytest.approx(first["gb_s"] / result["copy_gb_s"])
    env = result["environment"]
    expected = (
        "forge bench kernel --shape 24x40 --shape 9x5 --tokens 7 --rule adamw --rule lion --device cpu --rounds 2"
    )
    assert env["command"] == expected
    assert env["revision"] == "abc" and env["versions"]["torch"] and env["card"]


@pytest.mark.parametrize(
    ("dtype", "state", "stepped"),
    [
        (torch.float32, None, None),
        (torch.bfloat16, None, ["bf16-nearest"] * 2),
        (torch.bfloat16, "fp32", ["bf16-nearest", "fp32"]),
    ],
)
def test_rounding_to_nearest_is_timed_beside_stochastic_rounding(kernel_settings, monkeypatch, dtype, state, stepped):
    settings = dataclasses.replace(kernel_settings, dtype=dtype)
    problem = kernel.Problem(kernel.Case(9, 5, 7, "lion", state), settings)
    calls = kernel.paths(problem)
    assert ("fused_nearest" in calls) == (stepped is not None)
    seen = []
    monkeypatch.setattr(problem, "step", lambda target, scalars: seen.append((target.weight, target.storages)))
    if stepped:
        calls["fused_nearest"][0]()
        assert seen[0][0] is problem.targets[0].weight and seen[0][1] == stepped


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(
    ("dtype", "weight", "state"),
    [
        (torch.float32, None, None),
        (torch.float32, None, "bf16"),
        (torch.bfloat16, None, None),
        (torch.bfloat16, "nearest", "bf16-nearest"),
        (torch.bfloat16, None, "fp32"),
    ],
)
def test_right_results_pass_the_check(kernel_settings, rule, dtype, weight, state):
    settings = dataclasses.replace(kernel_settings, dtype=dtype, weight=weight)
    with torch.no_grad():
        found = kernel.check(kernel.Problem(kernel.Case(65, 33, 100, rule, state), settings))
    assert all(0 <= ratio <= 1 for ratio in found.values()) and set(found) == {"fused", "dw_param_step"}


@pytest.mark.parametrize("factor", [0.97, float("nan")])
@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_results_are_not_timed(kernel_settings, monkeypatch, factor, rule, dtype):
    settings = dataclasses.replace(kernel_settings, dtype=dtype, rules=(rule,))
    right = kernel.ops.step

    def wrong(target, gradient, *arguments):
        if rule == "lion":  # its update keeps only the sign
            gradient = dataclasses.replace(gradient, dys=[-dy * factor for dy in gradient.dys])
        else:
            gradient = dataclasses.replace(gradient, dys=[dy * factor for dy in gradient.dys])
        right(target, gradient, *arguments)

    monkeypatch.setattr(kernel.ops, "step", wrong)
    result = {**kernel.run(settings, lambda text: None), "environment": _environment()}
    (entry,) = result["entries"]
    assert entry["status"].startswith("wrong, not timed: fused: the error of") and "us" not in entry
    shown = sheet(result)
    assert "wrong, not timed" in markdown(shown) and shown.rows[0][4:] == ["-"] * 9


def test_wrong_results_end_the_command_with_an_error(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel.ops, "step", lambda *arguments: None)
    options = ["--shape", "8x8", "--tokens", 2, "--rule", "sgd", "--rounds", 1, "--device", "cpu"]
    done = invoke("bench", "kernel", *options, "--out", tmp_path / "a.json")
    assert done.exit_code == 1 and "wrong, not timed" in done.output


def test_running_out_of_memory_is_an_entry(kernel_settings, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(kernel, "check", full)
    assert kernel.measure_case(kernel.Case(8, 8, 2, "sgd", None), kernel_settings, 1.0)["status"] == "out of memory"


def test_samples_are_taken_in_turn():
    order: list[str] = []

    def timed(name):
        return timing.Timed(lambda: order.append(name) or float(len(order)), "clock")

    pair = [timed("a"), timed("b")]
    timing.take(pair, 2)
    assert order == ["a", "b", "a", "b"] and pair[0].samples == [1.0, 3.0] and pair[0].median_us == 2e6


# -- steps -------------------------------------------------------------------------------------------------------------


def test_step_command_measures_in_child_processes(invoke, child_command, monkeypatch, tiny, tmp_path):
    monkeypatch.setenv("PYTHONPATH", child_command[1]["PYTHONPATH"])
    out = tmp_path / "step.json"
    options = ["--model", tiny[1], "--seq", 8, "--warmup", 1, "--steps", 2, "--device", "cpu", "--out", out]
    done = invoke("bench", "step", *options, "--method", "forge-backward", "--method", "torch-adamw-fused")
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    ours, torchs = result["entries"]
    assert ours["status"] == torchs["status"] == "ok" and ours["loss_first"] == torchs["loss_first"]
    assert ours["loss_last"] == pytest.approx(torchs["loss_last"], rel=1e-4)
    assert ours["ms"] > 0 and ours["peak_gib"] > 0 and len(ours["ms_all"]) == 2
    assert result["model"] == "tiny" and str(tmp_path) not in out.read_text()


@pytest.mark.parametrize("method", EAGER)
def test_every_method_trains_and_leaves_nothing_behind(step_settings, monkeypatch, method):
    kept: list[weakref.ref] = []
    build = step.random_model

    def watched(*arguments):
        model = build(*arguments)
        kept.extend(map(weakref.ref, [model, *model.parameters()]))
        return model

    monkeypatch.setattr(step, "random_model", watched)
    entry = step.measure(method, step_settings)
    assert entry["status"] == "ok", entry
    assert (entry["loss_last"] < entry["loss_first"]) == (method != "forward-backward")
    gc.collect()
    gc.collect()
    assert kept and all(reference() is None for reference in kept)


def test_compiled_methods_compile_the_decoder_layers(step_settings):
    with torch.device("meta"):
        model = step.random_model(step.config_of(step_settings), torch.float32)
    assert decoder_layers(model) == list(model.model.layers)
    METHODS["torch-adamw-fused-compiled"](model, step_settings)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    with pytest.raises(ValueError, match="no ModuleList"):
        METHODS["forward-backward-compiled"](torch.nn.Linear(2, 2), step_settings)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("none left"), "out of memory"),
        (RuntimeError("two\nlines"), "failed: RuntimeError: two lines"),
    ],
)
def test_a_method_that_fails_does_not_end_the_run(step_settings, monkeypatch, error, status):
    def fail(model, settings):
        raise error

    monkeypatch.setitem(METHODS, "forge-step", fail)
    monkeypatch.setattr(step, "measure_in_child", step.measure)
    said: list[str] = []
    result = step.run(step_settings, ("forge-step", "forward-backward"), said.append)
    assert [e["status"] for e in result["entries"]] == [status, "ok"]
    assert said[0] == f"forge-step: {status}"
    shown = sheet({**result, "environment": _environment()})
    assert shown.failed == [f"forge-step: {status}"] and shown.rows[0][1:] == ["-"] * 5


def test_loss_that_is_not_finite_is_a_failure(step_settings):
    entry = step.measure("torch-adamw-fused", dataclasses.replace(step_settings, lr=float("inf")))
    assert entry["status"].startswith("failed: ArithmeticError: a loss is not finite")


def test_a_child_that_dies_is_an_entry(step_settings, monkeypatch):
    monkeypatch.setattr(step, "WORKER", "no_such_module_here")
    assert "No module named" in step.measure_in_child("forge-step", step_settings)["status"]


@pytest.mark.parametrize("name", step.MODELS)
def test_built_in_models(step_settings, name):
    count = {"llama-3.1-8b": 8_030_261_248, "llama-1b": 1_235_814_400, "tiny": 115_008}[name]
    assert step.parameter_count(step.config_of(dataclasses.replace(step_settings, model=name))) == count
    assert step.model_name(name) == name


# -- arguments and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("kernel", "shape", "big"),
        ("kernel", "tokens", 0),
        ("kernel", "rule", "adagrad"),
        ("kernel", "state", "int3"),
        ("kernel", "weight", "nearest"),
        ("kernel", "dtype", "int8"),
        ("kernel", "device", "abacus"),
        ("kernel", "rounds", 0),
        ("step", "model", "none"),
        ("step", "method", "magic"),
        ("step", "seq", 1),
        ("step", "seq", 100000),
        ("step", "lr", "nan"),
        ("step", "steps", 0),
        ("step", "state", "int3"),
        ("step", "seed", -1),
    ],
)
def test_a_wrong_argument_is_named(invoke, command, name, value):
    done = invoke("bench", command, *(() if name == "device" else ("--device", "cpu")), f"--{name}", value)
    assert done.exit_code == 2 and f"--{name}" in done.output, done.output


def test_out_is_checked_before_measuring(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "run", lambda *arguments: pytest.fail("measured"))
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "a.json"):
        done = invoke("bench", "kernel", "--device", "cpu", "--out", out)
        assert done.exit_code == 2 and "--out" in done.output


def test_default_file_is_named_after_what_was_measured():
    env = {"card": "NVIDIA H200"}
    path = results.default_path("step", env, "llama-3.1-8b", "b1", "s512")
    assert path == Path("benchmarks/results/step-nvidia-h200-llama-3.1-8b-b1-s512.json")


# -- tables ------------------------------------------------------------------------------------------------------------


def _kernel_result() -> dict:
    us = {
        "fused": 50.0,
        "fused_checked": 55.0,
        "fused_nearest": 49.0,
        "dw_torch": 100.0,
        "dw_param_step": 40.0,
        "dw": 20.0,
    }
    entry = {"n": 8, "k": 4, "tokens": 2, "rule": "adamw", "state": "bf16", "status": "ok", "us": us, "how": {}}
    entry |= {"gb_s": 3000.0, "share": 0.7}
    lion = {**entry, "rule": "lion", "us": {k: v for k, v in us.items() if k != "dw_torch"}}
    about = {"kind": "kernel", "dtype": "bfloat16", "rounds": 20, "caches": 3, "copy_gb_s": 4296.0}
    env = {**_environment(), "device": "cuda", "card": "Some card", "driver": "1.2"}
    return {**about, "entries": [entry, lion], "environment": env}


def test_kernel_table_says_what_got_slower():
    text = markdown(sheet(_kernel_result()))
    assert "| 8 x 4 | 2 | adamw | bf16 | 50.0 | 3000 | 70% | 55.0 | 49.0 | 100 | 40.0 | 20.0 | 2.00 | 0.80 |" in text
    assert "- 8 x 4, T=2, adamw, bf16: fused takes 1.25x dW + param_step" in text and "x dW + torch fused" not in text
    assert "Some card, driver 1.2" in text and "4296 GB/s" in text


def test_step_table_says_what_got_slower():
    def entry(method, ms, peak):
        more = {"loss_last": 1.0, "setup_s": 1.0, "held_before_gib": 0.0}
        return {"method": method, "status": "ok", "ms": ms, "peak_gib": peak, **more}

    about = {"kind": "step", "model": "m", "parameters": 8e9, "batch": 1, "seq": 512, "dtype": "bfloat16"}
    entries = [entry("forge-backward", 120.0, 45.0), entry("torch-adamw-fused", 100.0, 60.0)]
    result = {**about, "steps": 10, "warmup": 3, "entries": entries, "environment": _environment()}
    shown = sheet(result)
    assert shown.slower == ["forge-backward: 1.20x the time of torch-adamw-fused"]
    assert "| forge-backward | 45.00 | 120.0 | 4,267 | 1.000 | 1.0 |" in markdown(shown)


def test_readme_tables_are_regenerated_and_checked(tables, tmp_path, capsys):
    (tmp_path / "k.json").write_text(json.dumps(_kernel_result()))
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- table:k rule=lion -->\nold\n<!-- /table:k -->\nb\n")
    arguments = ["--readme", str(readme), "--results", str(tmp_path)]
    assert tables.main([*arguments, "--check"]) == 1 and "stale" in capsys.readouterr().err
    assert "old" in readme.read_text()
    assert tables.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("a\n<!-- table:k rule=lion -->\n**") and text.endswith("\n<!-- /table:k -->\nb\n")
    assert "| lion |" in text and "| adamw |" not in text and "old" not in text
    assert tables.main([*arguments, "--check"]) == 0 and readme.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:none -->\n<!-- /table:none -->", "there is no"),
        ("<!-- table:k -->", "no partner"),
        ("<!-- /table:k -->", "no partner"),
        ("<!-- table:k -->\n<!-- /table:j -->", "no partner"),
        ("<!-- table:k -->\n<!-- table:k -->\n<!-- /table:k -->", "no partner"),
        ("<!-- table:k rule=sgd -->\n<!-- /table:k -->", "no entry has rule=sgd"),
        ("<!-- table:other -->\n<!-- /table:other -->", "a result of kind"),
    ],
)
def test_markers_that_make_no_table_are_errors(tables, tmp_path, capsys, text, message):
    (tmp_path / "k.json").write_text(json.dumps(_kernel_result()))
    (tmp_path / "other.json").write_text('{"kind": "train"}')
    (tmp_path / "README.md").write_text(text)
    arguments = ["--readme", str(tmp_path / "README.md"), "--results", str(tmp_path)]
    assert tables.main(arguments) == 2 and message in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text
