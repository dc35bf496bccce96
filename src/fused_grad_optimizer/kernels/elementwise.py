"""Element-wise functions of torch tensors, run without allocating: recorded once, then each operation writes to `out=`.

A rule's twin written with Python operators makes a new tensor for every operation; on the CPU the page faults of those
tensors cost more than the arithmetic. The same operations in the same order give the same bits here, in a few buffers
that are reused from block to block.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

_OUT_FORMS: dict[Any, Callable] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.and_: torch.bitwise_and,
    operator.or_: torch.bitwise_or,
    operator.xor: torch.bitwise_xor,
    operator.rshift: torch.bitwise_right_shift,
    operator.gt: torch.gt,
    operator.ge: torch.ge,
    operator.lt: torch.lt,
    operator.le: torch.le,
    operator.eq: torch.eq,
    operator.ne: torch.ne,
    operator.neg: torch.neg,
    **{f: f for f in (torch.sqrt, torch.abs, torch.where, torch.exp)},
}
_COMMUTATIVE = (operator.add, operator.mul, operator.and_, operator.or_, operator.xor)
_COMPARISONS = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)


_LARGEST_KEPT = 1 << 20  # elements


class Workspace(threading.local):
    """Scratch buffers of one thread. They stay between calls, as large as the largest block so far (but 4 MiB)."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised contiguous tensor, a view of a buffer that `give` takes back."""
        count = 1
        for size in shape:
            count *= size
        free = self._free.setdefault((device, dtype), [])
        buffer = free.pop() if free else None
        if buffer is None or buffer.numel() < count:
            with torch.inference_mode(False):  # it outlives the block it was first needed in
                buffer = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count].view(tuple(shape))

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what `take` gave; the tensor must not be used any more."""
        whole = tensor.untyped_storage().nbytes() // tensor.element_size()
        if whole <= _LARGEST_KEPT:
            self._free[tensor.device, tensor.dtype].append(tensor.as_strided((whole,), (1,), 0))


WORKSPACE = Workspace()


@dataclass(frozen=True)
class _Operation:
    """`registers[write] = function(*registers[reads])`.

    Attributes:
        number: it computes a number from numbers; all others write to `out=`.
        lift: positions of numbers that the `out=` form takes only as 0-d tensors.
    """

    function: Callable
    reads: tuple[int, ...]
    write: int
    number: bool
    lift: tuple[int, ...]


class Elementwise:
    """An element-wise function `(scalars, *tensors) -> tensor or tuple of tensors`, recorded once.

    Calls run on a list of registers: scalars, tensors, constants and numbers, scratch buffers.

    Args:
        function: uses Python operators and torch's sqrt, abs, where, exp; no branches on values.
        scalars: how many numbers the tuple of scalars holds.
        tensors: how many tensors follow, all of one shape and dtype.
        in_place: for each result the index of the tensor it is written over.

    Raises:
        ValueError: the function uses an operation that is not listed here.
    """

    def __init__(self, function: Callable, scalars: int, tensors: int, in_place: Sequence[int]) -> None:
        graph = fx.Graph()
        tracer = GraphAppendingTracer(graph)
        inputs = [graph.placeholder(f"input{i}") for i in range(scalars + tensors)]
        proxies = [fx.Proxy(node, tracer) for node in inputs]
        results = function(tuple(proxies[:scalars]), *proxies[scalars:])
        results = [r.node for r in (results if isinstance(results, tuple) else (results,))]
        self._register: dict[Any, int] = {node: i for i, node in enumerate(inputs)}
        self._is_tensor = {node: i >= scalars for i, node in enumerate(inputs)}
        self._constants: list[Any] = []  # numbers' registers begin as None
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._place_numbers(nodes, len(inputs))
        self._scratch: list[torch.dtype | None] = []  # None: the dtype of the tensors
        places = {node: scalars + place for node, place in zip(results, in_place)}
        self._operations = self._place_tensors(nodes, results, places, len(inputs) + len(self._constants))
        # results that could not be written to their place, because the old content was read afterwards
        self._copies = [(p, self._register[n]) for n, p in places.items() if p != self._register[n]]
        copied_to = {place for place, _ in self._copies}
        self._overwritten = [register for _, register in self._copies if register in copied_to]
        self._first_scratch = len(inputs) + len(self._constants)
        del self._register, self._is_tensor

    def _place_numbers(self, nodes: list[fx.Node], first: int) -> None:
        """Registers of constants and of numbers computed from scalars."""
        for node in nodes:
            for argument in _keys(node):
                if not isinstance(argument, fx.Node) and argument not in self._register:
                    self._register[argument] = first + len(self._constants)
                    self._is_tensor[argument] = False
                    self._constants.append(argument[1])
            self._is_tensor[node] = any(self._is_tensor[a] for a in _keys(node))
            if not self._is_tensor[node]:
                self._register[node] = first + len(self._constants)
                self._constants.append(None)

    def _place_tensors(self, nodes, results, places, first: int) -> list[_Operation]:
        """Registers of the tensors that operations make: a result's place, else scratch, reused after the last read."""
        last = {argument: i for i, node in enumerate(nodes) for argument in _keys(node)}
        last.update(dict.fromkeys(results, len(nodes)))
        free: dict[torch.dtype | None, list[int]] = {None: [], torch.bool: []}
        dtypes: dict[int, torch.dtype | None] = {}
        operations = []
        by_register = {register: argument for argument, register in self._register.items()}
        for i, node in enumerate(nodes):
            if self._is_tensor[node]:
                for argument in set(_keys(node)):  # an operation may write over what it is the last to read
                    if last[argument] == i and self._register[argument] in dtypes:
                        free[dtypes[self._register[argument]]].append(self._register[argument])
                place = places.get(node)
                if place is not None and last.get(by_register[place], -1) <= i:
                    self._register[node] = place
                else:
                    dtype = torch.bool if node.target in _COMPARISONS else None
                    if not free[dtype]:
                        free[dtype].append(first + len(self._scratch))
                        dtypes[free[dtype][0]] = dtype
                        self._scratch.append(dtype)
                    self._register[node] = free[dtype].pop()
            operations.append(self._operation(node))
        return operations

    def _operation(self, node: fx.Node) -> _Operation:
        reads = tuple(self._register[a] for a in _keys(node))
        if not self._is_tensor[node]:
            return _Operation(node.target, reads, self._register[node], True, ())  # type: ignore[arg-type]
        function = _OUT_FORMS.get(node.target)
        if function is None or node.kwargs:
            raise ValueError(f"{node.target} is not an operation that element-wise functions may use here")
        numbers = [i for i, a in enumerate(_keys(node)) if not self._is_tensor[a]]
        if numbers == [0] and node.target in _COMMUTATIVE:
            reads, numbers = reads[::-1], [1]
        lift = tuple(numbers) if function is torch.where else tuple(i for i in numbers if i == 0)
        return _Operation(function, reads, self._register[node], False, lift)

    def __call__(self, scalars: Sequence[float], tensors: Sequence[torch.Tensor]) -> None:
        """Run it: results are written over the tensors at their places."""
        like = tensors[0]
        registers: list[Any] = [*scalars, *tensors, *self._constants]
        registers += [WORKSPACE.take(like.shape, dtype or like.dtype, like.device) for dtype in self._scratch]
        for operation in self._operations:
            arguments = [registers[i] for i in operation.reads]
            for i in operation.lift:
                arguments[i] = like.new_tensor(arguments[i])
            if operation.number:
                registers[operation.write] = operation.function(*arguments)
            else:
                operation.function(*arguments, out=registers[operation.write])
        saved = {register: registers[register].clone() for register in self._overwritten}
        for place, register in self._copies:
            registers[place].copy_(saved.get(register, registers[register]))
        for scratch in registers[self._first_scratch :]:
            WORKSPACE.give(scratch)


def _keys(node: fx.Node) -> list[Any]:
    """Its arguments; a constant with its type, since 1 == 1.0."""
    return [a if isinstance(a, fx.Node) else (type(a), a) for a in node.args]
