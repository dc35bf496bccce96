"""A run folder: its files, its lock, and writes that a kill at any moment leaves whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from fused_grad_optimizer.cli.training.config import Settings, UsageError

try:
    import fcntl
except ImportError:  # no lock where there is no flock
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, CHECKPOINT, PLOT = "config.json", "metrics.jsonl", "checkpoint.pt", "loss_and_memory.png"
MODEL, COMPARISON, BASELINE, LOCK = "model", "compare.json", "torch_adamw", ".lock"
KIND = "forge train"
_FILES = (CHECKPOINT, METRICS, PLOT, COMPARISON, MODEL, BASELINE, CONFIG)


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file beside `path` and rename it, so that `path` is the old or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(folder: Path, parts: dict[str, Any]) -> None:
    write_atomically(folder / CHECKPOINT, lambda file: torch.save(parts, file))


def load_checkpoint(folder: Path, *, peek: bool = False) -> dict[str, Any] | None:
    """The last checkpoint, on the CPU, or None where none was written yet; with `peek`, tensors stay on the disk."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=peek)
    except Exception as error:
        raise UsageError(f"--resume {folder}: {CHECKPOINT} cannot be read: {error}") from error


def save_model(folder: Path, model: Any, tokenizer: Any | None) -> None:
    """The trained model in Hugging Face's format, under `model/`."""
    temporary = folder / (MODEL + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    os.replace(temporary, folder / MODEL)
    _sync_folder(folder)


class FolderLock:
    """One process at a time in a run folder. The system drops the lock with the process, however that ends.

    A child that inherits `handle` holds the lock as well.
    """

    def __init__(self, folder: Path, option: str) -> None:
        self._file = open(folder / LOCK, "a")  # noqa: SIM115  (kept open: it is the lock)
        self.handle = self._file.fileno()
        if fcntl is not None:
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise UsageError(
                    f"{option} {folder} is in use by another forge train; wait for it or stop it"
                ) from None

    def release(self) -> None:
        self._file.close()


def read_record(folder: Path) -> dict[str, Any] | None:
    """What config.json of a run folder says, or None if the folder holds no run of this command."""
    try:
        record = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("kind") == KIND else None


def read_settings(folder: Path) -> Settings:
    record = read_record(folder)
    if record is None:
        raise UsageError(f"--resume {folder} holds no run: {CONFIG} of forge train is missing or damaged")
    return Settings.from_dict(record["settings"])


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something this run would write over, unless it is a run and may go."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; give a folder")
    there = [name for name in _FILES if (folder / name).exists()]
    if not there:
        return
    if read_record(folder) is None:
        raise UsageError(
            f"--out {folder} holds files that are not a run's and would be replaced: {', '.join(there)}; "
            f"give another folder"
        )
    if not overwrite:
        raise UsageError(
            f"--out {folder} already holds a run; go on with it (--resume {folder}), "
            f"replace it (--overwrite), or give another folder"
        )


def clear(folder: Path) -> None:
    """Remove a run's files, and nothing else."""
    for name in _FILES:  # config.json last: until then the folder is still known as a run's
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
