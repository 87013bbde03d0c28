from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models import GPT, assert_same, plainly, train
from plans.test_plan_json import change
from sized_subjects import make_plans

import recoup
from recoup.engines import ModelPlan, PlansBySize
from recoup.errors import EncodingError


@pytest.mark.parametrize("sizes", [(), ((2, 100), (1, 400), (2, 1000))], ids=["one axis", "two axes"])
def test_round_trips_are_exact(sizes: tuple[tuple[int, int], ...]) -> None:
    plans = make_plans(*sizes)
    again = PlansBySize.from_json(plans.to_json())
    assert again == plans
    assert hash(again) == hash(plans)
    assert again.plan == plans.plan
    assert again.ranges == plans.ranges
    size = tuple(max(1, value // 3) for value in plans.profiles.limits)
    assert again.plan_for(size) == plans.plan_for(size)
    assert PlansBySize.from_json(plans.to_json(indent=2)) == plans


def test_bytes_that_a_real_step_showed_to_be_missing_are_kept() -> None:
    plans = make_plans().with_missed(3 * 2**20)
    again = PlansBySize.from_json(plans.to_json())
    assert again == plans != make_plans()
    # The plan for the largest was verified by itself: it stays as predicted without them.
    assert again.plan.profile == make_plans().plan.profile
    assert again.ranges == plans.ranges


def test_plans_for_other_budgets_differ() -> None:
    plans = make_plans()
    other = plans.within(plans.budget_bytes + 1)
    assert other != plans
    assert plans != plans.plan


def test_saved_plans_are_applied_to_a_new_model() -> None:
    def make() -> GPT:
        torch.manual_seed(3)
        return GPT(plainly, num_blocks=4)

    sample = GPT.sample()
    length = sample[0].shape[1]
    short = tuple(tensor[:, : length // 2].clone() for tensor in sample)
    budget = int(1.1 * recoup.minimum_budget(recoup.measure(make(), sample)))
    fitted = recoup.fit(make(), samples=[sample, short], budget=budget, race=False)
    assert isinstance(fitted.applied, PlansBySize)
    assert not fitted.plan.keeps_everything
    model = recoup.apply(make(), PlansBySize.from_json(fitted.applied.to_json()))
    for batch in (sample, short):
        assert_same(train(model, batch), train(make(), batch))


def test_the_header_is_pinned() -> None:
    text = make_plans().to_json()
    beginning = (
        '{"format": "recoup.engines", "version": 1, "kind": "plans_by_size", "plans_by_size": {"axes": ['
    )
    assert text.startswith(
        f'{beginning}{{"members": [{{"name": "ids", "dim": 1}}, {{"name": "mask", "dim": 2}}]}}]'
    )


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("axes", {}, "axes should be a list; got dict"),
        ("axes", [{}], "The axis lacks members"),
        ("axes", [{"members": [{"name": "ids", "dim": "1"}]}], "A member's 'dim' should be a int; got '1'"),
        ("axes", [{"members": [{"name": "ids", "dim": 0}]}], "it has been altered"),
        ("profiles", [{}], "A profile lacks"),
        ("budget_bytes", True, "Plans by size's 'budget_bytes' should be a number of bytes; got True"),
        ("budget_bytes", 2**40, "it has been altered"),
        ("schedules", [[{"do": "sleep"}]], "An action should name what to do"),
        ("schedules", [], "it has been altered"),
        ("known", [{"size": [1000]}], "A known plan lacks plan"),
        ("known", [{"size": 1000, "plan": {}}], "size should be a list; got int"),
        ("known", [], "it has been altered"),
        ("checksum", 1, "it has been altered"),
        ("note", "mine", "Plans by size has unknown note"),
    ],
)
def test_damage_is_refused(path: str, value: Any, match: str) -> None:
    document = json.loads(make_plans().to_json())
    change(document["plans_by_size"], path, value)
    with pytest.raises(EncodingError, match=match):
        PlansBySize.from_json(json.dumps(document))


def test_what_is_left_out_is_named() -> None:
    document = json.loads(make_plans().to_json())
    del document["plans_by_size"]["checksum"]
    with pytest.raises(EncodingError, match="The plans_by_size is damaged: Plans by size lacks checksum"):
        PlansBySize.from_json(json.dumps(document))


def test_one_plan_is_not_plans_by_size() -> None:
    plans = make_plans()
    with pytest.raises(EncodingError, match="Unknown kind 'plan'; expected one of plans_by_size"):
        PlansBySize.from_json(plans.plan.to_json())
    with pytest.raises(EncodingError, match="Unknown kind 'plans_by_size'; expected one of plan"):
        ModelPlan.from_json(plans.to_json())
