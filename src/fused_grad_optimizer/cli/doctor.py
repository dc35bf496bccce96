"""`forge doctor`: the device, the versions, and which kernel path each layer size would take and why."""

from __future__ import annotations

import collections
import re
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

# (name, out_features, in_features) of Llama-3.1-8B's linears.
LLAMA_8B = [
    ("attention q, o", 4096, 4096),
    ("attention k, v", 1024, 4096),
    ("mlp gate, up", 14336, 4096),
    ("mlp down", 4096, 14336),
    ("lm_head", 128256, 4096),
]
Size = tuple[str, int, int]


def _option(text: str, metavar: str | None = None) -> typer.models.OptionInfo:
    return typer.Option(help=text, metavar=metavar, show_default=False)


def doctor(
    model: Annotated[str | None, _option("Layers of this model: a local Hugging Face folder or a config.json.")] = None,
    size: Annotated[list[str] | None, _option("One layer, out x in features; may be repeated.", "NxK")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in a step (batch x sequence).")] = 512,
    device: Annotated[str | None, _option("cpu, cuda, cuda:1, ... (default: cuda where there is one).")] = None,
    dtype: Annotated[str | None, _option("float32 or bfloat16 (default: bfloat16 on a GPU, else float32).")] = None,
    rule: Annotated[str, typer.Option(help="Update rule.")] = "adamw",
    state: Annotated[str | None, _option("States as fp32, bf16 or bf16-nearest (default: as the weights).")] = None,
) -> None:
    """Show device, versions, and which kernel path each layer size takes and why (default: Llama-3.1-8B's sizes)."""
    from fused_grad_optimizer.cli.training.config import UsageError, check_dtype, find_device

    try:
        if tokens < 1:
            raise UsageError(f"--tokens {tokens} must be at least 1")
        if model is not None and size:
            raise UsageError("--model and --size exclude each other; give one of them")
        place = find_device(device)
        kind = check_dtype(dtype, place)
        sizes = _model_sizes(model) if model else [_parse(text) for text in size] if size else LLAMA_8B
        table = _paths(sizes, tokens, place, getattr(torch, kind), rule, state)
    except ValueError as error:
        print(f"forge doctor: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    console = Console()
    console.print(_about(place, getattr(torch, kind)))
    console.print(table)


def _parse(text: str) -> Size:
    from fused_grad_optimizer.cli.training.config import UsageError

    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip().lower())
    if match is None:
        raise UsageError(f"--size {text}: give out x in features, as 4096x1024")
    return text, int(match[1]), int(match[2])


def _model_sizes(model: str) -> list[Size]:
    """The linears of a model, built without memory; layers that differ only in a number are one line."""
    from fused_grad_optimizer.cli.training.config import existing_path
    from fused_grad_optimizer.cli.training.model import load_config, quiet_transformers, random_model

    path = existing_path("model", model)
    quiet_transformers()
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        built = random_model(load_config(path, needs_weights=False), torch.float32)
    counts: collections.Counter[Size] = collections.Counter()
    for name, module in built.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            rows, columns = module.weight.shape
            counts[re.sub(r"\b\d+\b", "*", name), rows, columns] += 1
    return [(f"{name} (x{count})" if count > 1 else name, n, k) for (name, n, k), count in counts.items()]


def _about(device: str, dtype: torch.dtype) -> Table:
    from fused_grad_optimizer.cli.training.start import versions
    from fused_grad_optimizer.kernels import triton_reason

    table = Table(show_header=False, box=None)
    place = torch.device(device)
    name = f"{device} ({torch.get_num_threads()} threads)"
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        name = f"{device}: {properties.name}, sm_{properties.major}{properties.minor}, "
        name += f"{properties.total_memory / 1024**3:.0f} GiB"
    table.add_row("device", name)
    for library, version in versions().items():
        table.add_row(library, version or "not installed")
    reason = triton_reason(place, dtype)
    table.add_row("Triton kernels", "yes" if reason is None else f"no: {reason}")
    return table


def _paths(sizes: list[Size], tokens: int, device: str, dtype: torch.dtype, rule: str, state: str | None) -> Table:
    from fused_grad_optimizer import ops

    title = f"{tokens} tokens, {str(dtype).removeprefix('torch.')}"
    table = Table("layer", "out x in", "path", "in registers up to T", "why", title=title)
    for name, n, k in sizes:
        found = ops.explain(n, k, tokens, device=device, weight_dtype=dtype, input_dtype=dtype, rule=rule, state=state)
        crossover = "-" if found.crossover is None else str(found.crossover)
        table.add_row(name, f"{n} x {k}", found.path, crossover, found.reason)
    return table
