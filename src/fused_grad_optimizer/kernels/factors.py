"""The operands of a weight gradient that is never formed, as every kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gradient:
    """`scale * (sum_i dY_i^T X_i + R) + dense`, a gradient [N, K] that exists only as its factors.

    Attributes:
        dys: output gradients, each [T_i, N].
        xs: inputs, each [T_i, K].
        row_map: int32 [N], for each row the row of `row_sums` that R holds there, or -1 (zero); None without R.
        row_sums: [U, K], the summed embedding gradients.
        scale: 0-d float tensor, or None for 1.
        dense: [N, K], a gradient that is a tensor, or None.
    """

    dys: list[torch.Tensor]
    xs: list[torch.Tensor]
    row_map: torch.Tensor | None = None
    row_sums: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    dense: torch.Tensor | None = None


@dataclass(frozen=True)
class Target:
    """What a step writes: a weight [N, K] (contiguous), its states of the same shape, and how each is stored.

    Attributes:
        weight: updated in place.
        states: updated in place, in the order of the update's `states`.
        storages: storage names, the weight's first.
        parameter: index of the parameter in its optimizer; chooses the random bits of stochastic rounding.
    """

    weight: torch.Tensor
    states: list[torch.Tensor]
    storages: list[str]
    parameter: int
