"""`convert(model)` makes weight gradients factored, in place; `fuse(model, ...)` adds the optimizer."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from fused_grad_optimizer.modules import FusedEmbedding, FusedLinear
from fused_grad_optimizer.modules._registry import is_factored, register_factored

Exclude = Iterable[str] | Callable[[str, nn.Module], bool] | None


@dataclass
class ConversionReport:
    """What has factored gradients in a model, and what does not and why.

    Attributes:
        converted: module name -> class name.
        skipped: name of a module (linear-like or embedding) or of a parameter -> reason. These have ordinary gradients
            and are stepped all the same.
    """

    converted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} modules with factored gradients"]
        lines += [f"  {name or '(the model itself)'}: {kind}" for name, kind in self.converted.items()]
        lines.append(f"{len(self.skipped)} with ordinary gradients")
        lines += [f"  {name or '(the model itself)'}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def _fused_class(module: nn.Module) -> type[nn.Module] | None:
    """The class with factored gradients for a module of exactly this class, or None."""
    kind = type(module)
    if kind in (nn.Linear, FusedLinear):
        return FusedLinear
    if kind in (nn.Embedding, FusedEmbedding):
        return FusedEmbedding
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and (kind is transformers.Conv1D or kind.__name__ == "FusedConv1D"):
        from fused_grad_optimizer.modules.conv1d import FusedConv1D

        return FusedConv1D if kind in (transformers.Conv1D, FusedConv1D) else None
    return None


def reason_to_skip(module: nn.Module) -> str | None:
    """Why a linear, embedding or Conv1D module must keep ordinary gradients, or None if it can be converted."""
    weight = module._parameters.get("weight")
    if _fused_class(module) is None:
        return f"{type(module).__name__} is a subclass with code of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if weight is None:
        return "its weight is computed from other parameters"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialised yet; run a forward first"
    if type(weight) is not nn.Parameter and type(weight) is not torch.Tensor:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not floating point"
    if weight.numel() == 0:
        return "its weight has no elements"
    if not weight.is_contiguous():
        return "its weight is not contiguous"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm rewrites the weight in forward"
    if isinstance(module, nn.Embedding) and module.sparse:
        return "sparse=True asks for sparse gradients"
    return None


def _excluder(model: nn.Module, exclude: Exclude) -> Callable[[str, nn.Module], bool]:
    if exclude is None:
        return lambda name, module: False
    if callable(exclude):
        return exclude
    if isinstance(exclude, str):
        raise ValueError(f"exclude={exclude!r}: give a list of module names or patterns, or a function (name, module)")
    patterns = list(exclude)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"exclude: no module of the model matches {pattern!r}")
    return lambda name, module: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_candidate(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or _fused_class(module) is not None


def convert(model: nn.Module, exclude: Exclude = None) -> nn.Module:
    """Give the weights of linear layers, embeddings and GPT-2's Conv1D factored gradients. In place.

    Parameters, names, hooks, ties and `state_dict` keys stay what they are; only the class of the modules changes.
    `conversion_report(model)` says what was converted and what was left alone and why.

    Args:
        model: any module; a bare `nn.Linear` or `nn.Embedding` is converted itself.
        exclude: module names or `fnmatch` patterns (`["lm_head", "*.router"]`), or a function `(name, module) -> bool`.

    Returns:
        The same `model`.

    Raises:
        ValueError: `model` is not a module, or an `exclude` pattern matches nothing.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), exclude=["2"])
        >>> conversion_report(model).converted
        {'0': 'FusedLinear'}
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    excluded = _excluder(model, exclude)
    chosen = [
        module
        for name, module in model.named_modules()
        if _is_candidate(module) and not excluded(name, module) and reason_to_skip(module) is None
    ]
    for module in chosen:
        module.__class__ = _fused_class(module)
        register_factored(module.weight)
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """Which modules of the model have factored gradients now, and why the others have not."""
    report = ConversionReport()
    covered: set[int] = set()
    for name, module in model.named_modules():
        if not _is_candidate(module):
            continue
        weight = module._parameters.get("weight")
        if weight is not None and is_factored(weight) and reason_to_skip(module) is None:
            report.converted[name] = type(module).__name__
            covered.add(id(weight))
        else:
            report.skipped[name] = reason_to_skip(module) or "excluded, or not converted"
    inside = tuple(f"{name}." if name else "" for name in report.skipped)
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered and parameter.dim() > 1 and not name.startswith(inside or ("\0",)):
            report.skipped[name] = "used by a module that is neither a linear layer nor an embedding"
    return report
