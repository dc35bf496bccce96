"""Regenerate the README's tables from benchmarks/results/*.json.

A table stands between two marker comments that name a result file (without .json). Fields may select entries:

    <!-- table:kernel-nvidia-h200 rule=adamw -->
    ...
    <!-- /table:kernel-nvidia-h200 -->

    python benchmarks/tables.py            rewrite the tables
    python benchmarks/tables.py --check    change nothing; fail when the README is stale
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fused_grad_optimizer.cli.benchmarks.sheets import markdown, sheet

ROOT = Path(__file__).resolve().parent.parent
_MARKER = re.compile(r"<!--\s*(/?)table:(\S+)((?:\s+[^\s=>]+=\S+)*)\s*-->")


def render(text: str, results: Path) -> str:
    """`text` with every table between markers made anew.

    Raises:
        ValueError: markers that do not pair up, a result file that is not there, or a filter that keeps nothing.
    """
    parts: list[str] = []
    opened: re.Match | None = None
    position = 0
    for marker in _MARKER.finditer(text):
        closing, name = bool(marker[1]), marker[2]
        if closing != (opened is not None) or (opened is not None and opened[2] != name):
            raise ValueError(f"the marker {marker[0]} has no partner")
        if not closing:
            parts.append(text[position : marker.end()])
            opened, position = marker, marker.end()
        elif opened is not None:
            parts.append(f"\n{_table(opened, results)}\n")
            opened, position = None, marker.start()
    if opened is not None:
        raise ValueError(f"the marker {opened[0]} has no partner")
    return "".join(parts) + text[position:]


def _table(marker: re.Match, results: Path) -> str:
    path = results / f"{marker[2]}.json"
    if not path.exists():
        raise ValueError(f"{marker[0]}: there is no {path}")
    only = dict(part.split("=", 1) for part in marker[3].split())
    try:
        return markdown(sheet(json.loads(path.read_text(encoding="utf-8")), only))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{marker[0]}: {path.name}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Regenerate the README's tables from benchmark results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the README is stale")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    try:
        before = given.readme.read_text(encoding="utf-8")
        after = render(before, given.results)
    except (OSError, ValueError) as error:
        print(f"tables.py: {error}", file=sys.stderr)
        return 2
    if before == after:
        return 0
    if given.check:
        print(f"tables.py: {given.readme} is stale; run: python benchmarks/tables.py", file=sys.stderr)
        return 1
    given.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
