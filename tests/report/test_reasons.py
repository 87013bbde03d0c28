from __future__ import annotations

import pytest
from report_subjects import MIB, make_profile, make_subject

from recoup.planning import Bound, Plan, simulate
from recoup.planning.solvers.baselines import REPLAY, one_option_each
from recoup.plans.model_plan import ModelPlan, plan
from recoup.report.by_hand import recipes_by_hand
from recoup.report.decisions import Decisions
from recoup.report.memory_picture import MemoryPicture, moments_of
from recoup.report.rows import rows_of
from recoup.report.tradeoff import make_tradeoff


def reasons(chosen: ModelPlan) -> dict[str, str]:
    return {row.title: row.why for row in rows_of(chosen)}


def test_figures_add_up_to_the_prediction() -> None:
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        chosen = make_subject(12, num_kinds=3, unsafe=(4,), share=share).plan
        decisions = Decisions(chosen)
        assert [decision.unit for decision in decisions] == list(range(len(chosen.profile.units)))
        extra_s = sum(decision.extra_s for decision in decisions)
        assert abs(extra_s - (chosen.predicted_s - chosen.profile.plain.seconds)) < 1e-12


def test_what_a_second_run_costs_is_in_the_figures() -> None:
    profile = make_profile(8, again_ms=0.75)
    options = [REPLAY if index == 2 else 0 for index in range(len(profile.units))]
    schedule = one_option_each(profile.problem, options)
    predicted = simulate(profile.problem, schedule)
    made = Plan(profile.problem, 2**40, schedule, "hand", Bound(0.0, schedules="all schedules"), predicted)
    decisions = Decisions(ModelPlan(profile, made, 2**40))
    # layers.1 runs its forward of 4.5 ms again.
    assert decisions[2].extra_s == pytest.approx(5.25e-3)
    assert predicted.seconds - profile.plain.seconds == pytest.approx(5.25e-3)
    assert [way.extra_s for way in decisions.ways(2)] == pytest.approx([4.5e-3, 5.25e-3])


def test_every_kind_of_reason() -> None:
    assert reasons(make_subject(8, unsafe=(1, 4), share=0.6).plan) == {
        "embed": "Not needed: the budget is met without it. Recomputed, it would free 1.00 MiB for 500 µs"
        " (2.00 MiB/ms).",
        "layers.0": "Frees 8.00 MiB for 4.50 ms (1.78 MiB/ms). Kept, the step would peak at 111 MiB, over the"
        " budget.",
        "layers.1": "Unsafe to replay: values drift: its output.",
        "layers.2-3": "Forgotten with its neighbour: together they free 18.0 MiB for 9.00 ms (2.00 MiB/ms).",
        "layers.4": "Unsafe to replay: values drift: its output.",
        "layers.5-7": "Not needed: the budget is met without them. Recomputed, each would free 10.0 MiB for 6.00 ms"
        " (1.67 MiB/ms).",
        "head": "Nothing to gain: no other way to run it holds less.",
        "loss": "Code between units: only the model itself can run it.",
    }


def by_hand(choices: dict[int, int], budget_bytes: int, *, embed_mib: float = 1) -> ModelPlan:
    profile = make_profile(8, embed_mib=embed_mib)
    options = [choices.get(index, 0) for index in range(len(profile.units))]
    schedule = one_option_each(profile.problem, options)
    predicted = simulate(profile.problem, schedule)
    bound = Bound(0.0, schedules="all schedules")
    return ModelPlan(
        profile, Plan(profile.problem, budget_bytes, schedule, "hand", bound, predicted), budget_bytes
    )


def test_units_alike_share_a_reason() -> None:
    texts = reasons(by_hand({0: 1, 1: 1, 2: 1}, 115 * MIB))
    assert texts["layers.0-1"] == (
        "Each frees 8.00 MiB for 4.50 ms (1.78 MiB/ms), as much as any kept unit would."
        " With the first of them kept, the step would peak at 120 MiB, over the budget."
    )
    texts = reasons(by_hand(dict.fromkeys((0, 1, 2, 3, 4, 5), 1), 110 * MIB))
    assert texts["layers.0-3"] == (
        "Each frees 8.00 MiB for 4.50 ms (1.78 MiB/ms), more than any kept unit would (1.67 MiB/ms)."
    )


def test_a_unit_that_is_gone_when_the_peak_comes() -> None:
    # The peak is in the replay of the embedding, after all other backwards.
    texts = reasons(by_hand({0: 1}, 300 * MIB, embed_mib=200))
    assert texts["layers.4-7"] == "Recomputing it would not lower the peak."


def test_room_for_everything() -> None:
    texts = reasons(make_subject(8, share=1.0).plan)
    assert texts["layers.0-3"] == texts["layers.4-7"] == "The budget has room for everything."


def test_segments() -> None:
    texts = reasons(make_subject(8).plan)
    assert texts["layers.3"] == (
        "Forgotten with its neighbour: together they free 20.0 MiB for 10.5 ms (1.90 MiB/ms)."
    )


def test_what_would_happen_otherwise_is_simulated() -> None:
    chosen = make_subject(8, unsafe=(1, 4), share=0.6).plan
    decisions = Decisions(chosen)
    recomputed = next(d for d in decisions if not d.is_kept and d.segment is None)
    peak_bytes = decisions.peak_with(recomputed.unit, 0)
    assert peak_bytes is not None
    assert peak_bytes > chosen.budget_bytes
    assert decisions.peak_with(recomputed.unit, recomputed.choice) == chosen.predicted_bytes
    assert decisions.peak_with(0, 7) is None


def test_a_row_does_not_jump_over_a_unit_of_its_kind() -> None:
    chosen = make_subject(8, num_kinds=1, unsafe=(2, 5), share=0.6).plan
    for row in rows_of(chosen):
        indices = [index for index, unit in enumerate(chosen.profile.units) if unit.name in row.names]
        assert indices == list(range(indices[0], indices[-1] + 1)), row.title


def test_recipes_by_hand() -> None:
    found = {recipe.name: (recipe.peak_bytes, recipe.seconds) for recipe in recipes_by_hand(make_profile(8))}
    assert list(found) == [
        "keep everything",
        "recompute every unit",
        "recompute every second unit",
        "recompute the first 2 units",
        "recompute the first 4 units",
        "recompute the first 6 units",
        "segments of 4 units (√n)",
    ]
    plain_bytes, plain_s = found["keep everything"]
    # Every forward of the embedding and the blocks runs twice.
    _, seconds = found["recompute every unit"]
    assert abs(seconds - plain_s - (0.5 + 4 * 4.5 + 4 * 6) / 1e3) < 1e-12
    # The embedding and the first block: 1 and 8 MiB less at the peak.
    assert found["recompute the first 2 units"][0] == plain_bytes - 9 * MIB


def test_recipes_that_are_not_legal_are_left_out() -> None:
    profile = make_profile(4, unsafe=range(4))
    assert [recipe.name for recipe in recipes_by_hand(profile)] == [
        "keep everything",
        "recompute every unit",
    ]


def test_no_recipe_is_better_than_the_frontier() -> None:
    picture = make_tradeoff(make_subject(12, num_kinds=3, unsafe=(4,)).plan)
    for recipe in picture.by_hand:
        best_s = min(p.predicted_s for p in picture.plans if p.predicted_bytes <= recipe.peak_bytes)
        assert best_s <= recipe.seconds * (1 + 1e-9), recipe.name


def test_replays_are_told_apart() -> None:
    profile = make_profile(8)
    tight = plan(profile, make_subject(8, share=0.0).plan.budget_bytes)
    phases = {moment.phase for moment in MemoryPicture(make_subject(8)).predicted.points}
    assert {"forward", "replay", "backward"} <= phases
    moments = moments_of(tight.schedule.predicted)
    assert max(moment.num_bytes for moment in moments) == tight.schedule.predicted.peak_bytes
    plain = moments_of(profile.plain)
    assert {moment.phase for moment in plain} == {"forward", "backward"}
