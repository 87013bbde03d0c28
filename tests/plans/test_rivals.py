"""Who races against a plan, on hand-made profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_subjects import make_profile

from recoup.errors import BudgetError
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import Problem
from recoup.plans.by_hand import plan_by_hand, recomputing, usual_plan
from recoup.plans.model_plan import ModelPlan, minimum_budget, plan, plan_with_less
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
    every = plan_by_hand(small, recomputing(small, range(1, 9))).predicted_bytes
    found = usual_plan(small, every)
    assert found is not None
    assert found[0] == "recompute every large unit"
    recipes = [found[1].recipe(leaf) for leaf in found[1].items]
    assert recipes == [KEEP, *[RECOMPUTE] * 8, KEEP, KEEP]


def test_on_a_gpu_recomputing_every_unit_races_where_it_nearly_fits() -> None:
    """Real steps there may take a little less than predicted; with a budget a little smaller, nothing by hand fits."""
    on_gpu = replace(PROFILE, device="cuda:0 (one)")
    every = plan_by_hand(PROFILE, recomputing(PROFILE, range(10)))
    nearly = every.predicted_bytes * 995 // 1000
    assert nearly > minimum_budget(PROFILE)
    assert usual_plan(PROFILE, nearly) is None
    usual = usual_plan(on_gpu, nearly)
    assert usual is not None
    name, found = usual
    assert name == "recompute every large unit"
    assert found.predicted_bytes > found.budget_bytes == nearly
    assert usual_plan(on_gpu, every.predicted_bytes * 985 // 1000) is None


def test_rivals_are_few_and_not_far_behind() -> None:
    chosen = plan(PROFILE, MIDDLE)
    usual = usual_plan(PROFILE, MIDDLE)
    assert usual is not None
    assert usual[0] == "recompute the first 7 large units"
    needed = [
        plan_by_hand(PROFILE, recomputing(PROFILE, range(count))).predicted_bytes for count in range(10)
    ]
    assert [size <= MIDDLE for size in needed] == [False] * 7 + [True] * 3
    assert all(rival.predicted_s <= 1.15 * chosen.predicted_s for _, rival in rivals_of(chosen))
    assert len(plan_with_rivals(PROFILE, MIDDLE)[1]) <= 2
    slower = plan_by_hand(PROFILE, recomputing(PROFILE, range(10)), MIDDLE)
    assert rivals_of(slower, ("the same", slower)) == rivals_of(slower) == [usual]


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
    usual = usual_plan(PROFILE, MIDDLE)
    assert usual is not None
    assert ModelPlan.from_json(usual[1].to_json()) == usual[1]
    assert usual[1].schedule.solver == "by hand"
    assert recomputing(PROFILE, []) == PROFILE.plain_schedule
