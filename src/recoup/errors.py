"""Every exception that recoup raises on purpose.

::

    RecoupError
    ├── SizeError                    a byte size that cannot be read ("8 apples")
    ├── PolicyError                  a policy with impossible settings
    ├── CheckpointError              the checkpoint primitive
    │   ├── NothingToCheckpointError   a call that has no tensor and gives no gradient
    │   ├── InputChangedError          something the function reads changed before its replay
    │   └── ReplayMismatchError        the replay did not repeat the forward
    ├── StoreError                   the activation store
    │   ├── UnitRangeError             a unit number outside the store's range
    │   ├── NotHeldError               a unit in range whose activation is not held
    │   ├── StoreFullError             no room and nothing may be evicted
    │   └── PrecisionError             values that the chosen precision cannot hold
    ├── ChainError                   a hand-written chain used out of order
    ├── FitError                     fitting a model to a budget
    │   ├── SampleError                a model, sample or step that cannot be run
    │   ├── LossError                  a loss that is no scalar or needs no gradient
    │   ├── UnitError                  units that the model does not have or never calls
    │   ├── ApplyError                 a plan that does not belong to the model
    │   ├── CaptureError               a unit that the compiler cannot capture
    │   ├── RepeatError                a step that ran out of memory and cannot be repeated
    │   ├── HardwareError              hardware that is not known, or a damaged file of it
    │   └── VerificationError          a real step that changes a gradient
    │       └── OverBudgetError          or that passes the budget
    ├── CommandError                 a factory or file on the command line that cannot be used
    └── PlanningError                the planner
        ├── ProblemError               numbers, names or links that make no sense
        ├── ScheduleError              a schedule that is not legal for its problem
        ├── GraphError                 a malformed graph, or a schedule that is not legal on it
        ├── BudgetError                a budget below the smallest feasible one
        └── EncodingError              text that is not a problem, plan or schedule of ours

Each also derives from the built-in exception that a caller would expect (``ValueError``, ``LookupError``,
``RuntimeError``), so that code that knows nothing of recoup can catch it.

What does no harm by itself, but is not what the user may expect, is a `RecoupWarning`: a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ApplyError",
    "BudgetError",
    "CaptureError",
    "ChainError",
    "CheckpointError",
    "CommandError",
    "EncodingError",
    "FitError",
    "GraphError",
    "HardwareError",
    "InputChangedError",
    "LossError",
    "NotHeldError",
    "NothingToCheckpointError",
    "OverBudgetError",
    "PlanningError",
    "PolicyError",
    "PrecisionError",
    "ProblemError",
    "RecoupError",
    "RecoupWarning",
    "RepeatError",
    "ReplayMismatchError",
    "SampleError",
    "ScheduleError",
    "SizeError",
    "StoreError",
    "StoreFullError",
    "UnitError",
    "UnitRangeError",
    "VerificationError",
]


class RecoupError(Exception):
    """The root of recoup's exceptions."""


class RecoupWarning(UserWarning):
    """A plan that will not do what the user expects of it, for a reason that the warning names."""


class SizeError(RecoupError, ValueError):
    """A byte size that cannot be read."""


class PolicyError(RecoupError, ValueError):
    """A policy whose settings make no sense, or that lacks the costs it needs."""


class CheckpointError(RecoupError, RuntimeError):
    """A checkpointed call that cannot give correct gradients."""


class NothingToCheckpointError(CheckpointError):
    """A call without tensors whose result needs no gradient: there is nothing to forget or replay."""


class InputChangedError(CheckpointError):
    """An argument, parameter or captured tensor changed between a forward and its replay."""


class ReplayMismatchError(CheckpointError):
    """A replay that saved other tensors than the forward did."""


class StoreError(RecoupError):
    """The root of the activation store's exceptions."""


class UnitRangeError(StoreError, LookupError):
    """A unit number outside the range that the store was made for."""


class NotHeldError(StoreError, LookupError):
    """A unit in range whose activation is not held (never stored, taken, removed or evicted)."""


class StoreFullError(StoreError, RuntimeError):
    """An entry that does not fit and may not push others out."""


class PrecisionError(StoreError, ValueError):
    """Values that the chosen precision cannot represent, or an unknown precision."""


class ChainError(RecoupError, RuntimeError):
    """A hand-written chain that is malformed or used out of order."""


class FitError(RecoupError):
    """The root of what can go wrong when a model is fitted."""


class SampleError(FitError, ValueError):
    """A model, sample or step that cannot be run."""


class LossError(FitError, ValueError):
    """A loss that is no scalar, or that needs no gradient."""


class UnitError(FitError, ValueError):
    """Units that the model does not have, or that the step never calls."""


class ApplyError(FitError, ValueError):
    """A plan that does not belong to the model it is applied to."""


class CaptureError(FitError, RuntimeError):
    """A unit that torch's compiler cannot capture in one graph."""


class RepeatError(FitError, RuntimeError):
    """A step that ran out of memory under the autopilot, and that cannot be repeated with the same result."""


class HardwareError(FitError, ValueError):
    """Hardware that is not known, figures of it that make no sense, or a damaged file."""


class VerificationError(FitError, RuntimeError):
    """A real step under the plan that passes the budget, or whose gradients differ from the plain step's.

    Attributes:
        gradients: the names of the parameters whose gradients generated code got wrong; empty for other errors.
    """

    def __init__(self, message: str, *, gradients: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.gradients = tuple(gradients)


class OverBudgetError(VerificationError):
    """A real step under the plan that passes the budget.

    Attributes:
        peak_bytes: what it took.
    """

    def __init__(self, message: str, *, peak_bytes: int) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes


class CommandError(RecoupError, ValueError):
    """A factory or file that the command line names and that cannot be used."""


class PlanningError(RecoupError, ValueError):
    """The root of the planner's exceptions."""


class ProblemError(PlanningError):
    """A planning problem whose numbers, names, skips or links make no sense."""


class ScheduleError(PlanningError):
    """A schedule that is not legal for its problem.

    Attributes:
        index: of the action that is not legal; ``None`` where it is about the schedule as a whole.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class GraphError(PlanningError):
    """A malformed graph of operations, or a schedule or hold set that is not legal on it."""


class BudgetError(PlanningError):
    """A budget below the smallest one for which a schedule is known.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest feasible budget.
        unit: the name of the unit, or operation, that sets it; empty where none does.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int, unit: str = "") -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.unit = unit


class EncodingError(PlanningError):
    """Text that is not a problem, plan or schedule that recoup wrote."""
