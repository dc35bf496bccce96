"""`FusedLinear`: an `nn.Linear` whose weight gradient is a `FactoredGrad`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fused_grad_optimizer.factored_grad import of_pair
from fused_grad_optimizer.modules._registry import factors_wanted, register_factored
from fused_grad_optimizer.ops import without_autocast

_any_autocast = torch._C._is_any_autocast_enabled
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # of a tensor that a transform has left behind


class _FactoredLinear(torch.autograd.Function):
    """y = x W^T + b; dW stays the factors (dY, X). Called as `(x, weight)` or `(x, weight, bias)`.

    `weight` may have another dtype than x (autocast): it is cast for each product, so no cast copy is kept.
    """

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight if weight.dtype is x.dtype else weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy):
        return _gradients(ctx, dy, False)


class _FactoredTransposedLinear(torch.autograd.Function):
    """y = x W + b, for a weight [in, out]; as `_FactoredLinear` otherwise."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight)
        return F.linear(x, (weight if weight.dtype is x.dtype else weight.to(x.dtype)).t(), bias)

    @staticmethod
    def backward(ctx, dy):
        return _gradients(ctx, dy, True)


# `Function.apply` without what it does for torch.func transforms, which takes longer than all the rest of it:
# `factors_wanted` is false in them.
_apply_linear = super(torch.autograd.Function, _FactoredLinear).apply
_apply_transposed = super(torch.autograd.Function, _FactoredTransposedLinear).apply


def _gradients(ctx, dy: torch.Tensor, transposed: bool) -> tuple[torch.Tensor | None, ...]:
    """Of x, the weight and, if there is one, the bias."""
    if _any_autocast() and torch.is_autocast_enabled(dy.device.type):
        with without_autocast(dy.device):
            return _gradients(ctx, dy, transposed)
    x, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad
    dx = dw = None
    if needed[0]:
        cast = weight if weight.dtype is dy.dtype else weight.to(dy.dtype)
        dx = torch.matmul(dy, cast.t() if transposed else cast)
    matrix = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    if needed[1]:
        if x.dim() != 2:
            x = x.reshape(-1, x.shape[-1])
        rows, columns = (x, matrix) if transposed else (matrix, x)
        if torch.is_grad_enabled():  # create_graph=True: the gradient needs a graph of its own
            dw = (rows.t() @ columns).to(weight.dtype)
        else:
            dw = of_pair(weight, rows, columns)
    if len(needed) == 2:
        return dx, dw
    return dx, dw, matrix.sum(0) if needed[2] else None


def factored_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False
) -> torch.Tensor:
    """x W^T + b (x W + b for `transposed`) with a factored gradient of `weight`.

    Follows autocast: x and bias are cast to its dtype and the weight for the product only, without autocast's cache,
    which would go stale when the weight is updated inside one autocast block. Sparse and nested x take the ordinary
    path: their gradient is no product of two matrices. So does x that is a parameter or a view of one (learned
    queries): its own update may come before that of the weight, whose gradient needs it as it was.
    """
    x = _unwrap_if_dead(x)
    base = x if x._base is None else x._base
    is_parameter = base.is_leaf and base.requires_grad and isinstance(base, nn.Parameter)  # isinstance is slow
    if is_parameter or x.layout is not torch.strided or x.is_nested:
        return F.linear(x, weight.t() if transposed else weight, bias)
    apply = _apply_transposed if transposed else _apply_linear
    autocast = _any_autocast() and torch.is_autocast_enabled(x.device.type)
    if autocast and x.dtype != torch.float64 and weight.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype is not weight.dtype:
        raise RuntimeError(f"expected input and weight of one dtype, but got {x.dtype} and {weight.dtype}")
    inputs = (x, weight) if bias is None else (x, weight, bias if bias.dtype is x.dtype else bias.to(x.dtype))
    if not autocast:
        return apply(*inputs)
    with without_autocast(x.device):
        return apply(*inputs)


# Dynamo cannot trace a backward that builds a FactoredGrad: compiled code breaks the graph here.
_factored_linear_uncompiled = torch.compiler.disable(factored_linear)


def _weight_and_bias(module: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attributes, without `nn.Module.__getattr__` where nothing but it would give them: a sixth of the time."""
    own = module.__dict__
    parameters = own["_parameters"]
    plain = type(module) is FusedLinear and "weight" not in own and "bias" not in own
    if plain and "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return module.weight, module.bias


class FusedLinear(nn.Linear):
    """An `nn.Linear` whose weight gets a factored gradient: same parameters, same forward bits, same state_dict.

    Made by `convert`, `fuse` or `from_linear`; a copy (deepcopy, unpickled) behaves as an ordinary `nn.Linear` until it
    is converted again. A frozen weight, `no_grad`, `torch.func` transforms and dual numbers take the ordinary path too.

    Example:
        >>> layer = FusedLinear(4, 2)
        >>> layer(torch.ones(3, 4)).sum().backward()
        >>> layer.weight.grad
        FactoredGrad(shape=(2, 4), dtype=torch.float32, pairs=1, tokens=3)
    """

    fused_config: dict[str, Any] | None = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        register_factored(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = _weight_and_bias(self)
        if not factors_wanted(weight):
            return F.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            return _factored_linear_uncompiled(input, weight, bias)
        return factored_linear(input, weight, bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, optimizer_type: str = "adamw", state_mode: str | None = "bf16", **hyper
    ) -> FusedLinear:
        """A FusedLinear that shares the parameters of `linear`, to be stepped by a `FusedOptimizerManager`.

        Args:
            linear: an `nn.Linear` (exactly that class) with a floating-point weight.
            optimizer_type: a rule: "adamw", "adam", "sgd" or "lion".
            state_mode: how states are kept: "bf16", "fp32", "bf16-nearest", or None for the weight's dtype.
            **hyper: hyper-parameters of this layer, with torch.optim's names.

        Raises:
            ValueError: an unknown rule, state mode or hyper-parameter, or a layer that is not a plain nn.Linear.
        """
        from fused_grad_optimizer._parameters import check_settings
        from fused_grad_optimizer.convert import reason_to_skip
        from fused_grad_optimizer.rules import get_rule
        from fused_grad_optimizer.storage import check_modes

        rule = get_rule(optimizer_type)
        check_modes(state_mode, None)
        for name in hyper:
            if name not in rule.defaults:
                raise ValueError(f"{name} is not a hyper-parameter of {optimizer_type}: {', '.join(rule.defaults)}")
        settings = check_settings(rule, {**rule.defaults, "seed": 0, **hyper})
        reason = reason_to_skip(linear) if isinstance(linear, nn.Linear) else f"it is a {type(linear).__name__}"
        if reason is not None:
            raise ValueError(f"from_linear needs a plain nn.Linear: {reason}")
        fused = cls.__new__(cls)
        fused.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in linear.__dict__.items()})
        kept = {name: settings[name] for name in hyper}
        fused.fused_config = {"optimizer_type": optimizer_type, "state_mode": state_mode, "hyper": kept}
        register_factored(fused.weight)
        return fused
