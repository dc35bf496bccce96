"""`FusedLinear`: an `nn.Linear` whose weight gradient is a `FactoredGrad`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.modules._registry import factors_wanted, register_factored
from fused_grad_optimizer.ops import without_autocast


class _FactoredLinear(torch.autograd.Function):
    """y = x W^T + b (or x W + b for `transposed`, a weight [in, out]); dW stays the factors (dY, X).

    `weight` may have another dtype than x (autocast): it is cast for each product, so no cast copy is kept.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, transposed):
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        cast = weight.to(x.dtype)
        return F.linear(x, cast.t() if transposed else cast, bias)

    @staticmethod
    def backward(ctx, dy):
        if not torch.is_autocast_enabled(dy.device.type):
            return _FactoredLinear.gradients(ctx, dy)
        with without_autocast(dy.device):
            return _FactoredLinear.gradients(ctx, dy)

    @staticmethod
    def gradients(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            cast = weight.to(dy.dtype)
            dx = F.linear(dy, cast if ctx.transposed else cast.t())
        if ctx.needs_input_grad[1]:
            rows, columns = (x, dy) if ctx.transposed else (dy, x)
            rows, columns = rows.reshape(-1, rows.shape[-1]), columns.reshape(-1, columns.shape[-1])
            if torch.is_grad_enabled():  # create_graph=True: the gradient needs a graph of its own
                dw = (rows.t() @ columns).to(weight.dtype)
            else:
                dw = FactoredGrad(weight.shape, weight.dtype, pairs=[(rows, columns)])
        if ctx.needs_input_grad[2]:
            db = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, dw, db, None


def factored_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False
) -> torch.Tensor:
    """`F.linear` with a factored weight gradient. x [..., in]; weight [out, in], or [in, out] if `transposed`.

    Follows autocast: x and bias are cast to its dtype and the weight for the product only, without autocast's cache,
    which would go stale when the weight is updated inside one autocast block.
    """
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind)
    if autocast and x.dtype != torch.float64 and weight.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    elif x.dtype != weight.dtype:
        raise RuntimeError(f"expected input and weight of one dtype, but got {x.dtype} and {weight.dtype}")
    if bias is not None:
        bias = bias.to(x.dtype)
    if not autocast:
        return _FactoredLinear.apply(x, weight, bias, transposed)
    with without_autocast(x.device):
        return _FactoredLinear.apply(x, weight, bias, transposed)


# Dynamo cannot trace a backward that builds a FactoredGrad: compiled code breaks the graph here.
_factored_linear_uncompiled = torch.compiler.disable(factored_linear)


class FusedLinear(nn.Linear):
    """An `nn.Linear` whose weight gets a factored gradient: same parameters, same forward bits, same state_dict.

    Made by `convert`, `fuse` or `from_linear`; a copy (deepcopy, unpickled) behaves as an ordinary `nn.Linear` until it
    is converted again. A frozen weight, `no_grad` and `torch.func` transforms take the ordinary path too.

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
        if not factors_wanted(self.weight):
            return F.linear(input, self.weight, self.bias)
        if torch.compiler.is_compiling():
            return _factored_linear_uncompiled(input, self.weight, self.bias)
        return factored_linear(input, self.weight, self.bias)

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
        from fused_grad_optimizer.convert import reason_to_skip
        from fused_grad_optimizer.rules import get_rule
        from fused_grad_optimizer.storage import check_modes

        rule = get_rule(optimizer_type)
        check_modes(state_mode, None)
        for name in hyper:
            if name not in rule.defaults:
                raise ValueError(f"{name} is not a hyper-parameter of {optimizer_type}: {', '.join(rule.defaults)}")
        rule.validate({**rule.defaults, **hyper})
        reason = reason_to_skip(linear) if isinstance(linear, nn.Linear) else f"it is a {type(linear).__name__}"
        if reason is not None:
            raise ValueError(f"from_linear needs a plain nn.Linear: {reason}")
        fused = cls.__new__(cls)
        fused.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in linear.__dict__.items()})
        fused.fused_config = {"optimizer_type": optimizer_type, "state_mode": state_mode, "hyper": dict(hyper)}
        register_factored(fused.weight)
        return fused
