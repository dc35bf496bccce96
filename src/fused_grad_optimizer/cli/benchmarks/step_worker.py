"""`python -m ...step_worker`: one method of `forge bench step`; request on stdin, the entry on the last line."""

from __future__ import annotations

import json
import sys

from fused_grad_optimizer.cli.benchmarks.step import StepSettings, measure

if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps(measure(request["method"], StepSettings(**request["settings"]))))
