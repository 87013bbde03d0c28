from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recoup.measuring.unit.one_unit import CallBytes, CallSeconds
from recoup.measuring.unit.recipes import Effort, large_behaviours, promising_recipes, useful_recipes
from recoup.model.recipe import KEEP, RECOMPUTE, Recipe


def test_large_kinds_in_all_or_in_a_call() -> None:
    blocks = [("block", 30)] * 30
    assert large_behaviours([*blocks, ("first", 15), ("norm", 14)]) == {"block", "first"}
    # Of many that are all unlike, the largest.
    unlike = [(index, 100 + index) for index in range(30)]
    assert large_behaviours(unlike) == set(range(22, 30))
    assert large_behaviours([("leaf", 0), ("leaf", 0)]) == large_behaviours([]) == frozenset()


def test_single_calls_do_not_make_others_less_thorough() -> None:
    def seen(behaviour: str, size: int) -> Any:
        return SimpleNamespace(behaviour=behaviour, kind=behaviour, saved_inside={"up": size})

    alone = Effort.for_calls([seen("block", 30)] * 30)
    beside = Effort.for_calls([seen("first", 31), *[seen("block", 30)] * 30, seen("last", 20)])
    assert (beside.num_partial, beside.repeats) == (alone.num_partial, alone.repeats) == (4, 3)
    assert beside.large == {"first", "block", "last"}


def test_a_unit_with_nothing_inside() -> None:
    assert promising_recipes({}, {}) == [KEEP, RECOMPUTE]


def test_the_most_bytes_for_a_second_come_first() -> None:
    saved, seconds = {"a": 100, "b": 90, "c": 10}, {"a": 5.0, "b": 1.0, "c": 0.1}
    # 20, 90 and 100 bytes for a second.
    assert promising_recipes(saved, seconds)[2:] == [
        Recipe(inner=("c",)),
        Recipe(inner=("c", "b")),
        Recipe(inner=("c", "b", "a")),
        Recipe(whole=True, inner=("c", "b", "a")),
    ]


def test_what_saves_hardly_anything_is_left_out() -> None:
    assert promising_recipes({"a": 1000, "b": 20}, {"a": 1.0, "b": 1.0})[2:] == [Recipe(inner=("a",))]
    assert len(promising_recipes({"a": 1000, "b": 21}, {"a": 1.0, "b": 1.0})[2:]) == 3


@pytest.mark.parametrize(("count", "kept"), [(4, [1, 2, 3, 4]), (7, [1, 3, 5, 7]), (12, [1, 5, 8, 12])])
def test_no_more_than_four_steps_between(count: int, kept: list[int]) -> None:
    saved = {f"m{index}": 100 for index in range(count)}
    seconds = {f"m{index}": 1.0 + index for index in range(count)}
    partial = [recipe for recipe in promising_recipes(saved, seconds) if recipe.inner and not recipe.whole]
    assert [len(recipe.inner) for recipe in partial] == kept


def test_noise_does_not_make_a_second_replay_faster_than_the_first() -> None:
    twice = Recipe(whole=True, inner=("a", "b"))
    sizes = {
        KEEP: CallBytes(300, 100, 200, (False,), 400, (True,)),
        RECOMPUTE: CallBytes(200, 100, 0, (False,), 600, (True,)),
        twice: CallBytes(200, 100, 0, (False,), 500, (True,)),
    }
    seconds = {KEEP: CallSeconds(2.0, 4.0), RECOMPUTE: CallSeconds(9.0, 1.0), twice: CallSeconds(2.5, 4.0)}
    useful = useful_recipes(sizes, seconds, {"a": 0.5, "b": 1.5})
    # A replay takes at least a quarter of the forward: of the whole unit, and then of the modules inside it.
    assert [(option.recipe, option.seconds) for option in useful] == [
        (KEEP, CallSeconds(2.0, 4.0)),
        (RECOMPUTE, CallSeconds(2.5, 4.5)),
        (twice, CallSeconds(2.5, 5.0)),
    ]


def test_a_recipe_in_a_replay_costs_what_that_was_measured_to_cost() -> None:
    part, parts = Recipe(inner=("a",)), Recipe(inner=("a", "b"))
    twice = Recipe(whole=True, inner=parts.inner)
    times = {KEEP: (2.0, 4.0), part: (2.1, 5.0), parts: (2.2, 6.0), RECOMPUTE: (2.5, 7.0), twice: (2.5, 12.0)}
    # Each holds less than the one before it, and needs more in its backward.
    sizes = {
        recipe: CallBytes(300, 100, 200 - 50 * index, (False,), 400 + 10 * index, (True,))
        for index, recipe in enumerate(times)
    }
    seconds = {recipe: CallSeconds(*pair) for recipe, pair in times.items()}
    again = {option.recipe: option.seconds.replay_overhead_s for option in useful_recipes(sizes, seconds, {})}
    assert again == pytest.approx(
        {
            KEEP: 7.0 - 4.0 - 0.999 * 2.0,
            part: 7.0 - 4.0 - 0.999 * 2.0,  # not measured: as for keeping
            parts: 12.0 - 6.0 - 0.999 * 2.2,
            RECOMPUTE: 0.0,
            twice: 0.0,
        }
    )


def test_what_a_replay_takes_beyond_its_forward_it_takes_in_a_segment_too() -> None:
    sizes = {
        KEEP: CallBytes(300, 100, 200, (False,), 400, (True,)),
        RECOMPUTE: CallBytes(200, 100, 0, (False,), 600, (True,)),
    }
    seconds = {KEEP: CallSeconds(2.0, 4.0), RECOMPUTE: CallSeconds(2.0, 9.0)}
    keep, recompute = useful_recipes(sizes, seconds, {})
    assert recompute.seconds == CallSeconds(2.0, 9.0)
    # A little more than the rest: else the planner might run the forward again by itself, and then the backward.
    assert keep.seconds == CallSeconds(2.0, 4.0, 9.0 - 4.0 - 0.999 * 2.0)
