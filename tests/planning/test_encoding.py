from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from planning.problems import equal_problem, random_problem, small_problems, value_problems
from planning.solvers.test_chain import golden
from planning.test_simulate import link_problem, skip_problem, spill

from recoup.errors import EncodingError
from recoup.planning import (
    FORMAT_VERSION,
    Bound,
    Drop,
    Problem,
    Schedule,
    Value,
    Wait,
    from_json,
    frontier,
    minimum_budget,
    plan,
    to_json,
)
from recoup.planning.solvers import SOLVERS


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(problem=small_problems(max_units=5, additive=False) | value_problems())
def test_round_trips_are_exact(problem: Problem) -> None:
    assert from_json(to_json(problem)) == problem
    found = plan(problem, minimum_budget(problem))
    assert from_json(to_json(found)) == found
    assert from_json(to_json(found.schedule)) == found.schedule


def test_links_skips_and_every_action_round_trip() -> None:
    for value in (link_problem(capacity=60), skip_problem(), spill(wait=True)):
        assert from_json(to_json(value)) == value
    actions = Schedule([Drop(1, value=Value.OUTPUT), Wait(2, value=Value.HELD)])
    assert from_json(to_json(actions, indent=2)) == actions


def test_units_that_run_once_round_trip_and_old_files_have_none() -> None:
    problem = random_problem(3, num_units=4, once=[0, 3])
    again = from_json(to_json(problem))
    assert again == problem
    assert isinstance(again, Problem)
    assert [unit.runs_once for unit in again.units] == [True, False, False, True]
    text = to_json(problem).replace(', "runs_once": true', "")
    assert from_json(text) == random_problem(3, num_units=4)
    with pytest.raises(EncodingError, match="damaged: Unit 'u0': runs_once must be True or False; got 1"):
        from_json(to_json(problem).replace('"runs_once": true', '"runs_once": 1', 1))


def test_awkward_floats_survive() -> None:
    problem = skip_problem()
    text = to_json(problem).replace('"forward_s": 1', '"forward_s": 0.1000000000000000055511151231257827')
    again = from_json(text)
    assert isinstance(again, Problem)
    assert again.units[0].options[0].forward_s == 0.1
    assert from_json(to_json(again)) == again


def test_the_bytes_are_pinned() -> None:
    assert FORMAT_VERSION == 1
    assert to_json(Schedule([Drop(1, value=Value.OUTPUT)])) == (
        '{"format": "recoup.planning", "version": 1, "kind": "schedule",'
        ' "schedule": [{"do": "drop", "unit": 1, "value": "output"}]}'
    )


def document(**changes: Any) -> str:
    body = {"format": "recoup.planning", "version": 1, "kind": "schedule", "schedule": []}
    return json.dumps({**body, **changes})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "This is not JSON"),
        ("[]", "not recoup's"),
        ('{"format": "onnx"}', "not recoup's"),
        (document(version=2), "version 2 of the format; this recoup reads version 1"),
        (document(kind="model"), "Unknown kind 'model'"),
        (document(extra=1), "has unknown extra"),
        (document(schedule={}), "A schedule should be a list"),
        (document(schedule=[{"do": "fly"}]), "should name what to do"),
        (document(schedule=[{"do": "drop", "value": "output"}]), "should name its unit's index"),
        (document(schedule=[{"do": "drop", "unit": 1, "value": "weights"}]), "The schedule is damaged"),
        (document(schedule=[{"do": "drop", "unit": 1}]), "The schedule is damaged"),
        (document(schedule=[{"do": "drop", "unit": 1, "value": "held", "soon": 1}]), "has unknown soon"),
        (document(schedule=[{"do": "forward", "unit": 1, "option": 1}]), "damaged: .* comes with an option"),
        ('{"format": "recoup.planning", "version": 1, "kind": "problem"}', "lacks problem"),
    ],
)
def test_foreign_and_damaged_input_is_refused(text: str, match: str) -> None:
    with pytest.raises(EncodingError, match=match):
        from_json(text)


def damaged_problem(change: dict[str, Any]) -> str:
    body = json.loads(to_json(skip_problem()))
    body["problem"]["units"][0].update(change)
    return json.dumps(body)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"output_bytes": -1}, "damaged: Unit 'a': output_bytes"),
        ({"colour": "red"}, "A unit has unknown colour"),
        ({"options": {}}, "options should be a list"),
        ({"options": [{"name": "x"}]}, "The problem is damaged"),
        ({"options": [{"name": "x", "forward_s": float("nan"), "backward_s": 1}]}, "This is not JSON: NaN"),
    ],
)
def test_damaged_problems_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(EncodingError, match=match):
        from_json(damaged_problem(change))


def test_an_altered_plan_is_refused() -> None:
    body = json.loads(to_json(plan(skip_problem(), 1000)))
    body["plan"]["predicted"]["seconds"] -= 1
    with pytest.raises(EncodingError, match="it has been altered"):
        from_json(json.dumps(body))
    body = json.loads(to_json(plan(skip_problem(), 1000)))
    body["plan"]["schedule"].pop()
    with pytest.raises(EncodingError, match="The plan is damaged: The schedule ends after"):
        from_json(json.dumps(body))


ALTERED: dict[str, tuple[dict[str, Any], str]] = {
    "below the peak": ({"budget_bytes": 1}, "The plan's 'budget_bytes' is 1; its schedule needs"),
    "no number": ({"budget_bytes": "1GiB"}, "The plan's 'budget_bytes' is '1GiB'"),
    "another budget": (
        {"budget_bytes": 10**6},
        "The plan's 'checksum' is not that of its content: it has been altered",
    ),
    "no solver": ({"solver": "oracle"}, "The plan's 'solver' is 'oracle', and there is no such solver"),
    "another solver": (
        {"solver": "select"},
        "The plan's 'bound' is for 'persistent schedules'; select proves none",
    ),
    "another baseline": ({"solver": "greedy"}, "The plan's 'checksum' is not"),
    "no class": (
        {"bound": {"seconds": 36.0, "schedules": "good schedules"}},
        "The plan's 'bound' is for 'good schedules'",
    ),
    "another class": (
        {"bound": {"seconds": 36.0, "schedules": "all schedules"}},
        "The plan's 'bound' says 36.0 s for 'all",
    ),
    "above its seconds": (
        {"bound": {"seconds": 37.0, "schedules": "persistent schedules"}},
        "'bound' says 37.0 s",
    ),
    "too low": ({"bound": {"seconds": 1.0, "schedules": "persistent schedules"}}, "'bound' says 1.0 s"),
    "not proven": (
        {"bound": {"seconds": 35.9, "schedules": "persistent schedules"}},
        "The plan's 'checksum' is not",
    ),
}


@pytest.mark.parametrize("change", ALTERED)
def test_altered_claims_are_refused(change: str) -> None:
    found = plan(golden(), 100)
    assert (found.solver, found.bound) == ("chain", Bound(36.0, schedules="persistent schedules"))
    body = json.loads(to_json(found))
    body["plan"].update(ALTERED[change][0])
    with pytest.raises(EncodingError, match=ALTERED[change][1]):
        from_json(json.dumps(body))


def test_an_altered_problem_is_refused_and_a_plan_without_a_checksum_is_read() -> None:
    """An option that the schedule does not use changes no figure of it."""
    found = plan(golden(), 100)
    body = json.loads(to_json(found))
    options = body["plan"]["problem"]["units"][0]["options"]
    next(option for option in options if option["name"] != found.options[0])["backward_s"] = 70.0
    with pytest.raises(EncodingError, match="The plan's 'checksum' is not that of its content"):
        from_json(json.dumps(body))
    body = json.loads(to_json(found))
    del body["plan"]["checksum"]
    assert from_json(json.dumps(body)) == found


def test_every_plan_of_every_solver_is_read() -> None:
    for problem in (golden(), link_problem(capacity=60), skip_problem(), equal_problem(5)):
        for solver in SOLVERS:
            if solver.applies(problem):
                for point in frontier(problem, solvers=[solver]):
                    assert from_json(to_json(point)) == point


def test_other_values_are_refused() -> None:
    with pytest.raises(EncodingError, match="Only problems, schedules and plans"):
        to_json(3)  # type: ignore[arg-type]
