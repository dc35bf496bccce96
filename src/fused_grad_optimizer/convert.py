"""`convert(model)` makes weight gradients factored, in place; `fuse(model, ...)` adds the optimizer."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fused_grad_optimizer._messages import shown
from fused_grad_optimizer._parameters import group_of, listed
from fused_grad_optimizer.modules import FusedEmbedding, FusedLinear
from fused_grad_optimizer.modules._registry import is_factored, register_factored
from fused_grad_optimizer.optimizer import FusedOptimizer

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
    if callable(exclude) and not isinstance(exclude, (type, nn.Module)):
        return exclude
    if isinstance(exclude, (str, type, nn.Module)) or not isinstance(exclude, Iterable):
        raise ValueError(
            f"exclude={shown(exclude)}: give a list of module names or patterns, or a function (name, module)"
        )
    patterns = list(exclude)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"exclude: {shown(pattern)} is not a name or pattern; a function (name, module) can look at more"
            )
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"exclude: no module of the model matches {pattern!r}")
    return lambda name, module: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_candidate(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or _fused_class(module) is not None


def convertible(model: nn.Module, exclude: Exclude = None) -> list[Any]:
    """The modules of the model to which `convert` gives factored gradients, or gave them; nothing is changed.

    Raises:
        ValueError: an `exclude` pattern matches nothing.
    """
    excluded = _excluder(model, exclude)
    return [
        module
        for name, module in model.named_modules()
        if _is_candidate(module) and not excluded(name, module) and reason_to_skip(module) is None
    ]


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
    for module in convertible(model, exclude):
        module.__class__ = _fused_class(module)
        register_factored(module.weight)
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """Which modules of the model have factored gradients now, and why the others have not."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
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


def fuse(
    model: nn.Module,
    rule: str = "adamw",
    *,
    when: str = "backward",
    state: str | None = None,
    weight: str | None = None,
    param_groups: Iterable | None = None,
    exclude: Exclude = None,
    seed: int = 0,
    **hyper: Any,
) -> FusedOptimizer:
    """Convert `model` in place and return the optimizer that steps all its parameters.

    Args:
        model: any module; linear layers, embeddings and GPT-2's Conv1D get factored gradients.
        param_groups: groups as for torch.optim, default one group of all parameters.
        exclude: modules to leave with ordinary gradients, see `convert`. They are stepped all the same.
        rule, when, state, weight, seed, **hyper: see `FusedOptimizer`.

    Returns:
        The optimizer; its `report` says what was converted and what was not and why.

    Raises:
        ValueError: as `FusedOptimizer` and `convert` do; an error leaves the optimizer unmade.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = fuse(model, "adamw", lr=1e-3)
        >>> model(torch.ones(3, 4)).sum().backward()   # the weights move here
        >>> optimizer.step(); optimizer.zero_grad()
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not any(True for _ in model.parameters()):
        raise ValueError("model has no parameters")
    names: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters()}
    groups = list(model.named_parameters()) if param_groups is None else _named_groups(param_groups, names)
    optimizer = FusedOptimizer(groups, rule, when=when, state=state, weight=weight, seed=seed, **hyper)
    try:
        convert(model, exclude)
    except BaseException:
        optimizer.release()
        raise
    optimizer.report = conversion_report(model)
    optimizer.watch(model)
    return optimizer


def _named_groups(param_groups: Iterable, names: dict[torch.Tensor, str]) -> list:
    """The same groups with the model's names, so that messages can name parameters."""

    def named(group):
        pairs = enumerate(group["params"])
        return {**group, "params": [(n or names.get(p, f"parameter {i}"), p) for i, (n, p) in pairs]}

    groups = listed(param_groups, "param_groups")
    if groups and isinstance(groups[0], dict):
        return [named(group_of(group, "param_groups")) for group in groups]
    return named(group_of({"params": groups}, "param_groups"))["params"]
