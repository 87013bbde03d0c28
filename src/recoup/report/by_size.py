"""Plans for batches of several sizes in figures: what each range of sizes does, and what real steps took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from recoup.engines.verify import Verification
from recoup.plans.by_size.axes import Size, volume
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import Leaf, leaves_of
from recoup.report.subject import Subject

__all__ = [
    "PER",
    "RealStep",
    "SizeRow",
    "axes_in_words",
    "in_short",
    "notes_on_sizes",
    "real_steps",
    "rows_by_size",
    "size_in_words",
    "title_of",
    "treatments",
]

PER = 1000
_WORDS = {"recompute": "", "part": "in part", "segment": "in segments"}


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A range of sizes, with predicted figures for its end.

    Attributes:
        up_to: the largest of them.
        what: the plan in a few words.
        peak_bytes: of a step of that size.
        per_thousand_s: seconds of such a step for each 1,000 elements, as the axes count them.
        fits: whether the peak is within the budget.
    """

    up_to: str
    what: str
    peak_bytes: int
    per_thousand_s: float
    fits: bool


@dataclass(frozen=True, slots=True)
class RealStep:
    """A real step of one size.

    Attributes:
        size: of its batch.
        at: the same in words.
        plan: that it ran under, predicted for this size.
        seen: what it took.
    """

    size: Size
    at: str
    plan: ModelPlan
    seen: Verification


def rows_by_size(plans: PlansBySize) -> list[SizeRow]:
    """The ranges, in order."""
    return [
        SizeRow(
            size_in_words(one.up_to),
            in_short(one.plan),
            one.plan.predicted_bytes,
            PER * one.seconds_per_element,
            one.plan.predicted_bytes <= one.plan.budget_bytes,
        )
        for one in plans.ranges
    ]


def real_steps(subject: Subject) -> list[RealStep]:
    """The steps that were run, the smallest size first; the largest is that of the whole report."""
    plans = subject.by_size
    if plans is None or subject.verification is None:
        return []
    found = [(one.size, one.plan, one.verification) for one in subject.sizes]
    found.append((plans.profiles.size_of(subject.plan.profile), subject.plan, subject.verification))
    ordered = sorted(found, key=lambda one: volume(one[0]))
    return [RealStep(size, size_in_words(size), plan, seen) for size, plan, seen in ordered]


def notes_on_sizes(subject: Subject) -> Iterator[str]:
    """What is to be known about the figures of a model that was fitted to several sizes, in sentences."""
    plans = subject.by_size
    if plans is None:
        return
    largest = size_in_words(plans.profiles.size_of(subject.plan.profile))
    yield f"Figures are those of the largest batch, {axes_in_words(plans)} = {largest}."
    if subject.verification is not None and subject.verification.race:
        yield (
            "Only plans for the largest batch were raced. Those for smaller ones are chosen by their predicted seconds,"
            " which are corrected by that race."
        )
    seen = {step.size for step in real_steps(subject)}
    missing = [size_in_words(size) for size in plans.profiles.sizes if seen and size not in seen]
    if missing:
        yield (
            f"No real step was run under the plan for {', '.join(missing)}: steps passed the budget under plans before"
            " it, and it was made with the bytes that these missed."
        )


def axes_in_words(plans: PlansBySize) -> str:
    """What a size consists of: ``"input_ids.shape[1]"``, or ``"x.shape[0] by x.shape[1]"``."""
    return " by ".join(axis.name for axis in plans.profiles.axes)


def title_of(plans: PlansBySize) -> str:
    """What a table of them shows."""
    used = " that were used so far" if len(plans.profiles.axes) > 1 else ""
    return f"Plans by size{used}, {axes_in_words(plans)}"


def size_in_words(size: Size) -> str:
    """A size as people write it.

    >>> size_in_words((512,)), size_in_words((4, 512))
    ('512', '4 by 512')
    """
    return " by ".join(map(str, size))


def treatments(plan: ModelPlan) -> list[str]:
    """For every position: ``"keep"``, ``"part"``, ``"recompute"`` or ``"segment"``."""
    found = []
    for item in plan.items:
        if not isinstance(item, Leaf):
            kind = "recompute" if item.first == item.last else "segment"
        elif plan.recipe(item).is_kept:
            kind = "keep"
        else:
            kind = "recompute" if plan.recipe(item).whole else "part"
        found += [kind] * len(list(leaves_of([item])))
    return found


def in_short(plan: ModelPlan) -> str:
    """What a plan does, in a few words: ``"keep"``, ``"5 of 24 units recomputed, 16 in part"``."""
    pairs = zip(plan.profile.units, treatments(plan), strict=True)
    counts = Counter(kind for unit, kind in pairs if not unit.is_code)
    found = [(counts[kind], words) for kind, words in _WORDS.items() if counts[kind]]
    if not found:
        return "keep"
    (number, first), *others = found
    more = "".join(f", {count} {words}" for count, words in others)
    return f"{number} of {counts.total()} units recomputed {first}".rstrip() + more
