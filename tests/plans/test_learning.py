"""What measured steps teach about a profile's seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from report_subjects import make_profile

from recoup.planning import simulate
from recoup.planning.solvers.baselines import every
from recoup.plans.by_hand import recomputing
from recoup.plans.learning import Pricing, learn, learned_plan, priced
from recoup.plans.model_plan import frontier, minimum_budget, plan
from recoup.plans.profile import Profile

PRICING = Pricing(factor=1.25, extra_factor=0.9, replay_s=0.004, tensor_s=0.0005)


def profile_with_tensors() -> Profile:
    """Eight blocks of two kinds, which store 7 and 12 tensors in a replay."""
    profile = make_profile(8)
    units = [
        replace(unit, num_stored=(({1: 7, 2: 12}.get(unit.kind, 1)),) * len(unit.recipes))
        for unit in profile.units
    ]
    return replace(profile, units=tuple(units))


def test_seconds_by_a_pricing() -> None:
    profile = profile_with_tensors()
    learned = priced(profile, PRICING)
    # Blocks 1 to 4 are of the first kind.
    schedule = recomputing(profile, [1, 2, 5])
    before, after = (simulate(one.problem, schedule) for one in (profile, learned))
    plain_s = profile.plain.seconds
    replays_s = 0.9 * (before.seconds - plain_s) + 3 * 0.004 + (7 + 7 + 12) * 0.0005
    assert after.seconds == pytest.approx(1.25 * plain_s + replays_s)
    assert after.peak_bytes == before.peak_bytes
    assert learned.plain.seconds == pytest.approx(1.25 * profile.plain.seconds)


def test_a_segment_stores_what_its_units_save() -> None:
    profile = profile_with_tensors()
    schedule = every(profile.problem, 2)
    before, after = (simulate(one.problem, schedule).seconds for one in (profile, priced(profile, PRICING)))
    num_replays = sum(simulate(profile.problem, schedule).num_recomputes)
    # The embedding stores one tensor, blocks of the first kind 7, of the second 12.
    num_tensors = {8: 1 + 4 * 7 + 3 * 12, 10: 1 + 4 * 7 + 4 * 12 + 1}[num_replays]
    assert after == pytest.approx(1.25 * before + num_replays * 0.004 + num_tensors * 0.0005)


def test_a_pricing_is_found_from_steps() -> None:
    profile = profile_with_tensors()
    truth = priced(profile, PRICING)
    schedules = [recomputing(profile, units) for units in ([1, 2], [5, 6, 7], [1, 2, 3, 4, 5])]
    steps = [(schedule, simulate(truth.problem, schedule).seconds) for schedule in schedules]
    learned = priced(profile, learn(profile, steps, truth.plain.seconds))
    for schedule, seconds in steps:
        assert simulate(learned.problem, schedule).seconds == pytest.approx(seconds, rel=0.01)
    assert learned.plain.seconds == pytest.approx(truth.plain.seconds, rel=0.01)
    other = recomputing(profile, [1, 2, 3, 5, 6, 7, 8])
    predicted_s = [simulate(one.problem, other).seconds for one in (profile, learned, truth)]
    assert abs(predicted_s[1] / predicted_s[2] - 1) < 0.01 < abs(predicted_s[0] / predicted_s[2] - 1)


@pytest.mark.parametrize("noise", [0.8, 1.25])
def test_what_the_report_shows_is_predicted_as_measured_whatever_rivals_took(noise: float) -> None:
    """A host that others used while rivals ran makes their seconds disagree with all else."""
    profile = profile_with_tensors()
    truth = priced(profile, PRICING)
    schedules = [recomputing(profile, units) for units in ([1, 2, 3, 4, 5], [1, 2], [5, 6, 7])]
    seconds = [simulate(truth.problem, schedule).seconds for schedule in schedules]
    steps = list(zip(schedules, [seconds[0], *(noise * other for other in seconds[1:])], strict=True))
    learned = priced(profile, learn(profile, steps, truth.plain.seconds))
    assert simulate(learned.problem, schedules[0]).seconds == pytest.approx(seconds[0], rel=0.01)
    assert learned.plain.seconds == pytest.approx(truth.plain.seconds, rel=0.01)


def test_replays_may_turn_out_cheaper_but_never_for_nothing() -> None:
    profile = profile_with_tensors()
    schedule = recomputing(profile, [1, 2, 3])
    plain_s, seconds = profile.plain.seconds, simulate(profile.problem, schedule).seconds
    found = learn(profile, [(schedule, (plain_s + seconds) / 2)], plain_s)
    assert found.factor == pytest.approx(1.0, rel=0.02)
    assert found.extra_factor == pytest.approx(0.5, rel=0.15)
    assert (found.replay_s, found.tensor_s) == (0.0, 0.0)
    found = learn(profile, [(schedule, 0.9 * plain_s)], plain_s)
    assert (found.replay_s, found.tensor_s) == (0.0, 0.0)
    assert found.extra_factor == pytest.approx(0.1 * found.factor)
    assert 0.9 < found.factor < 1.0
    # Else a plan with room for everything would be free to recompute everything.
    assert plan(priced(profile, found), 2 * profile.plain_bytes).keeps_everything


@pytest.mark.parametrize("share", [0.8, 1.0, 1.3])
def test_without_a_plain_step_the_predicted_one_counts_a_little(share: float) -> None:
    profile = profile_with_tensors()
    schedule = recomputing(profile, [1, 2, 3])
    seconds = share * simulate(profile.problem, schedule).seconds
    learned = priced(profile, learn(profile, [(schedule, seconds)], None))
    assert simulate(learned.problem, schedule).seconds == pytest.approx(seconds, rel=0.01)
    if share >= 1:
        assert learned.plain.seconds == pytest.approx(profile.plain.seconds, rel=0.01)


def test_profiles_without_counts_learn_from_replays() -> None:
    profile = make_profile(8)
    schedule = recomputing(profile, [1, 2, 3])
    seconds = simulate(profile.problem, schedule).seconds + 0.03
    found = learn(profile, [(schedule, seconds)], profile.plain.seconds)
    assert found.replay_s == pytest.approx(0.01, rel=0.02)
    assert found.tensor_s == 0.0


def test_a_plan_is_predicted_anew() -> None:
    profile = profile_with_tensors()
    budget = (minimum_budget(profile) + profile.plain_bytes) // 2
    chosen, learned = plan(profile, budget), priced(profile, PRICING)
    again = learned_plan(chosen, learned)
    assert again.items == chosen.items
    assert again.predicted_bytes == chosen.predicted_bytes
    assert again.predicted_s == simulate(learned.problem, chosen.schedule.schedule).seconds
    assert type(again).from_json(again.to_json()) == again


def test_the_frontier_avoids_what_has_turned_out_to_be_expensive() -> None:
    """Replays of the second kind are dear, because they store many tensors."""
    profile = make_profile(8)
    units = [
        replace(unit, num_stored=((90 if unit.kind == 2 else 1),) * len(unit.recipes))
        for unit in profile.units
    ]
    profile = replace(profile, units=tuple(units))
    learned = priced(profile, Pricing(tensor_s=0.001))
    points = frontier(learned)
    assert all(one.predicted_s > other.predicted_s for one, other in pairwise(points))
    budget = (minimum_budget(profile) + profile.plain_bytes) // 2
    before, after = learned_plan(plan(profile, budget), learned), plan(learned, budget)
    assert after.predicted_s < before.predicted_s
