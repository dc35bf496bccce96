"""The few calls of the CUDA driver that a direct launch needs, through ctypes."""

from __future__ import annotations

import ctypes
import math
import threading
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from fused_grad_optimizer.kernels import interpreting

_INVALID_CONTEXT = 201
_MAP_BYTES = 128
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_SMALL_TENSOR = 1 << 21  # a bit that Triton clears for tensors under 128 KiB, for the sake of older drivers


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
        self._streams: dict[int, ctypes.c_void_p] = {}

    @staticmethod
    def handle(value: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(value)

    @staticmethod
    def on(device: int) -> AbstractContextManager:
        """Makes a device the current one."""
        return torch.cuda.device(device)

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, pointers: Any) -> None:
        """Launch on the current stream of the current device; what `pointers` point to is copied during the call."""
        current = self._stream(self.device())
        stream = self._streams.get(current)
        if stream is None:
            stream = self._handle_of(current)
        status = self._launch(function, *grid, threads, 1, 1, shared, stream, pointers, None)
        if status == _INVALID_CONTEXT:  # the first use of CUDA on this thread
            self._make_current()
            status = self._launch(function, *grid, threads, 1, 1, shared, stream, pointers, None)
        self._check(status)

    def _handle_of(self, stream: int) -> ctypes.c_void_p:
        if len(self._streams) >= 256:
            self._streams.clear()
        made = self._streams[stream] = ctypes.c_void_p(stream)
        return made

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
        size, dtype = meta["elem_size"], dtypes[meta["elem_type"]]
        values = (pointer, meta["swizzle"], size, dtype, meta["block_size"], shape, strides, 0)
        try:
            return fill(*values)
        except RuntimeError:  # the first use of CUDA on this thread, or there is something wrong with the values
            self._make_current()
            return fill(*values)

    def knows_maps(self, meta: dict[str, Any]) -> bool:
        """Whether at the `address` of a map by Triton is what the driver itself makes of the same values."""
        if not _map_offset():
            return False
        shape = [4 * size for size in meta["block_size"]]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        tensor_map = self.encode(meta, 1 << 20, shape, strides)  # alive while its memory is read
        ours = list((ctypes.c_uint64 * 16).from_address(self.address(tensor_map)))
        over_zeros = self._encoded_over(0x00, meta, shape, strides)
        over_ones = self._encoded_over(0xFF, meta, shape, strides)
        if over_zeros is None or over_ones is None:
            return False
        # bits that the driver leaves as they were are none of its map
        differ = [(own ^ a) & ~(a ^ b) for own, a, b in zip(ours, over_zeros, over_ones)]
        differ[1] &= ~_SMALL_TENSOR
        return not any(differ)

    def _encoded_over(self, fill: int, meta: dict[str, Any], shape: list[int], strides: list[int]) -> list[int] | None:
        """The driver's map of a tensor at 1 MiB, written over bytes of value `fill`; None if it refuses."""
        box, size, rank = meta["block_size"], meta["elem_size"], len(shape)
        memory = (ctypes.c_ubyte * (2 * _MAP_BYTES))(*[fill] * (2 * _MAP_BYTES))
        base = ctypes.addressof(memory)
        base += -base % _MAP_BYTES
        status = self._library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(base), _triton_maps()[1][meta["elem_type"]], rank, ctypes.c_void_p(1 << 20),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * (rank - 1))(*[stride * size for stride in reversed(strides[:-1])]),
            (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank), 0, meta["swizzle"],
            _L2_128B, 0,
        )  # fmt: skip
        return None if status else list((ctypes.c_uint64 * 16).from_address(base))

    @staticmethod
    def address(tensor_map: Any) -> int:
        return id(tensor_map) + _map_offset()


@cache
def _triton_maps() -> tuple[Any, Any, type]:
    """Triton's function that encodes tensor maps, its numbers of dtypes, and the class of the maps."""
    from triton.backends.nvidia import driver as module
    from triton.runtime import driver

    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    return fill, module.TMA_DTYPE_DEVICE_TO_HOST, module.PyCUtensorMap


@cache
def _map_offset() -> int:
    """Where in Triton's object, a C struct of a head and an aligned map, the map begins; 0 if it is another struct."""
    size = _triton_maps()[2].__basicsize__
    return size - _MAP_BYTES if size - _MAP_BYTES in (64, 128) else 0  # the alignments there have been


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
        return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError, ImportError):
        return None
