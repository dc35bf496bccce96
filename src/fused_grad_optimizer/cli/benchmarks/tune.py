"""`forge bench tune`: times every path and configuration of a weight update, and keeps the times as this card's table.

A cell is one weight, rule and number of tokens. What is in a table, and how FORGE reads it: `kernels/tuning.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.cli.benchmarks import kernel, results, timing
from fused_grad_optimizer.cli.benchmarks.kernel import Case, KernelSettings, Problem
from fused_grad_optimizer.cli.training.config import UsageError
from fused_grad_optimizer.kernels import dispatch, tuning
from fused_grad_optimizer.kernels.configs import (
    CANDIDATES,
    CHUNKED,
    HOPPER,
    PORTABLE,
    ChunkConfig,
    chunk_rows,
    multiprocessors,
)
from fused_grad_optimizer.kernels.tuning import Cell, Choice, Key, Table
from fused_grad_optimizer.storage import STORAGES

try:
    import fcntl
except ImportError:  # no lock where there is no flock
    fcntl = None  # type: ignore[assignment]

SHAPES = {"cuda": (*kernel.SHAPES["cuda"], (128256, 4096))}
TOKENS = {"cuda": tuple(128 << i for i in range(8))}
RULES = ("adamw",)


class Measured(NamedTuple):
    """Microseconds of the candidates of one cell, and for each that was left out a line that says why."""

    us: dict[Choice, float]
    dropped: list[str]


Measure = Callable[[Case, KernelSettings], Measured]


def run(
    settings: KernelSettings,
    path: Path,
    environment: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    again: bool = False,
    measure: Measure | None = None,
) -> int:
    """Measure the cells that the table at `path` lacks (all with `again`); the exit code of the command.

    Raises:
        UsageError: `path` cannot be written or holds something else, or a table in force is damaged.
    """
    card = environment["card"]
    results.check_out(path)
    try:
        table = tuning.read(path, card) or Table(card)
        before = tuning.in_force(card)
    except ValueError as error:
        raise UsageError(str(error)) from error
    cells = {(key_of(case, settings), case.tokens): case for case in kernel.cases(settings)}
    todo = [case for (key, tokens), case in cells.items() if again or tokens not in table.entries.get(key, {})]
    say(f"{card}: {len(todo)} cells to measure, {len(cells) - len(todo)} are in {path} already")
    old = [cell for (key, tokens) in cells for t, cell in table.entries.get(key, {}).items() if t == tokens]
    for versions in sorted({_versions(table.runs[cell.run]) for cell in old} - {_versions(_run_record(environment))}):
        say(f"some were measured with {versions}; --again measures them anew")
    session = _Session(table, path, _run_record(environment), bool(before))
    try:
        for i, case in enumerate(todo):
            line = session.add(case, settings, measure or measure_cell)
            say(f"[{i + 1}/{len(todo)}] {describe(case, settings)}: {line}")
    except KeyboardInterrupt:
        say(f"Stopped after {session.done} of {len(todo)} cells; they are in {path}. The same command goes on.")
        return 130
    finally:
        tuning.forget()
    say(f"{session.done} cells measured, {session.changed} choices changed. Table: {path}")
    if path not in (tuning.user_path(card), tuning.shipped_path(card)):
        say(f"FORGE reads it from {tuning.user_path(card)}")
    return 0 if session.done == len(todo) else 1


class _Session:
    """The table while it grows, and what was counted. `own` are the cells that this run measured."""

    def __init__(self, table: Table, path: Path, record: dict[str, Any], known: bool) -> None:
        self.table, self.path, self.record, self.known = table, path, record, known
        self.own: dict[tuple[Key, int], dict[Choice, float]] = {}
        self.done = self.changed = 0

    def add(self, case: Case, settings: KernelSettings, measure: Measure) -> str:
        """Measure one cell and write the table; returns what changed against the table in force."""
        key = key_of(case, settings)
        us, dropped = measure(case, settings)
        notes = "".join(f"\n  left out: {line}" for line in dropped)
        if not us:
            return f"not measured{notes}"
        self.own[key, case.tokens] = us
        results.check_out(self.path)
        with _alone(self.path.parent):
            notes += self._save()
        self.done += 1
        return self._change(key, case.tokens, us) + notes

    def _save(self) -> str:
        """Write this run's cells into what the file holds now: another run may have added to it meanwhile.

        A file that was removed or damaged meanwhile is written anew, from what this run last read and its own cells;
        returns a line about the damage, or nothing.
        """
        damage = ""
        try:
            self.table = tuning.read(self.path, self.table.card) or self.table
        except ValueError as error:
            damage = f"\n  written anew: {error}"
        if self.record not in self.table.runs:
            self.table.runs.append(self.record)
        run = self.table.runs.index(self.record)
        for (key, tokens), us in self.own.items():
            self.table.entries.setdefault(key, {})[tokens] = Cell(run, us)
        results.save(self.path, tuning.as_json(self.table))
        return damage

    def _change(self, key: Key, tokens: int, us: dict[Choice, float]) -> str:
        hopper = any(choice.path == HOPPER for choice in us)
        old = (
            tuning.ranges(self.table.card, key, hopper).at(tokens) if self.known else tuning.defaults(hopper).at(tokens)
        )
        new = min(us, key=lambda choice: us[choice])
        if old == new or us.get(old, float("inf")) <= tuning.NEAR * us[new]:
            return f"{old} stays, {us[old]:.1f} us"
        self.changed += 1
        was = f"{us[old]:.1f} us" if old in us else "not measured"
        return f"{old} ({was}) -> {new} ({us[new]:.1f} us)"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs that write into the folder waiting, where the system can."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {record.get(name)}" for name in ("torch", "triton", "driver"))


def _run_record(environment: Mapping[str, Any]) -> dict[str, Any]:
    versions = environment["versions"]
    names = ("date", "command", "revision", "driver")
    return {**{name: environment[name] for name in names}, "torch": versions["torch"], "triton": versions["triton"]}


def key_of(case: Case, settings: KernelSettings) -> Key:
    storages = [STORAGES[name] for name in kernel.storages_of(case, settings)]
    kept = tuple(storage.dtype.itemsize for storage in storages)
    return Key(kept, any(storage.stochastic for storage in storages), settings.dtype.itemsize, case.n, case.k)


def describe(case: Case, settings: KernelSettings) -> str:
    dtype = str(settings.dtype).removeprefix("torch.")
    return f"{case.n} x {case.k}, T={case.tokens}, {case.rule} {dtype}, states {case.state or 'as the weight'}"


# -- one cell ----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem) -> list[Choice]:
    """What can take this problem and fits its card; of chunk sizes that give the same rows only the first."""
    n, k, first = problem.case.n, problem.case.k, problem.targets[0]
    tensors = [first.weight, *first.states]
    found = [tuning.choice(PORTABLE, changes) for changes in CANDIDATES[PORTABLE]]
    if dispatch.reason_against_hopper(problem.gradient, n, k, tensors) is None:
        hopper = [tuning.choice(HOPPER, changes) for changes in CANDIDATES[HOPPER]]
        found += [choice for choice in hopper if dispatch.fits(choice, n, k, tensors, problem.case.tokens)]
    by_rows: dict[int, Choice] = {}
    for changes in CANDIDATES[CHUNKED]:
        rows = chunk_rows(n, k, multiprocessors(problem.device), ChunkConfig(**changes))
        by_rows.setdefault(rows, tuning.choice(CHUNKED, changes))
    return found + list(by_rows.values())


@torch.no_grad()
def measure_cell(case: Case, settings: KernelSettings) -> Measured:
    """Check each candidate against fp64, then time those that are right, in turn."""
    timed: dict[Choice, timing.Timed] = {}
    dropped: list[str] = []
    try:
        problem = Problem(case, settings)
        right = kernel.reference_and_bounds(problem)
        checked = _checked(problem, right, dropped)
        del right
        scalars = problem.scalars(kernel.TIMED_LR)
        for choice in checked:
            calls = [functools.partial(_step, problem, choice, target, scalars) for target in problem.targets]
            timed[choice] = timing.prepare(calls, settings.device)
        timing.take(list(timed.values()), settings.rounds)
    except torch.OutOfMemoryError:
        return Measured({}, [*dropped, "out of memory"])
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return Measured({choice: one.median_us for choice, one in timed.items()}, dropped)


def _step(problem: Problem, choice: Choice, target: Any, scalars: ops.StepScalars) -> None:
    ops.step_by(choice, target, problem.gradient, problem.update, scalars, problem.flag)


def _checked(problem: Problem, right: Any, dropped: list[str]) -> list[Choice]:
    """The candidates whose result is right; the others are named in `dropped`."""
    kept = []
    for choice in candidates(problem):
        try:
            kernel.error_over_bound(problem, str(choice), functools.partial(_step, problem, choice), *right)
        except kernel.WrongResult as error:
            dropped.append(f"wrong: {error}")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a configuration that does not compile or does not fit on this card
            dropped.append(f"{choice}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        else:
            kept.append(choice)
    return kept
