"""Profiles as versioned JSON: exact both ways, strict about what it reads."""

from __future__ import annotations

from typing import Any

from recoup.errors import EncodingError
from recoup.model.conditions import Conditions
from recoup.model.recipe import Recipe
from recoup.planning.documents import (
    build_typed,
    expect_fields,
    expect_list,
    plain,
    read_document,
    write_document,
)
from recoup.planning.encoding import decode_problem, encode_problem
from recoup.plans.profile import Profile, ProfiledUnit, Residents

__all__ = ["FORMAT_VERSION", "decode_profile", "encode_profile", "profile_from_json", "profile_to_json"]

FORMAT_VERSION = 1
_FORMAT = "recoup.measuring"


def profile_to_json(profile: Profile, *, indent: int | None = None) -> str:
    """Writes a profile."""
    return write_document(_FORMAT, FORMAT_VERSION, "profile", encode_profile(profile), indent=indent)


def profile_from_json(text: str) -> Profile:
    """Reads what `profile_to_json` wrote.

    Raises:
        EncodingError: the text is not JSON, not a profile, of another version, incomplete or damaged.
    """
    return read_document(text, _FORMAT, FORMAT_VERSION, {"profile": decode_profile})


def encode_profile(profile: Profile) -> dict[str, Any]:
    """A profile as what JSON knows; fields at their defaults are left out."""
    units = [{**plain(unit), "recipes": [plain(recipe) for recipe in unit.recipes]} for unit in profile.units]
    body = {
        **plain(profile),
        "units": units,
        "problem": encode_problem(profile.problem),
        "residents": plain(profile.residents),
    }
    if profile.conditions is not None:
        body["conditions"] = plain(profile.conditions)
    return body


def decode_profile(body: Any) -> Profile:
    """A profile from what `encode_profile` made of it."""
    expect_fields("A profile", Profile, body)
    units = tuple(_unit(unit) for unit in expect_list("units", body["units"]))
    problem = decode_problem(body["problem"])
    residents = build_typed("The residents", Residents, body["residents"])
    if len(units) != problem.num_units:
        raise EncodingError(f"The profile names {len(units)} units, and its problem has {problem.num_units}.")
    for unit, numbers in zip(units, problem.units, strict=True):
        if len(unit.recipes) != len(numbers.options):
            raise EncodingError(
                f"Unit {unit.name!r} has {len(unit.recipes)} recipes, and {len(numbers.options)} options in the"
                " problem."
            )
    conditions = _conditions(body.get("conditions"))
    return build_typed(
        "A profile", Profile, body, units=units, problem=problem, residents=residents, conditions=conditions
    )


def _conditions(body: Any) -> Conditions | None:
    if body is None:  # also of profiles that were written before there were any
        return None
    expect_fields("The conditions", Conditions, body)
    shapes = tuple(_shape(entry) for entry in expect_list("shapes", body.get("shapes", [])))
    return build_typed("The conditions", Conditions, body, shapes=shapes)


def _shape(entry: Any) -> tuple[str, tuple[int, ...]]:
    match entry:
        case [str(name), [*sizes]] if all(type(size) is int and size >= 0 for size in sizes):
            return name, tuple(sizes)
    raise EncodingError(f"A shape should be a name and a list of sizes; got {entry!r}.")


def _unit(body: Any) -> ProfiledUnit:
    expect_fields("A unit", ProfiledUnit, body)
    recipes = tuple(_recipe(recipe) for recipe in expect_list("recipes", body["recipes"]))
    return build_typed("A unit", ProfiledUnit, body, recipes=recipes)


def _recipe(body: Any) -> Recipe:
    recipe = build_typed("A recipe", Recipe, body)
    if not isinstance(recipe.inner, tuple) or not all(isinstance(name, str) for name in recipe.inner):
        raise EncodingError(f"A recipe's 'inner' should be a list of names; got {recipe.inner!r}.")
    return recipe
