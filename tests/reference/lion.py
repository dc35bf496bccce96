"""Lion as a torch.optim.Optimizer, typed from Algorithm 2 of arXiv:2302.06675: an oracle apart from the library."""

from __future__ import annotations

import torch


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum.

    c = beta1 m + (1 - beta1) g;  theta = theta - lr (sign(c) + weight_decay theta);  m = beta2 m + (1 - beta2) g
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for theta in group["params"]:
                if theta.grad is None:
                    continue
                m = self.state[theta].setdefault("exp_avg", torch.zeros_like(theta))
                direction = torch.sign(beta1 * m + (1 - beta1) * theta.grad)
                theta.copy_(theta - group["lr"] * (direction + group["weight_decay"] * theta))
                m.copy_(beta2 * m + (1 - beta2) * theta.grad)
        return loss
