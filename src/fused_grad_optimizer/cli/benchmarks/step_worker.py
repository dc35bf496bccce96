"""One method of `forge bench step` in its own process: request on stdin; the last line printed is the entry."""

from __future__ import annotations

import json
import sys

from fused_grad_optimizer.cli.benchmarks.step import StepSettings, measure

if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps(measure(request["method"], StepSettings(**request["settings"]))))
