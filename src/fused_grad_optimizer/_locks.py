"""Locks that a `fork()` waits for: a child process gets them free, and what they guard whole."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Any

_LOCKS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_FORKING = threading.RLock()
_held: list[Any] = []


def new_lock() -> Any:
    """A lock that one thread may take several times. Who holds one may take those that were made after it."""
    lock = threading.RLock()
    _LOCKS[next(_NUMBERS)] = lock
    return lock


def _before_fork() -> None:
    _FORKING.acquire()
    for _, lock in sorted(_LOCKS.copy().items()):
        lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    """In the parent and in the child, where the thread that forked has the same identity."""
    while _held:
        _held.pop().release()
    _FORKING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
