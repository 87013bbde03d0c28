"""Plans timed against each other on real steps: predicted seconds choose the candidates, real steps the plan.

NOTE [ Quiet moments ]
    1. Candidates take turns, a step each, and the plain step with them: a busy moment slows all of them down alike.
    2. A candidate's seconds are those of its fastest step: other processes only ever make a step slower.
    3. A rival replaces the plan only if it is faster by more than noise, in most rounds, and holds the budget.
    4. Memory is recorded in steps of their own, since counting slows a step down on the CPU: of the plan and of the
       plain step before they are timed, of a rival only if it is faster than the plan.
    5. Of several ranks, the slowest one's seconds and the largest peak count for all. Nothing is decided by a rank's
       own numbers, nor by an error that only one rank catches: all run the same steps in the same order.
    6. The first step under a plan that was just applied takes longer than later ones. It is not timed, and in later
       turns the same stand-ins are put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import nn

from recoup.devices.meter import Timing
from recoup.engines.eager import Earlier, apply
from recoup.engines.real_steps import RealSteps, Recorded
from recoup.engines.recording import Points
from recoup.errors import RecoupError
from recoup.plans.model_plan import ModelPlan
from recoup.progress import note

__all__ = ["Candidate", "Finisher", "Lap", "Race", "race", "take_turns", "time_as_it_stands"]

_MOST_ROUNDS = 5
_FEWEST_ROUNDS = 2
"""Of a race: in one round nobody can be faster in most."""
_ENOUGH_S = {"cpu": 0.5, "cuda": 0.15}
"""Steps are timed until they add up to this: longer steps hardly vary, least of all on a GPU."""
_BUSY_SHARE = 0.8
"""A host that is busy for more of a step than this may set its pace."""
_BUSY_S = 0.3
"""Where it may, steps are timed until they add up to this, since hosts vary."""
_BEHIND = 1.1
"""After the fewest rounds, a rival that takes this many times the fastest one's seconds leaves the race."""
_NOISE = 0.01
"""Steps that differ by a smaller share take the same time."""


@dataclass(frozen=True)
class Candidate:
    """A plan that takes part in a race, and what it is called in the report."""

    name: str
    plan: ModelPlan


@dataclass(frozen=True)
class Lap:
    """One way of running the step, measured.

    Attributes:
        times_s: seconds of its steps, round by round; empty if it was not timed.
        recorded: its memory; ``None`` if that was not asked for, or did not fit the device.
    """

    times_s: tuple[float, ...] = ()
    recorded: Recorded | None = None

    @property
    def seconds(self) -> float:
        """Of its fastest step; infinite if it was not timed, or does not fit the device."""
        return min(self.times_s, default=math.inf)

    @property
    def timeline(self) -> Points:
        """The recorded points, with their times scaled to `seconds`."""
        points = self.recorded.points if self.recorded else ((0.0, 0),)
        scale = self.seconds / (points[-1][0] or 1.0)
        return tuple((time_s * scale, num_bytes) for time_s, num_bytes in points)

    def is_faster_than(self, other: Lap) -> bool:
        """Whether it is faster by more than noise, and in most rounds."""
        num_won = sum(own_s < other_s for own_s, other_s in zip(self.times_s, other.times_s, strict=False))
        is_ahead = self.seconds < (1 - _NOISE) * other.seconds
        return is_ahead and 2 * num_won > min(len(self.times_s), len(other.times_s))


@dataclass(frozen=True, slots=True)
class Finisher:
    """A plan that was raced, for the report.

    Attributes:
        name: of the candidate.
        predicted_s: seconds that were predicted before the race.
        seconds: of its fastest step; infinite if none fitted the device.
        peak_bytes: measured; ``None`` for rivals that were no faster than the plan, of which it was not recorded.
        is_kept: whether it has won, and is the plan now.
    """

    name: str
    predicted_s: float
    seconds: float
    peak_bytes: int | None
    is_kept: bool = False


@dataclass(frozen=True)
class Race:
    """What was raced.

    Attributes:
        laps: by candidate, the plan first, then its rivals.
        winner: the fastest that holds the budget; the first, unless a rival is faster by more than noise.
        plain: the plain step, timed in the same rounds; ``None`` where that did not fit, or nothing was timed.
        reference: the step whose gradients those under a plan have to equal: the plain one, and with units that run
            their operations as captured the eager one.
    """

    laps: tuple[tuple[Candidate, Lap], ...]
    winner: ModelPlan
    plain: Lap | None = None
    reference: Recorded | None = None

    @property
    def winning(self) -> Lap:
        """The winner's lap."""
        return next(lap for candidate, lap in self.laps if candidate.plan is self.winner)

    @property
    def finishers(self) -> tuple[Finisher, ...]:
        """For the report, the fastest first; empty if there was no rival."""
        found = [
            Finisher(
                candidate.name,
                candidate.plan.predicted_s,
                lap.seconds,
                lap.recorded.peak_bytes if lap.recorded else None,
                candidate.plan is self.winner,
            )
            for candidate, lap in self.laps
        ]
        return tuple(sorted(found, key=lambda one: one.seconds)) if len(found) > 1 else ()


def race(steps: RealSteps, candidates: Sequence[Candidate]) -> Race:
    """Runs real steps under each candidate in turn. Some candidate's plan is on the model afterwards.

    Args:
        steps: how to run them.
        candidates: the plan first, then its rivals. Where a step under the plan passes its budget, nothing is timed.

    Raises:
        VerificationError: a replay under the plan differs from its forward.
        OutOfMemoryError: the plan does not fit the device.
    """
    model = steps.step.model
    return _race(steps, [(candidate, _Applied(model, candidate.plan)) for candidate in candidates])


def time_as_it_stands(steps: RealSteps, plan: ModelPlan) -> Race:
    """A race without rivals, of the model as it stands, with its plan applied."""
    return _race(steps, [(Candidate("plan", plan), nullcontext)])


_Way = Callable[[], AbstractContextManager[None]]
"""A context in which the model runs in one way."""


class _Applied:
    """Applies a plan, and from then on puts the same stand-ins back: their first step takes longer than later ones."""

    def __init__(self, model: nn.Module, plan: ModelPlan) -> None:
        self._model, self._plan = model, plan
        self._made: Earlier | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._made is None:
            apply(self._model, self._plan)
            self._made = Earlier(self._model)
        else:
            self._made.put_back()
        yield


def _race(steps: RealSteps, entries: Sequence[tuple[Candidate, _Way]]) -> Race:
    candidates, ways = [candidate for candidate, _ in entries], [way for _, way in entries]
    plan = candidates[0].plan
    note("verifying", 0, 2)
    plain_fits = steps.plain_fits()
    tells = plain_fits and not steps.step.changes_parameters
    recorded = _record(steps, ways[0], plan.budget_bytes, plan if tells else None)
    if recorded.peak_bytes > plan.budget_bytes:
        return Race(((candidates[0], Lap(recorded=recorded)),), plan)

    @contextmanager
    def keeping() -> Iterator[None]:
        with ways[0](), steps.keeping():
            yield

    @contextmanager
    def eagerly() -> Iterator[None]:
        with ways[0](), steps.eagerly():
            yield

    plain = _try_to_record(steps, keeping) if plain_fits else None
    is_other = plain is not None and steps.profile.is_captured and not steps.is_generated
    reference = _try_to_record(steps, eagerly) if is_other else plain
    times = _time(steps, [*ways, keeping] if plain else ways, num_racing=len(ways))
    laps = [Lap(own) for own in times]
    laps[0] = Lap(times[0], recorded)
    winner = 0
    faster = [index for index in range(1, len(ways)) if laps[index].is_faster_than(laps[0])]
    for index in sorted(faster, key=lambda index: laps[index].seconds):
        # A rival that cannot run is no reason to fail.
        seen = _try_to_record(steps, ways[index], plan.budget_bytes, RecoupError)
        laps[index] = Lap(times[index], seen)
        if seen and seen.peak_bytes <= plan.budget_bytes:
            winner = index
            break
    has_run = plain is not None and laps[-1].seconds < math.inf
    return Race(
        tuple(zip(candidates, laps, strict=False)),
        candidates[winner].plan,
        Lap(times[-1], plain) if has_run else None,
        reference,
    )


def _time(steps: RealSteps, ways: Sequence[_Way], *, num_racing: int) -> list[tuple[float, ...]]:
    with steps.timing() as time_step:

        def turn(way: _Way) -> Callable[[], Timing]:
            def run() -> Timing:
                with suppress(torch.OutOfMemoryError), steps.step.ranks.together(), way():
                    return time_step()
                steps.meter.make_room()
                return _NEVER

            return run

        turns = [turn(way) for way in ways]
        for run in turns[1:num_racing]:
            run()  # for the first time: the plan and the plain step were recorded
        return take_turns(turns, num_racing=num_racing, enough_s=_ENOUGH_S[steps.device.type])


_NEVER = Timing(math.inf, 0.0)
"""Of a step that does not fit the device."""


def _record(
    steps: RealSteps, way: _Way, budget_bytes: int | None = None, plan: ModelPlan | None = None
) -> Recorded:
    with steps.step.ranks.together(), way():
        return steps.record(budget_bytes, plan)


def _try_to_record(
    steps: RealSteps,
    way: _Way,
    budget_bytes: int | None = None,
    errors: type[Exception] = torch.OutOfMemoryError,
) -> Recorded | None:
    """The memory of a step; ``None`` if it does not fit the device, or raises such errors."""
    with suppress(torch.OutOfMemoryError, errors):
        return _record(steps, way, budget_bytes)
    steps.meter.make_room()
    return None


def take_turns(
    ways: Sequence[Callable[[], Timing]], *, num_racing: int, enough_s: float
) -> list[tuple[float, ...]]:
    """The seconds of several ways to run a step, timed in turn, round by round.

    Args:
        ways: each runs one step. The first is timed in every round.
        num_racing: how many of them race; the others are timed as often as the first. Racers that are clearly behind,
            or cannot win any more, leave the race.
        enough_s: ends with the round in which the first one's seconds add up to this, or after five.

    >>> take_turns([lambda: Timing(0.5, 0.0), lambda: Timing(0.75, 0.0)], num_racing=2, enough_s=1.5)
    [(0.5, 0.5, 0.5), (0.75, 0.75)]
    >>> take_turns([lambda: Timing(0.5, 0.0), lambda: Timing(0.75, 0.0)], num_racing=2, enough_s=1.0)
    [(0.5, 0.5), (0.75,)]
    """
    times: list[list[float]] = [[] for _ in ways]
    running = list(range(len(ways)))
    most_rounds = _MOST_ROUNDS
    for num_rounds in range(1, _MOST_ROUNDS + 1):
        for index in running:
            timing = ways[index]()
            times[index].append(timing.device_s)
            if timing.host_s > _BUSY_SHARE * timing.device_s:
                enough_s = max(enough_s, _BUSY_S)
        if num_racing > 1 and num_rounds < _FEWEST_ROUNDS:
            if _FEWEST_ROUNDS * times[0][0] >= enough_s:
                # In two rounds, only who is faster in both wins.
                most_rounds = _FEWEST_ROUNDS
                running = [i for i in running if i == 0 or i >= num_racing or times[i][0] < times[0][0]]
            continue
        most_s = _BEHIND * min(min(own) for own in times[:num_racing])
        running = [i for i in running if i == 0 or i >= num_racing or min(times[i]) <= most_s]
        if num_rounds == most_rounds or sum(times[0]) >= enough_s:
            break
    return [tuple(own) for own in times]
