"""Versioned JSON for problems, schedules and plans: exact both ways, strict about what it reads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

from recoup.errors import EncodingError
from recoup.planning.actions import Action
from recoup.planning.documents import decode, encode, expect_keys, expect_list, read_document, write_document
from recoup.planning.plan import Plan
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers import SOLVERS
from recoup.planning.solvers.base import ALL_SCHEDULES, Bound
from recoup.planning.solvers.baselines import BY_HAND
from recoup.planning.solvers.bounds import relaxed_bound

__all__ = [
    "FORMAT_VERSION",
    "decode_plan",
    "decode_schedule",
    "encode_plan",
    "encode_schedule",
    "from_json",
    "to_json",
]

FORMAT_VERSION = 1
_FORMAT = "recoup.planning"
_ACTIONS: dict[str, type[Action]] = {kind.__name__.lower(): kind for kind in get_args(Action)}
_SAME_SECONDS = 1e-9


def to_json(value: Problem | Schedule | Plan, *, indent: int | None = None) -> str:
    """Writes a problem, a schedule or a plan.

    >>> from recoup.planning.actions import Forward
    >>> to_json(Schedule([Forward(0)]))[-43:]
    '"schedule": [{"do": "forward", "unit": 0}]}'
    """
    kind, body = _encode(value)
    return write_document(_FORMAT, FORMAT_VERSION, kind, body, indent=indent)


def from_json(text: str) -> Problem | Schedule | Plan:
    """Reads what ``to_json`` wrote. A plan is simulated again, and refused if its figures or claims do not agree.

    Raises:
        EncodingError: if the text is not JSON, not ours, of another version, incomplete or altered.

    >>> from recoup.planning.actions import Backward, Forward
    >>> schedule = Schedule([Forward(0), Backward(0, option=1)])
    >>> from_json(to_json(schedule)) == schedule
    True
    """
    decoders: dict[str, Callable[[Any], Problem | Schedule | Plan]]
    decoders = {"problem": partial(decode, Problem), "schedule": decode_schedule, "plan": decode_plan}
    return read_document(text, _FORMAT, FORMAT_VERSION, decoders)


# Writing


def _encode(value: Problem | Schedule | Plan) -> tuple[str, object]:
    match value:
        case Problem():
            return "problem", encode(value)
        case Schedule():
            return "schedule", encode_schedule(value)
        case Plan():
            return "plan", encode_plan(value)
    raise EncodingError(f"Only problems, schedules and plans become JSON; got {type(value).__name__}.")


def encode_schedule(schedule: Schedule) -> list[dict[str, Any]]:
    """A schedule as what JSON knows."""
    return [{"do": type(action).__name__.lower(), **encode(action)} for action in schedule]


def encode_plan(plan: Plan) -> dict[str, Any]:
    """A plan as what JSON knows."""
    body = {
        "problem": encode(plan.problem),
        "budget_bytes": plan.budget_bytes,
        "schedule": encode_schedule(plan.schedule),
        "solver": plan.solver,
        "bound": encode(plan.bound),
        "predicted": {"seconds": plan.predicted.seconds, "peak_bytes": plan.predicted.peak_bytes},
    }
    return {**body, "checksum": _checksum(body)}


def _checksum(body: Mapping[str, Any]) -> int:
    """Of all that a plan says: simulation cannot check its claims, nor figures that its own schedule does not use."""
    content = {name: item for name, item in body.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# Reading


def decode_schedule(body: Any) -> Schedule:
    """A schedule from what `encode_schedule` made of it."""
    return Schedule(_action(action) for action in expect_list("A schedule", body))


def _action(body: Any) -> Action:
    if not isinstance(body, dict) or body.get("do") not in _ACTIONS:
        raise EncodingError(f"An action should name what to do ({', '.join(_ACTIONS)}); got {body!r}.")
    content = {name: item for name, item in body.items() if name != "do"}
    if not isinstance(content.get("unit"), int):
        raise EncodingError(f"An action should name its unit's index; got {body!r}.")
    return decode(_ACTIONS[body["do"]], content)


def decode_plan(body: Any, *, shared: tuple[Problem, Any] | None = None) -> Plan:
    """A plan from what `encode_plan` made of it, simulated again.

    Args:
        body: the plan's fields.
        shared: the problem that it is for, and how that is written, where the plan's own is left out.
    """
    names = {"budget_bytes", "schedule", "solver", "bound", "predicted"}
    names |= set() if shared else {"problem"}
    expect_keys("A plan", body, {*names, "checksum"}, names)
    problem, written = shared or (decode(Problem, body["problem"]), body["problem"])
    schedule = decode_schedule(body["schedule"])
    predicted = simulate(problem, schedule)
    claimed = body["predicted"]
    expect_keys("A plan's figures", claimed, {"seconds", "peak_bytes"})
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
        bound=decode(Bound, body["bound"]),
        predicted=predicted,
    )
    _check_claims(plan)
    # Of what is written, so that a field that a later version adds or leaves out does not matter. Plans of version 0.2
    # have none.
    checksum = _checksum({**body, "problem": written})
    if body.get("checksum", checksum) != checksum:
        raise EncodingError("The plan's 'checksum' is not that of its content: it has been altered.")
    return plan


def _check_claims(plan: Plan) -> None:
    """Refuses claims that cannot be true of the plan's schedule; those of a solver's own class are not proven again."""
    classes = {BY_HAND: ALL_SCHEDULES} | {solver.name: solver.schedules for solver in SOLVERS}
    own_class = classes.get(plan.solver)
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
