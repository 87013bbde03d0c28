"""``verify``: a real step under the plan, compared with the budget and with the plain step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain

import torch

from recoup.checkpointing.fingerprints import Fingerprint, differing, fingerprint, on_host
from recoup.engines.compare_by_unit import Compared, compare_units
from recoup.engines.drift import Drift, beyond_rounding, drift_between, list_drifts, sizes_of, too_far
from recoup.engines.racing import Finisher, Race, time_as_it_stands
from recoup.engines.real_steps import RealSteps, Recorded
from recoup.engines.recording import Points
from recoup.errors import OverBudgetError, VerificationError
from recoup.model.step import TrainingStep
from recoup.plans.by_size.axes import Size
from recoup.plans.model_plan import ModelPlan
from recoup.progress import note
from recoup.sizes import format_bytes
from recoup.torch_private import ConvNd

__all__ = ["Verification", "VerifiedSize", "verify_step"]

_MOST_PLAIN_STEPS = 3
_SHAKEN = 2.0
"""Rounding moves gradients by no more than so many times what other last bits of all parameters do."""
_TELLING = 0.25
"""Gradients that are further apart than this, and no further than last bits explain, are noise: that tells little."""
_ROUNDING = 0.05
"""Generated code does not make gradients differ by more than this, other than by other random numbers."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a real step under the plan took.

    Attributes:
        peak_bytes: measured peak of the whole step, the optimizer's step included.
        seconds: measured, forward and backward.
        plain_peak_bytes: of the plain step, in which captured units run as graphs that keep everything; ``None`` where
            that did not fit.
        plain_seconds: of the same step.
        gradients: how the gradients compare, in words: ``"bit-equal"``, or ``"bit-equal, unit by unit"`` where the
            plain step did not fit; what was not compared, how far those that drift are apart, and that they are
            compared with a step whose key-value cache is off, where the plan switches it off.
        drifting: gradients that are not bit-equal, in a model whose plain steps are not either or with units that are
            captured, and how far they are apart.
        notes: limits of these figures, in sentences.
        timeline: seconds, and the bytes of the whole step from then on. Recording slows a step down: the times are
            those of the recorded step, scaled to ``seconds``.
        race: plans that were timed against each other, the fastest first; empty if there was no other.
    """

    peak_bytes: int
    seconds: float
    plain_peak_bytes: int | None
    plain_seconds: float | None
    gradients: str
    drifting: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: Points = field(default=(), repr=False)
    race: tuple[Finisher, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifiedSize:
    """A real step with a batch of another size than the largest.

    Attributes:
        size: of the batch.
        plan: that it ran under.
        verification: what it took.
    """

    size: Size
    plan: ModelPlan
    verification: Verification


def verify_step(step: TrainingStep, plan: ModelPlan, race: Race | None = None) -> Verification:
    """Runs the step as the model stands, with its plan applied; and plainly, where that fits.

    Args:
        step: to run.
        plan: that is applied to the model.
        race: that the plan has won, with its memory and seconds; without one they are measured here.

    Raises:
        OverBudgetError: its peak passes the plan's budget. Nothing else is looked at then.
        VerificationError: a gradient differs from the plain step's, though plain steps agree with each other; with
            captured units, by more than rounding.
    """
    steps = RealSteps(step, plan.profile)
    if race is None:
        race = time_as_it_stands(steps, plan)
    lap, plain = race.winning, race.plain
    assert lap.recorded is not None, "a winner's memory is recorded"
    peak_bytes = lap.recorded.peak_bytes
    if peak_bytes > plan.budget_bytes:
        raise _over_budget(peak_bytes, plan)
    note("verifying", 1, 2)
    drifting, gradients = _compare_gradients(steps, plan, lap.recorded, race.reference if plain else None)
    if lap.recorded.is_cacheless:
        gradients += " to a step with use_cache off"
    return Verification(
        peak_bytes,
        lap.seconds,
        plain.recorded.peak_bytes if plain and plain.recorded else None,
        plain.seconds if plain else None,
        gradients,
        drifting,
        _notes(steps, race, is_cacheless=lap.recorded.is_cacheless),
        timeline=lap.timeline,
        race=race.finishers,
    )


def _compare_gradients(
    steps: RealSteps, plan: ModelPlan, fitted: Recorded, plain: Recorded | None
) -> tuple[tuple[Drift, ...], str]:
    """Compares gradients: of recorded steps; where these differ, with deterministic operations; or unit by unit."""
    leaves_traces = steps.leaves_traces(fitted.prints)
    if leaves_traces and plain is not None:
        if steps.is_generated:
            return _compare_generated(steps, fitted.prints, plain.prints)
        if not steps.step.ranks.largest(bool(differing(fitted.prints, plain.prints))):
            return (), _in_words(())
        prints, plain_prints = steps.results(fingerprint), _plain_prints(steps)
        if plain_prints is not None:
            names = _differing(steps, prints, plain_prints)
            if names and not fitted.compares_all:
                steps.compare_replays()  # names the first replay that differs
            return _compare(steps, names, plain_prints)
    if not fitted.compares_all:
        steps.compare_replays()  # by gradients nothing is known
    if not leaves_traces:
        return (), "not compared: the step leaves no gradients"
    compared = compare_units(steps.step, plan)
    return tuple(compared.drifting), _unit_by_unit(compared)


def _in_words(drifting: tuple[Drift, ...]) -> str:
    if not drifting:
        return "bit-equal"
    error, cosine = max(d.relative_error for d in drifting), min(d.cosine for d in drifting)
    return (
        f"not bit-equal, as in plain steps: {len(drifting)} with a relative error up to {error:.2g},"
        f" cosine from {cosine:.4f}"
    )


def _unit_by_unit(compared: Compared) -> str:
    if len(compared.skipped) == compared.num_units:
        return "not compared, for lack of memory"
    skipped = f"; not compared for lack of memory: {', '.join(compared.skipped)}" if compared.skipped else ""
    return f"{_in_words(tuple(compared.drifting))}, unit by unit{skipped}"


def _compare_generated(
    steps: RealSteps, fitted: dict[str, Fingerprint], plain: dict[str, Fingerprint]
) -> tuple[tuple[Drift, ...], str]:
    """Compares gradients of generated code with those of the same code with everything kept, and of eager code.

    Generated code rounds as it is fused, and it is fused by what is kept: as far as it is from eager code, code for
    another cut may be from it. It draws its random numbers in an order of its own, which is the same for all cuts: code
    that draws is compared with code that draws the same, and its distance from eager code says nothing. Gradients that
    are then further apart than usual are compared with how far other last bits of the parameters bring them.
    """
    names = _differing(steps, fitted, plain)
    with steps.plainly():
        kept = steps.results(on_host)
    with steps.eagerly():
        rounding = steps.inspect(lambda eager: drift_between(eager, kept))
    found = steps.inspect(lambda planned: drift_between(kept, planned)) if names else []
    error = _largest(rounding)
    against = f"relative error against eager up to {error:.2g}"
    drawn = " (it draws other random numbers)" if error > _ROUNDING and steps.draws else ""
    if not names:
        return (), f"bit-equal to the compiled step with everything kept, {against}{drawn}"
    wrong, noisy = too_far(found, () if steps.draws else rounding), []
    if steps.step.ranks.largest(bool(wrong)):
        with steps.plainly(), steps.shaken():
            shaken = steps.inspect(lambda results: drift_between(kept, results))
        known = [drift for drift in shaken if math.isfinite(drift.relative_error)]
        far, wrong = wrong, too_far(wrong, known, factor=_SHAKEN)
        noisy = [drift for drift in far if drift not in wrong and drift.relative_error > _TELLING]
    if wrong:
        raise VerificationError(
            f"Under the plan the gradient of {list_drifts(wrong)} differs from that of the compiled step with"
            " everything kept by more than rounding. Fit with engine='captured' or 'eager'.",
            gradients=[drift.name for drift in wrong],
        )
    untold = f"; too noisy to be compared: {list_drifts(noisy)}" if noisy else ""
    to_kept = f"relative error up to {_largest(found):.2g} to the compiled step with everything kept"
    return tuple(found), f"{to_kept}, {against}{drawn}{untold}"


def _largest(found: list[Drift]) -> float:
    return max((drift.relative_error for drift in found), default=0.0)


def _notes(steps: RealSteps, race: Race, *, is_cacheless: bool) -> tuple[str, ...]:
    """Which step was compared with, what was switched off for it, and what is not in the count."""
    found = []
    if race.plain is not None and race.reference is not None and race.reference is not race.plain.recorded:
        found.append(
            f"The eager step, with whose gradients those under the plan are compared, peaks at"
            f" {format_bytes(race.reference.peak_bytes)}."
        )
    if is_cacheless:
        found.append(
            "The plain step ran with the key-value cache (use_cache) off, as it is under the plan: a training step"
            " with the cache on takes more memory, and may round differently."
        )
    if steps.device.type == "cpu" and any(isinstance(m, ConvNd) for m in steps.step.model.modules()):
        found.append(
            "On a CPU the bytes are those of tensors: workspace that convolutions allocate inside their kernels is"
            " not in the count, so leave a margin for it in the budget."
        )
    return tuple(found)


def _plain_prints(steps: RealSteps) -> dict[str, Fingerprint] | None:
    """Of the plain step's gradients; ``None`` if it does not fit."""
    try:
        with steps.plainly():
            return steps.results(fingerprint)
    except torch.OutOfMemoryError:
        return None


def _differing(steps: RealSteps, fitted: dict[str, Fingerprint], plain: dict[str, Fingerprint]) -> list[str]:
    """Names of gradients that differ, on any rank: all ranks run the same steps after it."""
    return list(dict.fromkeys(chain(*steps.step.ranks.gathered(differing(fitted, plain)))))


def _compare(
    steps: RealSteps, names: list[str], plain: dict[str, Fingerprint]
) -> tuple[tuple[Drift, ...], str]:
    """Judges gradients that differ bit by bit from the plain step's; returns those, and words.

    Some differ as plain steps differ among themselves. Others differ by rounding: where a tensor is read inside a
    captured unit more than once, and outside of it as well, its gradients are added up inside the unit first.
    """
    ranks = steps.step.ranks
    if not names:
        return (), _in_words(())
    with steps.plainly():
        again = (steps.results(fingerprint) for _ in range(_MOST_PLAIN_STEPS))
        drifts = any(ranks.largest(bool(differing(plain, prints))) for prints in again)
        # On the host those that differ alone: all of them may be as large as the model.
        results, sizes = steps.inspect(
            lambda all: ({name: on_host(all[name]) for name in names if name in all}, sizes_of(all))
        )
        own = steps.inspect(lambda again: drift_between(results, again, sizes=sizes), names) if drifts else []
    found = steps.inspect(lambda planned: drift_between(results, planned, sizes=sizes), names)
    if not drifts and not found:
        found = [Drift(name, math.nan, math.nan) for name in names]  # they differ in some runs only
    adds_otherwise = not drifts and steps.profile.is_captured
    if drifts:
        wrong = too_far(found, own)
    elif adds_otherwise:
        conditions = steps.profile.conditions
        wrong = beyond_rounding(found, results, conditions.autocast if conditions is not None else "")
    else:
        wrong = found
    if wrong:
        raise VerificationError(
            f"Under the plan the gradient of {list_drifts(wrong)} differs from the plain step's, and plain"
            " steps do not differ so among themselves. Run recoup.audit on the model: a unit does not repeat"
            " itself in its replay."
        )
    if adds_otherwise:
        return tuple(found), (
            f"captured units add in another order: relative error up to {_largest(found):.2g}"
        )
    # Equal in these runs, but not in the first ones.
    drifting = tuple(found) or tuple(Drift(name, 0.0, 1.0) for name in names)
    return drifting, _in_words(drifting)


def _over_budget(peak_bytes: int, plan: ModelPlan) -> OverBudgetError:
    return OverBudgetError(
        f"A real step peaks at {format_bytes(peak_bytes)} ({peak_bytes} bytes), above the budget of"
        f" {format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes; predicted:"
        f" {format_bytes(plan.predicted_bytes)}). Plan for less than the budget; if the step's memory varies with the"
        " data, leave a margin.",
        peak_bytes=peak_bytes,
    )
