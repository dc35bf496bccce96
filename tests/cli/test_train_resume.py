"""A run that was stopped or killed at any moment goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time

import pytest

from fused_grad_optimizer.cli.training.loop import Trainer


@pytest.fixture
def signal_at(monkeypatch):
    """`signal_at(step, number)`: this process gets the signal in the middle of that step."""

    def install(at: int, number: int) -> None:
        train_step = Trainer.train_step

        def step(self: Trainer):
            if self.step + 1 == at:
                os.kill(os.getpid(), number)
            return train_step(self)

        monkeypatch.setattr(Trainer, "train_step", step)

    yield install


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_finishes_the_step_and_leaves_a_resumable_run(
    invoke, runs, tiny, tmp_path, signal_at, monkeypatch, number, code
):
    assert invoke("train", *tiny, "--out", tmp_path / "whole").exit_code == 0
    out = tmp_path / "a run"
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal_at(3, number)
    result = invoke("train", *tiny, "--out", out)
    assert result.exit_code == code, result.output
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert f"forge train --resume '{out}'" in result.output
    assert runs.checkpoint(out)["step"] == 3 and not (out / "model").exists()
    monkeypatch.undo()
    result = invoke("train", "--resume", out)
    assert result.exit_code == 0, result.output
    runs.assert_same(tmp_path / "whole", out)
    assert "finished" in invoke("train", "--resume", out).output


@pytest.mark.parametrize("options", [[], ["--when", "step", "--clip", 1.0, "--dtype", "bf16"]])
def test_kill_in_the_middle_then_resume_is_bit_identical(invoke, runs, tiny, tmp_path, child_command, options):
    command, environment = child_command
    tiny = [*tiny, "--steps", 120, "--save-every", 7, *options]
    out = tmp_path / "killed"
    arguments = [*command, "train", *(str(a) for a in [*tiny, "--out", out])]
    child = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "checkpoint.pt").exists() or len((out / "metrics.jsonl").read_bytes().splitlines()) < 20:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 9')  # the line a kill cut in two
    done = runs.checkpoint(out)["step"]
    assert 7 <= done < 120
    result = invoke("train", "--resume", out)
    assert result.exit_code == 0, result.output
    assert invoke("train", *tiny, "--out", tmp_path / "whole").exit_code == 0
    runs.assert_same(tmp_path / "whole", out)


def test_kill_before_the_first_checkpoint_starts_again(invoke, runs, tiny, tmp_path):
    out = tmp_path / "run"
    assert invoke("train", *tiny, "--out", out).exit_code == 0
    before = runs.curve(out)
    (out / "checkpoint.pt").unlink()
    assert invoke("train", "--resume", out).exit_code == 0
    assert runs.curve(out) == before


def test_checkpoint_is_whole_when_writing_the_next_one_fails(invoke, runs, tiny, tmp_path, monkeypatch):
    def fail(parts, file):
        file.write(b"half")
        raise OSError("disk full")

    out = tmp_path / "run"
    assert invoke("train", *tiny, "--out", out).exit_code == 0
    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match="disk full"):
        invoke("train", "--resume", out, "--steps", 10)
    assert runs.checkpoint(out)["step"] == 8


def test_more_steps_change_the_schedule(invoke, runs, tiny, tmp_path):
    out = tmp_path / "run"
    assert invoke("train", *tiny, "--schedule", "linear", "--warmup", 0, "--out", out).exit_code == 0
    assert invoke("train", "--resume", out, "--steps", 16).exit_code == 0
    rates = [m["lr"] for m in runs.metrics(out)]
    assert len(rates) == 16
    assert rates[8:] == pytest.approx([0.01 * (16 - step) / 16 for step in range(8, 16)])


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["--lr", 0.5], "--lr"),
        (["--rule", "sgd"], "--rule"),
        (["--data", "other.txt"], "--data"),
        (["--dtype", "bf16"], "--dtype"),
        (["--out", "elsewhere"], "--out"),
        (["--overwrite"], "--overwrite"),
        (["--compare", "adamw"], "--compare"),
        (["--steps", 3], "--steps"),
    ],
)
def test_resume_refuses_what_would_make_another_run(invoke, tiny, tmp_path, arguments, name):
    out = tmp_path / "run"
    assert invoke("train", *tiny, "--out", out).exit_code == 0
    before = (out / "config.json").read_bytes()
    result = invoke("train", "--resume", out, *arguments)
    assert result.exit_code == 2 and name in result.output, result.output
    assert (out / "config.json").read_bytes() == before
    assert invoke("train", "--resume", out, "--lr", 0.01, "--dtype", "fp32", "--seed", 0).exit_code == 0


def test_resume_notices_a_changed_text(invoke, tiny, tmp_path):
    out = tmp_path / "run"
    assert invoke("train", *tiny, "--out", out).exit_code == 0
    (tmp_path / "text.txt").write_text("another text altogether; " * 20)
    result = invoke("train", "--resume", out, "--steps", 20)
    assert result.exit_code == 2 and "--data" in result.output


def test_compare_survives_ctrl_c_and_ends_with_a_table(invoke, runs, tiny, tmp_path):
    out = tmp_path / "run"

    def interrupt() -> None:
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").stat().st_size < 200:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    result = invoke("train", *tiny, "--lr", 1e-3, "--steps", 150, "--out", out, "--compare", "adamw")
    assert result.exit_code == 130, result.output
    assert "--resume" in result.output and 0 < len(runs.metrics(out)) < 150
    result = invoke("train", "--resume", out)
    assert result.exit_code == 0, result.output
    for text in ("peak memory", "step time", "mean loss", "torch AdamW"):
        assert text in result.output
    comparison = json.loads((out / "compare.json").read_text())
    assert comparison["forge"]["first_loss"] == pytest.approx(comparison["torch_adamw"]["first_loss"], rel=1e-4)
    assert comparison["step_time_ratio"] > 0 and comparison["torch_adamw"]["peak_mem_gib"] > 0
    assert comparison["loss_difference"]["largest"] < 0.01
    assert len(runs.metrics(out / "torch_adamw")) == len(runs.metrics(out)) == 150
