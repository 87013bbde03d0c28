"""Versioned JSON for problems, schedules and plans: exact both ways, strict about what it reads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from recoup.errors import EncodingError
from recoup.planning.actions import Action, Backward, Drop, Fetch, Forward, Keep, Send, Value, Wait
from recoup.planning.documents import (
    build,
    build_typed,
    expect_keys,
    expect_list,
    plain,
    read_document,
    write_document,
)
from recoup.planning.plan import Plan
from recoup.planning.problem import Link, Option, Problem, Unit
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers import SOLVERS
from recoup.planning.solvers.base import ALL_SCHEDULES, Bound
from recoup.planning.solvers.bounds import relaxed_bound

__all__ = [
    "FORMAT_VERSION",
    "decode_plan",
    "decode_problem",
    "encode_plan",
    "encode_problem",
    "from_json",
    "to_json",
]

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
_SAME_SECONDS = 1e-9
_ACTION_NAMES = {kind: name for name, kind in _ACTIONS.items()}


def to_json(value: Problem | Schedule | Plan, *, indent: int | None = None) -> str:
    """Writes a problem, a schedule or a plan.

    >>> to_json(Schedule([Forward(0)]))[-43:]
    '"schedule": [{"do": "forward", "unit": 0}]}'
    """
    kind, body = _encode(value)
    return write_document(_FORMAT, FORMAT_VERSION, kind, body, indent=indent)


def from_json(text: str) -> Problem | Schedule | Plan:
    """Reads what ``to_json`` wrote. A plan is simulated again, and refused if its figures or claims do not agree.

    Raises:
        EncodingError: if the text is not JSON, not ours, of another version, incomplete or altered.

    >>> schedule = Schedule([Forward(0), Backward(0, option=1)])
    >>> from_json(to_json(schedule)) == schedule
    True
    """
    decoders: dict[str, Callable[[Any], Problem | Schedule | Plan]]
    decoders = {"problem": decode_problem, "schedule": _schedule, "plan": decode_plan}
    return read_document(text, _FORMAT, FORMAT_VERSION, decoders)


# Writing


def _encode(value: Problem | Schedule | Plan) -> tuple[str, object]:
    match value:
        case Problem():
            return "problem", encode_problem(value)
        case Schedule():
            return "schedule", [_encode_action(action) for action in value]
        case Plan():
            return "plan", encode_plan(value)
    raise EncodingError(f"Only problems, schedules and plans become JSON; got {type(value).__name__}.")


def encode_problem(problem: Problem) -> dict[str, Any]:
    """A problem as what JSON knows; fields at their defaults are left out."""
    units = [{**plain(unit), "options": [plain(option) for option in unit.options]} for unit in problem.units]
    return {**plain(problem), "units": units, "links": [plain(link) for link in problem.links]}


def _encode_action(action: Action) -> dict[str, Any]:
    body = {name: getattr(item, "value", item) for name, item in plain(action).items()}
    return {"do": _ACTION_NAMES[type(action)], **body}


def encode_plan(plan: Plan) -> dict[str, Any]:
    """A plan as what JSON knows."""
    body = {
        "problem": encode_problem(plan.problem),
        "budget_bytes": plan.budget_bytes,
        "schedule": [_encode_action(action) for action in plan.schedule],
        "solver": plan.solver,
        "bound": plain(plan.bound),
        "predicted": {"seconds": plan.predicted.seconds, "peak_bytes": plan.predicted.peak_bytes},
    }
    return {**body, "checksum": _checksum(body)}


def _checksum(body: Mapping[str, Any]) -> int:
    """Of all that a plan says: simulation cannot check its claims, nor figures that its own schedule does not use."""
    content = {name: item for name, item in body.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# Reading


def decode_problem(body: Any) -> Problem:
    """A problem from what `encode_problem` made of it."""
    expect_keys("A problem", body, {item.name for item in fields(Problem)}, {"units"})
    units = []
    for unit in expect_list("units", body["units"]):
        expect_keys("A unit", unit, {item.name for item in fields(Unit)}, {"name", "options", "output_bytes"})
        options = [build(Option, option) for option in expect_list("options", unit["options"])]
        units.append(build(Unit, unit, options=options))
    links = [build(Link, link) for link in expect_list("links", body.get("links", []))]
    return build(Problem, body, units=units, links=links)


def _schedule(body: Any) -> Schedule:
    return Schedule(_action(action) for action in expect_list("A schedule", body))


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
    return build(_ACTIONS[body["do"]], content)


def decode_plan(body: Any, *, problem: Problem | None = None) -> Plan:
    """A plan from what `encode_plan` made of it, simulated again.

    Args:
        body: the plan's fields.
        problem: that it is for, where its own is left out.
    """
    names = {"budget_bytes", "schedule", "solver", "bound", "predicted"} | (
        {"problem"} if problem is None else set()
    )
    expect_keys("A plan", body, {*names, "checksum"}, names)
    problem = decode_problem(body["problem"]) if problem is None else problem
    schedule = _schedule(body["schedule"])
    predicted = simulate(problem, schedule)
    claimed = expect_keys("A plan's figures", body["predicted"], {"seconds", "peak_bytes"})
    if (predicted.seconds, predicted.peak_bytes) != (claimed["seconds"], claimed["peak_bytes"]):
        raise EncodingError(
            f"The plan says {claimed['seconds']} s and {claimed['peak_bytes']} bytes, but its schedule takes"
            f" {predicted.seconds} s and {predicted.peak_bytes} bytes: it has been altered."
        )
    plan = Plan(
        problem=problem,
        budget_bytes=body["budget_bytes"],
        schedule=schedule,
        solver=body["solver"],
        bound=build_typed("A bound", Bound, body["bound"]),
        predicted=predicted,
    )
    _check_claims(plan)
    # Plans of version 0.2 have none.
    checksum = _checksum({**body, "problem": encode_problem(problem)})
    if body.get("checksum", checksum) != checksum:
        raise EncodingError("The plan's 'checksum' is not that of its content: it has been altered.")
    return plan


def _check_claims(plan: Plan) -> None:
    """Refuses claims that cannot be true of the plan's schedule; those of a solver's own class are not proven again."""
    own_class = {solver.name: solver.schedules for solver in SOLVERS}.get(plan.solver)
    if own_class is None:
        raise EncodingError(f"The plan's 'solver' is {plan.solver!r}, and there is no such solver.")
    budget_bytes, bound = plan.budget_bytes, plan.bound
    if type(budget_bytes) is not int or budget_bytes < plan.predicted.peak_bytes:
        raise EncodingError(
            f"The plan's 'budget_bytes' is {budget_bytes!r}; its schedule needs {plan.predicted.peak_bytes} bytes."
        )
    if bound.schedules not in (ALL_SCHEDULES, own_class):
        raise EncodingError(
            f"The plan's 'bound' is for {bound.schedules!r}; {plan.solver} proves none for these."
        )
    # Of a class, at least what holds for all schedules; and for all schedules nothing else is known.
    least_s = min(relaxed_bound(plan.problem, budget_bytes).seconds, plan.predicted.seconds)
    most_s = least_s if bound.schedules == ALL_SCHEDULES else plan.predicted.seconds
    if not least_s * (1 - _SAME_SECONDS) <= bound.seconds <= most_s * (1 + _SAME_SECONDS):
        raise EncodingError(
            f"The plan's 'bound' says {bound.seconds} s for {bound.schedules!r} in {budget_bytes} bytes; it should be"
            f" {least_s} to {most_s} s."
        )
