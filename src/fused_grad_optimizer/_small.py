"""Small dense parameters (norms, biases) are stepped together: a launch for each of them costs more than its work.

`when="step"`: `step()` gathers them. `when="backward"`: their gradients wait in a queue, until the backward that gave
them ends. A group with one set of scalars and dtypes takes one launch of the check and one of the step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fused_grad_optimizer._applied_grad import AppliedGrad
from fused_grad_optimizer._locks import new_lock
from fused_grad_optimizer.kernels import triton_reason
from fused_grad_optimizer.storage import state_storage, weight_storage

if TYPE_CHECKING:
    from fused_grad_optimizer.optimizer import FusedOptimizer

# Elements up to which a parameter is small. AdamW in bf16 moves 0.9 MB for 65,536, 0.2 us at the rate of an H200's
# memory, a twentieth of what two launches take; and 64 programs of the kernel, half of its multiprocessors.
SMALL = 1 << 16
# Elements of gradient that may wait in the queue: 16 MB in fp32.
WAITING = 1 << 22


class Entry(NamedTuple):
    """A gradient that is complete, of a small parameter.

    Attributes:
        task: autograd's number of the backward that gave it, -1 outside of one.
        stream: that it was computed on, and is to be stepped on; None for the current one, or without streams.
    """

    parameter: torch.Tensor
    group: dict[str, Any]
    grad: torch.Tensor
    task: int = -1
    stream: torch.cuda.Stream | None = None


_Ready = tuple[Entry, dict[str, Any], int]  # with the parameter's state and index


def pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether launches on this device cost so much that small parameters are stepped together."""
    return device.type == "cuda" and triton_reason(device, dtype) is None


def is_small(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether this update is one of those that are gathered."""
    return (
        type(grad) is torch.Tensor
        and 0 < parameter.numel() <= SMALL
        and pays(parameter.device, parameter.dtype)
        and parameter.is_contiguous()
    )


def step_together(
    optimizer: FusedOptimizer, entries: Iterable[Entry], moved: Callable[[Entry], None] | None = None
) -> None:
    """One update of each parameter, as `_update_generally` makes it; `moved` is called for each that is done."""
    alike: dict[Any, list[_Ready]] = {}
    seen: Counter[int] = Counter()  # two parameters may share memory: one launch would step it in any order
    for entry in entries:
        parameter, group, grad = entry[:3]
        record = optimizer._records[parameter]
        optimizer._say_once_if_dense(parameter, record, grad)
        device = parameter.device
        if device.type == "cpu" and not _finite_on_host(optimizer, record.index, grad):
            if moved is not None:
                moved(entry)  # skipped, which counts as done
            continue
        state, fresh = optimizer._state_of(parameter, optimizer.rule.select(group))
        address = parameter.data_ptr()
        key = (id(group), state["step"] + 1, fresh, parameter.dtype, grad.dtype, device, seen[address])
        alike.setdefault(key, []).append((entry, state, record.index))
        seen[address] += 1
    launches: dict[Any, list[tuple[Any, list[_Ready]]]] = {}
    for key, bucket in alike.items():
        _, number, fresh, *places = key
        group = bucket[0][0].group
        update = optimizer.rule.select(group)
        values = update.scalars(group, number, fresh)
        launches.setdefault((update.name, values, group["seed"], number, *places), []).append((key, bucket))
    for buckets in launches.values():
        _launch(optimizer, buckets)
        for _, bucket in buckets:
            for entry, state, _ in bucket:
                state["step"] += 1
                if moved is not None:
                    moved(entry)


def _finite_on_host(optimizer: FusedOptimizer, index: int, grad: torch.Tensor) -> bool:
    flag = optimizer._flags.of(index, grad.device)
    torch.ops.forge.check_finite([grad], flag)
    if int(flag) != 0:
        optimizer._flags.skipped_on_host(index)
        return False
    return True


def _launch(optimizer: FusedOptimizer, buckets: list[tuple[Any, list[_Ready]]]) -> None:
    """Step parameters with the same update, scalar values, dtypes and device; all or none of them."""
    (_, number, fresh, dtype, _, device, _), (first, *_) = buckets[0][0], buckets[0][1][0]
    update = optimizer.rule.select(first.group)
    weights: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    indices: list[int] = []
    for _, bucket in buckets:
        own = [entry.grad.contiguous() for entry, _, _ in bucket]
        grads += torch._foreach_neg(own) if bucket[0][0].group["maximize"] else own
        for entry, state, index in bucket:
            weights.append(entry.parameter)
            states += [state[name] for name in update.states]
            indices.append(index)
    scalars = optimizer._scalars_of(first.group, update, number, fresh, first.parameter)
    kept = state_storage(dtype, optimizer.state_mode).name
    storages = [weight_storage(dtype, optimizer.weight_mode).name] + [kept] * len(update.states)
    flags = optimizer._flags.all(max(indices), device) if device.type != "cpu" else None
    torch.ops.forge.multi_step(
        weights, states, grads, scalars.values, scalars.keys, flags, update.name, storages, indices
    )


class SmallQueue:
    """Complete gradients of small parameters, until the backward that gave them ends.

    The `BackwardPass` of the optimizer calls `flush` at the end of each backward, and `drop` for one that an exception
    has ended.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._entries: dict[int, Entry] = {}  # by id of the parameter
        self._elements = 0
        self._lock = new_lock()  # each device has an autograd thread of its own
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def add(self, parameter: torch.Tensor, group: dict[str, Any], grad: torch.Tensor) -> None:
        """Called in a post-accumulate-grad hook."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if id(parameter) in self._entries:  # a second update in one backward, after a hook has cleared `.grad`
            self.flush()
        optimizer._pass.defer(self)
        task = torch._C._current_graph_task_id()
        entry = Entry(parameter, group, grad, task, self._stream(parameter.device))
        with self._lock:
            self._entries[id(parameter)] = entry
            self._elements += parameter.numel()
        if self._elements > WAITING:
            self.flush()

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(device)
        return self._streams[key]

    @torch.no_grad()
    def flush(self) -> None:
        """Step all that wait. Those that an exception keeps from moving are dropped."""
        with self._lock:
            waiting, self._entries, self._elements = self._entries, {}, 0
        optimizer = self._optimizer()
        if optimizer is None or not waiting:
            return
        by_stream: dict[torch.cuda.Stream | None, list[Entry]] = {}
        for entry in waiting.values():
            by_stream.setdefault(entry.stream, []).append(entry)

        def moved(entry: Entry) -> None:
            del waiting[id(entry.parameter)]
            optimizer._pass.moved.append(optimizer.name_of(entry.parameter))

        try:
            for stream, part in by_stream.items():
                with _running_on(stream):
                    step_together(optimizer, part, moved)
        except BaseException:
            _take_back(waiting.values())
            raise

    def drop(self, of: Callable[[int], bool] | None = None) -> None:
        """Forget gradients that must not be applied: of the backwards for whose number `of` is true, or all."""
        with self._lock:
            dropped = [entry for entry in self._entries.values() if of is None or of(entry.task)]
            for entry in dropped:
                del self._entries[id(entry.parameter)]
            self._elements = sum(entry.parameter.numel() for entry in self._entries.values())
        _take_back(dropped)


def _take_back(entries: Iterable[Entry]) -> None:
    """These have not moved: nothing stands in `.grad`, as if the backward had not come to them."""
    for entry in entries:
        if isinstance(entry.parameter.grad, AppliedGrad):
            entry.parameter.grad = None


def _running_on(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    if stream is None or stream == torch.cuda.current_stream(stream.device):
        return nullcontext()
    return _another_stream(stream)


@contextmanager
def _another_stream(stream: torch.cuda.Stream):
    """Launches go to `stream`; the current stream waits for them, as it does for all that a backward launched.

    `stream` waits for the current one first: scalars and flags were made there.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
