"""GEMM into a reused chunk, and the streaming step on it: the path for many tokens.

    for rows of W that fit the chunk:
        chunk = sum_i dY_i[:, rows]^T X_i                     fp32, by the GEMM library (cuBLAS)
        W, states = rule(W, scale * (chunk + R) + dense, states)   on these rows, by `param_step`

From some thousand tokens on the GEMM is all that counts, and a library's is better than one that shares registers with
a rule. The chunk stays in the L2 cache between the two (`configs.chunk_rows` says how large it is); dW as a whole never
exists. The result is that of `param_step` on the same GEMM's output, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from fused_grad_optimizer.kernels import param_step
from fused_grad_optimizer.kernels.configs import ChunkConfig, chunk_rows, multiprocessors
from fused_grad_optimizer.kernels.factors import Gradient, Target

DEFAULT = ChunkConfig()
MOST_BUFFERS = 4  # kept, of as many streams
_buffers: OrderedDict[tuple[torch.device, int], torch.Tensor] = OrderedDict()
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def release() -> None:
    """Give the kept buffers back to torch's allocator: one for each stream, of 24 MiB or less each.

    Nothing here calls it, as the next step would allocate again. It is for a program that trains no more and needs the
    memory, or empties torch's cache: `kernels.chunked.release()`, then `torch.cuda.empty_cache()`. Not during a step.
    """
    _buffers.clear()


def launch(
    gradient: Gradient,
    n: int,
    k: int,
    *,
    target: Target,
    scalars: torch.Tensor,
    keys: torch.Tensor,
    flag: torch.Tensor | None,
    update,
    stores: tuple,
    stochastic: bool,
    config: ChunkConfig = DEFAULT,
) -> None:
    """Step a whole weight [n, k]. At least one (dY, X) pair; inputs have a unit stride in their last dimension."""
    if not n * k:
        return
    rows = chunk_rows(n, k, multiprocessors(target.weight.device), config)
    key, buffer = _take(rows * k, target.weight.device)
    with torch.no_grad():
        for start in range(0, n, rows):
            end = min(start + rows, n)
            chunk = buffer[: (end - start) * k].view(end - start, k)
            multiply(gradient, start, end, chunk)
            param_step.launch(
                gradient, target, scalars=scalars, keys=keys, flag=flag, update=update, stores=stores,
                stochastic=stochastic, acc=chunk, start=start * k,
            )  # fmt: skip
    _give(key, buffer)


def multiply(gradient: Gradient, start: int, end: int, chunk: torch.Tensor) -> None:
    """chunk [end - start, K] (fp32) = rows `start:end` of sum_i dY_i^T X_i.

    fp32 inputs are multiplied as torch's own matmul does it, in TF32 where the user allows that.
    """
    for i, (dy, x) in enumerate(zip(gradient.dys, gradient.xs)):
        part = dy[:, start:end].t()
        if part.dtype in _SIXTEEN_BITS and part.device.type == "cpu":  # has no such product: Triton's interpreter only
            part, x = part.float(), x.float()
        # operators with `out` take no part in autocast
        if part.dtype == chunk.dtype:
            torch.mm(part, x, out=chunk) if i == 0 else torch.addmm(chunk, part, x, out=chunk)
        elif i == 0:
            torch.ops.aten.mm.dtype_out(part, x, chunk.dtype, out=chunk)
        else:
            torch.ops.aten.addmm.dtype_out(chunk, part, x, chunk.dtype, out=chunk)


def _take(count: int, device: torch.device) -> tuple[tuple[torch.device, int] | None, torch.Tensor]:
    """A buffer of at least `count` fp32 elements, and the device and stream under which `_give` keeps it.

    It belongs to the caller until then: another thread that launches on the same stream gets one of its own. While a
    CUDA graph is captured the buffer comes from the graph's own pool, and is not kept. It is an ordinary tensor in
    inference mode too: one made there could not be written to by a later step outside it.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None, torch.empty(count, dtype=torch.float32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    kept = _buffers.pop(key, None)
    if kept is None or kept.numel() < count:
        kept = None  # free before its successor is allocated
        with torch.inference_mode(False):
            kept = torch.empty(count, dtype=torch.float32, device=device)
    return key, kept


def _give(key: tuple[torch.device, int] | None, buffer: torch.Tensor) -> None:
    if key is not None:
        _buffers[key] = buffer
        while len(_buffers) > MOST_BUFFERS:
            _buffers.popitem(last=False)
