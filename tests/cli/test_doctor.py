"""`forge doctor` says what would run and why."""

from __future__ import annotations

import json
import warnings

import torch

import fused_grad_optimizer as forge


def test_doctor_shows_device_versions_and_paths(invoke):
    result = invoke("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for text in ("cpu", torch.__version__, "Triton kernels", "lm_head", "128256 x 4096", "tile_cpu"):
        assert text in result.output


def test_doctor_lists_the_layers_of_a_model(invoke, runs, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(runs.tiny_config))
    result = invoke("doctor", "--model", tmp_path / "config.json", "--device", "cpu", "--state", "bf16")
    assert result.exit_code == 0, result.output
    assert "mlp.down_proj (x2)" in result.output and "32 x 64" in result.output and "256 x 32" in result.output


def test_doctor_knows_a_weight_that_an_embedding_has_too(invoke, runs, tmp_path, monkeypatch):
    """It is asked for the tied weight as it is used: with an embedding's rows, which no Hopper kernel takes."""
    asked = []
    monkeypatch.setattr(
        forge, "explain", lambda n, k, t, **options: asked.append((n, k, options)) or forge.Explanation("a path", "")
    )
    for tied in (True, False):
        (tmp_path / "config.json").write_text(json.dumps({**runs.tiny_config, "tie_word_embeddings": tied}))
        assert invoke("doctor", "--model", tmp_path / "config.json", "--device", "cpu").exit_code == 0
    heads = [options for n, k, options in asked if (n, k) == (256, 32)]
    assert [(options["uses"], options["embedding"]) for options in heads] == [(1, True), (1, False)]


def test_doctor_shows_a_path_that_the_environment_names(invoke, monkeypatch):
    monkeypatch.setenv("FORGE_KERNEL", "chunked")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = invoke("doctor", "--size", "48x33", "--device", "cpu", "--weight", "nearest")
    assert result.exit_code == 0 and "chunked, which nothing follows here" in result.output
    monkeypatch.setenv("FORGE_KERNEL", "fastest")
    result = invoke("doctor", "--size", "48x33", "--device", "cpu")
    assert result.exit_code == 2 and "FORGE_KERNEL='fastest' is not a path" in result.output


def test_doctor_of_one_size(invoke):
    result = invoke("doctor", "--size", "48x33", "--size", "5x7", "--device", "cpu")
    assert "48 x 33" in result.output and "5 x 7" in result.output


def test_doctor_names_a_wrong_argument(invoke):
    for name, value in (
        ("size", "big"),
        ("device", "abacus"),
        ("dtype", "int8"),
        ("tokens", 0),
        ("model", "none"),
        ("rule", "adagrad"),
        ("state", "int3"),
        ("weight", "up"),
    ):
        result = invoke("doctor", f"--{name}", value)
        assert result.exit_code == 2 and name in result.output, result.output
