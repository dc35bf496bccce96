"""Peak memory: of the device's allocator on a GPU, of the process (resident set) elsewhere."""

from __future__ import annotations

import sys

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

GIB = 1024**3


def _status(field: str) -> int | None:
    """A size from Linux's /proc/self/status in bytes."""
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _resident() -> int:
    return _status("VmRSS") or _high_water()


def _high_water() -> int:
    mark = _status("VmHWM")
    if mark is not None:
        return mark
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMemory:
    """Peak bytes above those in use at construction: make one after the imports and before the model.

    What happens between `pause()` and `resume()` (writing a checkpoint) does not count.
    """

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None
        self._peak = 0
        self._base = torch.cuda.memory_allocated(self._cuda) if self._cuda else _resident()
        self.resume()

    def read(self) -> int:
        mark = torch.cuda.max_memory_allocated(self._cuda) if self._cuda else _high_water()
        self._peak = max(self._peak, mark - self._base)
        return self._peak

    def pause(self) -> None:
        self.read()

    def resume(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # sets VmHWM back to VmRSS
        except OSError:
            pass  # the mark keeps counting what should not count
