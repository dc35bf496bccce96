"""Lion typed from Algorithm 2 of arXiv:2302.06675, in numpy: an oracle that shares no code with the library."""

from __future__ import annotations

import numpy as np


def lion_steps(weight, gradients, lr, beta1, beta2, weight_decay):
    """The weight after one step for each gradient, starting from zero momentum."""
    theta, m = np.array(weight, dtype=np.float64), np.zeros_like(np.asarray(weight, dtype=np.float64))
    for g in gradients:
        direction = np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        theta = theta - lr * (direction + weight_decay * theta)
    return theta
