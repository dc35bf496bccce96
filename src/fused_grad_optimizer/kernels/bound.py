"""The finite check and the step of one weight, as direct launches in which only a few addresses change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fused_grad_optimizer.kernels import cuda_driver
from fused_grad_optimizer.kernels.launch_layout import NotDirect
from fused_grad_optimizer.kernels.launcher import Arguments, DirectLaunch, find, hooked

Through = Callable[[Any, tuple, Any, dict], None]
_address = torch.Tensor.data_ptr


class BoundLaunch:
    """A direct launch with its arguments in place, which no longer refers to any tensor.

    Args:
        moving: tensors whose addresses are given anew for each run, in this order.
        fixed: tensors that stay where they are.

    Raises:
        NotDirect: an argument is a tensor that is neither.
    """

    def __init__(
        self, direct: DirectLaunch, grid: tuple[int, ...], args: Any, moving: Sequence, fixed: Sequence
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self.direct, self.grid = direct, (x, y, z)
        self.arguments = Arguments(direct.layout)
        numbers, maps = direct.values(args)
        direct.pack(self.arguments.memory, 0, *numbers)
        self._number_slots: list[tuple[int, int]] = []
        self._map_slots: list[tuple[int, int, Any, Any]] = []
        self._mapped = [0] * len(maps)
        places = {id(t): i for i, t in enumerate(moving)}
        staying = {id(t) for t in fixed}
        position = map_index = 0
        for kind, arg in _flat(direct.layout.kinds, args):
            tensor = arg.base if kind == "map" else arg
            place = places.get(id(tensor))
            if kind != "number" and place is None and id(tensor) not in staying:
                raise NotDirect("an argument is a tensor made for one launch")
            if kind == "map":
                direct.set_map(self.arguments, map_index, maps[map_index])
                if place is not None:
                    self._map_slots.append((map_index, place, arg.shape, arg.strides))
                    self._mapped[map_index] = tensor.data_ptr()
                map_index += 1
                position += len(arg.shape) + len(arg.strides)
            else:
                if place is not None:
                    self._number_slots.append((position, place))
                position += 1

    def run(self, addresses: list[int]) -> None:
        """Launch on the current stream with these addresses of the moving tensors."""
        arguments, direct = self.arguments, self.direct
        memory = arguments.memory
        with arguments.lock:
            for slot, place in self._number_slots:
                memory[slot] = addresses[place]
            for index, place, shape, strides in self._map_slots:
                address = addresses[place]
                if self._mapped[index] != address:
                    direct.set_map(arguments, index, (address, shape, strides))
                    self._mapped[index] = address
            direct.run(self.grid, arguments)


def _flat(kinds: tuple, args: Any) -> Iterable[tuple[str, Any]]:
    for kind, arg in zip(kinds, args):
        if isinstance(kind, tuple):
            yield from _flat(kind, arg)
        elif kind is not None:
            yield kind, arg


class BoundStep:
    """Launches one after the other, on the device that is current now, that share moving and fixed tensors.

    Args:
        launches: functions that each make one launch `through(kernel, grid, args, constants)` instead of making it. The
            first is the check of the moving tensors, and makes none if there is nothing to check.
        moving, fixed: see `BoundLaunch`.

    Raises:
        NotDirect: a launch that must be made by Triton, or was not made yet.
    """

    def __init__(self, launches: Sequence[Callable[[Through], None]], moving: Sequence, fixed: Sequence) -> None:
        if len({id(t) for t in (*moving, *fixed)}) != len(moving) + len(fixed):
            raise NotDirect("one tensor stands for two operands")
        driver = cuda_driver.active()
        if driver is None or hooked():
            raise NotDirect("Triton launches")
        self._driver, self._device = driver, driver.device()
        addresses = list(map(_address, moving))
        self._aligned = [i for i, address in enumerate(addresses) if address % 16 == 0]
        self._unaligned = [i for i, address in enumerate(addresses) if address % 16]
        self._fixed = list(map(_address, fixed))
        self._launches: list[BoundLaunch] = []

        def bind(kernel: Any, grid: tuple, args: Any, constants: dict) -> None:
            direct = find(kernel, args, constants)
            if not isinstance(direct, DirectLaunch):
                raise NotDirect("Triton launches")
            self._launches.append(BoundLaunch(direct, grid, args, moving, fixed))

        check, *steps = launches
        check(bind)
        self._checks = len(self._launches)  # 0 for operands without elements
        for launch in steps:
            launch(bind)

    def addresses(self, moving: Sequence[torch.Tensor], fixed: Sequence[torch.Tensor]) -> list[int] | None:
        """Those of `moving`, for `launch`; None: it cannot launch for these tensors.

        They are like those it was made with but for their addresses; `fixed` must lie where they did, and addresses be
        aligned as they were.
        """
        addresses = list(map(_address, moving))
        if list(map(_address, fixed)) != self._fixed or hooked():
            return None
        bits = 0
        for i in self._aligned:
            bits |= addresses[i]
        if bits & 15:
            return None
        for i in self._unaligned:
            if not addresses[i] & 15:
                return None
        return addresses

    def launch(self, addresses: list[int], checked: bool = False) -> None:
        """Make the launches, without the check if that is done, on the current stream of the device it was made on."""
        launches = self._launches[self._checks :] if checked else self._launches
        if self._driver.device() == self._device:
            for launch in launches:
                launch.run(addresses)
        else:
            with self._driver.on(self._device):
                for launch in launches:
                    launch.run(addresses)
