"""`autopilot`: training steps that survive out-of-memory errors.

NOTE [ A step under the autopilot ]
    1. What the step may change is held (NOTE [ What is put back ] in ``state.py``), and the step runs.
    2. All ranks agree how it ended: the worst of them counts. If none failed, gradients are reduced, and that is all.
       Where the step itself communicates, a rank that failed alone ends the others' steps by an error: NOTE [ A rank
       that fails alone ] in ``ranks/meetings.py``.
    3. After a failure everything that it left is freed and put back, what is usable is read, the plan for that is made
       from the profile at hand, and the same step runs again.
    4. A failed step that no plan fits raises a `BudgetError`, with everything put back.
    5. Under a smaller plan, the room at the beginning of each step is watched. If it was enough for a faster plan in
       several steps in a row, that plan is made. If this fails soon, the next time takes twice as many steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from logging import Logger
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from recoup.devices.meter import device_of, gc_disabled
from recoup.devices.tracker import MemoryTracker
from recoup.errors import BudgetError, FitError
from recoup.fitting import Fitted
from recoup.given import check_given
from recoup.model.optimizer_state import state_bytes_of
from recoup.model.optimizers import Optimizers, read_optimizers
from recoup.piloting.by_size import several_plans
from recoup.piloting.events import LOGGER, Event, summarize
from recoup.piloting.failure import free_frames, is_out_of_memory
from recoup.piloting.in_force import one_plan
from recoup.piloting.reducing import Reducing, reduce_gradients
from recoup.piloting.room import find_room
from recoup.piloting.state import StepState
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.ranks import find_ranks
from recoup.tensors import is_divided, storages_of

__all__ = ["Autopilot", "autopilot"]

T = TypeVar("T")
_PATIENCE = 10
_MOST_PATIENCE = 1000
_MOST_PRESSURE = 3
"""Steps in a row in which the allocator had to empty its cache, before the plan is made smaller."""
# How a step ended, from the best to the worst.
_ENDED, _ENDED_UNDER_PRESSURE, _OUT_OF_MEMORY, _RAISED = range(4)
_ALONE = (
    "Ranks wait for each other inside steps of this model, so that a step is repeated only if all of them can end it or"
    " fail at the same operation: fit the model to a smaller budget."
)


def autopilot(
    fitted: Fitted,
    *,
    optimizer: Optimizers | None = None,
    model: nn.Module | None = None,
    patience: int = _PATIENCE,
    tracker: MemoryTracker | None = None,
    together: Any = True,
    logger: Logger = LOGGER,
) -> Autopilot:
    """Runs training steps that survive out-of-memory errors: each is repeated under a smaller plan.

    Losses, gradients and parameters are those of a run without the error, bit for bit where the plans' are.

    Args:
        fitted: what `recoup.fit` returned.
        optimizer: whose state counts as allocated only when it is; several in a list.
        model: what the step calls, if that is a wrapper which was put around the fitted model later.
        patience: how many steps in a row must have had room before a faster plan is tried again.
        tracker: whose limit stands for the device's memory, for tests on the CPU.
        together: where `torch.distributed` is initialized, all ranks make an autopilot and call `step` equally often;
            as for `recoup.fit`.
        logger: what events and the summary are logged to; unless given, ``recoup.autopilot``.

    Raises:
        FitError: the model is wrapped in a way in which a rank that fails alone cannot be waited for; or it was given
            instead of what `recoup.fit` returned.

    >>> import recoup, torch
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    >>> batch = torch.zeros(512, 64)
    >>> fitted = recoup.fit(model, batch, budget="1.4MB", loss=lambda output: output.mean())
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with autopilot(fitted, optimizer=optimizer) as pilot:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         loss = pilot.step(lambda: model(batch).mean().backward())
    ...         optimizer.step()
    >>> pilot.summary()
    '3 steps, none out of memory.'
    """
    return Autopilot(
        fitted, optimizer, model, patience=patience, tracker=tracker, together=together, logger=logger
    )


class Autopilot:
    """Runs steps by NOTE [ A step under the autopilot ]; made by `autopilot`.

    Attributes:
        events: what happened, in order.
        num_steps: that ended.
    """

    def __init__(
        self,
        fitted: Fitted,
        optimizer: Optimizers | None,
        model: nn.Module | None,
        *,
        patience: int,
        tracker: MemoryTracker | None,
        together: Any,
        logger: Logger = LOGGER,
    ) -> None:
        check_given(fitted, Fitted, "autopilot takes what recoup.fit returns")
        self._logger = logger
        self.events: list[Event] = []
        self.num_steps = 0
        self._optimizers = read_optimizers(optimizer)
        self._model = fitted.model if model is None else model
        self._ranks = find_ranks(together).over_host()
        self._reducing = Reducing(self._model)
        #: Whether its forward and backward wait for other ranks.
        self._communicates = any(map(is_divided, self._model.parameters()))
        self._in_force = several_plans(fitted, self._ranks) if _differ(fitted) else one_plan(fitted)
        groups = [group for one in self._optimizers for group in one.param_groups]
        self._state = StepState(self._model, [p for group in groups for p in group["params"]])
        self._room = find_room(device_of(fitted.model), tracker)
        self._missed_bytes = _missed_bytes(fitted)
        self._patience, self._num_calm, self._least_usable_bytes = patience, 0, 0
        self._num_under_pressure = 0
        self._slower_steps, self._slower_s = 0, 0.0
        self._returned_at: int | None = None
        self._is_closed = False

    @property
    def plan(self) -> ModelPlan:
        """The plan that is applied now; of plans by size, the one for the last batch."""
        return self._in_force.plan

    @property
    def by_size(self) -> PlansBySize | None:
        """The plans by size that are applied now, if there are several."""
        return self._in_force.by_size

    def step(self, run: Callable[[], T]) -> T:
        """Runs a forward and backward, and runs it again under a smaller plan if it ran out of memory.

        Args:
            run: the whole step up to the optimizer's, which comes after it, outside. It may be called several times:
                what it needs, such as the batch, is made before.

        Returns:
            What ``run`` returned.

        Raises:
            BudgetError: no plan fits what is usable; it says what to do. Everything is put back.
            RepeatError: the failed step has changed something that cannot be put back.
            FitError: another rank raised something else; or a rank failed alone in the middle of a step in which
                others wait for it (sharded parameters, tensor parallelism), and the process groups were aborted.
        """
        self._return_to_faster()
        num_failures = 0
        while True:
            start_s = time.perf_counter()
            self._state.hold()
            num_retries = self._room.num_retries()
            with self._reducing.delayed() as reduced, self._watched():
                found, failure = self._attempt(run)
                is_calm = self._room.num_retries() == num_retries
                code = _OUT_OF_MEMORY if failure is not None else _ENDED if is_calm else _ENDED_UNDER_PRESSURE
                worst = self._agree(code, f"ran out of memory ({failure}). {_ALONE}")
            if worst < _OUT_OF_MEMORY:
                break
            if worst == _RAISED:
                raise FitError("Another rank raised an error in this step: see its output.")
            num_failures += 1
            found.clear()
            self._recover(failure, num_failures, start_s)
        reduce_gradients(reduced)
        self._settle(worst)
        return found[0]

    def _attempt(self, run: Callable[[], T]) -> tuple[list[T], str | None]:
        """The result, in a list that can be emptied; or why there is none."""
        try:
            return [run()], None
        except BaseException as error:
            if not is_out_of_memory(error):
                self._agree(_RAISED, f"failed: {type(error).__name__}: {error}")
                raise
            numbers = self._room.describe_failure()
            failure = f"{_first_sentence(error)}{'; ' if numbers else ''}{numbers}"
            free_frames(error)
        return [], failure

    def _watched(self) -> AbstractContextManager[None]:
        return self._ranks.watched() if self._communicates else nullcontext()

    def _agree(self, code: int, failure: str) -> int:
        """How the step ended on the rank where it ended worst.

        Raises:
            FitError: a rank failed alone, in a step that others cannot end without it.
        """
        if not self._communicates:
            return self._ranks.largest_code(code)
        return self._ranks.agree(code, failed_from=_OUT_OF_MEMORY, failure=failure)

    def _recover(self, failure: str | None, num_failures: int, start_s: float) -> None:
        """Frees and puts back everything, and applies the next plan."""
        reason = failure or "on another rank"
        with self._ranks.together():
            self._state.free()
            self._room.make_room()
            self._state.put_back()
        usable_bytes = self._ranks.smallest(self._usable_bytes())
        lost_s = time.perf_counter() - start_s
        try:
            with self._planning("out of memory", reason, usable_bytes, lost_s):
                self._in_force.shrink(usable_bytes, num_failures, has_failed=failure is not None)
        except BudgetError as error:
            raise BudgetError(
                f"The step ran out of memory ({reason}), and no plan fits what was really free. {error}",
                budget_bytes=error.budget_bytes,
                smallest_bytes=error.smallest_bytes,
                unit=error.unit,
            ) from None
        if self._returned_at is not None and self.num_steps - self._returned_at < self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._returned_at = None
        self._num_calm = 0

    @contextmanager
    def _planning(self, kind: str, reason: str, usable_bytes: int, lost_s: float = 0.0) -> Iterator[None]:
        """A block that may choose another plan, which is applied; unless nothing happened, it is an event."""
        before, start_s = self.plan, time.perf_counter()
        with gc_disabled():  # a collection can take longer than planning
            yield
        if self.plan is before and kind != "out of memory":
            return
        self._in_force.apply()  # also the same one: a step that failed left its place in it
        plan_s = time.perf_counter() - start_s
        event = Event(
            step=self.num_steps + 1,
            kind=kind,
            reason=reason,
            usable_bytes=usable_bytes,
            before=before,
            after=self.plan,
            lost_s=lost_s,
            plan_s=plan_s,
            batch=self._in_force.batch,
        )
        self.events.append(event)
        self._logger.log(30 if kind == "out of memory" else 20, "%s", event)

    def _usable_bytes(self) -> int:
        """What a whole step could peak at now: its own bytes that live already, and what is free."""
        profile = self._in_force.profile
        residents = profile.residents
        lives_bytes = residents.total_bytes
        if self._optimizers:
            lives_bytes -= max(0, residents.optimizer_bytes - state_bytes_of(*self._optimizers))
        if profile.accumulates:
            gradients = [parameter.grad for parameter in self._model.parameters()]
            gradients += self._state.unreduced_gradients()
            lives_bytes += min(residents.gradient_bytes, sum(storages_of(gradients).values()))
        return lives_bytes + self._room.free_bytes() - self._missed_bytes

    def _return_to_faster(self) -> None:
        """Tries a faster plan, when there was room for it in several steps in a row."""
        if self._in_force.is_first:
            return
        usable_bytes = self._ranks.smallest(self._usable_bytes())
        if usable_bytes <= self._in_force.budget_bytes:
            self._num_calm = 0
            return
        least_bytes = min(self._least_usable_bytes, usable_bytes) if self._num_calm else usable_bytes
        self._least_usable_bytes = least_bytes
        self._num_calm += 1
        if self._num_calm < self._patience:
            return
        self._num_calm = 0
        with self._planning("room", f"in each of {self._patience} steps", least_bytes):
            before = self.plan
            self._in_force.grow(least_bytes)
            if self.plan is not before:
                self._returned_at = self.num_steps

    def _settle(self, worst: int) -> None:
        self._state.settle()
        self.num_steps += 1
        if self.num_steps == 1:
            self._state.look_again()
        if not self._in_force.is_first:
            self._slower_steps += 1
            self._slower_s += max(0.0, self._in_force.slower_s)
        self._num_under_pressure = (self._num_under_pressure + 1) if worst == _ENDED_UNDER_PRESSURE else 0
        if self._num_under_pressure >= _MOST_PRESSURE:
            self._num_under_pressure = 0
            self._relieve()

    def _relieve(self) -> None:
        """Makes the plan smaller before it fails: emptying the cache in every step costs more than recomputing."""
        reason = self._room.describe_failure()
        usable_bytes = self._ranks.smallest(self._usable_bytes())
        try:
            with self._planning("pressure", reason, usable_bytes):
                self._in_force.shrink(usable_bytes, 2)
        except BudgetError:
            return  # it still runs
        self._num_calm = 0

    def summary(self) -> str:
        """How often a step ran out of memory, and what that cost."""
        return summarize(self.events, self.num_steps, self._slower_steps, self._slower_s)

    def close(self) -> None:
        """Logs the summary, once, and frees what failures would put back. The model keeps its plan."""
        if not self._is_closed:
            self._is_closed = True
            self._logger.info("%s", self.summary())
            self._state.free_copies()

    def __enter__(self) -> Autopilot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _differ(fitted: Fitted) -> bool:
    """Whether plans differ by size; where all sizes run as the largest does, the planner has smaller plans for that."""
    return fitted.by_size is not None and len(fitted.by_size.schedules) > 1


def _missed_bytes(fitted: Fitted) -> int:
    """By how much real steps passed their prediction at most."""
    seen = [(fitted.plan, fitted.verification), *((one.plan, one.verification) for one in fitted.sizes)]
    return max([0, *(found.peak_bytes - plan.predicted_bytes for plan, found in seen if found is not None)])


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
