"""`FusedEmbedding`: an `nn.Embedding` whose gradient is (ids, dY), never a [vocabulary, dim] tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.modules._registry import factors_wanted, register_factored


class _FactoredEmbedding(torch.autograd.Function):
    """W[ids]; the gradient of row v is the sum of dY over the places where ids == v."""

    @staticmethod
    def forward(ctx, ids, weight, padding_idx, scale_grad_by_freq):
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        ctx.padding_idx, ctx.scale_grad_by_freq = padding_idx, scale_grad_by_freq
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
        if torch.is_grad_enabled():  # create_graph=True
            dense = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.shape[0], padding_idx, ctx.scale_grad_by_freq)
            return None, dense, None, None
        ids = ids.reshape(-1).to(torch.int64, copy=True)  # a copy: input buffers are often refilled in place
        dy = dy.reshape(-1, ctx.shape[1])
        if ctx.scale_grad_by_freq:
            counts = torch.zeros(ctx.shape[0], dtype=torch.int64, device=ids.device)
            counts.index_add_(0, ids, torch.ones_like(ids))
            dy = dy / counts[ids].unsqueeze(1).to(dy.dtype)
        if ctx.padding_idx is not None:
            dy = dy.masked_fill((ids == padding_idx).unsqueeze(1), 0.0)
        return None, FactoredGrad(ctx.shape, ctx.dtype, rows=[(ids, dy)]), None, None


def _factored_embedding(ids, weight, padding_idx, scale_grad_by_freq):
    return _FactoredEmbedding.apply(ids, weight, padding_idx, scale_grad_by_freq)


_factored_embedding_uncompiled = torch.compiler.disable(_factored_embedding)


class FusedEmbedding(nn.Embedding):
    """An `nn.Embedding` whose weight gets a factored gradient; every row is stepped as a dense gradient would step it.

    `padding_idx` and `scale_grad_by_freq` work as in `nn.Embedding`; `max_norm` and `sparse=True` are left to it.

    Example:
        >>> layer = FusedEmbedding(10, 4)
        >>> layer(torch.tensor([1, 1, 2])).sum().backward()
        >>> layer.weight.grad.to_dense()[:3, 0].tolist()
        [0.0, 2.0, 1.0]
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        register_factored(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.max_norm is not None or self.sparse or not factors_wanted(self.weight):
            return super().forward(input)
        function = _factored_embedding_uncompiled if torch.compiler.is_compiling() else _factored_embedding
        return function(input, self.weight, self.padding_idx, self.scale_grad_by_freq)
