"""`NoMemory`: the base of gradients that have a shape, a dtype and a device, but no elements in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# C functions that no dispatch reaches (DLPack, extensions that take pointers) then raise; they would follow a null.
forbid_pointers: Callable[[torch.Tensor], None] = getattr(
    torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None
)


class NoMemory(torch.Tensor):
    """Answers the functions of `torch.Tensor` that go to memory past `__torch_dispatch__`.

    Who makes one calls `forbid_pointers` on it.
    """

    def _elements(self, operation: str) -> torch.Tensor:
        """An ordinary tensor with the elements, for `operation`; or raises."""
        raise NotImplementedError

    def _without_memory(self, operation: str) -> RuntimeError:
        """The error of what needs an address."""
        return RuntimeError(
            f"{operation}: a {type(self).__name__} of shape {tuple(self.shape)} has no memory; give the dense tensor "
            "that .to_dense() makes"
        )

    def data_ptr(self) -> int:
        raise self._without_memory("data_ptr")

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty one, of its device."""
        return torch.UntypedStorage(0, device=self.device)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def numpy(self, *, force: bool = False) -> Any:
        return self._elements("numpy").numpy(force=force)

    def tolist(self) -> list:
        return self._elements("tolist").tolist()

    def apply_(self, function: Callable) -> NoMemory:
        self._elements("apply_").apply_(function)
        return self

    def map_(self, tensor: torch.Tensor, function: Callable) -> NoMemory:
        self._elements("map_").map_(tensor, function)
        return self

    def __dlpack__(self, *args, **kwargs):
        return self._elements("__dlpack__").__dlpack__(*args, **kwargs)
