"""Ctrl-C and SIGTERM as a request, answered between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """While entered: the first SIGINT or SIGTERM is only noted; a second one ends the process at once.

    Attributes:
        signal: number of the signal that came, or None.
    """

    def __init__(self, notice: Callable[[int], None]) -> None:
        self.signal: int | None = None
        self._notice = notice
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self.signal = number
        self._notice(number)
