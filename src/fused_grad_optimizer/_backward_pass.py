"""Bookkeeping of `when="backward"`: which backward is running, what it has moved, and what must not happen."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction

from fused_grad_optimizer._locks import new_lock

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


def comes_to(parameter: torch.Tensor) -> bool:
    """Whether the running backward comes to this parameter's gradient; True where that cannot be known.

    One that reentrant checkpointing started knows only its own segment.
    """
    if is_nested():
        return True
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except (RuntimeError, AttributeError):  # no view of it can be made, `inputs` were given, or another torch
        return True


def _outermost_node() -> Any:
    """The node that the outermost backward on this thread is running, seen from a nested one; None if unknown."""
    node = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            node = frame.f_locals[frame.f_code.co_varnames[0]]
        frame = frame.f_back
    return node


class _Watch:
    """Held by the callbacks of one running backward: it dies with them, whether that backward ended well or not."""

    def __init__(self, outermost: bool) -> None:
        self.outermost = outermost


class Queue(Protocol):
    """Updates that wait for the end of a backward."""

    def flush(self) -> None:
        """Make them."""

    def drop(self, of: Callable[[int], bool] | None = None) -> None:
        """Forget those of the backwards for whose number `of` is true, or all."""


# Stands for the number of an outermost backward of which so far only nested ones have been seen.
_UNKNOWN = -1


class BackwardPass:
    """What happened since the last `step()`. Optimizers that are stepped together share one.

    A backward is told from the next by autograd's task numbers, which only grow. Reentrant checkpoints run each segment
    as a backward of its own inside the outermost one: when nothing else has been updated, the outermost one is found
    through the node it is running, and reached by a hook on the nodes it runs next.

    Args:
        closed_message: if given, each backward must be allowed by `armed = True`, or its first update raises this.

    Attributes:
        moved: names of the parameters updated, in order.
        armed: whether a backward may start now; False again after one, if there is a `closed_message`.
        number: changes when a backward begins that no earlier one belongs to.
        lock: held while a backward is entered, and while an optimizer begins a pass.
    """

    def __init__(self, closed_message: str | None = None) -> None:
        self.closed_message = closed_message
        self.armed = closed_message is None
        self._queues: list[Queue] = []
        self.number = 0
        # Each device has an autograd thread of its own: their first updates may come at the same time.
        self.lock = new_lock()
        self.end()

    def end(self) -> None:
        """Forget everything: the next backward is the first one."""
        for queue in self._queues:
            queue.drop()
        self._queues.clear()
        self.moved: list[str] = []
        self._task = -1  # of the last update
        self._forget_tasks()

    def _forget_tasks(self) -> None:
        self.number += 1
        self._open: dict[int, weakref.ref[_Watch]] = {}  # running backwards that updated something
        self._first_nested = -1
        self._outermost_ended = False

    @property
    def failed(self) -> bool:
        """Whether a backward moved something and did not reach its end."""
        return bool(self._open) and bool(self.moved)

    def defer(self, queue: Queue) -> None:
        """Flush `queue` at the end of the running backward; `enter` was called before. Drop it if that fails."""
        if queue not in self._queues:
            self._queues.append(queue)

    def settle(self) -> None:
        """Make what waits in a running backward. What an exception has left behind is dropped.

        A backward that has ended well has left nothing; what waits in one that runs on another thread stays.
        """
        for queue in self._queues:
            if torch._C._current_graph_task_id() >= 0:
                queue.flush()
            else:
                queue.drop(self._is_over)

    def _is_over(self, task: int) -> bool:
        watch = self._open.get(task)
        return watch is None or watch() is None

    def enter(self) -> None:
        """Called before each update.

        Raises:
            RuntimeError: a second backward before `step()`, an earlier backward that failed, a scaled loss, or a
                backward that was not allowed.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        with self.lock:
            if task not in self._open:
                self._enter_first(task)
            self._task = task

    def _enter_first(self, task: int) -> None:
        nested = is_nested()
        _refuse_scaled(task, nested)
        if nested or task > self._first_nested:
            self._refuse_second(nested)
            if not self.armed:
                raise RuntimeError(self.closed_message)
        if nested:
            self._find_outermost()
            self._first_nested = task if self._first_nested < 0 else self._first_nested
        else:
            self._open.pop(_UNKNOWN, None)
        self._watch(task, outermost=not nested)

    def _refuse_second(self, nested: bool) -> None:
        """Raise if the running backward is not the one that the earlier updates belong to."""
        if nested and not self._outermost_ended and None not in self._watches():
            return  # a further segment of the same backward
        if self.failed:
            raise RuntimeError(self.failure())
        if self.moved and self.armed:
            raise RuntimeError(
                f"a second backward before step(): the gradients of {_names(self.moved)} were already applied. "
                "Accumulating gradients or several losses need when='step'."
            )
        for queue in self._queues:
            queue.drop()
        self._forget_tasks()  # of one that was refused before it moved anything

    def _find_outermost(self) -> None:
        """Watch the end of the backward around this nested one, unless that is done already."""
        if any(watch is not None and watch.outermost for watch in self._watches()):
            return
        node = _outermost_node()
        if node is None:
            return
        unknown = _Watch(outermost=True)
        handles: list[Any] = []

        def reached(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            if _UNKNOWN in self._open and self._open[_UNKNOWN]() is unknown:
                del self._open[_UNKNOWN]
                self._watch(torch._C._current_graph_task_id(), outermost=True)

        handles += [after.register_prehook(reached) for after, _ in node.next_functions if after is not None]
        if handles:
            self._open[_UNKNOWN] = weakref.ref(unknown)

    def _watches(self) -> list[_Watch | None]:
        """Those of the backwards that did not end; None for each that an exception has ended."""
        return [found() for found in list(self._open.values())]

    def _watch(self, task: int, outermost: bool) -> None:
        watch = _Watch(outermost)
        self._open[task] = weakref.ref(watch, partial(self._abandon, task))
        _at_end(partial(self._close, task, watch))

    def _abandon(self, task: int, _: weakref.ref[_Watch]) -> None:
        for queue in self._queues:
            queue.drop(task.__eq__)

    def _close(self, task: int, watch: _Watch) -> None:
        for queue in self._queues:
            queue.flush()  # an exception here leaves the backward open: it has failed
        if task in self._open and self._open[task]() is watch:
            del self._open[task]
            if watch.outermost:
                self._outermost_ended = True
                self.armed = self.closed_message is None

    def failure(self) -> str:
        return (
            f"the last backward ended with an exception after it had updated {_names(self.moved)}; the other "
            "parameters did not move. Restore a checkpoint, or accept the partial step and go on."
        )


def _refuse_scaled(task: int, nested: bool) -> None:
    scaled = task in _SCALED_TASKS or (nested and bool(_SCALED_TASKS))
    if scaled or not nested:
        _SCALED_TASKS.clear()  # what an exception left behind
    if scaled:
        raise RuntimeError(
            "the loss was scaled by a GradScaler, and when='backward' applies gradients before they can be "
            "unscaled; use when='step', or bf16 without a scaler. Nothing was changed."
        )


def _names(names: list[str], most: int = 20) -> str:
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
