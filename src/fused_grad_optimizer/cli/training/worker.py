"""`python -m ...worker FOLDER`: the run that a folder's config.json describes. Its parent holds the folder's lock."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from fused_grad_optimizer.cli.training.checkpoint import read_settings
from fused_grad_optimizer.cli.training.config import UsageError
from fused_grad_optimizer.cli.training.loop import run_folder
from fused_grad_optimizer.cli.training.start import read_inputs


def main(folder: Path) -> int:
    try:
        settings = read_settings(folder)
        return run_folder(folder, settings, read_inputs(settings), Console())
    except UsageError as error:
        print(f"forge train: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
