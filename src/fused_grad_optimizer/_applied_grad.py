"""`AppliedGrad`: what stands in `.grad` of a parameter that backward has updated."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from fused_grad_optimizer._no_memory import NoMemory, forbid_pointers


class AppliedGrad(NoMemory):
    """Stands in `p.grad` after an update in backward: any use of it is an error that says what to do instead."""

    parameter_name: str

    @staticmethod
    def __new__(
        cls,
        parameter: torch.Tensor,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> AppliedGrad:
        dtype, device = dtype or parameter.dtype, device or parameter.device
        self = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=dtype, device=device
        )
        forbid_pointers(self)
        self.parameter_name = name
        return self

    def __init__(self, *args) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AppliedGrad({self.parameter_name!r}: the gradient was already applied during backward)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo) -> None:
        return None

    def __reduce_ex__(self, protocol):
        return _rebuild, (self.parameter_name, tuple(self.shape), self.stride(), self.dtype, self.device)

    def share_memory_(self) -> AppliedGrad:
        return self  # there is none

    def is_shared(self) -> bool:
        return True  # as share_memory_() leaves it: nothing is missing

    def _elements(self, operation: str) -> torch.Tensor:
        raise self._without_memory(operation)

    def _without_memory(self, operation: str) -> RuntimeError:
        return RuntimeError(
            f"{operation}: the gradient of {self.parameter_name!r} was already applied during backward "
            "(when='backward'). Clipping, gradient norms and a second backward before step() need when='step'. "
            "With a FusedOptimizerManager, call pre_step() before each backward."
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten._to_copy.default:  # the model moves to another dtype or device, and this mark with it
            kwargs = kwargs or {}
            return AppliedGrad(args[0], args[0].parameter_name, kwargs.get("dtype"), kwargs.get("device"))
        found = [a for a in tree_leaves((args, kwargs)) if isinstance(a, AppliedGrad)]
        raise found[0]._without_memory(str(func))


def _rebuild(name, shape, strides, dtype, device) -> AppliedGrad:
    return AppliedGrad(torch.empty_strided(shape, strides, device="meta"), name, dtype, device)
