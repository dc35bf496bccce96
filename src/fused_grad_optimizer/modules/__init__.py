"""Modules whose weights get factored gradients."""

from fused_grad_optimizer.modules.embedding import FusedEmbedding
from fused_grad_optimizer.modules.linear import FusedLinear

__all__ = ["FusedEmbedding", "FusedLinear"]
