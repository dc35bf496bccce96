"""`forge doctor`: the device, the versions, and which kernel path each layer size would take and why."""

from __future__ import annotations

import collections
import os
import re
import sys
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table


class Layer(NamedTuple):
    """A weight as the linear layers that have it see it; see `explain` for `uses` and `embedding`."""

    name: str
    n: int
    k: int
    uses: int = 1
    embedding: bool = False


# Of Llama-3.1-8B's linears.
LLAMA_8B = [
    Layer("attention q, o", 4096, 4096),
    Layer("attention k, v", 1024, 4096),
    Layer("mlp gate, up", 14336, 4096),
    Layer("mlp down", 4096, 14336),
    Layer("lm_head", 128256, 4096),
]


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
    weight: Annotated[str | None, _option("Rounding of bf16 weights: stochastic (default) or nearest.")] = None,
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
        layers = _layers_of(model) if model else [_parse(text) for text in size] if size else LLAMA_8B
        modes = {"rule": rule, "state": state, "weight": weight}
        table = _paths(layers, tokens, device=place, weight_dtype=getattr(torch, kind), **modes)
    except ValueError as error:
        print(f"forge doctor: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    console = Console()
    console.print(_about(place, getattr(torch, kind)))
    console.print(table)


def _parse(text: str) -> Layer:
    from fused_grad_optimizer.cli.training.config import UsageError

    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip().lower())
    if match is None:
        raise UsageError(f"--size {text}: give out x in features, as 4096x1024")
    return Layer(text, int(match[1]), int(match[2]))


def _layers_of(model: str) -> list[Layer]:
    """The linears of a model, built without memory; layers that differ only in a number are one line, and so are those
    that share a weight."""
    from fused_grad_optimizer.cli.training.config import existing_path
    from fused_grad_optimizer.cli.training.model import load_config, quiet_transformers, random_model

    path = existing_path("model", model)
    quiet_transformers()
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        built = random_model(load_config(path, needs_weights=False), torch.float32)
    shared: dict[int, tuple[torch.Tensor, list[str]]] = {}  # holds the weights, so that their ids stay their own
    embeddings = {id(m.weight) for m in built.modules() if isinstance(m, torch.nn.Embedding)}
    for name, module in built.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            weight = module.weight
            shared.setdefault(id(weight), (weight, []))[1].append(re.sub(r"\b\d+\b", "*", name))
    counts: collections.Counter[Layer] = collections.Counter()
    for key, (weight, names) in shared.items():
        n, k = weight.shape
        counts[Layer(", ".join(dict.fromkeys(names)), n, k, len(names), key in embeddings)] += 1
    return [layer._replace(name=f"{layer.name} (x{count})") if count > 1 else layer for layer, count in counts.items()]


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
    forced = os.environ.get("FORGE_KERNEL")
    if forced is not None:
        table.add_row("FORGE_KERNEL", forced if reason is None else f"{forced}, which nothing follows here")
    return table


def _paths(layers: list[Layer], tokens: int, *, weight_dtype: torch.dtype, **options: Any) -> Table:
    from fused_grad_optimizer import explain

    title = f"{tokens} tokens, {str(weight_dtype).removeprefix('torch.')}"
    table = Table("layer", "out x in", "path", "in registers up to T", "why", title=title)
    for name, n, k, uses, embedding in layers:
        found = explain(n, k, tokens, weight_dtype=weight_dtype, uses=uses, embedding=embedding, **options)
        crossover = "-" if found.crossover is None else str(found.crossover)
        table.add_row(name, f"{n} x {k}", found.path, crossover, found.reason)
    return table
