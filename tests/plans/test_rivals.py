"""Who races against a plan, on hand-made profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_subjects import make_profile

from recoup.errors import BudgetError
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import Problem
from recoup.plans.by_hand import plan_by_hand, recomputing, usual_plans
from recoup.plans.model_plan import minimum_budget, plan, plan_with_less
from recoup.plans.profile import Profile
from recoup.plans.rivals import plan_with_rivals, rivals_of
from recoup.sizes import format_bytes

PROFILE = make_profile(8)
MIDDLE = (minimum_budget(PROFILE) + PROFILE.plain_bytes) // 2


def test_the_plan_for_a_smaller_budget_fits_the_larger() -> None:
    """Else a smaller budget could be faster than a larger one."""
    less_bytes = MIDDLE - (MIDDLE - PROFILE.residents.total_bytes) // 8
    chosen, rivals = plan_with_rivals(PROFILE, MIDDLE)
    assert chosen == plan(PROFILE, MIDDLE)
    smaller = dict(rivals)[f"the plan for {format_bytes(less_bytes)}"]
    assert smaller.items == plan(PROFILE, less_bytes).items != chosen.items
    assert smaller.budget_bytes == MIDDLE
    assert all(rival.predicted_bytes <= MIDDLE for _, rival in rivals)


def test_below_the_smallest_budget_there_is_no_such_plan() -> None:
    smallest = minimum_budget(PROFILE)
    chosen, smaller = plan_with_less(PROFILE, smallest, smallest - 1)
    assert chosen == plan(PROFILE, smallest)
    assert smaller is None
    with pytest.raises(BudgetError, match="does not fit"):
        plan_with_rivals(PROFILE, smallest - 1)


def test_small_units_are_not_recomputed_by_hand() -> None:
    """The embedding saves 1 MiB; blocks save 8 and 10."""
    small = make_profile(8, embed_mib=0.5)
    (_, every), *_ = reversed(usual_plans(small, MIDDLE))
    recipes = [every.recipe(leaf) for leaf in every.items]
    assert recipes == [KEEP, *[RECOMPUTE] * 8, KEEP, KEEP]


def test_on_a_gpu_recomputing_every_unit_races_where_it_nearly_fits() -> None:
    """Real steps there may take a little less than predicted; with a budget a little smaller, nothing by hand fits."""
    on_gpu = replace(PROFILE, device="cuda:0 (one)")
    every = plan_by_hand(PROFILE, recomputing(PROFILE, range(10)))
    nearly = every.predicted_bytes * 995 // 1000
    assert nearly > minimum_budget(PROFILE)
    assert usual_plans(PROFILE, nearly) == []
    ((name, found),) = usual_plans(on_gpu, nearly)
    assert name == "recompute every large unit"
    assert found.predicted_bytes > found.budget_bytes == nearly
    assert usual_plans(on_gpu, every.predicted_bytes * 985 // 1000) == []


def test_rivals_are_few_and_not_far_behind() -> None:
    chosen = plan(PROFILE, MIDDLE)
    names = [name for name, _ in usual_plans(PROFILE, MIDDLE)]
    assert names == ["recompute the first 7 large units", "recompute every large unit"]
    needed = [
        plan_by_hand(PROFILE, recomputing(PROFILE, range(count))).predicted_bytes for count in range(10)
    ]
    assert [size <= MIDDLE for size in needed] == [False] * 7 + [True] * 3
    assert all(rival.predicted_s <= 1.15 * chosen.predicted_s for _, rival in rivals_of(chosen))
    assert len(plan_with_rivals(PROFILE, MIDDLE)[1]) <= 2
    slower = dict(usual_plans(PROFILE, MIDDLE))["recompute every large unit"]
    assert rivals_of(slower, [("the same", slower)]) == rivals_of(slower)


def test_long_steps_are_not_raced() -> None:
    """Its seconds a thousand times as long."""

    def longer(profile: Profile) -> Profile:
        units = [
            replace(
                unit,
                options=tuple(
                    replace(
                        o, forward_s=1e3 * o.forward_s, backward_s=1e3 * o.backward_s, extra_s=1e3 * o.extra_s
                    )
                    for o in unit.options
                ),
            )
            for unit in profile.problem.units
        ]
        return replace(profile, problem=Problem(units, values=profile.problem.values))

    assert plan_with_rivals(PROFILE, MIDDLE)[1]
    assert plan_with_rivals(longer(PROFILE), MIDDLE)[1] == []


def test_a_usual_plan_round_trips() -> None:
    for _, made in usual_plans(PROFILE, MIDDLE):
        assert type(made).from_json(made.to_json()) == made
        assert made.schedule.solver == "by hand"
    assert recomputing(PROFILE, []) == PROFILE.plain_schedule
