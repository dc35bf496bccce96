"""Launches of compiled Triton kernels straight through the CUDA driver: a few us instead of 60 to 100.

The first launch of a specialisation goes through Triton, which compiles and loads the kernel. Later ones write the
arguments where the driver reads them and call `cuLaunchKernel`. How a kernel takes its arguments is read from its PTX
and compared with what would be passed; where anything is not as expected, Triton goes on launching (`refusals` says
why). Tensor maps are encoded by Triton's own function.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import torch
from triton import knobs

from fused_grad_optimizer.kernels import cuda_driver
from fused_grad_optimizer.kernels.launch_layout import Layout, NotDirect, layout_of

_MISSING = object()
_LAUNCHES: dict[tuple, DirectLaunch | None] = {}
_REFUSALS: dict[str, str] = {}
_INT32 = 1 << 31


def refusals() -> dict[str, str]:
    """Why kernels, by name, are launched by Triton; `""` is a reason for all of them. Empty: all are direct."""
    reason = _reason_against_all()
    return {**_REFUSALS, **({"": reason} if reason is not None else {})}


def _reason_against_all() -> str | None:
    if cuda_driver.active() is None:
        return "the CUDA driver is not used here"
    if hooked():
        return "Triton has launch hooks"
    return None


def hooked() -> bool:
    """Whether someone listens to launches (a profiler): only Triton calls these hooks."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Arguments:
    """Where the driver reads the arguments of a launch: the numbers, the tensor maps, and pointers to all of them."""

    def __init__(self, layout: Layout) -> None:
        self.memory, self.pointers = cuda_driver.argument_memory(layout.offsets, layout.bytes)
        self.maps: list[Any] = [None] * len(layout.map_parameters)
        self.lock = threading.Lock()


class DirectLaunch:
    """One specialisation of a kernel on one device, loaded, with the memory for its arguments.

    Args:
        kernel: the JIT function; kept so that its id stays its own.
        compiled: what Triton's launch returned.
        count: how many positional arguments a launch has.

    Raises:
        NotDirect: this kernel must be launched by Triton.
    """

    def __init__(self, kernel: Any, compiled: Any, count: int) -> None:
        driver = cuda_driver.active()
        assert driver is not None  # `find` has looked
        self.driver = driver
        self.layout = layout_of(kernel, compiled, count)
        for meta in self.layout.maps:
            if not driver.knows_maps(meta):
                raise NotDirect(
                    "Triton's tensor maps are not as the CUDA driver makes them, or not where they are sought"
                )
        self.kept = (kernel, compiled)
        self.name = compiled.name
        self.threads = 32 * compiled.packed_metadata[0]
        self.shared = compiled.packed_metadata[2]
        self.function = self.driver.handle(compiled.function)
        self.pack = struct.Struct(self.layout.format).pack_into
        self.arguments = Arguments(self.layout)

    def values(self, args: tuple | list) -> tuple[list[int], list[tuple]]:
        """The arguments as numbers, and for each tensor map what it is encoded from."""
        numbers: list[int] = []
        maps: list[tuple] = []
        _collect(self.layout.kinds, args, numbers, maps)
        return numbers, maps

    def run(self, grid: tuple[int, int, int], arguments: Arguments, numbers: list[int] | None = None) -> None:
        """Launch on the current stream. The caller holds `arguments.lock`.

        `arguments.maps` are in place; so is what `arguments.memory` holds, if there are no `numbers` to put there.
        """
        if numbers is not None:
            self.pack(arguments.memory, 0, *numbers)
        self.driver.launch(self.function, grid, self.threads, self.shared, arguments.pointers)

    def set_map(self, arguments: Arguments, index: int, encoded_from: tuple) -> None:
        tensor_map = self.driver.encode(self.layout.maps[index], *encoded_from)
        arguments.maps[index] = tensor_map  # kept alive: the driver reads it at the launch
        arguments.pointers[self.layout.map_parameters[index]] = self.driver.address(tensor_map)

    def launch(self, grid: tuple[int, int, int], args: tuple | list) -> None:
        numbers, maps = self.values(args)
        with self.arguments.lock:
            for index, encoded_from in enumerate(maps):
                self.set_map(self.arguments, index, encoded_from)
            self.run(grid, self.arguments, numbers)


def _collect(kinds: tuple, args: tuple | list, numbers: list[int], maps: list[tuple]) -> None:
    for kind, arg in zip(kinds, args):
        if kind == "pointer":
            numbers.append(arg.data_ptr())
        elif kind == "number":
            numbers.append(arg)
        elif kind == "map":
            maps.append((arg.base.data_ptr(), arg.shape, arg.strides))
            numbers += arg.shape
            numbers += arg.strides
        elif kind is not None:
            _collect(kind, arg, numbers, maps)


def specialisation(arg: Any) -> Any:
    """All that Triton's compiled code may depend on in one argument.

    Raises:
        NotDirect: an argument of a kind that no kernel here takes.
    """
    if arg is None:
        return None
    kind = type(arg)
    if kind is int:
        return 1 if arg == 1 else (arg % 16 == 0, -_INT32 <= arg < _INT32)
    if kind is tuple:
        return tuple([specialisation(a) for a in arg])
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.is_cuda, arg.data_ptr() % 16 == 0  # Triton refuses a tensor that is not on a GPU
    if hasattr(arg, "block_shape") and arg.padding == "zero" and not getattr(arg, "round_f32_to_tf32", False):
        return arg.base.dtype, tuple(arg.block_shape), arg.layout
    raise NotDirect(f"an argument of type {kind.__name__}")


def launch(kernel: Any, grid: tuple[int, ...], args: tuple | list, constants: dict[str, Any]) -> None:
    """`kernel[grid](*args, **constants)`; tensors are on the current device. An empty grid launches nothing."""
    direct = find(kernel, args, constants)
    if isinstance(direct, DirectLaunch):
        if 0 not in grid:
            x, y, z = (*grid, 1, 1)[:3]
            direct.launch((x, y, z), args)
        return
    compiled = kernel[grid](*args, **constants)
    if isinstance(direct, tuple) and compiled is not None:
        _LAUNCHES[direct] = _made(kernel, compiled, len(args))


def find(kernel: Any, args: tuple | list, constants: dict[str, Any]) -> DirectLaunch | tuple | None:
    """The direct launch of these arguments; the key to keep it under if it is still to be made; None: use Triton."""
    driver = cuda_driver.active()
    if driver is None or hooked():
        return None
    try:
        key = (id(kernel), driver.device(), specialisation(tuple(args)), tuple(constants.items()))
    except NotDirect as reason:
        _REFUSALS[kernel.__name__] = str(reason)
        return None
    found = _LAUNCHES.get(key, _MISSING)
    return key if found is _MISSING else found  # type: ignore[return-value]


def _made(kernel: Any, compiled: Any, count: int) -> DirectLaunch | None:
    try:
        return DirectLaunch(kernel, compiled, count)
    except NotDirect as reason:
        _REFUSALS[compiled.name] = str(reason)
        return None
