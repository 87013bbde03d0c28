"""Versioned JSON for problems, schedules and plans: exact both ways, strict about what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from recoup.errors import EncodingError, PlanningError
from recoup.planning.actions import Action, Backward, Drop, Fetch, Forward, Keep, Send, Value, Wait
from recoup.planning.plan import Plan
from recoup.planning.problem import Link, Option, Problem, Unit
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import Bound

__all__ = ["FORMAT_VERSION", "from_json", "to_json"]

FORMAT_VERSION = 1
_FORMAT = "recoup.planning"
_ACTIONS: dict[str, type[Action]] = {
    "forward": Forward,
    "backward": Backward,
    "drop": Drop,
    "send": Send,
    "fetch": Fetch,
    "wait": Wait,
}
_ACTION_NAMES = {kind: name for name, kind in _ACTIONS.items()}
_T = TypeVar("_T")


def to_json(value: Problem | Schedule | Plan, *, indent: int | None = None) -> str:
    """Writes a problem, a schedule or a plan.

    >>> to_json(Schedule([Forward(0)]))[-43:]
    '"schedule": [{"do": "forward", "unit": 0}]}'
    """
    kind, body = _encode(value)
    return json.dumps({"format": _FORMAT, "version": FORMAT_VERSION, "kind": kind, kind: body}, indent=indent)


def from_json(text: str) -> Problem | Schedule | Plan:
    """Reads what ``to_json`` wrote. A plan is simulated again, and refused if its figures do not agree.

    Raises:
        EncodingError: if the text is not JSON, not ours, of another version, incomplete or altered.

    >>> schedule = Schedule([Forward(0), Backward(0, option=1)])
    >>> from_json(to_json(schedule)) == schedule
    True
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise EncodingError(f"This is not JSON: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise EncodingError(f"This JSON is not recoup's: its 'format' is not {_FORMAT!r}.")
    if document.get("version") != FORMAT_VERSION:
        raise EncodingError(
            f"This is version {document.get('version')!r} of the format; this recoup reads version"
            f" {FORMAT_VERSION}. Write it again with the same version of recoup."
        )
    kind = document.get("kind")
    decoders: dict[str, Callable[[Any], Problem | Schedule | Plan]]
    decoders = {"problem": _problem, "schedule": _schedule, "plan": _plan}
    if kind not in decoders:
        raise EncodingError(f"Unknown kind {kind!r}; expected one of {', '.join(decoders)}.")
    _expect_keys("The document", document, {"format", "version", "kind", kind})
    try:
        return decoders[kind](document[kind])
    except EncodingError:
        raise
    except (PlanningError, TypeError, ValueError, AttributeError) as error:
        raise EncodingError(f"The {kind} is damaged: {error}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a problem may hold")


# Writing


def _encode(value: Problem | Schedule | Plan) -> tuple[str, object]:
    match value:
        case Problem():
            return "problem", _encode_problem(value)
        case Schedule():
            return "schedule", [_encode_action(action) for action in value]
        case Plan():
            return "plan", _encode_plan(value)
    raise EncodingError(f"Only problems, schedules and plans become JSON; got {type(value).__name__}.")


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass's fields, without those that are at their defaults."""
    items = ((item, getattr(value, item.name)) for item in fields(value))
    return {item.name: content for item, content in items if content != item.default}


def _encode_problem(problem: Problem) -> dict[str, Any]:
    units = [
        {**_plain(unit), "options": [_plain(option) for option in unit.options]} for unit in problem.units
    ]
    return {**_plain(problem), "units": units, "links": [_plain(link) for link in problem.links]}


def _encode_action(action: Action) -> dict[str, Any]:
    body = {name: getattr(item, "value", item) for name, item in _plain(action).items()}
    return {"do": _ACTION_NAMES[type(action)], **body}


def _encode_plan(plan: Plan) -> dict[str, Any]:
    return {
        "problem": _encode_problem(plan.problem),
        "budget_bytes": plan.budget_bytes,
        "schedule": [_encode_action(action) for action in plan.schedule],
        "solver": plan.solver,
        "bound": _plain(plan.bound),
        "predicted": {"seconds": plan.predicted.seconds, "peak_bytes": plan.predicted.peak_bytes},
    }


# Reading


def _expect_keys(
    what: str, body: Any, allowed: set[str], required: set[str] | None = None
) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise EncodingError(f"{what} should be an object; got {type(body).__name__}.")
    missing, unknown = (allowed if required is None else required) - set(body), set(body) - allowed
    if missing or unknown:
        parts = [f"lacks {', '.join(sorted(missing))}"] if missing else []
        parts += [f"has unknown {', '.join(sorted(unknown))}"] if unknown else []
        raise EncodingError(f"{what} {' and '.join(parts)}.")
    return body


def _build(kind: type[_T], body: Any, **nested: Any) -> _T:
    """Makes a dataclass from its fields; lists become tuples, missing fields their defaults."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    _expect_keys(f"A {kind.__name__.lower()}", body, names, set())
    content = {name: tuple(item) if isinstance(item, list) else item for name, item in body.items()}
    return kind(**{**content, **nested})


def _list(what: str, body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise EncodingError(f"{what} should be a list; got {type(body).__name__}.")
    return body


def _problem(body: Any) -> Problem:
    _expect_keys("A problem", body, {item.name for item in fields(Problem)}, {"units"})
    units = []
    for unit in _list("units", body["units"]):
        _expect_keys(
            "A unit", unit, {item.name for item in fields(Unit)}, {"name", "options", "output_bytes"}
        )
        options = [_build(Option, option) for option in _list("options", unit["options"])]
        units.append(_build(Unit, unit, options=options))
    links = [_build(Link, link) for link in _list("links", body.get("links", []))]
    return _build(Problem, body, units=units, links=links)


def _schedule(body: Any) -> Schedule:
    return Schedule(_action(action) for action in _list("A schedule", body))


def _action(body: Any) -> Action:
    if not isinstance(body, dict) or body.get("do") not in _ACTIONS:
        raise EncodingError(f"An action should name what to do ({', '.join(_ACTIONS)}); got {body!r}.")
    content = {name: item for name, item in body.items() if name != "do"}
    if not isinstance(content.get("unit"), int):
        raise EncodingError(f"An action should name its unit's index; got {body!r}.")
    if "keep" in content:
        content["keep"] = Keep(content["keep"])
    if "value" in content:
        content["value"] = Value(content["value"])
    return _build(_ACTIONS[body["do"]], content)


def _plan(body: Any) -> Plan:
    names = {"problem", "budget_bytes", "schedule", "solver", "bound", "predicted"}
    _expect_keys("A plan", body, names)
    problem, schedule = _problem(body["problem"]), _schedule(body["schedule"])
    predicted = simulate(problem, schedule)
    claimed = _expect_keys("A plan's figures", body["predicted"], {"seconds", "peak_bytes"})
    if (predicted.seconds, predicted.peak_bytes) != (claimed["seconds"], claimed["peak_bytes"]):
        raise EncodingError(
            f"The plan says {claimed['seconds']} s and {claimed['peak_bytes']} bytes, but its schedule takes"
            f" {predicted.seconds} s and {predicted.peak_bytes} bytes: it has been altered."
        )
    return Plan(
        problem=problem,
        budget_bytes=body["budget_bytes"],
        schedule=schedule,
        solver=body["solver"],
        bound=_build(Bound, body["bound"]),
        predicted=predicted,
    )
