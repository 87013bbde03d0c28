"""What every solver is: something that prepares a problem once and then answers for any budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule

__all__ = ["ALL_SCHEDULES", "PERSISTENT_SCHEDULES", "Bound", "Candidate", "Prepared", "Solver"]

ALL_SCHEDULES = "all schedules"
PERSISTENT_SCHEDULES = "persistent schedules"


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule of the named class takes fewer seconds at this budget.

    >>> Bound(1.5, schedules="all schedules").seconds
    1.5
    """

    seconds: float
    schedules: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A solver's answer for one budget: a schedule, and what it has proven about its own class."""

    schedule: Schedule
    bound: Bound | None = None


class Prepared(ABC):
    """A problem that a solver has worked through. More bytes never cost more seconds."""

    @property
    @abstractmethod
    def smallest_bytes(self) -> int | None:
        """The smallest budget for which ``best`` answers; ``None`` if it never does."""

    @abstractmethod
    def best(self, budget_bytes: int) -> Candidate | None:
        """The solver's best schedule under a budget, or ``None`` below ``smallest_bytes``, which is its peak there."""

    def suggested_budgets(self) -> list[int]:
        """Budgets at which the answer may change; the frontier looks at these."""
        return []


class Solver(ABC):
    """An algorithm without state of its own: ``prepare`` returns what is worth sharing across budgets."""

    name: str
    #: The class that all its schedules belong to; where another solver has solved that class, it is skipped.
    schedules: str = ALL_SCHEDULES

    @abstractmethod
    def applies(self, problem: Problem) -> bool:
        """Whether this solver understands everything in the problem that it may not ignore."""

    @abstractmethod
    def prepare(self, problem: Problem, *, time_limit_s: float) -> Prepared:
        """Does the work that does not depend on the budget."""

    def unproven(self) -> Solver:
        """The same solver without what only bounds need: as good schedules, and bounds that may be lower."""
        return self
