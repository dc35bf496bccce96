"""The few calls of the CUDA driver that a direct launch needs, through ctypes."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from fused_grad_optimizer.kernels import interpreting

_INVALID_CONTEXT = 201
_MAP_OFFSET = 128  # of the tensor map in Triton's object


class CudaDriver:
    """libcuda as Triton and torch use it in this process.

    Args:
        library: libcuda, opened by ctypes so that a call releases the interpreter's lock: a launch may have to wait.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._launch = library.cuLaunchKernel  # no argtypes: handles are c_void_p, the rest are C ints
        self.device = torch._C._cuda_getDevice
        self._stream = torch._C._cuda_getCurrentRawStream

    @staticmethod
    def handle(value: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(value)

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, pointers: Any) -> None:
        """Launch on the current stream of the current device; what `pointers` point to is copied during the call."""
        stream = ctypes.c_void_p(self._stream(self.device()))
        status = self._launch(function, *grid, threads, 1, 1, shared, stream, pointers, None)
        if status == _INVALID_CONTEXT:  # the first use of CUDA on this thread
            self._make_current()
            status = self._launch(function, *grid, threads, 1, 1, shared, stream, pointers, None)
        self._check(status)

    def _make_current(self) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._library.cuDeviceGet(ctypes.byref(device), self.device()))
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check(self._library.cuCtxSetCurrent(context))

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            message = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"CUDA error {status} in a kernel launch: {message}")

    def encode(self, meta: dict[str, Any], pointer: int, shape: list[int], strides: list[int]) -> Any:
        """The tensor map that Triton would pass for a descriptor with this metadata, as Triton's own object."""
        fill, dtypes, _ = _triton_maps()
        return fill(
            pointer, meta["swizzle"], meta["elem_size"], dtypes[meta["elem_type"]], meta["block_size"], shape, strides, 0
        )

    @staticmethod
    def address(tensor_map: Any) -> int:
        return id(tensor_map) + _MAP_OFFSET


@cache
def _triton_maps() -> tuple[Any, Any, type]:
    """Triton's function that encodes tensor maps, its numbers of dtypes, and the class of the maps."""
    from triton.backends.nvidia import driver as module
    from triton.runtime import driver

    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    return fill, module.TMA_DTYPE_DEVICE_TO_HOST, module.PyCUtensorMap


def _maps_are_known() -> bool:
    """Whether a map lies where it is looked for: after the object's head, at the next multiple of its alignment."""
    _, _, cls = _triton_maps()
    return cls is not None and cls.__basicsize__ == 2 * _MAP_OFFSET


def argument_memory(offsets: tuple[int | None, ...], size: int) -> tuple[ctypes.Array, ctypes.Array]:
    """Zeroed memory for arguments, and an array of pointers to their offsets in it (null where there is none)."""
    memory = (ctypes.c_uint64 * (size // 8))()
    base = ctypes.addressof(memory)
    return memory, (ctypes.c_void_p * len(offsets))(*[None if o is None else base + o for o in offsets])


_STATE: list[CudaDriver | None] = []
_LOCK = threading.Lock()


def active() -> CudaDriver | None:
    """The driver for direct launches, or None: no NVIDIA GPU, Triton's interpreter, or an unknown Triton."""
    if not _STATE:
        with _LOCK:
            if not _STATE:
                _STATE.append(_open())
    return _STATE[0]


def _open() -> CudaDriver | None:
    if interpreting() or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        if not _maps_are_known():
            return None
        return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError, ImportError):
        return None
