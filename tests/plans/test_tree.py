"""From schedules to nested segments and back: golden traces, errors, and random plans that are run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from handmade import COUNTS, actions_of, keep, replay, segment
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planning.problems import budgets_between, small_problems
from torch import Tensor, nn

from recoup import planning
from recoup.engines import Leaf, Segment, tree_of
from recoup.engines.running import PlannedCall, Run
from recoup.errors import ScheduleError
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import Backward, Drop, Forward, Keep, Problem, Schedule
from recoup.planning.actions import Value
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.select import SelectSolver
from recoup.plans.tree import Item


def read(trace: str) -> Schedule:
    """A schedule from its trace; a backward without an option of its own runs under option 0."""
    actions: list[planning.Action] = []
    for word in trace.split():
        kind, digits, rest = word[0], word[1], word[2:]
        unit = int(digits)
        if kind == "B":
            actions.append(Backward(unit, option=int(rest[1:] or 0)))
        elif rest.startswith(":"):
            actions.append(Forward(unit, keep=Keep.OPTION, option=int(rest[1:])))
        else:
            actions.append(Forward(unit, keep=Keep.INPUT if rest == "i" else Keep.NOTHING))
    return Schedule(actions)


GOLDEN = {
    "everything kept": ("F0:0 F1:0 F2:0 B2 B1 B0", keep(0, 1, 2)),
    "options": ("F0:2 F1:0 F2:1 B2:1 B1 B0:2", [Leaf(0, 2), Leaf(1, 0), Leaf(2, 1)]),
    "one segment": ("F0 F1 F2:0 B2 F0:0 F1:0 B1 B0", [segment(keep(0, 1)), *keep(2)]),
    "two segments in a row": (
        "F0 F1 F2i F3 F4:0 B4 F2:0 F3:0 B3 B2 F0:0 F1:0 B1 B0",
        [segment(keep(0, 1)), segment(keep(2, 3)), *keep(4)],
    ),
    "a segment of one": ("F0i F1:0 B1 F0:0 B0", [segment(keep(0)), *keep(1)]),
    "a segment to the end": ("F0:0 F1i F2 F1:0 F2:0 B2 B1 B0", [*keep(0), segment(keep(1, 2))]),
    "only the input kept": (
        "F0 F1 F2:0 B2 F0 F1:0 B1 F0:0 B0",
        [segment(segment(keep(0)), keep(1)), *keep(2)],
    ),
    "nested in the middle": (
        "F0 F1 F2 F3 F4:0 B4 F0:0 F1i F2 F3:0 B3 F1:0 F2:0 B2 B1 B0",
        [segment(keep(0), segment(keep(1, 2)), keep(3)), *keep(4)],
    ),
    "nested three deep": (
        "F0 F1 F2 F3:0 B3 F0 F1 F2:0 B2 F0 F1:0 B1 F0:0 B0",
        [segment(segment(segment(keep(0)), keep(1)), keep(2)), *keep(3)],
    ),
    "closes directly": ("F0 F1 F2:0 B2 F0:0 B1:1 B0", [segment(keep(0), replay(1)), *keep(2)]),
    "a unit alone closes directly": ("F0i F1:0 B1 B0:1", [*replay(0), *keep(1)]),
}


@pytest.mark.parametrize(("trace", "items"), GOLDEN.values(), ids=GOLDEN)
def test_golden(trace: str, items: list[Item]) -> None:
    schedule = read(trace)
    num_units = 1 + max(action.unit for action in schedule)
    assert tree_of(schedule, num_units) == tuple(items)


@pytest.mark.parametrize(
    ("trace", "num_units", "message"),
    [
        ("F0:0 B0 F0:0", 1, r"Action 2 \(F0:0\): an eager model runs persistent schedules"),
        ("F0:0 F1:0 B1", 2, r"Action 3 \(the end\)"),
        ("F0:0 F1:0 B0 B1", 2, r"Action 2 \(B0\)"),
        ("F1:0 F0:0 B1 B0", 2, r"Action 0 \(F1:0\)"),
        ("F0:0 F0:0 F1:0 B1 B0", 2, r"Action 1 \(F0:0\)"),
        ("F0:0 B0 B1", 2, r"Action 1 \(B0\)"),
        ("", 1, r"Action 0 \(the end\)"),
    ],
)
def test_what_is_no_persistent_schedule(trace: str, num_units: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        tree_of(read(trace), num_units)


def test_moves_and_drops_are_for_others() -> None:
    schedule = Schedule([*read("F0:0 F1:0 B1").actions, Drop(0, value=Value.HELD)])
    with pytest.raises(ScheduleError, match=r"Action 3 \(D0h\).*forwards and backwards only"):
        tree_of(schedule, 2)


# Random trees and random plans


@st.composite
def trees(draw: st.DrawFn, first: int = 0, max_depth: int = 3) -> list[Item]:
    items: list[Item] = []
    unit = first
    for _ in range(draw(st.integers(1, 4))):
        if max_depth and draw(st.booleans()):
            item: Item = segment(draw(trees(unit, max_depth - 1)))
        else:
            item = Leaf(unit, draw(st.integers(0, 1)))
        items.append(item)
        unit = item.last + 1
    return items


@given(trees())
def test_a_tree_is_read_back_from_its_schedule(items: list[Item]) -> None:
    assert list(tree_of(Schedule(actions_of(items)), items[-1].last + 1)) == items


class Layer(nn.Module):
    """Counts its forwards, and draws random numbers."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.unit, self.scale = unit, nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        COUNTS[str(self.unit)] += 1
        return torch.tanh(x * self.scale) + x * torch.rand(3)


def gradients(layers: Sequence[Layer], items: Sequence[Item]) -> list[Tensor]:
    """Of the layers' weights, run under a tree; option 0 keeps, all others recompute."""
    for layer in layers:
        layer.scale.grad = None
    COUNTS.clear()
    torch.manual_seed(5)
    run = Run(items, {unit: [KEEP, *[RECOMPUTE] * 5] for unit in range(len(layers))})
    x = torch.linspace(-1, 1, 3).requires_grad_()
    for unit, layer in enumerate(layers):
        x = run(PlannedCall(unit, layer, layer.forward), x)
    x.sum().backward()
    return [layer.scale.grad for layer in layers]


def units_of(items: Sequence[Item]) -> Iterator[int]:
    for item in items:
        if isinstance(item, Segment):
            assert item.first == item.items[0].first
            assert item.last == item.items[-1].last
            yield from units_of(item.items)
        else:
            yield item.unit


def replays(items: Sequence[Item]) -> Counter[int]:
    """How often each unit runs again: a segment's replay stops where nothing more is wanted from it.

    That is before its last unit, if this is recomputed on its own, or before the segment that it ends with.
    """
    found: Counter[int] = Counter()
    for item in items:
        if isinstance(item, Leaf):
            found[item.unit] += item.option > 0
            continue
        end = item.items[-1]
        stop = end.first if isinstance(end, Segment) or end.option > 0 else end.last + 1
        found.update(range(item.first, stop))
        found.update(replays(item.items))
    return found


@settings(max_examples=60, deadline=None)
@given(trees())
def test_random_trees_give_the_plain_gradients(items: list[Item]) -> None:
    torch.manual_seed(1)
    layers = list(map(Layer, units_of(items)))
    plain = gradients(layers, keep(*range(len(layers))))
    assert set(COUNTS.values()) == {1}
    planned = gradients(layers, items)
    assert {unit: COUNTS[str(unit)] - 1 for unit in replays(items)} == replays(items)
    for unit, (expected, found) in enumerate(zip(plain, planned, strict=True)):
        assert torch.equal(expected, found), unit


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(small_problems(max_units=6), st.integers(0, 4))
def test_plans_run_as_predicted(problem: Problem, position: int) -> None:
    # These layers keep something under the first option, and replay under every other one.
    assume(all(unit.options[0].needs_forward for unit in problem.units))
    assume(all(option.extra_s > 0 for unit in problem.units for option in unit.options[1:]))
    low = planning.minimum_budget(problem, solvers=(ChainSolver(), SelectSolver()))
    high = max(
        low, planning.plan(problem, 10**9, solvers=(ChainSolver(), SelectSolver())).predicted.peak_bytes
    )
    budgets = budgets_between(low, high)
    found = planning.plan(problem, budgets[position % len(budgets)], solvers=(ChainSolver(), SelectSolver()))
    items = tree_of(found.schedule, problem.num_units)
    assert list(units_of(items)) == list(range(problem.num_units))
    torch.manual_seed(1)
    layers = list(map(Layer, range(problem.num_units)))
    plain = gradients(layers, keep(*range(len(layers))))
    planned = gradients(layers, items)
    assert all(torch.equal(*pair) for pair in zip(plain, planned, strict=True))
    closing = Counter(closers(items))
    for unit, predicted in enumerate(found.predicted.num_recomputes):
        num_replays = COUNTS[str(unit)] - 1
        assert num_replays <= predicted, unit
        # What a segment's replay need not run to its end is known to the engine only.
        assert predicted - num_replays <= closing[unit], unit


def closers(items: Sequence[Item]) -> Iterator[int]:
    """The units that end a segment and are recomputed on their own."""
    for item in items:
        if isinstance(item, Segment):
            if isinstance(item.items[-1], Leaf) and item.items[-1].option > 0:
                yield item.items[-1].unit
            yield from closers(item.items)
