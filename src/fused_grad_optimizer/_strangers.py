"""Trainable parameters of a model that its optimizer does not step: added or replaced after the optimizer was made."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container

import torch
from torch import nn


class Strangers:
    """Looks for them in one model, kept weakly, and names each once.

    Attributes:
        model: a weak reference to the model, None when none is watched.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: weakref.ref[nn.Module] | None = weakref.ref(model) if model is not None else None
        self._known: set[int] = set()

    def warn(self, stepped: Container[torch.Tensor]) -> None:
        """Warn of those that are not among `stepped` and were not named before."""
        model = self.model() if self.model is not None else None
        if model is None:
            return
        found = []
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad or parameter in stepped:
                    continue
                if id(parameter) not in self._known:
                    self._known.add(id(parameter))
                    found.append((key, parameter))
        if found:
            names = {id(p): n for n, p in model.named_parameters()}
            listed = ", ".join(sorted({names.get(id(p), key) for key, p in found}))
            warnings.warn(
                f"the model has trainable parameters that this optimizer does not step: {listed}. They were added or "
                "replaced after it was made: call add_param_group, or release() and fuse() again",
                stacklevel=3,
            )
