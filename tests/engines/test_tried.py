"""What other engines could gain over an eager plan, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_subjects import make_subject

from recoup.engines.tried import most_gain_in_words


@pytest.mark.parametrize("is_verified", [True, False])
def test_at_most_what_recomputing_takes(is_verified: bool) -> None:
    made = make_subject(is_verified=is_verified)
    plan, seen = made.plan, made.verification
    step_s, plain_s = plan.predicted_s, plan.profile.plain.seconds
    if seen is not None:
        seen = replace(seen, seconds=0.5, plain_seconds=0.4)
        step_s, plain_s = 0.5, 0.4
    (sentence,) = most_gain_in_words(plan, seen)
    assert (
        f"can save at most the {100 * (1 - plain_s / step_s):.0f} % of this step that recomputing takes"
        in sentence
    )
    assert "engine='best' measures" in sentence


def test_nothing_is_said_where_nothing_can_be_told() -> None:
    made = make_subject()
    plan, seen = made.plan, made.verification
    assert seen is not None
    assert most_gain_in_words(plan, replace(seen, seconds=0.5, plain_seconds=0.495)) == ()
    assert most_gain_in_words(make_subject(share=1.0).plan, None) == ()
    for other in ({"engine": "captured"}, {"seconds_are_estimates": True}):
        assert most_gain_in_words(replace(plan, profile=replace(plan.profile, **other)), seen) == ()
