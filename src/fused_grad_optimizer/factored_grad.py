"""`FactoredGrad`: a weight gradient kept as its factors, `scale * (sum_i dY_i^T X_i + rows) + dense`.

It is a `torch.Tensor` of the weight's shape and dtype that autograd, clipping and loss scaling handle like any other
gradient, but no GEMM has run and no [N, K] tensor exists. Joining two of them joins their lists; a multiplication by a
scalar, on the device or not, changes one 0-d scale and waits for nothing. Operations it does not know turn it into an
ordinary dense gradient once, with a warning that names the operation.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fused_grad_optimizer import _copies, _folding, _foreach, ops
from fused_grad_optimizer._copies import is_modified, mark_modified
from fused_grad_optimizer._factors import (
    MODIFIED,
    Pair,
    alike,
    check_parts,
    inverse,
    is_scalar,
    same_scale,
    unit_stride,
    version_of,
    versions_of,
)
from fused_grad_optimizer._no_memory import NoMemory, forbid_pointers
from fused_grad_optimizer.kernels import Gradient
from fused_grad_optimizer.kernels.tile_cpu import compute_dtype

aten = torch.ops.aten

_wrapper = torch.Tensor._make_wrapper_subclass
_DETACH = aten.detach.default

# Elements of the piece of gradient that norms and checks form and drop, one at a time.
_CHUNK_ELEMENTS = 1 << 22


class FactoredGrad(NoMemory):
    """The gradient of a weight [N, K] as a list of factors.

    Attributes:
        pairs: `(dY [T, N], X [T, K])` for each use of the weight in a linear layer.
        rows: `(ids [T], dY [T, K])` for each use of the weight as an embedding.
        dense: a part that came as a tensor [N, K] (a use outside its module, or many folded factors), or None. The next
            fold may change it in place.

    Example:
        >>> dy, x = torch.ones(3, 2), torch.ones(3, 4)
        >>> g = FactoredGrad((2, 4), torch.float32, pairs=[(dy, x)])
        >>> g.mul_(0.5).to_dense()[0, 0].item(), round(g.norm().item(), 4)
        (1.5, 4.2426)
    """

    pairs: list[Pair]
    rows: list[Pair]
    dense: torch.Tensor | None
    _scale: float | torch.Tensor
    _versions: list[tuple[torch.Tensor, int]]
    _dense_version: int | None = None  # of `dense`, while it is a tensor that others may hold
    _folded: weakref.ref[torch.Tensor] | None = None  # the accumulator of `fold`, while no copy shares it

    @staticmethod
    def __new__(
        cls,
        shape,
        dtype: torch.dtype,
        *,
        pairs: list[Pair] | None = None,
        rows: list[Pair] | None = None,
        dense: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> FactoredGrad:
        if device is None:
            source = pairs[0][0] if pairs else rows[0][1] if rows else dense
            device = source.device if source is not None else torch.device("cpu")
        self = _wrapper(cls, tuple(shape), dtype=dtype, device=device)
        forbid_pointers(self)
        pairs, rows = list(pairs or []), list(rows or [])
        if pairs or rows or dense is not None:
            check_parts(tuple(shape), self.device, pairs, rows, dense)
        self.pairs, self.rows = [(unit_stride(dy), unit_stride(x)) for dy, x in pairs], rows
        self.dense = dense
        self._dense_version = version_of(dense)
        self._scale = 1.0
        self._versions = versions_of(self.pairs, rows)
        return self

    def __init__(self, *args, **kwargs) -> None:
        pass

    # __torch_dispatch__ sees all operations; without a second look at them attributes take half the time
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # -- what it holds ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:  # type: ignore[override]
        tokens = sum(dy.shape[0] for dy, _ in self.pairs)
        parts = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"pairs={len(self.pairs)}", f"tokens={tokens}"]
        if self.rows:
            parts.append(f"embedding_rows={sum(ids.numel() for ids, _ in self.rows)}")
        if self.dense is not None:
            parts.append("dense part")
        return f"FactoredGrad({', '.join(parts)})"

    def factor_bytes(self) -> int:
        """Bytes of all factors (a factor shared with another weight's gradient counts in both)."""
        total = 0
        for a, b in (*self.pairs, *self.rows):
            total += a.nbytes + b.nbytes
        return total

    def operands(self) -> list[torch.Tensor]:
        """Every floating tensor of the gradient: it is finite when these are."""
        tensors = [t for pair in self.pairs for t in pair] + [dy for _, dy in self.rows]
        return tensors + [t for t in (self.dense, self._scale) if isinstance(t, torch.Tensor)]

    check_unmodified = _copies.check_unmodified

    def gradient(self) -> Gradient:
        """The operands in the form kernels take; embedding rows are summed by row here.

        Raises:
            RuntimeError: a factor was modified in place since the backward pass.
        """
        self.check_unmodified()
        dtype = compute_dtype(self.dtype)
        pairs = self.pairs
        if len({t.dtype for pair in pairs for t in pair}) > 1:
            pairs = [(dy.to(dtype), x.to(dtype)) for dy, x in pairs]
        row_map = row_sums = None
        if self.rows:
            ids = torch.cat([i for i, _ in self.rows]) if len(self.rows) > 1 else self.rows[0][0]
            dys = torch.cat([dy.to(dtype) for _, dy in self.rows]) if len(self.rows) > 1 else self.rows[0][1]
            row_map, row_sums = torch.ops.forge.sum_rows(ids, unit_stride(dys), self.shape[0], dtype)
        scale: torch.Tensor | None = None
        if isinstance(self._scale, torch.Tensor):
            scale = self._scale
        elif self._scale != 1.0:
            scale = torch.full((), self._scale, dtype=dtype, device=self.device)
        dense = self.dense.contiguous() if self.dense is not None else None
        return Gradient([dy for dy, _ in pairs], [x for _, x in pairs], row_map, row_sums, scale, dense)

    def _chunks(self):
        """Pieces of rows of the gradient, in fp32 (fp64 for fp64 weights): `(start, end, tensor)`."""
        n, k = self.shape
        rows = max(1, min(_CHUNK_ELEMENTS // max(k, 1), (n + 3) // 4))
        gradient = self.gradient()
        for start in range(0, n, rows):
            end = min(start + rows, n)
            yield start, end, ops.wgrad(gradient, self.shape, start, end, compute_dtype(self.dtype))

    def to_dense(self, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> torch.Tensor:  # type: ignore[override]
        """The gradient as an ordinary tensor [N, K], summed in fp32 and rounded once to `dtype` (default: its own)."""
        with torch.no_grad():
            dtype = dtype or self.dtype
            if (self.pairs or self.rows) and dtype == compute_dtype(self.dtype):
                return ops.wgrad(self.gradient(), self.shape, 0, self.shape[0], dtype)
            out = torch.empty(self.shape, dtype=dtype, device=self.device)
            if not (self.pairs or self.rows):
                self.check_unmodified()
                return out.copy_(self.dense) if self.dense is not None else out.zero_()
            for start, end, piece in self._chunks():
                out[start:end] = piece
                del piece  # before the next is formed
            return out

    def norm(self, p=2, dim=None, keepdim=False, dtype=None) -> torch.Tensor:  # type: ignore[override]
        """The exact p-norm of all elements (0-d), formed from pieces of the gradient that are dropped one by one."""
        if dim is not None or keepdim or (isinstance(p, str) and p != "fro"):
            return super().norm(p, dim, keepdim, dtype)
        return self._vector_norm(2.0 if p in (None, "fro") else float(p), dtype)

    def _vector_norm(self, order: float, dtype: torch.dtype | None) -> torch.Tensor:
        with torch.no_grad():
            parts = [torch.linalg.vector_norm(piece, order) for _, _, piece in self._chunks()]
            if not parts:
                return torch.zeros((), dtype=dtype or compute_dtype(self.dtype), device=self.device)
            total = torch.stack(parts)
            total = total.sum() if order == 0 else torch.linalg.vector_norm(total, order)
            return total.to(dtype) if dtype is not None else total

    # -- changing it in place --------------------------------------------------------------------------------------

    def _take(self, other: FactoredGrad) -> FactoredGrad:
        self.pairs, self.rows, self.dense = list(other.pairs), list(other.rows), other.dense
        self._scale, self._versions, self._dense_version = other._scale, list(other._versions), other._dense_version
        self._folded = other._folded = None
        return self

    def _copy(self) -> FactoredGrad:
        return FactoredGrad(self.shape, self.dtype, device=self.device)._take(self)

    def _become(self, dense: torch.Tensor) -> torch.Tensor:
        """Hold nothing but `dense`. One call, which no Ctrl-C can divide."""
        self.__dict__.update(pairs=[], rows=[], dense=dense, _scale=1.0, _versions=[], _dense_version=None)
        return dense

    def _multiply(self, factor: float | torch.Tensor) -> FactoredGrad:
        if isinstance(factor, torch.Tensor):
            factor = (
                factor.detach().to(device=self.device, dtype=compute_dtype(self.dtype), non_blocking=True).reshape(())
            )
        dense = self.dense * factor if self.dense is not None else None  # first, for memory may run out
        version = None if self._dense_version in (None, version_of(self.dense)) else MODIFIED
        self.__dict__.update(_scale=self._scale * factor, dense=dense, _dense_version=version)
        return self

    def _add(self, other: torch.Tensor) -> FactoredGrad:
        """self += other, joining lists; parts with different scales are folded into the dense part first."""
        with _folding.LOCK:
            if not isinstance(other, FactoredGrad):
                # In a backward nobody goes on with `other` as a rule, and no copy of it is made.
                in_backward = torch._C._current_graph_task_id() >= 0
                self._add_dense(other if in_backward or self.dense is not None else other.clone(), in_backward)
                return self.fold_if_larger()
            if other.pairs or other.rows:
                if (self.pairs or self.rows) and not same_scale(self._scale, other._scale):
                    self.fold()
                if not (self.pairs or self.rows):
                    self._scale = other._scale
            if other.dense is not None:  # first, for memory may run out
                other.check_unmodified()
                self._add_dense(other.dense, other._dense_version is not None)
                other._folded = None
            self.pairs, self.rows = self.pairs + other.pairs, self.rows + other.rows
            self._versions = self._versions + other._versions
            return self.fold_if_larger()

    def _add_dense(self, other: torch.Tensor, shared: bool) -> None:
        if self.dense is None:
            self.dense, self._dense_version = other, version_of(other) if shared else None
        else:
            self.check_unmodified()
            self.dense, self._dense_version = self.dense + other, None

    fold = _folding.fold
    fold_if_larger = _folding.fold_if_larger

    def _densify(self, operation: str) -> torch.Tensor:
        """Become dense, in the gradient's own dtype, for an operation that needs elements."""
        if self.pairs or self.rows:
            warnings.warn(
                f"{operation} needs the elements of a factored gradient of shape {tuple(self.shape)}: it was turned "
                "into a dense tensor, which costs the memory it saved",
                stacklevel=3,
            )
        return self._become(self.to_dense())

    _elements = _densify

    # -- copies ----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """An alias. Setting it replaces the content by a copy of what is given, and takes its shape, dtype, device."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            new = FactoredGrad(value.shape, value.dtype, device=value.device).copy_(value)
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.__dict__ = new.__dict__

    share_memory_ = _copies.share_memory_  # type: ignore[assignment]
    is_shared = _copies.is_shared

    def __copy__(self) -> FactoredGrad:
        return self._copy()

    __deepcopy__ = _copies.deepcopy

    def __reduce_ex__(self, protocol):
        self._folded = None  # what takes it may share its memory
        parts = self.pairs, self.rows, self.dense, self._scale
        return _rebuild, (tuple(self.shape), self.dtype, self.device, *parts, is_modified(self))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is _DETACH:  # autograd does it to each gradient that it puts into `.grad`
            return _alias(func, *args)
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _dense_fallback(func, args, kwargs)


def of_pair(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> FactoredGrad:
    """`FactoredGrad(weight.shape, weight.dtype, pairs=[(dy, x)])` in half the time; dY [T, N] and X [T, K]."""
    self = _wrapper(FactoredGrad, weight.shape, dtype=weight.dtype, device=weight.device)
    forbid_pointers(self)
    dy = dy if dy.is_contiguous() else unit_stride(dy)
    x = x if x.is_contiguous() else unit_stride(x)
    try:
        versions = [(dy, dy._version), (x, x._version)]
    except RuntimeError:  # an inference tensor has none
        versions = versions_of([(dy, x)])
    self.__dict__ = {"pairs": [(dy, x)], "rows": [], "dense": None, "_scale": 1.0, "_versions": versions}
    return self


def _rebuild(shape, dtype, device, pairs, rows, dense, scale, modified=False) -> FactoredGrad:
    if pairs or rows or dense is not None:
        device = None  # theirs: `torch.load` may have put them elsewhere
    result = FactoredGrad(shape, dtype, pairs=pairs, rows=rows, dense=dense, device=device)
    result._scale = scale
    if modified:
        mark_modified(result)
    return result


def _dense_fallback(func, args, kwargs) -> Any:
    """Run an operation that is not known on dense gradients; results that alias one are that FactoredGrad again.

    Raises:
        RuntimeError: the operation gave a gradient another shape in place, which it cannot follow.
    """
    seen: dict[int, tuple[torch.Tensor, FactoredGrad]] = {}
    made: dict[int, torch.Tensor] = {}  # by content: a gradient that is given twice is one tensor

    def dense(value):
        if not isinstance(value, FactoredGrad):
            return value
        tensor = made.get(id(value.__dict__))
        if tensor is None:
            tensor = made[id(value.__dict__)] = aten.alias.default(value._densify(str(func)))
            seen[id(tensor)] = tensor, value
        return tensor

    result = func(*tree_map(dense, args), **tree_map(dense, kwargs))
    for tensor, grad in seen.values():
        held = grad.dense
        if held is None or tensor.shape != grad.shape or tensor.stride() != held.stride():
            raise RuntimeError(
                f"{func} changes the shape or strides of a factored gradient of shape {tuple(grad.shape)} in place, "
                "which it cannot follow; use the dense tensor that .to_dense() makes"
            )
        if torch.Tag.inplace_view in func.tags:  # it may be in other memory now
            grad._become(tensor)
    return tree_map(lambda value: seen[id(value)][1] if id(value) in seen else value, result)


# -- the operations it knows ---------------------------------------------------------------------------------------

_HANDLERS: dict[Any, Callable] = {}


def _handles(*operations):
    def register(function: Callable) -> Callable:
        for operation in operations:
            _HANDLERS[operation] = function
        return function

    return register


@_handles(aten.clone.default)
def _clone(func, grad, **kwargs):
    return grad._copy()  # what is in it is never modified in place


@_handles(aten.detach.default, aten.alias.default)
def _alias(func, grad):
    view = _wrapper(FactoredGrad, grad.shape, dtype=grad.dtype, device=grad.device)
    forbid_pointers(view)
    view.__dict__ = grad.__dict__  # an alias shares its content: grad.detach().mul_(0.5) scales grad
    return view


@_handles(aten.new_empty_strided.default)
def _new_empty_strided(func, grad, size, stride, **kwargs):
    # AccumulateGrad clones a gradient that others also hold by filling one of these
    if tuple(size) == tuple(grad.shape) and tuple(stride) == grad.stride():
        return FactoredGrad(grad.shape, grad.dtype, device=grad.device)
    return torch.empty_strided(size, stride, dtype=kwargs.get("dtype") or grad.dtype, device=grad.device)


@_handles(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
def _like(func, grad, **kwargs):
    make: Any = {aten.empty_like.default: torch.empty, aten.zeros_like.default: torch.zeros}.get(func, torch.ones)
    return make(grad.shape, dtype=kwargs.get("dtype") or grad.dtype, device=kwargs.get("device") or grad.device)


@_handles(aten.copy_.default)
def _copy(func, target, source, non_blocking=False):
    if isinstance(target, FactoredGrad):
        if isinstance(source, FactoredGrad):
            return target._take(source)
        target._become(source.expand(target.shape).to(target.device, target.dtype, copy=True))
        return target
    return target.copy_(source.to_dense(), non_blocking)


@_handles(aten.zero_.default)
def _zero(func, grad):
    return grad._take(FactoredGrad(grad.shape, grad.dtype, device=grad.device))


@_handles(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _scale_in_place(func, grad, other):
    if not isinstance(grad, FactoredGrad) or not is_scalar(other):
        return NotImplemented
    return grad._multiply(inverse(other) if func in (aten.div_.Tensor, aten.div_.Scalar) else other)


@_handles(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _scaled(func, grad, other):
    divides = func in (aten.div.Tensor, aten.div.Scalar)
    if not isinstance(grad, FactoredGrad) and not divides:
        grad, other = other, grad
    if not isinstance(grad, FactoredGrad) or not is_scalar(other):
        return NotImplemented
    return grad._copy()._multiply(inverse(other) if divides else other)


@_handles(aten.neg.default)
def _negated(func, grad):
    return grad._copy()._multiply(-1.0)


@_handles(aten.add.Tensor)
def _sum(func, a, b, *, alpha=1):
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or alpha != 1 or not alike(a, b):
        return NotImplemented
    first, second = (a, b) if isinstance(a, FactoredGrad) else (b, a)
    return first._copy()._add(second)  # type: ignore[attr-defined]


@_handles(aten.add_.Tensor)
def _sum_in_place(func, target, other, *, alpha=1):
    if not isinstance(other, torch.Tensor) or target.shape != other.shape or target.device != other.device:
        return NotImplemented
    if target.layout != other.layout or (other.is_complex() and not target.is_complex()):
        return NotImplemented
    if isinstance(target, FactoredGrad):
        return target._add(other) if alpha == 1 else NotImplemented
    # An ordinary gradient stays one: the pieces are added to it.
    for start, end, piece in other._chunks():  # type: ignore[attr-defined]
        target[start:end].add_(piece.to(target.dtype), alpha=alpha)
    return target


@_handles(aten.linalg_vector_norm.default)
def _vector_norm(func, grad, ord=2, dim=None, keepdim=False, *, dtype=None):
    if dim is not None and len(dim) not in (0, grad.dim()):
        return NotImplemented
    total = grad._vector_norm(float(ord), dtype)
    return total.reshape((1,) * grad.dim()) if keepdim else total


@_handles(aten.norm.Scalar, aten.norm.ScalarOpt_dtype)
def _norm(func, grad, p=2, dtype=None):
    return grad._vector_norm(float(2 if p is None else p), dtype)


@_handles(aten.isfinite.default, aten.isnan.default, aten.isinf.default)
def _check(func, grad):
    out = torch.empty(grad.shape, dtype=torch.bool, device=grad.device)
    for start, end, piece in grad._chunks():
        out[start:end] = func(piece)
    return out


# -- lists of gradients --------------------------------------------------------------------------------------------


_HANDLERS.update(_foreach.HANDLERS)


@_handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(func, grads, found_inf, inv_scale):
    """`GradScaler.unscale_`: a factored gradient is finite when its factors are; its scale takes the inverse scale."""
    dense = [g for g in grads if not isinstance(g, FactoredGrad)]
    if dense:
        func(dense, found_inf, inv_scale)
    for grad in grads:
        if isinstance(grad, FactoredGrad):
            flag = torch.zeros((), dtype=torch.int32, device=grad.device)
            torch.ops.forge.check_finite(grad.operands(), flag)
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.dtype).reshape(found_inf.shape)))
            grad._multiply(inv_scale)
