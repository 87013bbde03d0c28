"""``spill``: which held bytes leave over a link, and when, so that the transfers hide behind computation.

Swap first, recompute what cannot be hidden (Beaumont, Eyraud-Dubois, Shilova: Efficient combination of
rematerialization and offloading for training DNNs, POFO, NeurIPS 2021):

1. *What.* ``select``'s choices, and each of them with its held bytes or a read output sent away, which holds
   less and costs time on a link. At a given price for that time the best selection under a budget is
   ``select``'s integer program again, solved exactly. Almost for free, all that helps is swapped; as the
   price rises, recomputing or keeping takes over, unit by unit.
2. *When.* A selection becomes a schedule by a rule that hides transfers as well as their order allows
   (``transfers``); waits for room or for a value cost what ``simulate`` says.
3. Many prices and budgets give a pool of simulated schedules. An answer is the fastest of the pool that fits,
   or ``select``'s own answer without links if that is no slower. So more bytes never cost more seconds, and
   links never do harm.

The bound is Lagrange's, the best of two relaxations at several prices. A schedule of T seconds computes for
at most T and keeps each of L links busy for at most T in the slower direction, so with p the highest price
that any unit pays, the selection's optimum is at most T * (1 + p * L). And what is away as the last backward
starts was sent before and is fetched after, so its time in both directions together is at most T on each
link; there only that moment's bytes count. It is close where links are fast, and looser where stalls decide,
because it does not see when other bytes must move. Departure from POFO: no dynamic program over the chain;
options, skips and outputs are included, and the placement of moves is a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from recoup.errors import BudgetError
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import Bound, Candidate, Prepared, Solver
from recoup.planning.solvers.select import PreparedSelect
from recoup.planning.solvers.select.levels import Choice, Levels
from recoup.planning.solvers.select.prices import Pricer
from recoup.planning.solvers.select.search import Selector
from recoup.planning.solvers.spill.choices import LATE_WEIGHT, SpillChoices
from recoup.planning.solvers.spill.transfers import place_moves
from recoup.sizes import format_bytes

__all__ = ["SPILL_SCHEDULES", "PreparedSpill", "SpillSolver", "solve_spill"]

SPILL_SCHEDULES = "schedules with one option per unit, each value moved away at most once"

_SAME_SECONDS = 1e-12
_MAX_PRICES = 16
# Not 0: of selections that compute for equally long, the one that moves fewest bytes.
_LEAST_PRICE = 1e-10
_MAX_BUDGETS = 32
# Measured: units that are placed and simulated in a second, over all schedules of the pool.
_UNITS_A_SECOND = 15_000
_MIN_PLACINGS = 4
_MAX_PLACINGS = 64


def solve_spill(problem: Problem, *, budget_bytes: int, time_limit_s: float = 10.0) -> Candidate:
    """The best schedule that ``spill`` finds under a budget.

    Args:
        problem: with links, and with options or outputs that may use them.
        budget_bytes: for the whole step, resident bytes included.
        time_limit_s: roughly how long to search; it sets counts and not a clock.

    Raises:
        BudgetError: if none fits; it names the smallest budget that does and the unit that sets it.

    >>> from recoup.planning.problem import Link, Option, Unit
    >>> keep = Option("keep", forward_s=1, backward_s=2, held_bytes=60, held_links=("host",))
    >>> units = [Unit(name, [keep], output_bytes=10) for name in "abcd"]
    >>> problem = Problem(units, links=[Link("host", send_bytes_per_s=60.0, fetch_bytes_per_s=60.0)])
    >>> best = solve_spill(problem, budget_bytes=230)
    >>> print(best.schedule, simulate(problem, best.schedule).seconds)
    F0:0 S0h F1:0 S1h F2:0 S2h F3:0 R2h B3 R1h B2 R0h B1 B0 12.0
    """
    prepared = PreparedSpill(problem, time_limit_s=time_limit_s)
    candidate = prepared.best(budget_bytes)
    if candidate is None:
        raise prepared.budget_error(budget_bytes)
    return candidate


class SpillSolver(Solver):
    """One option per unit, and values that leave over links."""

    name = "spill"
    schedules = SPILL_SCHEDULES

    def applies(self, problem: Problem) -> bool:
        """Something must be allowed to leave."""
        return any(
            unit.output_links or any(option.held_links for option in unit.options) for unit in problem.units
        )

    def prepare(self, problem: Problem, *, time_limit_s: float) -> PreparedSpill:
        """Lists the choices; the pool follows when it is needed."""
        return PreparedSpill(problem, time_limit_s=time_limit_s)


@dataclass(frozen=True, slots=True)
class _Member:
    """A schedule of the pool with its simulated figures."""

    peak_bytes: int
    seconds: float
    schedule: Schedule
    chosen: tuple[Choice, ...] = ()


class PreparedSpill(Prepared):
    """A problem's choices with moves, and the pool of schedules."""

    def __init__(self, problem: Problem, *, time_limit_s: float) -> None:
        self.problem = problem
        self.time_limit_s = time_limit_s
        self.without = PreparedSelect(problem, time_limit_s=time_limit_s)
        self.choices = SpillChoices(problem)
        self.prices = _spread_prices(self.choices.break_even_prices())
        self.selectors = [
            Selector(self.choices.levels(price), time_limit_s=time_limit_s / len(self.prices))
            for price in self.prices
        ]

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that the pool or ``select`` meets."""
        return min([self.without.smallest_bytes, *(member.peak_bytes for member in self.pool)])

    def best(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule that fits, with its bound, or ``None`` below the smallest budget."""
        fitting = [member for member in self.pool if member.peak_bytes <= budget_bytes]
        plain = self.without.best(budget_bytes)
        if plain is not None:
            result = simulate(self.problem, plain.schedule)
            fitting.insert(0, _Member(result.peak_bytes, result.seconds, plain.schedule))
        if not fitting:
            return None
        # The first of equal ones: what moves nothing, then the lowest peak.
        best = fitting[0]
        for member in fitting[1:]:
            if member.seconds < best.seconds * (1 - _SAME_SECONDS):
                best = member
        return Candidate(best.schedule, self._bound(budget_bytes, best.seconds))

    def suggested_budgets(self) -> list[int]:
        """The peaks of the pool, and what ``select`` suggests."""
        return sorted({*self.without.suggested_budgets(), *(member.peak_bytes for member in self.pool)})

    def budget_error(self, budget_bytes: int) -> BudgetError:
        """What to say of a budget below the smallest."""
        smallest = self.smallest_bytes
        tight = self.best(smallest)
        assert tight is not None
        peak = simulate(self.problem, tight.schedule).peak
        unit = self.problem.units[peak.unit].name
        return BudgetError(
            f"No schedule that spill finds fits {format_bytes(budget_bytes)} ({budget_bytes} bytes). The"
            f" smallest is {format_bytes(smallest)} ({smallest} bytes), set by the {peak.phase} of unit"
            f" {unit!r}. Raise the budget, or let more of that unit's bytes leave over a link.",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
            unit=unit,
        )

    def _bound(self, budget_bytes: int, seconds: float) -> Bound:
        """The best of all prices' bounds."""
        num_links = len(self.problem.links)
        bounds = [0.0]
        for price, selector, turn in zip(self.prices, self.selectors, self._turn_levels, strict=True):
            if budget_bytes >= selector.smallest_bytes:
                optimum_s = selector.select([budget_bytes])[0].bound_s
                bounds.append(optimum_s / (1 + price * LATE_WEIGHT * num_links))
                relaxed_s = Pricer(turn).price(budget_bytes).bound_ticks * turn.tick_s
                bounds.append(relaxed_s / (1 + price / 2 * num_links))
        return Bound(min(max(bounds), seconds), schedules=SPILL_SCHEDULES)

    @cached_property
    def _turn_levels(self) -> list[Levels]:
        """Half of each price: for both directions together about the same per byte."""
        return [self.choices.turn_levels(price / 2) for price in self.prices]

    @cached_property
    def pool(self) -> list[_Member]:
        """Schedules for many prices and budgets, none with another that is as fast in fewer bytes."""
        budgets = self._budgets()
        found: dict[tuple[Choice, ...], int] = {}
        for selector in self.selectors:
            feasible = [budget for budget in budgets if budget >= selector.smallest_bytes]
            for selection in selector.select(feasible):
                chosen = self.choices.chosen(selector.levels, selection.positions)
                found.setdefault(chosen, selector.levels.peak_bytes(selection.positions))
        members: list[_Member] = []
        for chosen, least_bytes in found.items():
            members += self._descend(chosen, least_bytes, len(found))
        return self._improve(_undominated(members))

    def _budgets(self) -> list[int]:
        """Where to look: from the smallest budget with free moves to what keeping everything needs."""
        num_runs = self._num_runs // (2 * len(self.prices) * _MIN_PLACINGS)
        num_budgets = min(max(num_runs, 4), _MAX_BUDGETS)
        low = min(selector.smallest_bytes for selector in self.selectors)
        high = max(self.without.selector.fastest_bytes, low)
        return sorted({low + (high - low) * step // (num_budgets - 1) for step in range(num_budgets)})

    @property
    def _num_runs(self) -> int:
        """How many schedules may be placed and simulated."""
        return int(self.time_limit_s * _UNITS_A_SECOND) // self.problem.num_units

    def _descend(self, chosen: tuple[Choice, ...], least_bytes: int, num_found: int) -> list[_Member]:
        """A selection placed under lower and lower budgets: first without a wait for room, then with more."""
        num_placings = min(max(self._num_runs // (2 * num_found), _MIN_PLACINGS), _MAX_PLACINGS)
        members: list[_Member] = []
        budget_bytes, step_bytes = None, 1
        for _ in range(num_placings):
            member = self._place(chosen, budget_bytes)
            if member is None:
                break
            if not members:
                step_bytes = max(1, (member.peak_bytes - least_bytes) // num_placings)
            members.append(member)
            budget_bytes = member.peak_bytes - step_bytes
            if budget_bytes < least_bytes:
                break
        return members

    def _improve(self, members: list[_Member]) -> list[_Member]:
        """One unit at a time with another choice, as long as schedules get faster; small problems only."""
        num_runs = self._num_runs // 2
        num_changes = sum(len(choices) - 1 for choices in self.choices.choices)
        while num_runs >= len(members) * num_changes:
            num_runs -= len(members) * num_changes
            better = [*members]
            for member in members:
                for unit, choices in enumerate(self.choices.choices):
                    for choice in choices:
                        changed = (*member.chosen[:unit], choice, *member.chosen[unit + 1 :])
                        if choice != member.chosen[unit]:
                            placed = self._place(changed, member.peak_bytes)
                            better += [placed] if placed is not None else []
            better = _undominated(better)
            if better == members:
                break
            members = better
        return members

    def _place(self, chosen: tuple[Choice, ...], budget_bytes: int | None) -> _Member | None:
        schedule = place_moves(self.problem, chosen, budget_bytes=budget_bytes)
        if schedule is None:
            return None
        result = simulate(self.problem, schedule)
        return _Member(result.peak_bytes, result.seconds, schedule, chosen)


def _spread_prices(break_even: list[float]) -> list[float]:
    """Almost free, and prices between those at which units change their minds, evenly among them."""
    between = [(low + high) / 2 for low, high in pairwise(break_even)]
    ends = [break_even[0] / 2, break_even[-1] * 2] if break_even else []
    inner = sorted({*between, *ends})
    wanted = _MAX_PRICES - 1
    if len(inner) > wanted:
        inner = [inner[index * (len(inner) - 1) // (wanted - 1)] for index in range(wanted)]
    return [_LEAST_PRICE, *inner]


def _undominated(members: list[_Member]) -> list[_Member]:
    """From the lowest peak up, only members that are faster than all before."""
    kept: list[_Member] = []
    for member in sorted(members, key=lambda one: (one.peak_bytes, one.seconds)):
        if not kept or member.seconds < kept[-1].seconds:
            kept.append(member)
    return kept
