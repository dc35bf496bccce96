"""`forge train`: the options; the work is in `training/`."""

from __future__ import annotations

from typing import Annotated

import typer

_MODEL, _UPDATE, _LOOP, _RUN = "Model and data", "Update", "Training loop", "Run folder"
Text = str | None
Number = float | None
Whole = int | None


def option(panel: str, text: str, *names: str, metavar: str | None = None) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


# No default is given here, so that an option nobody typed is known from one typed; `training/config.py` fills them in.
def train(
    model: Annotated[Text, option(_MODEL, "Local Hugging Face folder, or a config.json for random weights.")] = None,
    data: Annotated[Text, option(_MODEL, "Text, or .jsonl with a 'text' field (default: CPython's help).")] = None,
    dtype: Annotated[Text, option(_MODEL, "float32 or bfloat16 (default: bfloat16 on a GPU, else float32).")] = None,
    device: Annotated[Text, option(_MODEL, "cpu, cuda, cuda:1, ... (default: cuda where there is one).")] = None,
    rule: Annotated[Text, option(_UPDATE, "adamw, adam, sgd (with momentum 0.9) or lion (default: adamw).")] = None,
    state: Annotated[Text, option(_UPDATE, "States as fp32, bf16 or bf16-nearest (default: as the weights).")] = None,
    weight: Annotated[Text, option(_UPDATE, "Rounding of bf16 weights: stochastic or nearest.")] = None,
    when: Annotated[
        Text, option(_UPDATE, "Update in 'backward' (least memory) or in 'step' (default: backward).")
    ] = None,
    lr: Annotated[
        Number, option(_UPDATE, "Learning rate (default: 1e-3; lion 1e-4, sgd 0.1; pretrained: 1/50).")
    ] = None,
    schedule: Annotated[Text, option(_UPDATE, "constant, cosine or linear (default: cosine).")] = None,
    warmup: Annotated[Whole, option(_UPDATE, "Steps over which lr rises from 0 (default: 5% of the steps).")] = None,
    weight_decay: Annotated[Number, option(_UPDATE, "Weight decay (default: torch.optim's default).")] = None,
    clip: Annotated[Number, option(_UPDATE, "Largest global gradient norm; needs --when step.")] = None,
    batch: Annotated[Whole, option(_LOOP, "Sequences in a micro-batch (default: 8).")] = None,
    seq: Annotated[Whole, option(_LOOP, "Tokens in a sequence (default: 128).")] = None,
    accumulate: Annotated[Whole, option(_LOOP, "Micro-batches in a step; more than 1 needs --when step.")] = None,
    steps: Annotated[Whole, option(_LOOP, "Optimizer steps (default: 300).")] = None,
    seed: Annotated[Whole, option(_LOOP, "Seed of weights, batches and rounding (default: 0).")] = None,
    out: Annotated[Text, option(_RUN, "Run folder (default: runs/DATE-TIME).")] = None,
    save_every: Annotated[Whole, option(_RUN, "Steps between checkpoints (default: 100).")] = None,
    overwrite: Annotated[bool, option(_RUN, "Replace the run that --out holds.", "--overwrite")] = False,
    resume: Annotated[Text, option(_RUN, "Go on with the run in this folder.", metavar="FOLDER")] = None,
    compare: Annotated[Text, option(_RUN, "'adamw': the same run with torch AdamW beside it.")] = None,
) -> None:
    """Train a causal language model. With no arguments: a small Llama on bytes of English text, in about a minute."""
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    from fused_grad_optimizer.cli.training.start import start

    raise typer.Exit(start(given))
