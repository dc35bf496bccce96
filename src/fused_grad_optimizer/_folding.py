"""Folding: the factors of a gradient are summed into one dense tensor, in pieces, in place once there is such a sum."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fused_grad_optimizer._locks import new_lock
from fused_grad_optimizer.kernels.tile_cpu import compute_dtype

if TYPE_CHECKING:
    from fused_grad_optimizer.factored_grad import FactoredGrad

# Held while a gradient is added to or folded: backwards of several threads, and their hooks, meet in one `.grad`.
LOCK = new_lock()


def fold(grad: FactoredGrad) -> FactoredGrad:
    """Sum all parts into one dense accumulator in fp32 (fp64 for fp64 weights), in place once there is one.

    An exception changes nothing before the first rows are written in place. After that it leaves NaN, which the
    optimizer's finite check finds: some rows hold the factors already, and would get them twice.
    """
    with LOCK:
        dense = grad._folded() if grad._folded is not None else None
        if dense is None or dense is not grad.dense or dense.is_inference():
            dense = grad.to_dense(compute_dtype(grad.dtype))
            grad._become(dense)
            grad._folded = weakref.ref(dense)
            return grad
        end = 0
        try:
            for start, end, piece in grad._chunks():
                dense[start:end] = piece
                del piece  # before the next is formed
            grad._become(dense)
        except BaseException:
            if end:
                dense.fill_(float("nan"))
            raise
        return grad


def fold_if_larger(grad: FactoredGrad) -> FactoredGrad:
    """Hold at most an fp32 sum's bytes, 9/8 of them with a dense part; while a fold makes a new sum, one more."""
    with LOCK:
        held, limit = grad.factor_bytes(), grad.numel() * compute_dtype(grad.dtype).itemsize
        if held and grad.dense is not None:  # not at once: each fold reads and writes the accumulator
            held, limit = held + grad.dense.nbytes, limit + limit // 8
        return fold(grad) if held > limit else grad
