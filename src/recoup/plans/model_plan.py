"""Plans for a model: the planner's answer together with the profile that it answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from recoup import planning
from recoup.budgets import read_share
from recoup.given import check_given
from recoup.model.recipe import Recipe
from recoup.planning.plan import Session
from recoup.plans.profile import Profile
from recoup.plans.refusal import NOTED_SHARE, refusal
from recoup.plans.tightest import session_of
from recoup.plans.tree import Item, Leaf, Segment, tree_of
from recoup.plans.usable_bytes import smallest_budget, usable_bytes
from recoup.sizes import format_bytes

__all__ = [
    "ModelPlan",
    "Replanner",
    "find_schedule",
    "frontier",
    "minimum_budget",
    "plan",
    "plan_with_less",
    "span_name",
    "tightest",
]

_NUM_IN_FLIGHT = 24
"""How many plans are compared where several forwards are in flight."""

_WARM = 6
"""For how many budgets a `Replanner` plans when it is made."""

_TAKES_A_PROFILE = "takes a profile, what recoup.measure returns or .profile of what recoup.fit returns"


@dataclass(frozen=True)
class ModelPlan:
    """What to do with every unit of a model, and what that will cost.

    Attributes:
        profile: the measured step.
        schedule: the planner's plan for it, with schedule, prediction and proof.
        budget_bytes: that was asked for.
    """

    profile: Profile = field(repr=False)
    schedule: planning.Plan
    budget_bytes: int

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The units' options and the segments."""
        return tree_of(self.schedule.schedule, len(self.profile.units))

    @cached_property
    def predicted_bytes(self) -> int:
        """The predicted peak of the whole step, the optimizer's step included."""
        predicted = self.schedule.predicted
        waiting_bytes = self.profile.waiting_bytes(self.schedule.schedule, predicted)
        return max(predicted.peak_bytes + waiting_bytes, self.profile.residents.optimizer_peak_bytes)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of forward and backward."""
        return self.schedule.predicted.seconds

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan counts on, in sentences for its user."""
        return (*_on_engine(self.profile), *self._on_output(), *self._in_flight())

    def _in_flight(self) -> tuple[str, ...]:
        profile, predicted = self.profile, self.schedule.predicted
        if profile.in_flight == 1:
            return ()
        waiting_bytes = profile.waiting_bytes(self.schedule.schedule, predicted)
        return (
            f"{profile.in_flight} forwards are in flight: {format_bytes(waiting_bytes)} of the predicted peak are what"
            " all but one of them hold.",
        )

    def _on_output(self) -> tuple[str, ...]:
        profile = self.profile
        if profile.output_bytes < NOTED_SHARE * self.predicted_bytes:
            return ()
        output = f"the model's output ({profile.output_names}, {format_bytes(profile.output_bytes)})"
        if profile.holds_output:
            return (
                f"The training loop is taken to hold {output} through the backward; where it does not, as with loss ="
                " model(**batch).loss, holds_output=False leaves that room to activations.",
            )
        return (
            f"The plan counts on {output} being let go before the backward, as loss = model(**batch).loss does; a loop"
            " that holds it needs up to that much more.",
        )

    @property
    def keeps_everything(self) -> bool:
        """Whether the plan is the plain step."""
        return all(isinstance(item, Leaf) and self.recipe(item).is_kept for item in self.items)

    def recipe(self, leaf: Leaf) -> Recipe:
        """How a unit runs."""
        return self.profile.units[leaf.unit].recipes[leaf.option]

    def describe_units(self) -> list[tuple[str, str]]:
        """For groups of neighbouring units that are treated alike: their names, and what happens to them."""
        labelled = [
            (self.profile.units[item.first], item.last, self.label(item))
            for item in self.items
            if not self.profile.units[item.first].is_code
        ]
        described = []
        for label, group in groupby(labelled, key=lambda entry: entry[2]):
            members = list(group)
            name = span_name(members[0][0].name, self.profile.units[members[-1][1]].name)
            if label.startswith("segment of") and len(members) > 1:
                label = f"{len(members)} segments{label.removeprefix('segment')}"
                label = label.replace(", recomputed", ", each recomputed")
            described.append((name, label))
        return described

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes it, its profile included, as versioned JSON, from which `from_json` makes an equal plan."""
        from recoup.plans.plan_json import plan_to_json

        return plan_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> ModelPlan:
        """Reads what `to_json` wrote; `apply` takes it for any model of the same architecture.

        Raises:
            EncodingError: the text is not JSON, not a model's plan, of another version, incomplete or altered.
        """
        from recoup.plans.plan_json import plan_from_json

        return plan_from_json(text)

    def label(self, item: Item) -> str:
        """What happens to a unit or a segment, in a few words."""
        if isinstance(item, Leaf):
            return self.recipe(item).name
        depth = _depth(item)
        if item.first == item.last:
            recipe = self.recipe(item.items[0]) if isinstance(item.items[0], Leaf) else Recipe()
            return replace(recipe, whole=True).name
        nested = f", nested {depth} deep" if depth > 1 else ""
        return f"segment of {item.last - item.first + 1}, recomputed together{nested}"

    def __str__(self) -> str:
        lines = [
            f"{self.profile.model} within {format_bytes(self.budget_bytes)}: predicted peak"
            f" {format_bytes(self.predicted_bytes)} (plain {format_bytes(self.profile.plain_bytes)}),"
            f" {self.predicted_s:.4g} s (plain {self.profile.plain.seconds:.4g} s"
            f"{'; seconds are estimates' if self.profile.seconds_are_estimates else ''})"
        ]
        return "\n".join(lines + [f"  {names}: {label}" for names, label in self.describe_units()])


def _on_engine(profile: Profile) -> Iterator[str]:
    """Which units run as captured graphs, and why others do not."""
    calls = [unit for unit in profile.units if not unit.is_code]
    for engine, what in (("captured", "graphs of operations"), ("compiled", "generated code")):
        ran = [
            unit for unit in calls if unit.recipes[0].cut is not None and unit.recipes[0].cut.engine == engine
        ]
        if ran:
            num_small = len(calls) - len(ran) - sum(bool(unit.uncaptured) for unit in calls)
            hold = "holds" if num_small == 1 else "hold"
            small = f"; {num_small} {hold} too little to be worth it" if num_small else ""
            yield f"{len(ran)} of {len(calls)} unit calls run as {what} (engine={engine!r}){small}."
            yield f"The plain step is that of the same {what}, with everything kept."
    reasons: dict[str, list[str]] = {}
    for unit in calls:
        if unit.uncaptured:
            reasons.setdefault(unit.uncaptured, []).append(unit.name)
    for why, names in reasons.items():
        more = f" and {len(names) - 1} more run" if len(names) > 1 else " runs"
        yield f"{names[0]}{more} eagerly: {why}."


def _depth(item: Item) -> int:
    return 1 + max(map(_depth, item.items)) if isinstance(item, Segment) else 0


def span_name(first: str, last: str) -> str:
    """The name of neighbouring units.

    >>> span_name("layers.0", "layers.9"), span_name("2", "4"), span_name("embed", "layers.2")
    ('layers.0-9', '2-4', 'embed to layers.2')
    """
    if first == last:
        return first
    (stem, _, end), (first_stem, _, start) = last.rpartition("."), first.rpartition(".")
    if stem == first_stem and start.isdigit() and end.isdigit():
        return f"{first}-{end}"
    return f"{first} to {last}"


def plan(profile: Profile, budget: int | str) -> ModelPlan:
    """The fastest way to run a measured step under a budget.

    Args:
        profile: what `measure` found.
        budget: bytes for the whole step, such as ``"8GiB"``, or ``"80%"`` of the device's memory.

    Raises:
        BudgetError: nothing fits; it names the smallest budget, as predicted, and the unit that sets it.
    """
    check_given(profile, Profile, f"plan {_TAKES_A_PROFILE}")
    return plan_with_less(profile, read_share(budget, profile.device_bytes))[0]


class Replanner:
    """Plans one profile again and again: the solvers' shared work is done once, when this is made.

    For 100 units that takes seconds, and each plan after it some 40 ms (``benchmarks/autopilot.py``).

    Attributes:
        profile: that is planned.
        smallest: the plan with the smallest budget.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._session = session_of(profile.problem, proves=False)
        least_bytes = max(self._session.smallest_bytes, profile.residents.optimizer_peak_bytes)
        found = ModelPlan(profile, self._session.plan(least_bytes), least_bytes)
        least = min(found, tightest(profile), key=smallest_budget)
        self.smallest = replace(least, budget_bytes=smallest_budget(least))
        # Solvers have tables of their own for small and for large budgets.
        span_bytes = max(0, profile.plain.peak_bytes - least_bytes)
        for share in range(1, _WARM + 1):
            self._session.plan(least_bytes + span_bytes * share // _WARM)

    def plan(self, budget_bytes: int) -> ModelPlan:
        """As `plan`."""
        return plan_with_less(self.profile, budget_bytes, session=self._session)[0]


def plan_with_less(
    profile: Profile,
    budget_bytes: int,
    less_bytes: int | None = None,
    *,
    session: Session | None = None,
) -> tuple[ModelPlan, ModelPlan | None]:
    """As `plan`, and the plan for a smaller budget: it fits, too; ``None`` where nothing fits that.

    Args:
        profile: what `measure` found.
        budget_bytes: for the whole step.
        less_bytes: the smaller budget.
        session: of the profile's problem, with what solvers have done so far.

    Raises:
        BudgetError: nothing fits the larger budget.
    """
    floor = profile.residents.optimizer_peak_bytes
    if floor > budget_bytes:
        raise refusal(tightest(profile), budget_bytes)
    if profile.in_flight > 1:
        return _plan_in_flight(profile, budget_bytes), None
    most_bytes = usable_bytes(budget_bytes, profile)
    session = session_of(profile.problem) if session is None else session
    found = find_schedule(profile, most_bytes, session)
    if found is None:
        raise refusal(tightest(profile), budget_bytes)
    smaller = None if less_bytes is None else session.find(usable_bytes(less_bytes, profile))
    chosen = ModelPlan(profile, found, budget_bytes)
    return chosen, None if smaller is None else ModelPlan(profile, smaller, budget_bytes)


def find_schedule(profile: Profile, most_bytes: int, session: Session) -> planning.Plan | None:
    """The fastest schedule of a session of the profile's problem within these bytes; ``None`` if nothing fits."""
    found = session.find(most_bytes)
    # Measured seconds may lead below the smallest budget, or end above it: it is known without them.
    if found is None or session.is_near_smallest(most_bytes):
        return (found or profile.tightest) if profile.may_fit(most_bytes) else None
    return found


def _plan_in_flight(profile: Profile, budget_bytes: int) -> ModelPlan:
    """The fastest of the plans on the frontier of one forward that fits with all that are in flight.

    Raises:
        BudgetError: none fits.
    """
    points = session_of(profile.problem).frontier(num_points=_NUM_IN_FLIGHT, budgets=None)
    found = [tightest(profile), *(ModelPlan(profile, point, budget_bytes) for point in points)]
    found = [replace(one, budget_bytes=budget_bytes) for one in found]
    fitting = [one for one in found if one.predicted_bytes <= usable_bytes(budget_bytes, profile)]
    if not fitting:
        raise refusal(min(found, key=lambda one: one.predicted_bytes), budget_bytes)
    return min(fitting, key=lambda one: one.predicted_s)


def minimum_budget(profile: Profile) -> int:
    """The smallest budget in bytes for which `plan` finds a plan; `frontier` begins there.

    It is a prediction: a real step may take a little more or less. A refusal by `fit` names a budget that it verified.
    """
    check_given(profile, Profile, f"minimum_budget {_TAKES_A_PROFILE}")
    return smallest_budget(tightest(profile))


def tightest(profile: Profile) -> ModelPlan:
    """The plan that needs the least memory, as predicted; the same one whatever the seconds of the day."""
    return ModelPlan(profile, profile.tightest, profile.tightest.budget_bytes)


def frontier(
    profile: Profile, *, num_points: int = 20, budgets: Iterable[int | str] | None = None
) -> tuple[ModelPlan, ...]:
    """The best seconds for every budget, from the smallest feasible one up.

    Args:
        profile: what `measure` found.
        num_points: at most this many plans.
        budgets: where to look, instead of spread over the useful range.
    """
    check_given(profile, Profile, f"frontier {_TAKES_A_PROFILE}")
    given = None if budgets is None else [read_share(budget, profile.device_bytes) for budget in budgets]
    session = session_of(profile.problem)
    found = [
        ModelPlan(profile, point, point.budget_bytes)
        for point in session.frontier(num_points=num_points, budgets=given)
    ]
    least = tightest(profile)
    smallest = smallest_budget(least)
    most_bytes = usable_bytes(smallest, profile)
    is_feasible = most_bytes >= session.smallest_bytes
    first = ModelPlan(profile, session.plan(most_bytes), smallest) if is_feasible else least
    points = (
        [replace(first, budget_bytes=smallest)] if given is None or max(given, default=0) >= smallest else []
    )
    for point in sorted((replace(one, budget_bytes=smallest_budget(one)) for one in found), key=_order):
        if (
            points
            and point.budget_bytes > points[-1].budget_bytes
            and point.predicted_s < points[-1].predicted_s
        ):
            points.append(point)
    if given is None:
        del points[1 : 1 + max(0, len(points) - num_points)]
    return tuple(points)


def _order(plan: ModelPlan) -> tuple[int, float]:
    return plan.budget_bytes, plan.predicted_s
