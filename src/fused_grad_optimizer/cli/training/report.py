"""What a run shows: a line a step in metrics.jsonl, a progress bar, a plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fused_grad_optimizer.cli.training.checkpoint import METRICS, write_atomically

Metrics = dict[str, Any]


class MetricsFile:
    """metrics.jsonl: one line a step. Opening it drops every line after step `done`, whole or half written."""

    def __init__(self, folder: Path, done: int) -> None:
        self._path = folder / METRICS
        self.lines = [m for m in read_metrics(folder) if m["step"] <= done]
        text = "".join(_line(m) for m in self.lines)
        write_atomically(self._path, lambda file: file.write(text.encode()))
        self._file = open(self._path, "a")  # noqa: SIM115  (open for the whole run)

    def append(self, metrics: Metrics) -> None:
        self.lines.append(metrics)
        self._file.write(_line(metrics))
        self._file.flush()

    def sync(self) -> None:
        """On disk before the checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[Metrics]:
    """The lines of metrics.jsonl up to the first one that a kill left half written."""
    rows: list[Metrics] = []
    if not (folder / METRICS).exists():
        return rows
    for line in (folder / METRICS).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _line(metrics: Metrics) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class Display:
    """A progress bar on a terminal; elsewhere a line for about every tenth of the run."""

    def __init__(self, console: Console, done: int, steps: int, title: str) -> None:
        self._console = console
        self._title = title
        self._every = max(1, steps // 10)
        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=steps, completed=done, text="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, m: Metrics) -> None:
        text = f"loss {m['loss']:.4f}  {m['tokens_per_s']:,.0f} tokens/s  peak {m['peak_mem_gib']:.2f} GiB"
        self._progress.update(self._task, completed=m["step"], text=text)
        if not self._console.is_terminal and (m["step"] % self._every == 0 or m["step"] == 1):
            self._console.print(f"{self._title}: step {m['step']}  {text}", highlight=False)


def mean_loss(rows: Sequence[Metrics]) -> float:
    losses = [m["loss"] for m in rows if m["loss"] is not None]
    return sum(losses) / len(losses) if losses else math.nan


def first_and_last(rows: Sequence[Metrics]) -> tuple[float, float, int]:
    """Mean loss over the first and over the last tenth of the steps (at most 20), and how many steps that is."""
    count = max(1, min(20, len(rows) // 10))
    return mean_loss(rows[:count]), mean_loss(rows[-count:]), count


def plot(path: Path, runs: Mapping[str, Sequence[Metrics]]) -> None:
    """Loss and peak memory against steps, one line a run, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, memory = figure.subplots(2, 1, sharex=True)
    for name, rows in runs.items():
        steps = [m["step"] for m in rows]
        loss.plot(steps, [math.nan if m["loss"] is None else m["loss"] for m in rows], label=name, linewidth=1)
        memory.plot(steps, [m["peak_mem_gib"] for m in rows], label=name)
    loss.set_ylabel("loss (nats per token)")
    memory.set_ylabel("peak memory (GiB)")
    memory.set_xlabel("step")
    memory.set_ylim(bottom=0)
    for axes in (loss, memory):
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        loss.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
