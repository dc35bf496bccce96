"""Result files: what was measured, where, with which versions, and the command that measures it again."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fused_grad_optimizer.cli.training.checkpoint import write_json
from fused_grad_optimizer.cli.training.config import UsageError
from fused_grad_optimizer.cli.training.start import versions

FOLDER = Path("benchmarks/results")


def environment(device: torch.device, command: str, revision: str | None) -> dict[str, Any]:
    """The card, processor, driver, versions, git revision, date and command of a run."""
    cuda, processor = device.type == "cuda", _processor()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "revision": revision or _git_revision(),
        "device": device.type,
        "card": torch.cuda.get_device_name(device) if cuda else processor,
        "processor": processor,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "versions": versions(),
    }


def default_path(kind: str, env: Mapping[str, Any], *parts: str) -> Path:
    """`benchmarks/results/KIND-CARD-PARTS.json`: a run of the same kind on the same card replaces the earlier one."""
    return FOLDER / ("-".join(slug(part) for part in (kind, env["card"], *parts)) + ".json")


def check_out(path: Path) -> None:
    """Refuse a place that cannot be written before minutes are spent on measuring.

    Raises:
        UsageError: it is a folder, or no file can be made beside it.
    """
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; give a file name ending in .json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error


def save(path: Path, result: Mapping[str, Any]) -> None:
    check_out(path)
    write_json(path, result)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The commit of this source, with "-dirty" where tracked files differ; None outside a git checkout."""
    here = str(Path(__file__).parents[2])
    if _output("git", "-C", here, "ls-files", "__init__.py") is None:
        return None  # installed somewhere inside another project's checkout
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no", ".")
    return commit and (f"{commit}-dirty" if changed else commit)


def _output(*command: str) -> str | None:
    """First line that a command prints, or None: not found, failed, or nothing printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
