"""Hand-made fitted models for the report's tests: numbers that nothing measured, so that every figure is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from recoup.auditing.findings import Audit, Kind, make_finding
from recoup.engines.recording import thinned
from recoup.engines.verify import Verification, VerifiedSize
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import Option, Problem, Unit
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan, minimum_budget, plan
from recoup.plans.profile import Profile, ProfiledUnit, Residents

MIB = 2**20


@dataclass(frozen=True)
class Made:
    """As much of a fitted model as a report reads."""

    plan: ModelPlan
    audit: Audit = field(default_factory=lambda: Audit(()))
    verification: Verification | None = None
    notes: tuple[str, ...] = ()
    by_size: PlansBySize | None = None
    sizes: tuple[VerifiedSize, ...] = ()


@dataclass(frozen=True)
class NotedPlan(ModelPlan):
    """A plan that says something about itself."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotedVerification(Verification):
    """A verification that says something about itself."""

    notes: tuple[str, ...] = ()


def with_notes(made: Made, *, plan: Sequence[str] = (), verification: Sequence[str] = ()) -> Made:
    """The same fitted model, whose plan and verification come with sentences."""

    def noted(kind: type[Any], value: Any, notes: Sequence[str]) -> Any:
        kept = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
        return kind(**{**kept, "notes": tuple(notes)})

    seen = made.verification and noted(NotedVerification, made.verification, verification)
    return replace(made, plan=noted(NotedPlan, made.plan, plan), verification=seen)


def make_profile(
    num_blocks: int,
    *,
    num_kinds: int = 2,
    stem: str = "layers",
    unsafe: Sequence[int] = (),
    model: str = "Stack",
    embed_mib: float = 1,
    again_ms: float = 0.0,
) -> Profile:
    """An embedding, blocks of several kinds in turn with unequal costs, a head, and the loss.

    A block that is kept in a replay costs ``again_ms`` more.
    """
    units = [_unit("embed", held_mib=embed_mib, output_mib=2, forward_ms=0.5)]
    profiled = [ProfiledUnit("embed", "embed", 0, 0, (KEEP, RECOMPUTE))]
    for index in range(num_blocks):
        kind = 1 + index * num_kinds // num_blocks
        name = f"{stem}.{index}"
        is_unsafe = index in unsafe
        costs = {
            "held_mib": 6 + 2 * kind,
            "output_mib": 2,
            "forward_ms": 3.0 + 1.5 * kind,
            "again_ms": again_ms,
        }
        units.append(_unit(name, **costs, replays=not is_unsafe, runs_once=is_unsafe))
        recipes = (KEEP,) if is_unsafe else (KEEP, RECOMPUTE)
        reason = "values drift: its output" if is_unsafe else ""
        profiled.append(ProfiledUnit(name, name, 0, kind, recipes, reason))
    units.append(_unit("head", held_mib=0, output_mib=5, forward_ms=1.5, replays=False))
    profiled.append(ProfiledUnit("head", "head", 0, num_kinds + 1, (KEEP,)))
    units.append(_unit("loss", held_mib=3, output_mib=0, forward_ms=0.25, replays=False, runs_once=True))
    profiled.append(ProfiledUnit("loss", None, 0, -1, (KEEP,)))
    return Profile(
        model=model,
        device="cpu",
        units=tuple(profiled),
        problem=Problem(units, resident_bytes=24 * MIB),
        residents=Residents(8 * MIB, 14 * MIB, 2 * MIB, 8 * MIB, 0),
    )


def _unit(
    name: str,
    *,
    held_mib: float,
    output_mib: float,
    forward_ms: float,
    again_ms: float = 0.0,
    replays: bool = True,
    runs_once: bool = False,
) -> Unit:
    if replays:
        unit = Unit.keep_or_recompute(
            name,
            forward_s=forward_ms / 1e3,
            backward_s=2.1 * forward_ms / 1e3,
            held_bytes=int(held_mib * MIB),
            output_bytes=int(output_mib * MIB),
            forward_transient_bytes=MIB // 2,
            backward_transient_bytes=MIB,
        )
        keep, recompute = unit.options
        return replace(unit, options=(replace(keep, again_s=again_ms / 1e3), recompute))
    keep = Option(
        "keep",
        forward_s=forward_ms / 1e3,
        backward_s=2.1 * forward_ms / 1e3,
        held_bytes=int(held_mib * MIB),
        backward_transient_bytes=MIB,
    )
    return Unit(name, [keep], output_bytes=int(output_mib * MIB), runs_once=runs_once)


def make_subject(
    num_blocks: int = 8,
    *,
    share: float = 0.5,
    num_kinds: int = 2,
    stem: str = "layers",
    unsafe: Sequence[int] = (),
    model: str = "Stack",
    is_verified: bool = True,
) -> Made:
    """A hand-made fitted model under a budget between the smallest (0) and the plain step's peak (1)."""
    profile = make_profile(num_blocks, num_kinds=num_kinds, stem=stem, unsafe=unsafe, model=model)
    smallest = minimum_budget(profile)
    chosen = plan(profile, smallest + int((profile.plain_bytes - smallest) * share))
    findings = [make_finding(profile.units[index + 1].name, Kind.DRIFT, "its output") for index in unsafe]
    return Made(chosen, Audit(tuple(findings)), _verification(chosen) if is_verified else None)


@cache
def large_subject() -> Made:
    """A thousand blocks of twenty kinds."""
    profile = make_profile(1000, num_kinds=20)
    chosen = plan(profile, profile.plain_bytes * 2 // 5)
    return Made(chosen, verification=_verification(chosen))


def _verification(chosen: ModelPlan) -> Verification:
    """Measured figures a little beside the predicted ones."""
    predicted, profile = chosen.schedule.predicted, chosen.profile
    timeline = thinned([(moment.time_s * 1.05, moment.num_bytes) for moment in predicted.timeline[::2]])
    peak_bytes = max(num_bytes for _, num_bytes in timeline)
    return Verification(
        peak_bytes=peak_bytes,
        seconds=predicted.seconds * 1.05,
        plain_peak_bytes=profile.plain_bytes,
        plain_seconds=profile.plain.seconds * 1.02,
        gradients="bit-equal",
        timeline=tuple(timeline),
    )
