"""The `forge` command. Its libraries come with the extra `train`; the package itself never needs them."""

from __future__ import annotations

import sys

# Library -> the extra of this package that installs it.
_EXTRAS = {"typer": "train", "rich": "train", "matplotlib": "train", "transformers": "train"}


def main() -> None:
    """Entry point of the `forge` command."""
    try:
        from fused_grad_optimizer.cli.app import app

        app(prog_name="forge")
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        extra = _EXTRAS[library]
        print(
            f"forge: {library} is not installed; get it with: pip install 'fused-grad-optimizer[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(2)
