"""Direct launches against Triton's own C launcher, byte by byte, on a libcuda that launches nothing.

    python -m tests.kernels.stub_cuda DIRECTORY    where `build` has put the stub

Triton's launcher and its encoding of tensor maps are the real ones. Needs a C compiler, as they do.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

STREAM, FUNCTION = 0x7777000000000005, 0x6666000000000003


def build(directory: Path) -> dict[str, str]:
    """Compile the stub; the environment in which a process uses it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    library = directory / "libcuda.so.1"
    source = Path(__file__).with_name("stub_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    (directory / "libcuda.so").symlink_to(library.name)
    paths = {"TRITON_LIBCUDA_PATH": str(directory), "LD_LIBRARY_PATH": str(directory)}
    return {**os.environ, **paths, "TRITON_CACHE_DIR": str(directory / "cache")}


def main(directory: str) -> int:
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    import triton
    from triton.backends.nvidia import driver as nvidia

    from fused_grad_optimizer.kernels import cuda_driver, launcher, wgrad_step
    from fused_grad_optimizer.kernels.launch_layout import ptx_parameters
    from tests.kernels.compile_only import FakeDriver
    from tests.kernels.test_launcher import launches

    fake, utils = FakeDriver(90), nvidia.CudaUtils()
    utils.load_binary = lambda *_: (1, FUNCTION, 32, 0, 1024)
    utils.get_device_properties = lambda device: {"max_shared_mem": 232_448}
    fake.launcher_cls, fake.utils, fake.get_current_stream = nvidia.CudaLauncher, utils, lambda device: STREAM
    triton.runtime.driver.set_active(fake)
    table = torch.zeros(2, 5, dtype=torch.int64)
    wgrad_step._segment_table = lambda gradient, _: table if len(gradient.dys) > 1 else None
    library = ctypes.CDLL(os.path.join(directory, "libcuda.so.1"))
    direct_driver = cuda_driver.CudaDriver(library)

    def seen(name: str, kind, count: int) -> list[bytes]:
        return [bytes(part) for part in ((kind * count) * 2).in_dll(library, name)]

    failed = 0
    for label, launch in launches():
        ctypes.c_int.in_dll(library, "parameters").value = 0
        cuda_driver._STATE[:] = [direct_driver]
        launch()
        used = _launched_by(launcher, launch)
        sizes = [size for size, _ in ptx_parameters(used.kept[1].asm["ptx"])]
        (ctypes.c_int * 128).in_dll(library, "sizes")[: len(sizes)] = sizes
        ctypes.c_int.in_dll(library, "parameters").value = len(sizes)
        launch()
        cuda_driver._STATE[:] = [None]
        launch()
        pairs = [seen("bytes", ctypes.c_ubyte, 16384), seen("dimensions", ctypes.c_uint, 8)]
        pairs.append(seen("handles", ctypes.c_uint64, 2))
        same = all(a == b for a, b in pairs) and any(pairs[0][0])
        failed += not same
        print(f"{label}, {sum(sizes)} bytes: {'the same' if same else 'DIFFERENT'}", flush=True)
        ctypes.memset(ctypes.addressof(ctypes.c_char.in_dll(library, "bytes")), 0, 2 * 16384)
    cuda_driver._STATE[:] = [direct_driver]
    print(f"triton {triton.__version__}: {failed} failed; refused: {launcher.refusals()}", flush=True)
    os._exit(1 if failed else 0)  # Triton's kernels cannot be unloaded from a stub


def _launched_by(launcher, launch):
    """The direct launch that this uses."""
    used = []
    original = launcher.DirectLaunch.run

    def run(self, *args) -> None:
        used.append(self)
        original(self, *args)

    launcher.DirectLaunch.run = run
    launch()
    launcher.DirectLaunch.run = original
    assert len(used) == 1, launcher.refusals()
    return used[0]


if __name__ == "__main__":
    main(sys.argv[1])
