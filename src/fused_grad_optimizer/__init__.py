"""FORGE: the optimizer step fused into the weight-gradient GEMM, so that the weight gradient never becomes a tensor.

Example:
    >>> import torch, fused_grad_optimizer as forge
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = forge.fuse(model, "adamw", lr=1e-3, weight_decay=0.1)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step(); optimizer.zero_grad()
"""

from fused_grad_optimizer.convert import ConversionReport, conversion_report, convert, fuse
from fused_grad_optimizer.explain import Explanation, explain
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.manager import FusedOptimizerManager
from fused_grad_optimizer.modules import FusedEmbedding, FusedLinear
from fused_grad_optimizer.optimizer import FusedOptimizer

__all__ = [
    "ConversionReport",
    "Explanation",
    "FactoredGrad",
    "FusedEmbedding",
    "FusedLinear",
    "FusedOptimizer",
    "FusedOptimizerManager",
    "conversion_report",
    "convert",
    "explain",
    "fuse",
]
__version__ = "0.1.0"
