"""`forge bench step`: whole training steps of a causal LM; each method begins in a clean state."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused_grad_optimizer.cli.benchmarks.methods import METHODS
from fused_grad_optimizer.cli.training.config import UsageError, existing_path
from fused_grad_optimizer.cli.training.memory import GIB, PeakMemory
from fused_grad_optimizer.cli.training.model import load_config, quiet_transformers, random_model

WORKER = "fused_grad_optimizer.cli.benchmarks.step_worker"
_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "bos_token_id": None, "eos_token_id": None,
    },
}  # fmt: skip


@dataclass(frozen=True)
class StepSettings:
    """What to measure. `model` is a name in `MODELS`, or the path of a config.json or of a folder that holds one."""

    model: str
    batch: int
    seq: int
    dtype: str
    device: str
    state: str | None
    weight: str | None
    lr: float
    warmup: int
    steps: int
    seed: int


def config_of(settings: StepSettings) -> Any:
    """The transformers config, checked against --seq; weights are never read."""
    quiet_transformers()
    from transformers import LlamaConfig

    if settings.model in MODELS:
        config = LlamaConfig(**MODELS[settings.model])
    else:
        try:
            config = load_config(existing_path("model", settings.model), needs_weights=False)
        except UsageError as error:
            raise UsageError(f"{error}; built in: {', '.join(MODELS)}") from error
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.seq > longest:
        raise UsageError(f"--seq {settings.seq} is longer than the model's longest sequence, {longest}")
    return config


def parameter_count(config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in random_model(config, torch.bfloat16).parameters())


def measure(method: str, settings: StepSettings) -> dict[str, Any]:
    """One method in this process, which must hold nothing on the device. Failures become the entry's status."""
    entry: dict[str, Any] = {"method": method}
    try:
        return {**entry, "status": "ok", **_measure(method, settings)}
    except (torch.OutOfMemoryError, MemoryError):
        return {**entry, "status": "out of memory"}
    except Exception as error:  # one method that fails must not lose the others
        return {**entry, "status": f"failed: {type(error).__name__}: {_one_line(error)}"}


def _measure(method: str, settings: StepSettings) -> dict[str, Any]:
    config = config_of(settings)
    held = _held_gib(settings.device)
    memory = PeakMemory(settings.device)
    begin = time.perf_counter()
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = random_model(config, getattr(torch, settings.dtype)).train()
        ids = torch.randint(0, config.get_text_config().vocab_size, (settings.batch, settings.seq))
    training = METHODS[method](model, settings)

    def once() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        training.step()
        return loss.detach()

    try:
        losses = [once() for _ in range(settings.warmup)]
        _synchronize(settings.device)
        setup = time.perf_counter() - begin
        memory.resume()
        seconds, timed_losses = _time_steps(once, settings)
    finally:
        training.close()
    values = [float(loss) for loss in losses + timed_losses]
    if not all(map(math.isfinite, values)):
        raise ArithmeticError(f"a loss is not finite: {values}")
    return {
        "peak_gib": _peak(memory, settings.device) / GIB,
        "ms": 1000 * statistics.median(seconds),
        "ms_all": [1000 * s for s in seconds],
        "loss_first": values[0],
        "loss_last": values[-1],
        "setup_s": setup,
        "held_before_gib": held,
    }


def _time_steps(once: Callable[[], torch.Tensor], settings: StepSettings) -> tuple[list[float], list[torch.Tensor]]:
    """Seconds from step to step. The host may run ahead of the device, as in training: no synchronisation between."""
    if torch.device(settings.device).type != "cuda":
        marks, losses = [time.perf_counter()], []
        for _ in range(settings.steps):
            losses.append(once())
            marks.append(time.perf_counter())
        return [b - a for a, b in zip(marks, marks[1:])], losses
    with torch.cuda.device(settings.device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(settings.steps + 1)]
        losses = []
        events[0].record()
        for event in events[1:]:
            losses.append(once())
            event.record()
        events[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in zip(events, events[1:])], losses


def _peak(memory: PeakMemory, device: str) -> int:
    """On a GPU all that is allocated: cuBLAS keeps its workspace from method to method, and each of them needs one."""
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else memory.read()


def _held_gib(device: str) -> float | None:
    """What is already allocated: shows that a method began in a clean state."""
    return torch.cuda.memory_allocated(device) / GIB if torch.device(device).type == "cuda" else None


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _clean(device: str) -> None:
    torch._dynamo.reset()
    gc.collect()
    gc.collect()  # the first pass runs finalizers, which let go of more
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def measure_in_child(method: str, settings: StepSettings) -> dict[str, Any]:
    """One method in a process of its own: the peak of a process's resident size cannot be told apart by method."""
    request = json.dumps({"method": method, "settings": dataclasses.asdict(settings)})
    done = subprocess.run([sys.executable, "-m", WORKER], input=request, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    if done.returncode == -9:
        return {"method": method, "status": "out of memory (killed)"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"method": method, "status": f"failed: exit code {done.returncode}: {last}"}


def run(settings: StepSettings, methods: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all methods; `say` is told each one as it ends."""
    count = parameter_count(config_of(settings))
    on_cuda = torch.device(settings.device).type == "cuda"
    entries = []
    for method in methods:
        entry = measure(method, settings) if on_cuda else measure_in_child(method, settings)
        if on_cuda:
            _clean(settings.device)
        found = f"{entry['ms']:.1f} ms, {entry['peak_gib']:.2f} GiB" if entry["status"] == "ok" else entry["status"]
        say(f"{method}: {found}")
        entries.append(entry)
    about = {**dataclasses.asdict(settings), "model": model_name(settings.model)}
    return {"kind": "step", **about, "parameters": count, "entries": entries}


def model_name(model: str) -> str:
    """A built-in name as it is; of a path, the model folder's name, or that of the folder around its config.json."""
    if model in MODELS:
        return model
    place = Path(model).expanduser().resolve()
    return place.name if place.is_dir() else place.parent.name if place.name == "config.json" else place.stem


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
