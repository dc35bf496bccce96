"""Every mistake in the arguments is named, before anything is loaded or written."""

from __future__ import annotations

import json
import sys

import pytest

from fused_grad_optimizer.cli import main
from fused_grad_optimizer.cli.training.checkpoint import FolderLock

WRONG = [
    (["--rule", "adagrad"], "--rule"),
    (["--state", "int3"], "--state"),
    (["--weight", "up", "--dtype", "bf16"], "--weight"),
    (["--weight", "nearest", "--dtype", "float32"], "--weight"),
    (["--when", "later"], "--when"),
    (["--when", "backward", "--clip", "1"], "--clip"),
    (["--when", "backward", "--accumulate", "2"], "--accumulate"),
    (["--lr", "-1"], "--lr"),
    (["--lr", "nan"], "--lr"),
    (["--schedule", "steps"], "--schedule"),
    (["--warmup", "-1"], "--warmup"),
    (["--warmup", "9"], "--warmup"),
    (["--weight-decay", "-0.1"], "--weight-decay"),
    (["--clip", "0"], "--clip"),
    (["--batch", "0"], "--batch"),
    (["--seq", "1"], "--seq"),
    (["--seq", "65"], "--seq"),
    (["--accumulate", "0"], "--accumulate"),
    (["--steps", "0"], "--steps"),
    (["--save-every", "0"], "--save-every"),
    (["--seed", "-1"], "--seed"),
    (["--seed", str(2**64)], "--seed"),
    (["--device", "abacus"], "--device"),
    (["--dtype", "int8"], "--dtype"),
    (["--compare", "sgd"], "--compare"),
    (["--compare", "adamw", "--rule", "lion"], "--compare"),
    (["--model", "no/such/model"], "--model"),
    (["--data", "no/such/text"], "--data"),
    (["--resume", "no/such/run"], "--resume"),
]


@pytest.fixture
def refused(invoke, tmp_path):
    """`refused(name, *arguments)`: the command ends with 2, one line that names the option, and no run folder."""

    def check(name: str, *arguments: object) -> str:
        result = invoke("train", *arguments)
        assert result.exit_code == 2, result.output
        assert name in result.output and "Traceback" not in result.output
        assert not (tmp_path / "run" / "config.json").exists()
        return result.output

    return check


@pytest.mark.parametrize("arguments, name", WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_argument_is_named_before_a_model_is_built(refused, tiny, tmp_path, monkeypatch, arguments, name):
    monkeypatch.setattr("fused_grad_optimizer.cli.training.loop.build_model", None)
    refused(name, *tiny, "--out", tmp_path / "run", *arguments)


@pytest.mark.parametrize(
    "file, content, part",
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n", "is empty"),
        ("binary.txt", b"\x89PNG\xff\xfe", "UTF-8"),
        ("zeros.txt", b"abc\0def" * 9, "binary"),
        ("short.txt", b"short", "fewer than one sequence"),
        ("no_json.jsonl", b'{"text": "a"}\nplain words\n', "line 2"),
        ("no_text.jsonl", b'{"body": "a"}\n', "'text'"),
        ("number.jsonl", b'{"text": 3}\n', "'text'"),
        ("list.jsonl", b"[1, 2]\n", "'text'"),
    ],
)
def test_bad_data_file(refused, tiny, tmp_path, file, content, part):
    (tmp_path / file).write_bytes(content)
    message = refused("--data", *tiny, "--data", tmp_path / file, "--out", tmp_path / "run")
    assert part in message and file in message


def test_data_folder(refused, tiny, tmp_path):
    refused("--data", *tiny, "--data", tmp_path, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    "content, part",
    [
        ("not json", "config"),
        ("{}", "config"),
        ({"vocab_size": 100}, "vocabulary of 100"),
        ({"hidden_size": 33}, "--model"),
        (json.dumps({"model_type": "vit"}), "causal LM"),
    ],
)
def test_bad_model_config(invoke, runs, tiny, tmp_path, content, part):
    if isinstance(content, dict):
        content = json.dumps({**runs.tiny_config, **content})
    (tmp_path / "bad.json").write_text(content)
    result = invoke("train", *tiny, "--model", tmp_path / "bad.json", "--out", tmp_path / "run")
    assert result.exit_code == 2 and "--model" in result.output and part in result.output
    assert not (tmp_path / "run").exists()


def test_model_folder_without_weights_is_not_trained_from_random_ones(refused, tiny, tmp_path):
    assert "no weights" in refused("--model", *tiny, "--model", tmp_path / "tiny", "--out", tmp_path / "run")
    assert "no config.json" in refused("--model", *tiny, "--model", tmp_path, "--out", tmp_path / "run")


def test_out_folder_that_is_taken(invoke, refused, tiny, tmp_path):
    held = tmp_path / "held"
    assert invoke("train", *tiny, "--out", held).exit_code == 0
    before = (held / "metrics.jsonl").read_bytes()
    assert "--overwrite" in refused("--out", *tiny, "--out", held)
    refused("--out", *tiny, "--model", held / "model", "--out", held, "--overwrite")
    refused("--out", *tiny, "--out", held / "config.json")
    (tmp_path / "other" / "model").mkdir(parents=True)
    refused("--out", *tiny, "--out", tmp_path / "other", "--overwrite")
    lock = FolderLock(held, "--out")
    assert "in use" in refused("--out", *tiny, "--out", held, "--overwrite")
    assert "in use" in refused("--resume", "--resume", held)
    lock.release()
    assert (held / "metrics.jsonl").read_bytes() == before


def test_missing_library_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in ("app", "train", "doctor"):
        monkeypatch.delitem(sys.modules, f"fused_grad_optimizer.cli.{name}", raising=False)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "typer" in capsys.readouterr().err
