"""Bookkeeping of `when="backward"`: which backward is running, what it has moved, and what must not happen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch

# Graph tasks whose root is a loss scaled by an enabled GradScaler.
_SCALED_TASKS: set[int] = set()


def watch_grad_scaler() -> None:
    """Make `GradScaler.scale` mark the backward passes of the losses it scaled. Done once a process.

    An update in backward would apply the scaled gradient; nothing else tells it that the loss was scaled.
    """
    scaler = torch.amp.GradScaler
    if getattr(scaler.scale, "marks_scaled_backwards", False):
        return
    original = scaler.scale

    def scale(self, outputs):
        scaled = original(self, outputs)
        if self.is_enabled():
            for tensor in [scaled] if isinstance(scaled, torch.Tensor) else list(scaled):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(_mark_scaled)
        return scaled

    scale.marks_scaled_backwards = True  # type: ignore[attr-defined]
    scaler.scale = scale  # type: ignore[method-assign]


def _mark_scaled(grad: torch.Tensor) -> None:
    task = torch._C._current_graph_task_id()
    _SCALED_TASKS.add(task)
    _at_end(lambda: _SCALED_TASKS.discard(task))


def _at_end(function: Callable[[], None]) -> None:
    """Run `function` when the current backward has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_nested() -> bool:
    """Whether this backward was started inside another one (reentrant checkpointing)."""
    engine_calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        engine_calls += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    # On a thread of the engine the outer call is on the caller's stack, not on this one.
    outer = 0 if isinstance(threading.current_thread(), threading._DummyThread) else 1
    return engine_calls > outer


class BackwardPass:
    """What happened since the last `step()`.

    Attributes:
        moved: names of the parameters updated, in order.
    """

    def __init__(self) -> None:
        self.moved: list[str] = []
        self._open: set[int] = set()
        self._task = -1

    @property
    def failed(self) -> bool:
        """Whether a backward moved something and did not reach its end."""
        return bool(self._open) and bool(self.moved)

    def enter(self) -> None:
        """Called before each update.

        Raises:
            RuntimeError: a second backward before `step()`, an earlier backward that failed, or a scaled loss.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if task not in self._open:
            nested = is_nested()
            scaled = task in _SCALED_TASKS or (nested and bool(_SCALED_TASKS))
            if scaled or not nested:
                _SCALED_TASKS.clear()  # what an exception left behind
            if scaled:
                raise RuntimeError(
                    "the loss was scaled by a GradScaler, and when='backward' applies gradients before they can be "
                    "unscaled; use when='step', or bf16 without a scaler. Nothing was changed."
                )
            if not nested and self.failed:
                raise RuntimeError(self.failure())
            if not nested and self.moved:
                raise RuntimeError(
                    f"a second backward before step(): the gradients of {_names(self.moved)} were already applied. "
                    "Accumulating gradients or several losses need when='step'."
                )
            if not nested:
                self._open.clear()  # one that was refused before it moved anything
            self._open.add(task)
            _at_end(lambda: self._open.discard(task))
        self._task = task

    def failure(self) -> str:
        return (
            f"the last backward ended with an exception after it had updated {_names(self.moved)}; the other "
            "parameters did not move. Restore a checkpoint, or accept the partial step and go on."
        )

    def end(self) -> None:
        self.moved, self._open, self._task = [], set(), -1


def _names(names: list[str], most: int = 20) -> str:
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
