"""A CUDA driver that launches nothing and remembers everything, so that launches can be tested and timed without a GPU.

Kernels are compiled for sm_90 as usual. What Triton would hand to its own launcher, and the bytes that a direct launch
puts before the driver, are kept side by side.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton

from fused_grad_optimizer.kernels import cuda_driver, launcher
from fused_grad_optimizer.kernels.launch_layout import ptx_parameters
from tests.kernels.compile_only import FakeDriver


class TensorMap(ctypes.Structure):
    """Stands for a tensor map: what it was encoded from, in the first bytes."""

    _fields_ = [("words", ctypes.c_int64 * 16)]

    @classmethod
    def of(cls, meta: dict, pointer: int, shape, strides) -> TensorMap:
        rank = [meta["swizzle"], meta["elem_size"], meta["elem_type"], *meta["block_size"]]
        words = [pointer, *shape, *strides, *rank]
        return cls((ctypes.c_int64 * 16)(*words))


@dataclass
class FakeCuda:
    """Counts and keeps launches.

    Attributes:
        triton: for each launch by Triton `(compiled source, metadata, grid, stream, arguments of the kernel)`.
        direct: for each direct launch `(function, grid, threads, shared, bytes of every parameter)`.
        devices: the current device at each of these.
        parameters: by function handle, the sizes of the kernel's parameters in its PTX.
        keep: whether direct launches are kept; off for timing.
    """

    triton: list[tuple] = field(default_factory=list)
    direct: list[tuple] = field(default_factory=list)
    parameters: dict[int, list[int]] = field(default_factory=dict)
    devices: list[int] = field(default_factory=list)
    keep: bool = True
    device_index: int = 0
    encoded: int = 0

    def device(self) -> int:
        return self.device_index

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device_index = self.device_index, device
        yield
        self.device_index = before

    @staticmethod
    def handle(value: int) -> int:
        return value

    def encode(self, meta: dict[str, Any], pointer: int, shape, strides) -> TensorMap:
        self.encoded += 1
        return TensorMap.of(meta, pointer, shape, strides)

    @staticmethod
    def knows_maps(meta: dict[str, Any]) -> bool:
        return True

    @staticmethod
    def address(tensor_map: TensorMap) -> int:
        return ctypes.addressof(tensor_map)

    def launch(self, function: int, grid: tuple, threads: int, shared: int, pointers: Any) -> None:
        if self.keep:
            self.devices.append(self.device_index)
            sizes = self.parameters[function]
            assert len(sizes) == len(pointers)
            values = tuple(ctypes.string_at(p, size) for p, size in zip(pointers, sizes))
            self.direct.append((function, grid, threads, shared, values))


class _Utils:
    """Of Triton's driver, as far as it is used to load a kernel."""

    def __init__(self) -> None:
        self.loaded = 0

    def get_device_properties(self, device: int) -> dict:
        return {"max_shared_mem": 232_448}

    def load_binary(self, name, binary, shared, device):
        self.loaded += 1
        return self.loaded, 1000 + self.loaded, 32, 0, 1024

    def unload_module(self, module) -> None:
        pass


class LaunchingDriver(FakeDriver):
    """A `FakeDriver` that `kernel[grid](...)` can be used with."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(90)
        self.utils = _Utils()

        class Launcher:
            def __init__(self, source, metadata) -> None:
                self.source, self.metadata = source, metadata

            def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter, leave, *args) -> None:
                cuda.triton.append((self.source, self.metadata, (x, y, z), function, args))

        self.launcher_cls = Launcher

    def get_device_interface(self):
        raise NotImplementedError


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Triton and the direct launches both use a fake driver in this block; nothing launched here is kept after it."""
    cuda = FakeCuda()
    before, launches, refused = list(cuda_driver._STATE), dict(launcher._LAUNCHES), dict(launcher._REFUSALS)
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(LaunchingDriver(cuda))
    cuda_driver._STATE[:] = [cuda]  # type: ignore[list-item]
    launcher._LAUNCHES.clear()
    launcher._REFUSALS.clear()
    original = launcher.DirectLaunch.__init__

    def made(self, kernel, compiled, count) -> None:
        original(self, kernel, compiled, count)
        cuda.parameters[self.function] = [size for size, _ in ptx_parameters(compiled.asm["ptx"])]

    launcher.DirectLaunch.__init__ = made  # type: ignore[method-assign]
    try:
        yield cuda
    finally:
        launcher.DirectLaunch.__init__ = original  # type: ignore[method-assign]
        launcher._LAUNCHES.clear()
        for device_caches in _caches():
            device_caches.clear()
        gc.collect()  # a kernel that is freed tells the driver it was loaded with
        launcher._LAUNCHES.update(launches)
        launcher._REFUSALS.clear()
        launcher._REFUSALS.update(refused)
        cuda_driver._STATE[:] = before
        triton.runtime.driver._active = active


def _caches() -> Iterator[dict]:
    from fused_grad_optimizer.kernels import finite, multi_finite, param_step, wgrad_step, wgrad_step_hopper

    for kernel in (
        finite.nonfinite_kernel, multi_finite.multi_finite_kernel, param_step.param_step_kernel,
        param_step.sum_rows_kernel, wgrad_step.wgrad_step_kernel,
        wgrad_step_hopper.wgrad_step_hopper_kernel,
    ):  # fmt: skip
        yield kernel.device_caches


def passed_by_triton(launch: tuple) -> tuple[bytes, ...]:
    """The bytes of each parameter, as Triton's launcher derives them from the signature of the compiled kernel."""
    source, metadata, _, _, args = launch
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    found: list[bytes] = []

    def visit(kind, arg) -> None:
        if isinstance(kind, tuple):
            for k, a in zip(kind, arg):
                visit(k, a)
        elif kind.startswith("tensordesc"):
            found.append(bytes(TensorMap.of(next(maps), arg.base.data_ptr(), arg.shape, arg.strides)))
            found.extend(int(s).to_bytes(4, "little") for s in arg.shape)
            found.extend(int(s).to_bytes(8, "little") for s in arg.strides)
        elif kind.startswith("*"):
            found.append(arg.data_ptr().to_bytes(8, "little"))
        elif kind != "constexpr":
            found.append(int(arg).to_bytes({"i32": 4, "i64": 8}[kind], "little", signed=True))

    for kind, arg in zip(source.signature.values(), args):
        visit(kind, arg)
    return (*found, bytes(8), bytes(8))
