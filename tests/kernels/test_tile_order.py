"""The order in which the Hopper kernel takes the tiles of a weight: its own function, run on Python's integers."""

from __future__ import annotations

import pytest

from fused_grad_optimizer.kernels import wgrad_step_hopper


@pytest.fixture
def order(monkeypatch):
    monkeypatch.setattr(wgrad_step_hopper, "_divide", divmod)

    def order(tiles, group):
        return [wgrad_step_hopper._tile_of.fn(i, tiles, group) for i in range(tiles[0] * tiles[1])]

    return order


def test_groups_of_rows_share_columns(order):
    assert order((3, 2), 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("tiles", [(1, 1), (5, 7), (8, 112), (33, 3)])
@pytest.mark.parametrize("group", [1, 4, 16, 1024])
def test_every_tile_has_its_turn(order, tiles, group):
    assert sorted(order(tiles, group)) == [(row, column) for row in range(tiles[0]) for column in range(tiles[1])]
