"""`FusedConv1D`: GPT-2's `Conv1D` (y = x W + b, W [in, out]) with a factored weight gradient. Needs transformers."""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from fused_grad_optimizer.modules._registry import factors_wanted
from fused_grad_optimizer.modules.linear import _factored_linear_uncompiled, factored_linear


class FusedConv1D(Conv1D):
    """A transformers `Conv1D` whose weight gets a factored gradient; made by `convert` or `fuse`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not factors_wanted(weight):
            return super().forward(x)
        function = _factored_linear_uncompiled if torch.compiler.is_compiling() else factored_linear
        return function(x, weight, self.bias, True)
