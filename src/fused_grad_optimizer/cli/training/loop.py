"""One run: steps, checkpoints and what is left in the folder at the end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fused_grad_optimizer as forge
from fused_grad_optimizer.cli.training import checkpoint as files
from fused_grad_optimizer.cli.training.config import RULE_SETTINGS, Settings, UsageError
from fused_grad_optimizer.cli.training.data import Tokens, batch_at
from fused_grad_optimizer.cli.training.memory import GIB, PeakMemory
from fused_grad_optimizer.cli.training.model import build_model
from fused_grad_optimizer.cli.training.report import Display, Metrics, MetricsFile, first_and_last, plot
from fused_grad_optimizer.cli.training.signals import StopRequest

MOST_NAN_STEPS = 3  # in a row, before the run gives up


@dataclass
class Inputs:
    """What was read and checked before the run: the text, its tokenizer (None: bytes), the model's config."""

    tokens: Tokens
    tokenizer: Any | None
    model_config: Any


@dataclass
class Trainer:
    """A model with its optimizer and schedule, `step` optimizer steps into the run."""

    settings: Settings
    tokens: Tokens
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int = 0

    def train_step(self) -> Metrics:
        """One optimizer step over `accumulate` micro-batches; the metrics that do not depend on the clock."""
        s = self.settings
        total = torch.zeros((), device=s.device)
        for micro in range(s.accumulate):
            ids = batch_at(self.tokens, seed=s.seed, step=self.step, micro=micro, batch=s.batch, seq=s.seq)
            ids = ids.to(s.device)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / s.accumulate
            total += loss.detach()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip) if s.clip is not None else None
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        metrics = {"step": self.step, "loss": total.item(), "lr": float(lr)}
        return metrics if norm is None else {**metrics, "grad_norm": float(norm)}

    def state(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {
            "step": self.step,
            "settings": self.settings.to_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "cuda": cuda},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        if state["settings"]["steps"] != self.settings.steps:  # --steps was changed: the schedule is another one
            s = self.scheduler
            for group, base, factor in zip(self.optimizer.param_groups, s.base_lrs, s.lr_lambdas):
                group["lr"] = base * factor(s.last_epoch)
        torch.set_rng_state(state["rng"]["torch"])
        if state["rng"]["cuda"] and len(state["rng"]["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["rng"]["cuda"])


def make_optimizer(model: torch.nn.Module, s: Settings) -> torch.optim.Optimizer:
    """The fused optimizer, or torch's AdamW, fused where it offers that."""
    hyper: dict[str, Any] = {"lr": s.lr, **RULE_SETTINGS.get(s.rule, {})}
    if s.weight_decay is not None:
        hyper["weight_decay"] = s.weight_decay
    if s.optimizer == "torch":
        try:
            return torch.optim.AdamW(model.parameters(), fused=True, **hyper)
        except RuntimeError:
            return torch.optim.AdamW(model.parameters(), **hyper)
    try:
        return forge.fuse(model, s.rule, when=s.when, state=s.state, weight=s.weight, seed=s.seed, **hyper)
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_scheduler(optimizer: torch.optim.Optimizer, s: Settings) -> Any:
    from transformers import get_scheduler

    name = "constant_with_warmup" if s.schedule == "constant" else s.schedule
    return get_scheduler(name, optimizer, num_warmup_steps=s.warmup, num_training_steps=s.steps)


def run_folder(folder: Path, settings: Settings, inputs: Inputs, console: Console) -> int:
    """Start the run in this folder, or go on from its checkpoint. Returns the exit code of the command.

    0: all steps done. 1: the loss stayed NaN. 128 + number: stopped by that signal, resumable.
    """
    with StopRequest(lambda number: console.print("Stopping after this step; once more to stop at once.")) as stop:
        memory = PeakMemory(settings.device)
        model = build_model(inputs.model_config, settings)
        optimizer = make_optimizer(model, settings)
        trainer = Trainer(settings, inputs.tokens, model, optimizer, make_scheduler(optimizer, settings))
        saved = files.load_checkpoint(folder)
        if saved is not None:
            trainer.load(saved)
            console.print(f"Going on after step {trainer.step}.")
            del saved
        metrics = MetricsFile(folder, trainer.step)
        memory.resume()
        try:
            code = _steps(trainer, folder, metrics, memory, stop, console)
        finally:
            metrics.close()
        plot(folder / files.PLOT, {settings.optimizer: metrics.lines})
        if code == 0:
            if settings.optimizer == "forge":
                files.save_model(folder, model, inputs.tokenizer)
            _say_end(folder, metrics.lines, console)
        return code


def _steps(
    trainer: Trainer, folder: Path, metrics: MetricsFile, memory: PeakMemory, stop: StopRequest, console: Console
) -> int:
    s = trainer.settings
    title = "torch AdamW" if s.optimizer == "torch" else s.rule
    nan_steps, saved_at = 0, -1

    def save() -> None:
        nonlocal saved_at
        if saved_at != trainer.step:
            memory.pause()
            metrics.sync()
            files.save_checkpoint(folder, trainer.state())
            memory.resume()
            saved_at = trainer.step

    with Display(console, trainer.step, s.steps, title) as display:
        while trainer.step < s.steps and stop.signal is None:
            start = time.perf_counter()
            row = trainer.train_step()
            seconds = time.perf_counter() - start
            row["tokens_per_s"] = s.batch * s.seq * s.accumulate / seconds
            row["peak_mem_gib"] = memory.read() / GIB
            metrics.append(row)
            display.update(row)
            nan_steps = 0 if math.isfinite(row["loss"]) else nan_steps + 1
            if nan_steps == MOST_NAN_STEPS:
                metrics.sync()
                console.print(
                    f"The loss was not a number for {nan_steps} steps in a row, up to step {trainer.step}: stopped "
                    f"without a checkpoint of them. Try a lower --lr (now {s.lr:g}), a longer --warmup, or --clip 1."
                )
                return 1
            if nan_steps:
                console.print(f"Step {trainer.step}: the loss is not a number.")
            elif trainer.step % s.save_every == 0:
                save()
    save()
    return stop.exit_code if trainer.step < s.steps else 0


def _say_end(folder: Path, rows: list[Metrics], console: Console) -> None:
    first, last, count = first_and_last(rows)
    console.print(
        f"Loss {first:.4f} (mean of the first {count} steps) -> {last:.4f} (mean of the last {count}), "
        f"peak memory {max(m['peak_mem_gib'] for m in rows):.2f} GiB. "
        f"Run folder: {folder}",
        highlight=False,
        soft_wrap=True,
    )
