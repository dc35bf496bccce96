"""The settings of a run: defaults, checks, and what a resumed run may change.

Everything here is decided from the arguments alone, before a model or a data file is opened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused_grad_optimizer.rules import RULES
from fused_grad_optimizer.storage import STATES, WEIGHTS

SCHEDULES = ("constant", "cosine", "linear")
DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
# A rule that is not listed gets AdamW's.
LEARNING_RATES = {"lion": 1e-4, "sgd": 0.1}
DEFAULT_LR = 1e-3
PRETRAINED_LR_DIVISOR = 50
# Hyper-parameters that have no option of their own.
RULE_SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}}
RESUMABLE = ("steps", "save_every")
LARGEST_SEED = 2**63 - 1


class UsageError(ValueError):
    """A mistake in the arguments: shown without a traceback; names the option and the remedy."""


@dataclass(frozen=True)
class Settings:
    """One run. `optimizer` is "forge", or "torch" for the baseline that --compare runs beside it."""

    model: str | None
    data: str | None
    rule: str
    state: str | None
    weight: str | None
    when: str
    lr: float
    schedule: str
    warmup: int
    weight_decay: float | None
    batch: int
    seq: int
    accumulate: int
    clip: float | None
    steps: int
    seed: int
    device: str
    dtype: str
    save_every: int
    compare: str | None
    optimizer: str = "forge"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        return cls(**values)


def settings_from(given: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Settings for a new run from the options that were typed, and lines to tell the user.

    Raises:
        UsageError: an option is wrong, or two do not go together.
    """
    notes: list[str] = []
    options = dict(given)
    options["rule"] = _choice(given, "rule", sorted(RULES), "adamw")
    options["state"] = _choice(given, "state", STATES, None)
    options["compare"] = _choice(given, "compare", ("adamw",), None)
    options["schedule"] = _choice(given, "schedule", SCHEDULES, "cosine")
    for name, default, least in (("batch", 8, 1), ("seq", 128, 2), ("accumulate", 1, 1), ("steps", 300, 1)):
        options[name] = _at_least(name, given.get(name, default), least)
    options["save_every"] = _at_least("save_every", given.get("save_every", 100), 1)
    options["seed"] = _at_least("seed", given.get("seed", 0), 0)
    if options["seed"] > LARGEST_SEED:
        raise UsageError(f"--seed {options['seed']} is too large; use a seed up to {LARGEST_SEED}")
    options["model"] = existing_path("model", given.get("model"))
    options["data"] = existing_path("data", given.get("data"))
    options["device"] = find_device(given.get("device"))
    options["dtype"] = check_dtype(given.get("dtype"), options["device"])
    options["weight"] = _weight(given, options["dtype"])
    options["warmup"] = _warmup(given, options["steps"])
    options["clip"] = _number(given, "clip", None, above=True)
    options["weight_decay"] = _number(given, "weight_decay", None)
    options["lr"] = _number(given, "lr", _default_lr(options["rule"], options["model"]))
    options["when"] = _when(given, options, notes)
    if options["compare"] and options["rule"] != "adamw":
        raise UsageError(f"--compare adamw compares AdamW with AdamW; leave out --rule {options['rule']}")
    if options["compare"] and torch.device(options["device"]).type not in ("cpu", "cuda"):
        raise UsageError(f"--compare measures memory on cpu and cuda only; --device is {options['device']}")
    fields = [f.name for f in dataclasses.fields(Settings) if f.name != "optimizer"]
    return Settings(**{name: options[name] for name in fields}), notes


def resumed(saved: Settings, given: Mapping[str, Any], folder: Path, done: int) -> Settings:
    """The settings of a run that goes on: the saved ones, with what may be changed.

    Args:
        saved: settings that the run folder holds.
        given: options typed beside --resume.
        folder: the run folder.
        done: steps that its checkpoint has behind it.
    """
    known = saved.to_dict()
    for name in ("dtype", "model", "data", "device"):
        if name in given and name in known:
            given = {**given, name: _normal(name, given)}
    for name, value in given.items():
        if name in RESUMABLE or name == "resume":
            continue
        if name in ("out", "overwrite") or known.get(name) != value:
            raise UsageError(
                f"{flag(name)} cannot be changed by --resume {folder}: only {_flags(RESUMABLE)} can; "
                f"leave it out, or start a new run with another --out"
            )
    changes: dict[str, Any] = {name: _at_least(name, given[name], 1) for name in RESUMABLE if name in given}
    if changes.get("steps", saved.steps) < done:
        raise UsageError(f"--steps {changes['steps']} is fewer than the {done} steps that {folder} has already done")
    return dataclasses.replace(saved, **changes)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flags(names: Iterable[str]) -> str:
    return " and ".join(flag(name) for name in names)


def _normal(name: str, given: Mapping[str, Any]) -> Any:
    if name == "dtype":
        return DTYPES.get(given[name], given[name])
    if name == "device":
        return find_device(given[name])
    return str(Path(given[name]).expanduser().resolve())


def _choice(given: Mapping[str, Any], name: str, choices: Iterable[str], default: str | None) -> str | None:
    value = given.get(name, default)
    if value is not None and value not in choices:
        raise UsageError(f"{flag(name)} {value} is not offered; choose one of {', '.join(choices)}")
    return value


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{flag(name)} {value} must be at least {least}")
    return value


def _number(given: Mapping[str, Any], name: str, default: float | None, above: bool = False) -> float | None:
    value = given.get(name, default)
    if value is None:
        return None
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise UsageError(f"{flag(name)} {value} must be a finite number {'above' if above else 'of at least'} 0")
    return float(value)


def existing_path(name: str, value: str | None) -> str | None:
    """The absolute form of a path given to this option."""
    if value is None:
        return None
    path = Path(value).expanduser().resolve()
    if not path.exists():
        hint = "; nothing is downloaded here, so save the model to a folder first" if name == "model" else ""
        raise UsageError(f"{flag(name)} {value}: there is no such file or folder{hint}")
    return str(path)


def find_device(value: str | None) -> str:
    """The device of --device, tried with a small tensor; by default a GPU where there is one."""
    if value is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(value)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {value} cannot be used here ({reason}); try --device cpu") from error
    return str(device)


def check_dtype(value: str | None, device: str) -> str:
    """The full name of --dtype; the default depends on the device."""
    if value is None:
        return "bfloat16" if torch.device(device).type == "cuda" else "float32"
    if value not in DTYPES:
        raise UsageError(f"--dtype {value} is not offered; choose one of float32, bfloat16")
    return DTYPES[value]


def _weight(given: Mapping[str, Any], dtype: str) -> str | None:
    weight = _choice(given, "weight", WEIGHTS, None)
    if weight is not None and dtype != "bfloat16":
        raise UsageError(f"--weight {weight} is about bf16 weights; add --dtype bfloat16 or leave it out")
    return weight


def _warmup(given: Mapping[str, Any], steps: int) -> int:
    warmup = _at_least("warmup", given.get("warmup", steps // 20), 0)
    if warmup > steps:
        raise UsageError(f"--warmup {warmup} is longer than the run; use at most --steps ({steps})")
    return warmup


def _default_lr(rule: str, model: str | None) -> float:
    lr = LEARNING_RATES.get(rule, DEFAULT_LR)
    return lr / PRETRAINED_LR_DIVISOR if model is not None and Path(model).is_dir() else lr


def _when(given: Mapping[str, Any], options: Mapping[str, Any], notes: list[str]) -> str:
    when = _choice(given, "when", ("backward", "step"), None)
    reasons = [f"--accumulate {options['accumulate']}"] if options["accumulate"] > 1 else []
    if options["clip"] is not None:
        reasons.append(f"--clip {options['clip']:g}")
    if not reasons:
        return when or "backward"
    if when == "backward":
        raise UsageError(f"{reasons[0]} needs the gradients of the whole model at once: use --when step")
    if when is None:
        notes.append(f"Updating in the step, not in backward: {' and '.join(reasons)} needs it.")
    return "step"
