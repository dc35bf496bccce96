"""Which path takes a gradient at which number of tokens: tables of measurements, one JSON file a card.

`forge bench tune` writes them. The user's own (`user_path`) goes before the one shipped in `tuned/`, cell by cell:

    {"format": 1, "card": "NVIDIA H200",
     "runs": [{"date": ..., "command": ..., "torch": ..., "triton": ..., "driver": ...}],
     "entries": [{"bytes": [2, 2, 2], "stochastic": true, "inputs": 2, "n": 4096, "k": 4096,
                  "cells": [{"tokens": 512, "run": 0,
                             "candidates": [{"path": "wgrad_step_hopper", "config": {}, "us": 80.5}, ...]}]}]}

`bytes` are those of an element of the weight and of each state, `inputs` those of dY and X, `config` the fields that
differ from the configuration `configs.py` gives, of those in `configs.TUNABLE`: candidates with others, of another
version of the kernels, are left out. A weight that is not in the table gets the entry nearest to it; from one of other
bytes the paths, but no configurations. Between two measured numbers of tokens the path changes where the
measured times, taken as straight lines, cross; beyond the largest the last two lines go on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fused_grad_optimizer.kernels.configs import CHUNKED, HOPPER, PORTABLE, TUNABLE

FORMAT = 1
NEAR = 1.01  # a path is kept at the next measured T unless another takes 1% less: fewer kernels to compile
BEYOND = 2  # times the largest measured T, what was measured is still believed
_ENDLESS = 1 << 20  # tokens
_LOG = logging.getLogger("fused_grad_optimizer")


class Key(NamedTuple):
    """What a measurement is about; `bytes` of an element: of the weight and each state, and of dY and X (`inputs`)."""

    bytes: tuple[int, ...]
    stochastic: bool
    inputs: int
    n: int
    k: int


class Choice(NamedTuple):
    """A path, and the fields of its configuration that differ from what `configs.py` gives, sorted by name."""

    path: str
    config: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.path, *(f"{name}={value}" for name, value in self.config)])


@dataclass
class Cell:
    """Microseconds of each candidate at one number of tokens; `run` is an index into `Table.runs`."""

    run: int
    us: dict[Choice, float]


@dataclass
class Table:
    """One file: see the module's docstring. `left_out`: how many candidates were not of this version."""

    card: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[Key, dict[int, Cell]] = field(default_factory=dict)
    left_out: int = 0


@dataclass(frozen=True)
class Ranges:
    """`choices[i]` for T up to and with `limits[i]`; the last choice above all limits. `source` says who measured."""

    limits: tuple[int, ...]
    choices: tuple[Choice, ...]
    source: str

    def at(self, tokens: int) -> Choice:
        return self.choices[bisect_left(self.limits, tokens)]

    @cached_property
    def crossover(self) -> int | None:
        """The largest T of an in-register kernel, above which all is chunked; None where the largest T are not."""
        registers = [i for i, choice in enumerate(self.choices) if choice.path != CHUNKED]
        if not registers:
            return 0
        return self.limits[registers[-1]] if registers[-1] < len(self.limits) else None

    @cached_property
    def reason(self) -> str:
        """As in "table for NVIDIA H200: wgrad_step_hopper up to T=1800, chunked above"."""
        paths = [choice.path for choice in self.choices]
        ends = [i for i, (a, b) in enumerate(pairwise(paths)) if a != b]
        parts = [f"{paths[i]} up to T={self.limits[i]}" for i in ends]
        return f"{self.source}: " + ", ".join([*parts, paths[-1] + (" above" if ends else " at any T")])


# -- files -------------------------------------------------------------------------------------------------------------


def file_name(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_") + ".json"


def shipped_path(card: str) -> Path:
    return Path(__file__).parent / "tuned" / file_name(card)


def user_path(card: str) -> Path:
    """`$XDG_CACHE_HOME/fused_grad_optimizer/tuned/CARD.json`, under `~/.cache` where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache_folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return cache_folder / "fused_grad_optimizer" / "tuned" / file_name(card)


def read(path: Path, card: str) -> Table | None:
    """The table in a file, None without a file: also where a folder above it is none, or may not be entered.

    Raises:
        ValueError: it cannot be read, is not a table, or is another card's; names the file and the remedy.
    """
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError) and not _is_seen(path):
            return None
        raise ValueError(f"the tuning table {path} cannot be read: {error}; remove it, or give access to it") from error
    try:
        table = _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is not a tuning table ({what}); remove it, `forge bench tune` makes one") from error
    if table.card != card:
        raise ValueError(f"the tuning table {path} is of {table.card!r}, and this card is {card!r}; remove it")
    return table


def _is_seen(path: Path) -> bool:
    """Whether there is such a file, as far as the folders above it let one look."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _parse(data: Any) -> Table:
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {FORMAT}")
    table = Table(str(data["card"]), [dict(run) for run in data["runs"]])
    for entry in data["entries"]:
        bytes_ = tuple(_positive(b) for b in entry["bytes"])
        if not bytes_ or not isinstance(entry["stochastic"], bool):
            raise ValueError("bytes or stochastic of an entry is wrong")
        key = Key(bytes_, entry["stochastic"], *(_positive(entry[name]) for name in ("inputs", "n", "k")))
        cells = table.entries.setdefault(key, {})
        for cell in entry["cells"]:
            if cell["run"] not in range(len(table.runs)):
                raise ValueError(f"there is no run {cell['run']!r}")
            us = {_choice(c["path"], c["config"]): _time(c["us"]) for c in cell["candidates"]}
            kept = {choice: time for choice, time in us.items() if _is_known(choice)}
            table.left_out += len(us) - len(kept)
            if kept:
                cells[_positive(cell["tokens"])] = Cell(cell["run"], kept)
    return table


def _choice(path: str, config: Mapping[str, int]) -> Choice:
    if path not in TUNABLE:
        raise ValueError(f"there is no path {path!r}")
    return choice(path, {name: _positive(value) for name, value in config.items()})


def _is_known(candidate: Choice) -> bool:
    """Whether the kernels of this version have what a table says of a candidate."""
    limits = TUNABLE[candidate.path]
    return all(value <= limits.get(name, 0) for name, value in candidate.config)


def choice(path: str, config: Mapping[str, int]) -> Choice:
    return Choice(path, tuple(sorted(config.items())))


def _positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} stands where a positive whole number is needed")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} stands where microseconds are needed")
    return float(value)


def as_json(table: Table) -> dict[str, Any]:
    """What the table's file holds; candidates begin with the fastest."""
    entries = [
        {
            **key._asdict(),
            "cells": [
                {
                    "tokens": tokens,
                    "run": cell.run,
                    "candidates": [
                        {"path": c.path, "config": dict(c.config), "us": round(us, 2)}
                        for c, us in sorted(cell.us.items(), key=lambda item: item[1])
                    ],
                }
                for tokens, cell in sorted(cells.items())
            ],
        }
        for key, cells in table.entries.items()
    ]
    return {"format": FORMAT, "card": table.card, "runs": table.runs, "entries": entries}


# -- what to run -------------------------------------------------------------------------------------------------------


@cache
def in_force(card: str) -> dict[Key, dict[int, Cell]]:
    """The user's and the shipped measurements for this card; where both have a cell, the user's."""
    merged: dict[Key, dict[int, Cell]] = {}
    for table in (read(shipped_path(card), card), read(user_path(card), card)):
        for key, cells in table.entries.items() if table is not None else ():
            merged.setdefault(key, {}).update(cells)
        if table is not None and table.left_out:
            _LOG.warning(
                "The tuning table for %s has %d candidates that these kernels do not have: they are left out; "
                "`forge bench tune` measures anew.", card, table.left_out,
            )  # fmt: skip
    return merged


@cache
def ranges(card: str | None, key: Key, hopper: bool) -> Ranges:
    """The paths for a weight on a card (None: no card), with or without the Hopper kernel.

    Raises:
        ValueError: a table is damaged or foreign.
    """
    guess = defaults(hopper)
    if card is None:
        return guess
    entries = in_force(card)
    if not entries:
        _say_how_to_measure(card)
    near = nearest(key, entries)
    if near is None:
        return guess
    source = f"table for {card}" if near == key else f"table for {card}, by its entry {near.n}x{near.k}"
    cells = {tokens: cell.us for tokens, cell in entries[near].items()}
    if near.bytes != key.bytes:
        cells = {tokens: _fastest_of_paths(us) for tokens, us in cells.items()}
    return from_cells(cells, hopper, guess, source)


def _fastest_of_paths(us: Mapping[Choice, float]) -> dict[Choice, float]:
    """The least time of each path, under its default configuration."""
    least: dict[Choice, float] = {}
    for measured, time in us.items():
        path = Choice(measured.path)
        least[path] = min(time, least.get(path, math.inf))
    return least


def forget() -> None:
    """Read the files again at the next call."""
    in_force.cache_clear()
    ranges.cache_clear()


def defaults(hopper: bool) -> Ranges:
    """For a card without a table: the Hopper kernel up to T = 32768, the portable one up to 1024, chunked above.

    Guesses, to be replaced by `forge bench tune`, from one weight on one H200 (14336 x 4096, AdamW in bf16, us):

        T                      128    512   2048   4096  16384
        wgrad_step_hopper      186    205    413    731   2935
        wgrad_step             281    340    620   1028   4117
        chunked                329    391    592    886   3152
    """
    if hopper:
        return Ranges((32768,), (Choice(HOPPER), Choice(CHUNKED)), "a guess, not measured on this card")
    return Ranges((1024,), (Choice(PORTABLE), Choice(CHUNKED)), "a guess, not measured on this card")


@cache
def _say_how_to_measure(card: str) -> None:
    _LOG.warning(
        "FORGE has no tuning table for %s and guesses which kernel is fastest; `forge bench tune` makes one.", card
    )


def nearest(key: Key, entries: Iterable[Key]) -> Key | None:
    """The entry that predicts `key`: of the same input bytes, and as near as there is in what is kept, then in shape.

    Compared in this order: the same bytes of weight and states, else the nearest sum of them; the same rounding; the
    distance in log2(N K) plus half of that in log2(N / K). None where no entry has these input bytes.
    """

    def distance(other: Key) -> tuple[bool, float, bool, float]:
        size = abs(math.log2(max(key.n * key.k, 1) / (other.n * other.k)))
        aspect = abs(math.log2(max(key.n, 1) / max(key.k, 1)) - math.log2(other.n / other.k))
        kept = abs(math.log2(sum(key.bytes) / sum(other.bytes)))
        return key.bytes != other.bytes, kept, key.stochastic != other.stochastic, size + aspect / 2

    return min((other for other in entries if other.inputs == key.inputs), key=distance, default=None)


def from_cells(cells: Mapping[int, Mapping[Choice, float]], hopper: bool, guess: Ranges, source: str) -> Ranges:
    """Ranges of T from times in us by T and candidate.

    Beyond the largest T the straight lines through the last two go on. Where they are not known, `guess` serves T
    beyond `BEYOND` times the largest. What is chunked stays so.
    """
    best: list[tuple[int, Choice]] = []
    for tokens, measured in sorted(cells.items()):
        us = {c: t for c, t in measured.items() if hopper or c.path != HOPPER}
        if not us:
            continue
        fastest = min(us, key=lambda c: us[c])
        if best and us.get(best[-1][1], math.inf) <= NEAR * us[fastest]:
            fastest = best[-1][1]
        best.append((tokens, fastest))
    if not best:
        return guess
    limits, choices = [], [best[0][1]]
    for (t0, a), (t1, b) in pairwise(best):
        if a != b:
            limits.append(_crossing(t0, t1, a, b, cells))
            choices.append(b)
    if choices[-1].path == CHUNKED:
        return Ranges(tuple(limits), tuple(choices), source)
    followed = _followed(best, cells)
    if followed is None:
        end = BEYOND * best[-1][0]
        for i, guessed in enumerate(guess.choices):
            if (i == len(guess.limits) or guess.limits[i] > end) and guessed.path != choices[-1].path:
                limits.append(max(end, guess.limits[i - 1] if i else 0))
                choices.append(guessed)
                source += " (larger T are a guess)"
    elif followed[1] < _ENDLESS:
        limits.append(followed[1])
        choices.append(followed[0])
    return Ranges(tuple(limits), tuple(choices), source)


def _followed(best: list[tuple[int, Choice]], cells: Mapping[int, Mapping[Choice, float]]) -> tuple[Choice, int] | None:
    """The chunked choice that follows the last measured one, and the T up to which that is still faster.

    None if the two were not both measured at the last two T.
    """
    if len(best) < 2:
        return None
    (t0, _), (t1, last) = best[-2:]
    chunked = min((c for c in cells[t1] if c.path == CHUNKED), key=lambda c: cells[t1][c], default=None)
    if chunked is None or not {chunked, last} <= cells[t0].keys():
        return None
    before, ahead = (cells[t][chunked] - cells[t][last] for t in (t0, t1))
    if ahead >= before:  # and so it stays
        return chunked, _ENDLESS
    return chunked, t1 + min(_ENDLESS, int((t1 - t0) * max(ahead, 0.0) / (before - ahead)))


def _crossing(t0: int, t1: int, a: Choice, b: Choice, cells: Mapping[int, Mapping[Choice, float]]) -> int:
    """The largest T in [t0, t1 - 1] at which `a` is still chosen; `b` is at t1."""
    try:
        ahead, behind = (cells[t][b] - cells[t][a] for t in (t0, t1))
    except KeyError:  # one of them was not measured at both: the middle, as times grow by factors
        return min(t1 - 1, round(math.sqrt(t0 * t1)))
    if ahead <= 0 or behind >= 0:  # within NEAR of each other
        return t0
    return min(t1 - 1, t0 + round((t1 - t0) * ahead / (ahead - behind)))
