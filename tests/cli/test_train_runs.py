"""What a run trains and what it leaves in its folder."""

from __future__ import annotations

import json

import pytest
import torch

from fused_grad_optimizer.rules import RULES


def test_no_arguments_trains_the_built_in_model_on_the_built_in_text(invoke, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("train", "--steps", 20, "--batch", 4, "--seq", 64)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    metrics = runs.metrics(folder)
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.0
    assert all(m["tokens_per_s"] > 0 and m["peak_mem_gib"] > 0 for m in metrics)
    assert "mean of the first" in result.output and "mean of the last" in result.output
    record = json.loads((folder / "config.json").read_text())
    assert record["settings"]["rule"] == "adamw" and record["settings"]["when"] == "backward"
    assert record["versions"]["torch"] == torch.__version__
    assert (folder / "loss_and_memory.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.tmp"))


def test_saved_model_loads_with_transformers_and_is_the_trained_one(invoke, runs, tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "run"
    assert invoke("train", *tiny, "--out", out).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    assert loaded.config.use_cache
    trained = runs.checkpoint(out)["model"]
    assert loaded.state_dict().keys() == trained.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trained[name]), name


def test_trained_model_can_be_trained_further(invoke, runs, tiny, tmp_path):
    assert invoke("train", *tiny, "--out", tmp_path / "a").exit_code == 0
    result = invoke("train", "--model", tmp_path / "a" / "model", *tiny[2:], "--out", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert runs.metrics(tmp_path / "b")[0]["loss"] < runs.metrics(tmp_path / "a")[0]["loss"]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_trains(invoke, runs, tiny, tmp_path, rule):
    options = tiny[:-2]  # with the rule's own lr
    result = invoke("train", *options, "--rule", rule, "--steps", 30, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    losses = [m["loss"] for m in runs.metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]


def test_bf16_weights_and_states(invoke, runs, tiny, tmp_path):
    options = ["--dtype", "bf16", "--state", "bf16", "--weight", "stochastic", "--out", tmp_path / "run"]
    assert invoke("train", *tiny, *options).exit_code == 0
    saved = runs.checkpoint(tmp_path / "run")
    assert all(value.dtype == torch.bfloat16 for value in saved["model"].values())
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in saved["optimizer"]["state"].values())


def test_clip_and_accumulate_switch_to_updates_in_the_step(invoke, runs, tiny, tmp_path):
    result = invoke("train", *tiny, "--clip", 0.5, "--accumulate", 2, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "--accumulate 2 and --clip 0.5" in result.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["when"] == "step"
    assert all(m["grad_norm"] > 0 for m in runs.metrics(tmp_path / "run"))


def test_the_data_depend_on_the_seed_alone(invoke, runs, tiny, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert invoke("train", *tiny, "--seed", seed, "--out", tmp_path / name).exit_code == 0
    assert runs.curve(tmp_path / "a") == runs.curve(tmp_path / "b")
    assert runs.curve(tmp_path / "a") != runs.curve(tmp_path / "c")


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_schedule_and_warmup(invoke, runs, tiny, tmp_path, schedule):
    out = tmp_path / "run"
    assert invoke("train", *tiny, "--schedule", schedule, "--warmup", 2, "--out", out).exit_code == 0
    rates = [m["lr"] for m in runs.metrics(out)]
    assert rates[:3] == pytest.approx([0, 0.005, 0.01])
    assert (rates[-1] == 0.01) == (schedule == "constant")
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_jsonl_is_the_text_of_its_documents(invoke, runs, tiny, tmp_path):
    documents = ["first document, " * 10, "the second document, " * 10]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": d, "id": 1}) + "\n\n" for d in documents))
    (tmp_path / "rows.txt").write_text("\n\n".join(documents))
    for kind in ("jsonl", "txt"):
        options = ["--data", tmp_path / f"rows.{kind}", "--out", tmp_path / kind]
        assert invoke("train", *tiny, *options).exit_code == 0
    assert runs.curve(tmp_path / "jsonl") == runs.curve(tmp_path / "txt")


def test_tokenizer_of_the_model_folder_is_used_and_saved(invoke, runs, tiny, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", ";", "[UNK]", "[END]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]").save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({**runs.tiny_config, "vocab_size": len(words)}))
    result = invoke("train", *tiny, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["tokens"] == 401
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved("lazy dog")["input_ids"] == [6, 7]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_stays_nan_stops_the_run(invoke, runs, tiny, tmp_path, monkeypatch):
    from fused_grad_optimizer.cli.training.loop import Trainer

    train_step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: {**train_step(self), "loss": float("nan")})
    result = invoke("train", *tiny, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "not a number for 3 steps in a row" in result.output and "--lr" in result.output
    assert [m["loss"] for m in runs.metrics(tmp_path / "run")] == [None] * 3
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_overwrite_replaces_a_run_and_nothing_else(invoke, runs, tiny, tmp_path):
    out = tmp_path / "run"
    assert invoke("train", *tiny, "--out", out).exit_code == 0
    (out / "notes.txt").write_text("mine")
    assert invoke("train", *tiny, "--steps", 3, "--out", out, "--overwrite").exit_code == 0
    assert len(runs.metrics(out)) == 3
    assert (out / "notes.txt").read_text() == "mine"
