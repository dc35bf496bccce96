"""From the typed options to a run folder with its lock, then the run; errors and exit codes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fused_grad_optimizer.cli.training import checkpoint as files
from fused_grad_optimizer.cli.training.compare import run_both
from fused_grad_optimizer.cli.training.config import Settings, UsageError, resumed, settings_from
from fused_grad_optimizer.cli.training.data import check_length, load_tokenizer, load_tokens
from fused_grad_optimizer.cli.training.loop import Inputs, run_folder
from fused_grad_optimizer.cli.training.model import check_fits, load_config, quiet_transformers, try_model


def start(given: Mapping[str, Any]) -> int:
    """Run `forge train` with the options that were typed; returns the exit code."""
    console = Console()
    for library in ("transformers", "matplotlib"):
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    try:
        folder, settings, inputs, lock = _resume(given) if "resume" in given else _new(given, console)
        try:
            return _run(folder, settings, inputs, lock, console)
        finally:
            lock.release()
    except UsageError as error:
        print(f"forge train: {error}", file=sys.stderr)
        return 2


def _run(folder: Path, settings: Settings, inputs: Inputs, lock: files.FolderLock, console: Console) -> int:
    what = "bytes" if inputs.tokenizer is None else "tokenizer of the model's folder"
    console.print(
        f"{settings.rule}, update in {settings.when}, {settings.dtype} on {settings.device}; "
        f"{len(inputs.tokens.ids):,} tokens ({what}); run folder {folder}",
        highlight=False,
        soft_wrap=True,
    )
    if settings.compare:
        code = run_both(folder, settings, lock, console)
    elif _finished(folder, settings):
        console.print(f"This run has finished its {settings.steps} steps; --steps with a larger number goes on.")
        return 0
    else:
        code = run_folder(folder, settings, inputs, console)
    if code in (130, 143):
        command = f"forge train --resume {shlex.quote(str(folder))}"
        console.print(f"Stopped. Go on with: {command}", highlight=False, soft_wrap=True)
    return code


def _finished(folder: Path, settings: Settings) -> bool:
    return (folder / files.MODEL).exists() and _done(folder) == settings.steps


def _done(folder: Path) -> int:
    saved = files.load_checkpoint(folder, peek=True)
    return 0 if saved is None else saved["step"]


def read_inputs(settings: Settings) -> Inputs:
    """Text, tokenizer and model config, checked against each other."""
    quiet_transformers()
    config = load_config(settings.model)
    tokenizer = load_tokenizer(settings.model)
    tokens = load_tokens(settings.data, tokenizer)
    check_length(tokens, settings.data, settings.seq)
    check_fits(config, tokens, settings)
    try_model(config, settings)
    return Inputs(tokens, tokenizer, config)


def _new(given: Mapping[str, Any], console: Console) -> tuple[Path, Settings, Inputs, files.FolderLock]:
    settings, notes = settings_from(given)
    overwrite = given.get("overwrite", False)
    folder = Path(given.get("out", time.strftime("runs/%Y%m%d-%H%M%S"))).expanduser()
    files.check_free(folder, overwrite)
    for option, path in (("model", settings.model), ("data", settings.data)):
        if path is not None and overwrite and Path(path).is_relative_to(folder.resolve()):
            raise UsageError(
                f"--out {folder} holds --{option} {path}, which --overwrite would remove; give another folder"
            )
    inputs = read_inputs(settings)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = files.FolderLock(folder, "--out")
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from error
    try:
        files.check_free(folder, overwrite)  # once more, now that nobody else can write
        files.clear(folder)
        files.write_json(folder / files.CONFIG, _record(settings, inputs))
    except BaseException:
        lock.release()
        raise
    return folder, settings, inputs, lock


def _resume(given: Mapping[str, Any]) -> tuple[Path, Settings, Inputs, files.FolderLock]:
    folder = Path(given["resume"]).expanduser()
    files.read_settings(folder)  # before a lock file is made in some other folder
    lock = files.FolderLock(folder, "--resume")
    try:
        record = files.read_record(folder) or {}
        saved = files.read_settings(folder)
        settings = resumed(saved, given, folder, _done(folder))
        inputs = read_inputs(settings)
        if inputs.tokens.sha256 != record["data"]["sha256"]:
            raise UsageError(
                f"--resume {folder}: the text of --data {settings.data or '(built in)'} is not the one "
                f"the run began with; bring that back, or start a new run"
            )
        if settings != saved:
            files.write_json(folder / files.CONFIG, {**record, "settings": settings.to_dict()})
    except BaseException:
        lock.release()
        raise
    return folder, settings, inputs, lock


def _record(settings: Settings, inputs: Inputs) -> dict[str, Any]:
    tokens = inputs.tokens
    return {
        "kind": files.KIND,
        "settings": settings.to_dict(),
        "data": {"tokens": len(tokens.ids), "tokenizer": tokens.name, "sha256": tokens.sha256},
        "model": json.loads(inputs.model_config.to_json_string(use_diff=False)),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that decide a run's numbers; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("fused-grad-optimizer", "torch", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
