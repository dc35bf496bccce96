"""A tiny model, short texts, and the command run in this process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
CLOCK = ("tokens_per_s", "peak_mem_gib")


@pytest.fixture(autouse=True)
def one_thread():
    """The same number of threads here and in child processes, so that sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def invoke(monkeypatch):
    """`invoke("train", "--steps", 3, ...)`: the command in this process; `.exit_code` and `.output`."""
    from fused_grad_optimizer.cli.app import app

    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: object):
        result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def tiny(tmp_path) -> list[object]:
    """Options of a run of milliseconds a step; the run folder is not among them."""
    (tmp_path / "tiny").mkdir()
    model = tmp_path / "tiny" / "config.json"
    model.write_text(json.dumps(TINY))
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return ["--model", model, "--data", data, "--batch", 2, "--seq", 16, "--steps", 8, "--lr", 0.01]


@pytest.fixture
def child_command():
    """Command line and environment of the command in a process of its own."""
    import fused_grad_optimizer.cli as cli

    source = Path(cli.__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    return [sys.executable, "-m", "fused_grad_optimizer.cli"], environment


class Runs:
    """Reads run folders."""

    tiny_config = TINY

    @staticmethod
    def metrics(folder: Path) -> list[dict]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    @classmethod
    def curve(cls, folder: Path) -> list[dict]:
        """The metrics without what the clock and the system decide."""
        return [{k: v for k, v in m.items() if k not in CLOCK} for m in cls.metrics(folder)]

    @staticmethod
    def checkpoint(folder: Path) -> dict:
        return torch.load(folder / "checkpoint.pt", weights_only=True)

    @classmethod
    def assert_same(cls, a: Path, b: Path) -> None:
        """Both folders hold the same loss curve, weights and optimizer states, bit for bit."""
        assert cls.curve(a) == cls.curve(b)
        one, other = cls.checkpoint(a), cls.checkpoint(b)
        assert one["step"] == other["step"]
        assert one["scheduler"] == other["scheduler"]
        assert one["model"].keys() == other["model"].keys()
        assert all(torch.equal(one["model"][k], other["model"][k]) for k in one["model"])
        states, others = one["optimizer"]["state"], other["optimizer"]["state"]
        assert states.keys() == others.keys() and states
        for i, state in states.items():
            assert all(torch.equal(state[k], others[i][k]) for k in state), i


@pytest.fixture
def runs() -> type[Runs]:
    return Runs
