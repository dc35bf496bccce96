"""Two networks and two optimizers: the generator's pass does not move the discriminator, or says that it would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .helpers import BOTH, both, data, passes, snapshot, unchanged


def generator():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))


def discriminator():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def two_pairs(when, state="fp32"):
    g, og, g2, og2 = both(generator, when, state=state)
    d, od, d2, od2 = both(discriminator, when, state=state)
    return (g, d, og, od), (g2, d2, og2, od2)


def adversarial_step(g, d, og, od, i, freeze):
    z, real = data(i, 8, 4), data(9 + i, 8, 6)
    od.zero_grad()
    (d(g(z).detach()).square().mean() + (d(real) - 1).square().mean()).backward()
    od.step()
    og.zero_grad()
    if freeze:
        d.requires_grad_(False)
    (d(g(z)) - 1).square().mean().backward()
    og.step()
    d.requires_grad_(True)


@pytest.mark.parametrize("when, freeze", [("step", False), ("step", True), ("backward", True)])
def test_both_networks_equal_the_dense_pair(when, freeze):
    dense, fused = two_pairs(when)
    for i in range(4):
        for networks in (dense, fused):
            adversarial_step(*networks, i, freeze)
    assert passes(dense[0], fused[0], 4) and passes(dense[1], fused[1], 4)
    assert fused[3].state[fused[1][0].weight]["step"] == 4


def test_zero_grad_drops_the_factors_of_the_other_pass():
    _, (g, d, og, od) = two_pairs("step")
    d(g(data(0, 8, 4))).mean().backward()
    assert d[0].weight.grad is not None
    od.zero_grad()
    assert all(p.grad is None for p in d.parameters()) and all(p.grad is not None for p in g.parameters())
    before = snapshot(d)
    od.step()
    assert unchanged(d, before)


def test_updates_in_backward_refuse_to_be_dropped_and_name_the_remedy():
    """Without requires_grad_(False) the generator's pass moves the discriminator; the next zero_grad() says so."""
    _, (g, d, og, od) = two_pairs("backward")
    og.zero_grad()
    (d(g(data(0, 8, 4))) - 1).square().mean().backward()
    og.step()
    with pytest.raises(RuntimeError, match=r"0\.weight.*cannot be dropped.*requires_grad_\(False\)"):
        od.zero_grad()
    od.zero_grad()  # said once
    adversarial_step(g, d, og, od, 1, freeze=True)


def test_a_missing_zero_grad_is_noticed_at_the_next_backward():
    _, (g, d, og, od) = two_pairs("backward")
    d(g(data(0, 8, 4))).mean().backward()
    og.step()
    before = snapshot(d)
    with pytest.raises(RuntimeError, match="second backward before step.*when='step'"):
        d(g(data(1, 8, 4)).detach()).mean().backward()
    assert unchanged(d, before)


@BOTH
def test_a_frozen_discriminator_is_bit_unchanged_and_keeps_its_state(when):
    _, (g, d, og, od) = two_pairs(when, state="bf16")
    adversarial_step(g, d, og, od, 0, freeze=True)
    before, state = snapshot(d), {k: v.clone() for k, v in od.state_dict()["state"][0].items()}
    od.zero_grad()
    d.requires_grad_(False)
    (d(g(data(1, 8, 4))) - 1).square().mean().backward()
    og.step()
    od.step()
    assert unchanged(d, before)
    assert all(torch.equal(v, od.state_dict()["state"][0][k]) for k, v in state.items())
