"""The command's sub-commands."""

from __future__ import annotations

import importlib
import importlib.util

import typer

from fused_grad_optimizer.cli.doctor import doctor
from fused_grad_optimizer.cli.train import train

app = typer.Typer(
    name="forge",
    help="Train a model with no weight gradient in memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(doctor)

_BENCH = "fused_grad_optimizer.cli.bench"
if importlib.util.find_spec(_BENCH) is not None:
    app.add_typer(importlib.import_module(_BENCH).app, name="bench")
