"""Timing of repeated calls: replays of a CUDA graph where they can be captured, else events or the host's clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]
TARGET_SECONDS = {"cuda": 1.5e-3, "cpu": 1.5e-2}  # of one sample: long against the clock's resolution
MOST_CALLS = 200
CACHES = 3  # buffers are rotated until together they are this many times the L2 cache


@dataclass
class Timed:
    """Something to time: `sample()` returns seconds for one call.

    Attributes:
        how: "graph", "events" (CUDA without a graph: includes the host's launch cost where that is longer) or "clock".
        samples: seconds, one entry for each sample taken.
    """

    sample: Callable[[], float]
    how: str
    samples: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        return 1e6 * statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        if len(self.samples) < 4:
            return 0.0
        low, middle, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / middle


def copies_needed(size: int, device: torch.device) -> int:
    """How many buffers of `size` bytes to rotate so that none is still in the GPU's L2 cache when its turn comes."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(CACHES * cache / size)) if size < CACHES * cache else 1


def prepare(calls: Sequence[Call], device: torch.device) -> Timed:
    """Warm up and, where possible, capture `calls`, which do the same on different buffers and are made in turn."""
    if device.type != "cuda":
        return Timed(_clock_sampler(calls), "clock")
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as capture asks for; also compiles kernels and makes optimizer states
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(side)
        estimate = _events(calls, len(calls))
        count = _count(estimate, len(calls), "cuda")
        graph = _capture(calls, count)
        if graph is None:
            return Timed(lambda: _events(calls, count), "events")
        graph.replay()
        return Timed(lambda: _events([graph.replay], 1) / count, "graph")


def take(timed: Sequence[Timed], rounds: int) -> None:
    """Sample all in turn, `rounds` times, so that a drift of the clocks meets all of them."""
    for _ in range(rounds):
        for one in timed:
            one.samples.append(one.sample())


def copy_ceiling(device: torch.device, rounds: int) -> float:
    """GB/s (read + written) of a copy far larger than the caches: what memory-bound code can reach at best."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source = torch.randint(-(1 << 31), 1 << 31, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    calls: list[Call] = [lambda: target.copy_(source)]
    timed = prepare(calls, device)
    if timed.how == "graph":  # in a graph a copy may run on a copy engine, which is slower
        timed = Timed(lambda: _events(calls, 4), "events")
    take([timed], rounds)
    return 2 * size / timed.median_us / 1e3


def _count(estimate: float, copies: int, kind: str) -> int:
    """Calls in one sample: whole turns of the copies."""
    wanted = min(MOST_CALLS, math.ceil(TARGET_SECONDS[kind] / max(estimate, 1e-9)))
    return copies * max(1, math.ceil(wanted / copies))


def _repeat(calls: Sequence[Call], count: int) -> None:
    for i in range(count):
        calls[i % len(calls)]()


def _capture(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            _repeat(calls, count)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, KeyError):  # an operation, or torch's own check of the optimizer, refuses to be captured
        torch.cuda.synchronize()
        return None
    return graph


def _events(calls: Sequence[Call], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    _repeat(calls, count)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _clock_sampler(calls: Sequence[Call]) -> Callable[[], float]:
    _repeat(calls, len(calls))
    begin = time.perf_counter()
    _repeat(calls, len(calls))
    count = _count((time.perf_counter() - begin) / len(calls), len(calls), "cpu")

    def sample() -> float:
        begin = time.perf_counter()
        _repeat(calls, count)
        return (time.perf_counter() - begin) / count

    return sample
