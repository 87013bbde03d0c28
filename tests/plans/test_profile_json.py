from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.problems import random_problem, small_problems, value_problems

from recoup.errors import EncodingError
from recoup.measuring import Profile, ProfiledUnit, Recipe, measure
from recoup.planning import Problem
from recoup.plans.profile import Residents
from recoup.plans.profile_json import FORMAT_VERSION


def profile_of(problem: Problem, **changes: Any) -> Profile:
    """A profile with a problem's numbers; some positions are code, some units are unsafe."""
    units = []
    for index, unit in enumerate(problem.units):
        inner = [Recipe(whole=number % 2 == 1, inner=("mlp",) * (number // 2)) for number in range(4)]
        recipes = tuple(inner[: len(unit.options)])
        if index % 3 == 2:
            units.append(ProfiledUnit(unit.name, None, 0, -1, recipes))
        else:
            unsafe = "changes an object: cache" if index % 3 else ""
            units.append(ProfiledUnit(unit.name, f"blocks.{index}", index % 2, index, recipes, unsafe))
    residents = Residents(problem.resident_bytes, 3, 5, 7, 11)
    return Profile("GPT", "cpu", tuple(units), problem, residents, **changes)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    problem=small_problems(max_units=5, additive=False) | value_problems(),
    accumulates=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_round_trips_are_exact(problem: Problem, accumulates: bool, indent: int | None) -> None:
    profile = profile_of(problem, accumulates=accumulates)
    again = Profile.from_json(profile.to_json(indent=indent))
    assert again == profile
    assert hash(again.units) == hash(profile.units)
    assert again.plain == profile.plain


def test_a_measured_profile_round_trips() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    profile = measure(
        model,
        torch.zeros(4, 8),
        loss=torch.mean,
        optimizer=torch.optim.Adam(model.parameters()),
        unsafe={"2": "because"},
    )
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert str(again) == str(profile)
    assert again.units[1].unsafe == "because"


def test_the_header_is_pinned() -> None:
    assert FORMAT_VERSION == 1
    text = profile_of(random_problem(0, num_units=1)).to_json()
    assert text.startswith(
        '{"format": "recoup.measuring", "version": 1, "kind": "profile",'
        ' "profile": {"model": "GPT", "device": "cpu", "units": [{"name": "u0", "module": "blocks.0", "call": 0,'
        ' "kind": 0, "recipes": [{}, {"whole": true}]}]'
    )


def damaged(path: str, value: Any) -> str:
    """A profile's text with one thing changed; ``...`` takes it away."""
    document = json.loads(profile_of(random_problem(0, num_units=3)).to_json())
    *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    body = document
    for key in keys:
        body = body[key]
    if value is ...:
        del body[last]
    else:
        body[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("format", "onnx", "This JSON is not recoup's: its 'format' is not 'recoup.measuring'"),
        ("format", "recoup.planning", "another kind of recoup's: it is a profile of recoup.planning"),
        ("version", 7, "This is version 7 of the format; this recoup reads version 1"),
        ("kind", ["profile"], r"Unknown kind \['profile'\]; expected one of profile"),
        ("profile", 3, "A profile should be an object; got int"),
        ("profile/model", ..., "A profile lacks model"),
        ("profile/model", 3, "A profile's 'model' should be a str; got 3"),
        ("profile/accumulates", 1, "A profile's 'accumulates' should be a bool or \"unreduced\"; got 1"),
        ("profile/colour", "red", "A profile has unknown colour"),
        ("profile/units", {}, "units should be a list; got dict"),
        ("profile/units/0", ..., "The profile names 2 units, and its problem has 3"),
        ("profile/units/0/call", True, "A unit's 'call' should be a int; got True"),
        ("profile/units/0/name", ..., "A unit lacks name"),
        ("profile/units/0/recipes/0", ..., "Unit 'u0' has 1 recipes, and 2 options in the problem"),
        ("profile/units/0/recipes/0", "keep", "A recipe should be an object; got str"),
        ("profile/units/0/recipes/0/inner", "mlp", "'inner' should be a list of names; got 'mlp'"),
        ("profile/units/0/recipes/0/inner", [3], "'inner' should be a list of names"),
        ("profile/residents/parameter_bytes", -1, "'parameter_bytes' should be a int of at least 0; got -1"),
        ("profile/residents/other_bytes", 1.5, "'other_bytes' should be a int of at least 0; got 1.5"),
        ("profile/residents/gradient_bytes", ..., "The residents lacks gradient_bytes"),
        ("profile/problem/units/0/output_bytes", -4, "The profile is damaged: Unit 'u0': output_bytes"),
        ("profile/problem", [], "A problem should be an object; got list"),
    ],
)
def test_damaged_profiles_are_refused(path: str, value: Any, match: str) -> None:
    with pytest.raises(EncodingError, match=match):
        Profile.from_json(damaged(path, value))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("units/0/left_bytes", 8, "left_bytes"),
        ("units/1/left_bytes", -8, "left_bytes"),
        ("units/0/options/1/freed_input_bytes", 8, "freed_input_bytes"),
        ("units/0/options/1/backward_transient_bytes", -8, "backward_transient_bytes below 0"),
    ],
)
def test_profiles_of_an_earlier_version_are_to_be_measured_again(path: str, value: int, named: str) -> None:
    match = (
        f"The profile was written by an earlier version of recoup: it has {named}, which this version cannot read."
        " Measure the step again with this version."
    )
    with pytest.raises(EncodingError, match=match):
        Profile.from_json(damaged(f"profile/problem/{path}", value))


@pytest.mark.parametrize("text", ["", "{", "profile", '{"format": NaN}', "[" * 100_000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(EncodingError, match="This is not JSON"):
        Profile.from_json(text)


def test_a_truncated_file_is_refused_wherever_it_ends() -> None:
    text = profile_of(random_problem(2, num_units=2)).to_json()
    for end in range(0, len(text), 7):
        with pytest.raises(EncodingError):
            Profile.from_json(text[:end])
