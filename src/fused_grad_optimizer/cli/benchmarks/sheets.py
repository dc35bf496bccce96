"""Result files as tables: for the terminal and, the same cells, for the README."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Result = Mapping[str, Any]
NONE = "-"
FAILED, SLOWER = "Not measured", "Slower or larger than a baseline"


@dataclass
class Sheet:
    """A table of text; `notes` say what the numbers are, `failed` why some are missing, `slower` what got worse."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: int = 1
    notes: list[str] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def sheet(result: Result, only: Mapping[str, str] | None = None) -> Sheet:
    """The table of a result file.

    Args:
        result: what `forge bench` wrote.
        only: keep entries whose fields have these values, e.g. `{"rule": "adamw", "tokens": "512"}`.

    Raises:
        ValueError: the result is of no known kind, or `only` keeps nothing.
    """
    makers = {"kernel": _kernel_sheet, "step": _step_sheet, "host": _host_sheet}
    kind = result.get("kind")
    if kind not in makers:
        raise ValueError(f"a result of kind {kind!r}; {' or '.join(makers)} is needed")
    entries = [e for e in result["entries"] if all(str(e.get(k)) == v for k, v in (only or {}).items())]
    if not entries:
        raise ValueError(f"no entry has {', '.join(f'{k}={v}' for k, v in (only or {}).items())}")
    made = makers[kind]({**result, "entries": entries})
    made.notes.append(_where(result["environment"]))
    return made


def markdown(made: Sheet) -> str:
    lines = [f"**{made.title}**", "", "| " + " | ".join(made.columns) + " |"]
    lines.append("|" + "".join("---|" if i < made.left else "---:|" for i in range(len(made.columns))))
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in made.rows]
    lines += ["", " ".join(made.notes)]
    for heading, texts in ((FAILED, made.failed), (SLOWER, made.slower)):
        if texts:
            lines += ["", f"{heading}:", "", *(f"- {text}" for text in texts)]
    return "\n".join(lines)


def print_sheet(made: Sheet, console: Any) -> None:
    from rich.table import Table

    table = Table(title=made.title)
    for i, column in enumerate(made.columns):
        table.add_column(column, justify="left" if i < made.left else "right")
    for row in made.rows:
        table.add_row(*row)
    console.print(table)
    for note in made.notes:
        console.print(note, highlight=False)
    for heading, texts in ((FAILED, made.failed), (SLOWER, made.slower)):
        for i, text in enumerate(texts):
            console.print(f"{heading}:\n  {text}" if i == 0 else f"  {text}", highlight=False, markup=False)


def _where(env: Mapping[str, Any]) -> str:
    found = env["versions"]
    commit, _, dirty = (env["revision"] or "unknown").partition("-")
    revision = commit[:12] + (f"-{dirty}" if dirty else "")
    driver = f", driver {env['driver']}" if env.get("driver") else ""
    threads = f", {env['threads']} threads" if env.get("threads") else ""
    named = [f"{name} {found[name]}" for name in ("torch", "triton", "transformers") if found.get(name)]
    return (
        f"{env['card']}{driver}{threads}; {', '.join(named)}; Python {found['python']}; {env['date'][:10]}, "
        f"revision {revision}. Command: `{env['command']}`."
    )


def _number(value: float | None, form: str = ".0f") -> str:
    return NONE if value is None else format(value, form)


# -- kernels -----------------------------------------------------------------------------------------------------------

PATHS = {
    "fused": "fused",
    "fused_checked": "fused + finite check",
    "fused_nearest": "fused, to nearest",
    "dw_torch": "dW + torch fused",
    "dw_param_step": "dW + param_step",
    "dw": "dW alone",
}
SAME = 1.005  # ratios below this are not worth a line
BASELINES = ("dw_torch", "dw_param_step")


def _kernel_sheet(result: Result) -> Sheet:
    rows, slower, failed = [], [], []
    for entry in result["entries"]:
        name = [f"{entry['n']} x {entry['k']}", str(entry["tokens"]), entry["rule"], entry["state"]]
        if entry["status"] != "ok":
            rows.append([*name, *[NONE] * 9])
            failed.append(f"{_case(name)}: {entry['status']}")
            continue
        us = {path: entry["us"].get(path) for path in PATHS}
        ratios = {path: us["fused"] / us[path] for path in BASELINES if us[path]}
        times = [_number(us[path], _digits(us[path])) for path in PATHS]
        rates = [_number(entry["gb_s"], ".1f" if entry["gb_s"] < 10 else ".0f"), f"{100 * entry['share']:.0f}%"]
        gains = [_number(1 / ratios[path], ".2f") if path in ratios else NONE for path in BASELINES]
        rows.append([*name, times[0], *rates, *times[1:], *gains])
        worse = {path: ratio for path, ratio in ratios.items() if ratio > SAME}
        slower += [f"{_case(name)}: fused takes {ratio:.2f}x {PATHS[path]}" for path, ratio in worse.items()]
    env = result["environment"]
    paths = list(PATHS.values())
    columns = ["N x K", "T", "rule", "states", paths[0], "GB/s", "of copy", *paths[1:], "vs torch", "vs param_step"]
    library = "cuBLAS" if env["device"] == "cuda" else "torch"
    notes = [
        f"{result['dtype']} weights and inputs; times in us, medians of {result['rounds']} rounds over random data; "
        f"dW by {library}. The last two columns are {PATHS[BASELINES[0]]} and {PATHS[BASELINES[1]]} over fused: "
        "above 1, fused is faster. GB/s counts weight and states read and written once, dY and X read once; a copy in "
        f"the same run: {result['copy_gb_s']:.0f} GB/s."
    ]
    if env["device"] == "cuda":
        notes.append(
            f"Weights with states take turns until together they exceed {result['caches']} L2 caches; dY and X stay, "
            "as they are fresh in training too."
        )
    if any("events" in entry.get("how", {}).values() for entry in result["entries"]):
        notes.append("Some paths could not be captured in a CUDA graph: their times hold the host's launch cost.")
    return Sheet("One weight update", columns, rows, left=4, notes=notes, slower=slower, failed=failed)


def _case(name: list[str]) -> str:
    return f"{name[0]}, T={name[1]}, {name[2]}, {name[3]}"


def _digits(us: float | None) -> str:
    return ".1f" if us is not None and us < 100 else ".0f"


# -- steps -------------------------------------------------------------------------------------------------------------


def _step_sheet(result: Result) -> Sheet:
    entries = result["entries"]
    rows, slower, failed = [], [], []
    for entry in entries:
        if entry["status"] != "ok":
            rows.append([entry["method"], *[NONE] * 5])
            failed.append(f"{entry['method']}: {entry['status']}")
            continue
        rows.append(
            [
                entry["method"],
                _number(entry["peak_gib"], ".2f" if entry["peak_gib"] >= 1 else ".3f"),
                _number(entry["ms"], ".1f"),
                _number(1000 * result["batch"] * result["seq"] / entry["ms"], ",.0f"),
                _number(entry["loss_last"], ".3f"),
                _number(entry["setup_s"], ".1f"),
            ]
        )
    measured = [e for e in entries if e["status"] == "ok"]
    for ours in (e for e in measured if e["method"].startswith("forge")):
        for other in (e for e in measured if e["method"].startswith("torch")):
            slower += _worse(ours, other)
    columns = ["method", "peak GiB", "ms a step", "tokens/s", "loss at the end", "set-up s"]
    count = result["parameters"]
    size = f"{count / 1e9:.2f} B" if count >= 5e7 else f"{count:,}"
    shape = f"batch {result['batch']}, seq {result['seq']}, {result['dtype']}"
    title = f"Whole step: {result['model']} ({size} parameters), {shape}"
    on_cuda = result["environment"]["device"] == "cuda"
    peak = (
        "peak of the allocator during the timed steps, weights and states included"
        if on_cuda
        else "peak resident size during the timed steps, above that before the model; a process for each method"
    )
    notes = [
        f"Random weights and tokens; {peak}; median of {result['steps']} steps after {result['warmup']}; set-up is "
        "making the model and the first steps, compilation included. forward-backward takes no optimizer step. Losses "
        "are of the same batch after the same number of steps."
    ]
    held = max((e.get("held_before_gib") or 0 for e in measured), default=0)
    if held > 0.1:  # less is cuBLAS's workspace
        notes.append(f"Up to {held:.2f} GiB were still held from an earlier method.")
    return Sheet(title, columns, rows, notes=notes, slower=slower, failed=failed)


def _worse(ours: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = []
    for key, what in (("ms", "time"), ("peak_gib", "peak memory")):
        if other[key] and ours[key] > SAME * other[key]:
            found.append(f"{ours['method']}: {ours[key] / other[key]:.2f}x the {what} of {other['method']}")
    return found


# -- host time ---------------------------------------------------------------------------------------------------------


def _host_sheet(result: Result) -> Sheet:
    rows, failed = [], []
    for entry in result["entries"]:
        if entry["status"] != "ok":
            rows.append([entry["name"], *[NONE] * 3])
            failed.append(f"{entry['name']}: {entry['status']}")
            continue
        form = ".2f" if entry["us"] < 10 else _digits(entry["us"])
        rows.append([entry["name"], *[_number(entry[key], form) for key in ("us", "least", "ninth_decile")]])
    env = result["environment"]
    width, rounds = result["width"], result["rounds"]
    notes = [
        f"{result['layers']} layers {width} x {width} without bias, {result['tokens']} tokens, {result['dtype']} where "
        f"no line says otherwise; AdamW. us a layer, median of {rounds} round{'' if rounds == 1 else 's'} after "
        f"{result['warmup']}, in one process.",
        f"Host time, on {env['processor']}: the device is idle before each round and not waited for at its end."
        if env["device"] == "cuda"
        else "On a CPU updates are computed within these times, and so are forward and backward.",
    ]
    if any("launch" in entry["name"] for entry in result["entries"]):
        notes.append("Launches are of the check for NaN and inf, one a layer.")
    if result["refusals"]:
        reasons = "; ".join(f"{name or 'all kernels'} ({reason})" for name, reason in result["refusals"].items())
        notes.append(f"Not launched directly: {reasons}.")
    return Sheet("Host time", ["what", "us a layer", "least", "9th decile"], rows, notes=notes, failed=failed)
