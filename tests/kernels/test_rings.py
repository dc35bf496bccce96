"""The barriers of the Hopper kernel in a model: every order in which its roles may run and TMA may complete loads.

The roles' programs are written out here once more, step by step; a barrier has a parity, arrivals to come and loads
under way, as an mbarrier has. A read must find what the writer meant for it, and no role may wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest

UPDATERS = 2


class Step(NamedTuple):
    """`wait` for a parity at a barrier, `arrive` there, `load` tagged slots through it, `read` or `write` a tag."""

    kind: str
    place: tuple
    value: object = None


@dataclass(frozen=True)
class Rings:
    """Sizes as in `HopperConfig`; `units` of a tile, `blocks` of a unit; `products` of a tile: its operand stages."""

    tiles: int = 3
    products: int = 2
    units: int = 2
    blocks: int = 4
    stages: int = 2
    slots: int = 2
    state_slots: int = 2

    def load_role(self) -> list[Step]:
        steps = []
        for i in range(self.tiles * self.products):
            stage = i % self.stages
            steps += [
                Step("wait", ("stage empty", stage), (i // self.stages & 1) ^ 1),
                Step("load", ("stage full", stage), ((("dY", stage), i), (("X", stage), i))),
            ]
        return steps

    def state_role(self) -> list[Step]:
        steps = []
        for i in range(self.tiles * self.units * self.blocks):
            slot = i % self.state_slots
            steps += [
                Step("wait", ("state empty", slot), (i // self.state_slots & 1) ^ 1),
                Step("load", ("state full", slot), ((("state", slot), i),)),
            ]
        return steps

    def mma_role(self) -> list[Step]:
        """A product reads its operands until the next one is issued."""
        steps: list[Step] = []

        def done(i: int) -> list[Step]:
            stage = i % self.stages
            return [Step("read", (name, stage), i) for name in ("dY", "X")] + [Step("arrive", ("stage empty", stage))]

        for tile in range(self.tiles):
            for t in range(self.products):
                i = tile * self.products + t
                stage = i % self.stages
                steps.append(Step("wait", ("stage full", stage), i // self.stages & 1))
                steps += [Step("read", (name, stage), i) for name in ("dY", "X")]
                steps += done(i - 1) if t > 0 else []
            steps += done((tile + 1) * self.products - 1)
            for unit in range(self.units):
                u = tile * self.units + unit
                steps += [
                    Step("wait", ("unit empty", u % self.slots), (u // self.slots & 1) ^ 1),
                    Step("write", ("unit", u % self.slots), u),
                    Step("arrive", ("unit full", u % self.slots)),
                ]
        return steps

    def update_role(self, updater: int) -> list[Step]:
        steps = []
        for u in range(self.tiles * self.units):
            steps.append(Step("wait", ("unit full", u % self.slots), u // self.slots & 1))
            for b in range(updater, self.blocks, UPDATERS):
                i = u * self.blocks + b
                slot = i % self.state_slots
                steps += [
                    Step("wait", ("state full", slot), i // self.state_slots & 1),
                    Step("read", ("state", slot), i),
                    Step("read", ("unit", u % self.slots), u),
                    Step("arrive", ("state empty", slot)),
                ]
                if b >= self.blocks - UPDATERS:
                    steps.append(Step("arrive", ("unit empty", u % self.slots)))
        return steps

    def programs(self) -> list[list[Step]]:
        return [self.load_role(), self.state_role(), self.mma_role(), *map(self.update_role, range(UPDATERS))]


Barrier = tuple[int, int, int]  # parity of its phase, arrivals to come, loads under way


def settled(barrier: Barrier, expected: int) -> Barrier:
    parity, arrivals, loads = barrier
    assert arrivals >= 0, "one arrival too many"
    return (parity ^ 1, expected, 0) if arrivals == loads == 0 else barrier


def fault(rings: Rings, most: int = 300_000) -> str | None:
    """A wrong read or a deadlock in any order of steps, among the first `most` states; None if there is none."""
    programs = rings.programs()
    barriers = sorted({s.place for p in programs for s in p if s.kind in ("wait", "arrive", "load")})
    expected = {place: UPDATERS if place[0] == "unit empty" else 1 for place in barriers}
    start = ((0,) * len(programs), tuple((place, (0, expected[place], 0)) for place in barriers), (), ())
    seen, todo = {start}, [start]
    while todo and len(seen) < most:
        at, kept, contents, flying = todo.pop()
        state, memory = dict(kept), dict(contents)
        followers = []

        def reached(at, changed=None, written=(), flying=flying, state=state, memory=memory, into=followers):
            into.append((at, tuple(sorted({**state, **(changed or {})}.items())),
                         tuple(sorted({**memory, **dict(written)}.items())), flying))  # fmt: skip

        for role, program in enumerate(programs):
            if at[role] == len(program):
                continue
            kind, place, value = program[at[role]]
            after = (*at[:role], at[role] + 1, *at[role + 1 :])
            if kind == "wait":
                if state[place][0] != value:  # the phase of this parity is over
                    reached(after)
            elif kind == "read":
                if memory.get(place) != value:
                    return f"{place} holds {memory.get(place)}, and {value} is read"
                reached(after)
            elif kind == "write":
                reached(after, written={place: value})
            else:
                parity, arrivals, loads = state[place]
                loading = value if kind == "load" else ()
                changed = {place: settled((parity, arrivals - 1, loads + len(loading)), expected[place])}
                overwritten = {slot: None for slot, _ in loading}
                reached(after, changed, overwritten, tuple(sorted(flying + tuple((place, *load) for load in loading))))
        for k, (place, slot, tag) in enumerate(flying):
            parity, arrivals, loads = state[place]
            changed = {place: settled((parity, arrivals, loads - 1), expected[place])}
            reached(at, changed, {slot: tag}, (*flying[:k], *flying[k + 1 :]))
        if not followers and any(i < len(p) for i, p in zip(at, programs)):
            return f"deadlock at {[p[i] if i < len(p) else 'end' for i, p in zip(at, programs)]}"
        for follower in followers:
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)
    return None


@pytest.mark.parametrize("state_slots", [2, 4])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("products, stages", [(1, 2), (2, 3)])
def test_no_order_of_steps_is_wrong(products, stages, slots, state_slots):
    rings = Rings(products=products, stages=stages, slots=slots, state_slots=state_slots, blocks=2)
    assert fault(rings, 40_000) is None


@pytest.mark.parametrize("state_slots", [1, 3])
def test_an_odd_number_of_state_slots_lets_a_wait_pass_early(state_slots):
    assert "is read" in str(fault(Rings(state_slots=state_slots)))


def test_one_operand_stage_is_never_free():
    assert "deadlock" in str(fault(Rings(stages=1)))


def test_each_updater_has_blocks_in_every_unit():
    assert "deadlock" in str(fault(Rings(blocks=1)))
