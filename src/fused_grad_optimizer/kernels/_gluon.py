"""What differs between Gluon's releases, under one name each. Tried: Triton 3.6 and 3.9.

A name that is missing is found here, when the module is loaded, and not by the compiler in the middle of a training.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# A TMA load into shared memory: (descriptor, [row, column], barrier, destination).
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# All threads of the calling role.
role_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# A layout of shared memory by bits of the address; Triton 3.5 has none.
SharedLinearLayout = gl.SharedLinearLayout
