"""`forge bench`: the options; the work is in `benchmarks/`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fused_grad_optimizer.cli.benchmarks import results
from fused_grad_optimizer.cli.benchmarks.sheets import print_sheet, sheet
from fused_grad_optimizer.cli.training.config import UsageError, check_dtype, find_device, flag
from fused_grad_optimizer.kernels import tuning
from fused_grad_optimizer.rules import get_rule
from fused_grad_optimizer.storage import check_modes

app = typer.Typer(
    help="Measure kernels, whole steps and the host's part in them; results go to benchmarks/results/.",
    no_args_is_help=True,
)
Text = str | None
NOTHING_FAILED = ("ok", "out of memory", "out of memory (killed)")


def _option(text: str, *names: str, metavar: str | None = None, default: bool = False) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, metavar=metavar, show_default=default)


DEVICE = _option("cpu, cuda, cuda:1, ... (default: cuda where there is one).")
DTYPE = _option("float32 or bfloat16 (default: bfloat16 on a GPU, else float32).")
WEIGHT = _option("Rounding of bf16 weights: stochastic or nearest (default: stochastic).")
OUT = _option("Result file (default: benchmarks/results/, named after what was measured).", metavar="FILE")
REVISION = _option("Revision to record where git cannot tell it.")
SEED = _option("Seed of the random data.", default=True)


@app.command()
def kernel(
    shape: Annotated[list[str] | None, _option("Weight, out x in features; may be repeated.", metavar="NxK")] = None,
    tokens: Annotated[list[int] | None, _option("Tokens T; may be repeated.")] = None,
    rule: Annotated[list[str] | None, _option("Update rule; may be repeated (default: adamw, lion, sgd).")] = None,
    state: Annotated[
        list[str] | None, _option("States as fp32, bf16 or bf16-nearest; may be repeated (default: as the weights).")
    ] = None,
    weight: Annotated[Text, WEIGHT] = None,
    dtype: Annotated[Text, DTYPE] = None,
    device: Annotated[Text, DEVICE] = None,
    rounds: Annotated[int, _option("Samples of each time; the median counts.", default=True)] = 20,
    seed: Annotated[int, SEED] = 0,
    out: Annotated[Text, OUT] = None,
    revision: Annotated[Text, REVISION] = None,
) -> None:
    """Time one weight update, fused, against dW + torch's fused optimizer and dW + param_step.

    Each result is first checked against fp64; a wrong one is not timed.
    """
    options = {k: v for k, v in locals().items() if k not in ("out", "revision")}
    with _usage_errors("kernel"):
        from fused_grad_optimizer.cli.benchmarks import kernel as bench

        settings = _kernel_settings(bench, options)
        command = _command("kernel", options, {"rounds": 20, "seed": 0})
        _measure(lambda say: bench.run(settings, say), settings.device, command, out, revision, ())


@app.command()
def tune(
    shape: Annotated[list[str] | None, _option("Weight, out x in features; may be repeated.", metavar="NxK")] = None,
    tokens: Annotated[list[int] | None, _option("Tokens T; may be repeated (default: 128, 256, ... 16384).")] = None,
    rule: Annotated[list[str] | None, _option("Update rule; may be repeated (default: adamw).")] = None,
    state: Annotated[
        list[str] | None, _option("States as fp32, bf16 or bf16-nearest; may be repeated (default: as the weights).")
    ] = None,
    weight: Annotated[Text, WEIGHT] = None,
    dtype: Annotated[Text, DTYPE] = None,
    device: Annotated[Text, _option("cuda, cuda:1, ... (default: cuda).")] = None,
    rounds: Annotated[int, _option("Samples of each time; the median counts.", default=True)] = 20,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what the table has already.")] = False,
    out: Annotated[Text, _option("The table (default: this card's in your cache folder, which FORGE reads).")] = None,
) -> None:
    """Time every path and configuration on this card, and write down which one FORGE is to take at which T.

    Random tensors only. Each candidate is first checked against fp64. The table is written after every cell: Ctrl-C
    loses nothing, and the same command goes on where it stopped.
    """
    options = {k: v for k, v in locals().items() if k not in ("again", "out")}
    with _usage_errors("tune"):
        from fused_grad_optimizer.cli.benchmarks import tune as bench

        place = find_device(device)
        if torch.device(place).type != "cuda":
            raise UsageError(
                f"--device {place}: tuning needs a CUDA device; elsewhere there is one path only, and nothing to choose"
            )
        command = _command("tune", options, {"rounds": 20})
        settings = _kernel_settings(bench, {**options, "seed": 0})
        environment = results.environment(settings.device, command, None)
        path = Path(out).expanduser() if out else tuning.user_path(environment["card"])
        console = Console(soft_wrap=True)
        code = bench.run(settings, path, environment, lambda text: console.print(text, highlight=False), again=again)
    if code:
        raise typer.Exit(code)


@app.command()
def step(
    model: Annotated[
        Text, _option("llama-3.1-8b, llama-1b, tiny, or a config.json or its folder (default: the first; CPU: tiny).")
    ] = None,
    batch: Annotated[int, _option("Sequences in a step.", default=True)] = 1,
    seq: Annotated[int, _option("Tokens in a sequence.", default=True)] = 512,
    method: Annotated[
        list[str] | None, _option("Method, as the table names them; may be repeated (default: all).")
    ] = None,
    state: Annotated[Text, _option("States here as fp32, bf16 or bf16-nearest (default: as the weights).")] = None,
    weight: Annotated[Text, WEIGHT] = None,
    lr: Annotated[float, _option("Learning rate.", default=True)] = 1e-5,
    dtype: Annotated[Text, DTYPE] = None,
    device: Annotated[Text, DEVICE] = None,
    warmup: Annotated[int, _option("Steps before those timed.", default=True)] = 3,
    steps: Annotated[int, _option("Timed steps; the median counts.", default=True)] = 10,
    seed: Annotated[int, SEED] = 0,
    out: Annotated[Text, OUT] = None,
    revision: Annotated[Text, REVISION] = None,
) -> None:
    """Peak memory and time of whole training steps of a causal LM with random weights. Nothing is downloaded."""
    options = {k: v for k, v in locals().items() if k not in ("out", "revision")}
    with _usage_errors("step"):
        from fused_grad_optimizer.cli.benchmarks import step as bench

        settings, methods = _step_settings(bench, options)
        defaults = {"batch": 1, "seq": 512, "lr": 1e-5, "warmup": 3, "steps": 10, "seed": 0}
        command = _command("step", options, defaults)
        parts = (bench.model_name(settings.model), f"b{batch}", f"s{seq}")
        bench.config_of(settings)
        place = torch.device(settings.device)
        _measure(lambda say: bench.run(settings, methods, say), place, command, out, revision, parts)


@app.command()
def host(
    layers: Annotated[int, _option("Layers of the model; times are a layer's share.", default=True)] = 64,
    width: Annotated[int, _option("In and out features of each layer.", default=True)] = 256,
    tokens: Annotated[int, _option("Tokens T.", default=True)] = 64,
    rounds: Annotated[int, _option("Samples of each time; the median counts.", default=True)] = 60,
    device: Annotated[Text, DEVICE] = None,
    dtype: Annotated[Text, DTYPE] = None,
    out: Annotated[Text, OUT] = None,
    revision: Annotated[Text, REVISION] = None,
) -> None:
    """Host time of small layers and their updates, beside that of plain layers. Random data only.

    On a GPU the device is never waited for, as long as the layers stay small; on a CPU times hold the computation.
    """
    options = {k: v for k, v in locals().items() if k not in ("out", "revision")}
    with _usage_errors("host"):
        from fused_grad_optimizer.cli.benchmarks import host as bench

        settings = _host_settings(bench, options)
        command = _command("host", options, {"layers": 64, "width": 256, "tokens": 64, "rounds": 60})
        _measure(lambda say: bench.run(settings, say), settings.device, command, out, revision, ())


def _measure(
    run: Callable[[Callable[[str], None]], dict[str, Any]],
    device: torch.device,
    command: str,
    out: str | None,
    revision: str | None,
    parts: Sequence[str],
) -> None:
    """Run, save, show. Exit code 1 when something was wrong or failed; running out of memory is a result."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a log has no width: keep rows whole
    environment = results.environment(device, command, revision)
    kind = command.split()[2]
    path = Path(out).expanduser() if out else results.default_path(kind, environment, *parts)
    results.check_out(path)
    result = {**run(lambda text: console.print(text, highlight=False)), "environment": environment}
    results.save(path, result)
    print_sheet(sheet(result), console)
    console.print(f"Saved: {path}", highlight=False, soft_wrap=True)
    if any(entry["status"] not in NOTHING_FAILED for entry in result["entries"]):
        raise typer.Exit(1)


class _usage_errors:
    """Mistakes in the arguments: one line, no traceback, exit code 2."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UsageError):
            print(f"forge bench {self.name}: {error}", file=sys.stderr)
            raise typer.Exit(2) from error


def _command(name: str, options: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The command that measures this again, without what equals a default and without places of files."""
    words = ["forge", "bench", name]
    for key, value in options.items():
        if value is None or value == defaults.get(key):
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [flag(key), Path(one).name if key == "model" else str(one)]
    return shlex.join(words)


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip().lower())
    if match is None:
        raise UsageError(f"--shape {text}: give out x in features, as 4096x1024")
    return int(match[1]), int(match[2])


def _at_least(options: dict[str, Any], least: int, *names: str) -> None:
    for name in names:
        value = options[name]
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one < least:
                raise UsageError(f"{flag(name)} {one} must be at least {least}")


def _modes(states: Sequence[str | None], weight: str | None, dtype: str) -> None:
    try:
        for state in states:
            check_modes(state, weight)
    except ValueError as error:
        raise UsageError(f"--state or --weight: {error}") from error
    if weight is not None and dtype != "bfloat16":
        raise UsageError(f"--weight {weight} is about bf16 weights; add --dtype bfloat16 or leave it out")


def _device(options: dict[str, Any]) -> tuple[str, str]:
    device = find_device(options["device"])
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: only cpu and cuda are measured")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # events and kernels go to the current device
    return device, check_dtype(options["dtype"], device)


def _kernel_settings(bench: Any, options: dict[str, Any]) -> Any:
    _at_least(options, 1, "tokens", "rounds")
    _at_least(options, 0, "seed")
    device, dtype = _device(options)
    kind = torch.device(device).type
    rules = options["rule"] or list(bench.RULES)
    states = options["state"] or [None]
    try:
        for rule in rules:
            get_rule(rule)
    except ValueError as error:
        raise UsageError(f"--rule: {error}") from error
    _modes(states, options["weight"], dtype)
    return bench.KernelSettings(
        shapes=tuple(_shape(text) for text in options["shape"]) if options["shape"] else bench.SHAPES[kind],
        tokens=tuple(options["tokens"] or bench.TOKENS[kind]),
        rules=tuple(rules),
        states=tuple(states),
        weight=options["weight"],
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        rounds=options["rounds"],
        seed=options["seed"],
    )


def _step_settings(bench: Any, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    _at_least(options, 1, "batch", "warmup", "steps")
    _at_least(options, 2, "seq")
    _at_least(options, 0, "seed")
    if not 0 <= options["lr"] < float("inf"):
        raise UsageError(f"--lr {options['lr']} must be a finite number of at least 0")
    device, dtype = _device(options)
    _modes([options["state"]], options["weight"], dtype)
    methods = tuple(options["method"] or bench.METHODS)
    for name in methods:
        if name not in bench.METHODS:
            raise UsageError(f"--method {name} is not offered; choose among {', '.join(bench.METHODS)}")
    default = "llama-3.1-8b" if torch.device(device).type == "cuda" else "tiny"
    names = ("batch", "seq", "state", "weight", "lr", "warmup", "steps", "seed")
    given = {name: options[name] for name in names}
    return bench.StepSettings(model=options["model"] or default, dtype=dtype, device=device, **given), methods


def _host_settings(bench: Any, options: dict[str, Any]) -> Any:
    sizes = ("layers", "width", "tokens", "rounds")
    _at_least(options, 1, *sizes)
    device, dtype = _device(options)
    given = {name: options[name] for name in sizes}
    return bench.HostSettings(dtype=getattr(torch, dtype), device=torch.device(device), **given)
