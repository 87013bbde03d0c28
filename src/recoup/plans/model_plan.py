"""Plans for a model: the planner's answer together with the profile that it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from recoup import planning
from recoup.budgets import read_share
from recoup.errors import BudgetError
from recoup.model.recipe import KEEP, Recipe
from recoup.planning.plan import Session
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.select import SelectSolver
from recoup.plans.profile import Profile, ProfiledUnit
from recoup.plans.tree import Item, Leaf, Segment, tree_of
from recoup.sizes import format_bytes

__all__ = [
    "ModelPlan",
    "frontier",
    "minimum_budget",
    "plan",
    "refusal",
    "smallest_budget",
    "span_name",
    "tightest",
]

# What an eager model can run: options per unit, and (nested) segments. No moves to other stores.
_SOLVERS = (ChainSolver(), SelectSolver())
_NOTED_SHARE = 0.01
"""An output that takes less of the peak than this is not worth a sentence."""


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
        return max(self.schedule.predicted.peak_bytes, self.profile.residents.optimizer_peak_bytes)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of forward and backward."""
        return self.schedule.predicted.seconds

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan counts on, in sentences for its user."""
        profile = self.profile
        if profile.output_bytes < _NOTED_SHARE * self.predicted_bytes:
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
        return all(isinstance(item, Leaf) and self.recipe(item) == KEEP for item in self.items)

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
            inner = self.recipe(item.items[0]).inner if isinstance(item.items[0], Leaf) else ()
            return Recipe(whole=True, inner=inner).name
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
    budget_bytes = read_share(budget, profile.device_bytes)
    floor = profile.residents.optimizer_peak_bytes
    if floor > budget_bytes:
        raise refusal(tightest(profile), budget_bytes)
    usable_bytes = _usable_bytes(budget_bytes, profile)
    session = Session(profile.problem, solvers=_SOLVERS)
    least = None
    # Measured seconds may lead below the smallest budget, which is known without them.
    if usable_bytes < max(session.smallest_bytes, floor):
        least = tightest(profile)
        if least.predicted_bytes > usable_bytes:
            raise refusal(least, budget_bytes)
    chosen = least or ModelPlan(profile, session.plan(usable_bytes), budget_bytes)
    return replace(chosen, budget_bytes=budget_bytes)


def minimum_budget(profile: Profile) -> int:
    """The smallest budget in bytes for which `plan` finds a plan; `frontier` begins there.

    It is a prediction: a real step may take a little more or less. A refusal by `fit` names a budget that it verified.
    """
    return smallest_budget(tightest(profile))


def _usable_bytes(budget_bytes: int, profile: Profile) -> int:
    """What plans may take of a budget: on a GPU a thousandth less, since real steps were up to 0.09 % above prediction.

    Its allocator does not split every block, so that a tensor may take up to 1 MiB more than it needs. The optimizer's
    own step needs no room.
    """
    room_bytes = budget_bytes // 1000 if profile.device.startswith("cuda") else 0
    return max(profile.residents.optimizer_peak_bytes, budget_bytes - room_bytes)


def smallest_budget(plan: ModelPlan, measured_bytes: int = 0) -> int:
    """The smallest budget that leaves room above a plan's peak: as measured, or as predicted where no step was run."""
    peak_bytes = measured_bytes or plan.predicted_bytes
    budget_bytes = max(peak_bytes, plan.profile.residents.optimizer_peak_bytes)
    while (missing_bytes := peak_bytes - _usable_bytes(budget_bytes, plan.profile)) > 0:
        budget_bytes += missing_bytes
    return budget_bytes


def tightest(profile: Profile) -> ModelPlan:
    """The plan that needs the least memory, as predicted; the same one whatever the seconds of the day."""
    steady = replace(profile, problem=_with_steady_seconds(profile))
    session = Session(steady.problem, solvers=_SOLVERS)
    best = session.plan(session.smallest_bytes)
    bound = relaxed_bound(profile.problem, best.budget_bytes)
    predicted = planning.simulate(profile.problem, best.schedule)
    found = replace(best, problem=profile.problem, bound=bound, predicted=predicted)
    return ModelPlan(profile, found, best.budget_bytes)


def _with_steady_seconds(profile: Profile) -> planning.Problem:
    """The problem with the number of forwards in the place of seconds, so that equal plans are told apart by that."""
    units = []
    for unit, profiled in zip(profile.problem.units, profile.units, strict=True):
        options = [
            replace(
                option, forward_s=1.0, backward_s=1.0 + recipe.whole + 0.1 * len(recipe.inner), again_s=0.0
            )
            for option, recipe in zip(unit.options, profiled.recipes, strict=True)
        ]
        units.append(replace(unit, options=tuple(options)))
    return replace(profile.problem, units=tuple(units))


def refusal(least: ModelPlan, budget_bytes: int, *, measured_bytes: int = 0) -> BudgetError:
    """Why nothing fits a budget, what would, and what to change.

    Args:
        least: the plan that needs the least memory.
        budget_bytes: that was asked for.
        measured_bytes: the peak of a real step under that plan; 0 if none was run.
    """
    profile = least.profile
    smallest = smallest_budget(least, measured_bytes)
    known = "verified on a real step" if measured_bytes else "predicted"
    named = f"smallest feasible budget is {format_bytes(smallest)} ({smallest} bytes, {known})"
    floor = profile.residents.optimizer_peak_bytes
    if floor > budget_bytes:
        return BudgetError(
            f"The optimizer's own step needs {format_bytes(floor)} ({floor} bytes: {_residents(profile)}), and the"
            f" budget is {format_bytes(budget_bytes)}. No plan for activations changes that; the {named}. Use a lighter"
            " optimizer, fewer bits for parameters, or shard them; or a smaller batch, where the sample is what takes"
            " the room.",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
        )
    peak = least.schedule.predicted.peak
    unit = profile.units[peak.unit]
    parts = _floor(least, measured_bytes)
    given = "" if profile.holds_output else " with the model's output let go before the backward"
    return BudgetError(
        f"{profile.model} does not fit {format_bytes(budget_bytes)} ({budget_bytes} bytes). The {named}{given}, set by"
        f" the {peak.phase} of {unit.name!r}:"
        f" {', '.join(f'{format_bytes(size)} {name}' for name, size in parts.items() if size)}."
        f" {' '.join(_advice(profile, unit, parts))}",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        unit=unit.name,
    )


def _residents(profile: Profile) -> str:
    """What lives in an optimizer's step."""
    residents = profile.residents
    parts = {
        "parameters and buffers": residents.parameter_bytes,
        "gradients": residents.gradient_bytes,
        "optimizer state": residents.optimizer_bytes,
        "sample and other tensors": residents.other_bytes,
        "temporaries of the step": residents.optimizer_transient_bytes,
    }
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)


def _floor(least: ModelPlan, measured_bytes: int) -> dict[str, int]:
    """What a plan's peak consists of: bytes by name, those of parameters, gradients and optimizer state first."""
    profile, predicted = least.profile, least.schedule.predicted
    residents = profile.residents
    run = least.schedule.schedule.actions[: predicted.peak.action]
    gradient_bytes = residents.gradient_bytes if profile.accumulates else 0
    gradient_bytes += sum(
        profile.problem.units[action.unit].parameter_gradient_bytes
        for action in run
        if isinstance(action, planning.Backward)
    )
    output_bytes = profile.output_bytes if profile.holds_output else 0
    parts = {
        "parameters and buffers": residents.parameter_bytes,
        "gradients": gradient_bytes,
        "optimizer state": residents.optimizer_bytes,
        "sample and other tensors": residents.other_bytes,
        f"the model's output ({profile.output_names})": output_bytes,
    }
    peak_bytes = measured_bytes or predicted.peak_bytes
    parts["activations and workspace there"] = max(0, peak_bytes - sum(parts.values()))
    return parts


def _advice(profile: Profile, unit: ProfiledUnit, parts: Mapping[str, int]) -> list[str]:
    """What would lower the smallest budget, as far as it is known."""
    fixed_bytes = sum(list(parts.values())[:3])
    advice = ["Raise the budget, or use a smaller batch."]
    if profile.holds_output and profile.output_bytes:
        advice.append(
            f"Letting the model's output go before the backward, as loss = model(**batch).loss does, frees up to"
            f" {format_bytes(profile.output_bytes)}: then pass holds_output=False."
        )
    if fixed_bytes > sum(parts.values()) // 2:
        advice.append(
            "Most of it is parameters, gradients and optimizer state, which no plan makes smaller: use a lighter"
            " optimizer, train fewer parameters, or shard them."
        )
    elif unit.num_parts:
        advice.append(f"units= can name what {unit.name!r} calls, to split it.")
    return advice


def frontier(
    profile: Profile, *, num_points: int = 20, budgets: Iterable[int | str] | None = None
) -> tuple[ModelPlan, ...]:
    """The best seconds for every budget, from the smallest feasible one up.

    Args:
        profile: what `measure` found.
        num_points: at most this many plans.
        budgets: where to look, instead of spread over the useful range.
    """
    given = None if budgets is None else [read_share(budget, profile.device_bytes) for budget in budgets]
    session = Session(profile.problem, solvers=_SOLVERS)
    found = [
        ModelPlan(profile, point, point.budget_bytes)
        for point in session.frontier(num_points=num_points, budgets=given)
    ]
    least = tightest(profile)
    smallest = smallest_budget(least)
    usable_bytes = _usable_bytes(smallest, profile)
    is_feasible = usable_bytes >= session.smallest_bytes
    first = ModelPlan(profile, session.plan(usable_bytes), smallest) if is_feasible else least
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
