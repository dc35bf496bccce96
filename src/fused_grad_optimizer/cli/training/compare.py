"""--compare: the run and its torch AdamW twin, each in a process of its own, one after the other, and their table."""

from __future__ import annotations

import dataclasses
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from fused_grad_optimizer.cli.training import checkpoint as files
from fused_grad_optimizer.cli.training.config import Settings
from fused_grad_optimizer.cli.training.report import Metrics, first_and_last, plot, read_metrics

WORKER = "fused_grad_optimizer.cli.training.worker"
UNTIMED_STEPS = 3  # the first ones load libraries and fill caches


def run_both(folder: Path, settings: Settings, lock: files.FolderLock, console: Console) -> int:
    """Run (or go on with) both, print the table and write compare.json. Returns the exit code of the command."""
    baseline = folder / files.BASELINE
    baseline.mkdir(exist_ok=True)
    record = {**(files.read_record(folder) or {}), "settings": _twin(settings).to_dict()}
    files.write_json(baseline / files.CONFIG, record)
    for place in (folder, baseline):
        code = _run_worker(place, lock)
        if code != 0:
            return code
    rows = {"forge": read_metrics(folder), "torch AdamW": read_metrics(baseline)}
    result = comparison(rows["forge"], rows["torch AdamW"], settings)
    files.write_json(folder / files.COMPARISON, result)
    plot(folder / files.PLOT, rows)
    console.print(_table(result))
    return 0


def _twin(settings: Settings) -> Settings:
    return dataclasses.replace(settings, optimizer="torch", compare=None)


def _run_worker(folder: Path, lock: files.FolderLock) -> int:
    """A child in a session of its own, so that Ctrl-C reaches it once, through us. It holds the folder's lock too."""
    command = [sys.executable, "-m", WORKER, str(folder)]
    early: list[int] = []
    child: subprocess.Popen | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, start_new_session=True, pass_fds=[lock.handle])
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def comparison(ours: Sequence[Metrics], theirs: Sequence[Metrics], settings: Settings) -> dict[str, Any]:
    """Losses, peak memory and step times of both runs, and how they differ."""
    pairs = [(a["loss"], b["loss"]) for a, b in zip(ours, theirs) if a["loss"] is not None and b["loss"] is not None]
    differences = [abs(a - b) for a, b in pairs]
    both = {"forge": _summary(ours, settings), "torch_adamw": _summary(theirs, settings)}
    return {
        **both,
        "loss_difference": {
            "largest": max(differences, default=None),
            "mean": statistics.fmean(differences) if differences else None,
            "last_step": differences[-1] if differences else None,
        },
        "peak_mem_ratio": _ratio(both, "peak_mem_gib"),
        "step_time_ratio": _ratio(both, "step_ms"),
        "settings": settings.to_dict(),
    }


def _summary(rows: Sequence[Metrics], s: Settings) -> dict[str, float]:
    first, last, _ = first_and_last(rows)
    timed = rows[UNTIMED_STEPS:] or rows
    tokens = s.batch * s.seq * s.accumulate
    return {
        "first_loss": first,
        "last_loss": last,
        "peak_mem_gib": max(m["peak_mem_gib"] for m in rows),
        "step_ms": statistics.median(1000 * tokens / m["tokens_per_s"] for m in timed),
    }


def _ratio(both: dict[str, dict[str, float]], name: str) -> float | None:
    return both["forge"][name] / both["torch_adamw"][name] if both["torch_adamw"][name] else None


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="forge and torch AdamW: same data, same seed")
    for name in ("", "forge", "torch AdamW", "forge / torch"):
        table.add_column(name, justify="left" if name == "" else "right")
    ours, theirs = result["forge"], result["torch_adamw"]

    def row(title: str, key: str, form: str, last: str) -> None:
        table.add_row(title, format(ours[key], form), format(theirs[key], form), last)

    def ratio(name: str) -> str:
        return "-" if result[name] is None else f"{result[name]:.3f}"

    row("mean loss, first steps", "first_loss", ".4f", "")
    row("mean loss, last steps", "last_loss", ".4f", "")
    row("peak memory, GiB", "peak_mem_gib", ".3f", ratio("peak_mem_ratio"))
    row("step time, ms (median)", "step_ms", ".1f", ratio("step_time_ratio"))
    difference = result["loss_difference"]
    if difference["largest"] is not None:
        table.caption = f"loss difference: largest {difference['largest']:.2e}, mean {difference['mean']:.2e}"
    return table
