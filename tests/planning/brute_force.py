"""An independent search over all legal schedules of a small problem without links, with its own bookkeeping.

It explores states (what is on the device, which backwards have run) in order of seconds, and never passes
the budget. ``persistent`` restricts it to persistent schedules, as ``recoup.planning.solvers.chain`` defines
them; otherwise any value may be dropped, and any forward run again, at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from recoup.planning import Action, Backward, Drop, Forward, Keep, Problem, Schedule, Value

NONE = -1


class State(NamedTuple):
    next_backward: int
    is_seeded: bool
    outputs: int  # bit i: output i is on the device
    kept: int  # bit i: output i may not be dropped (persistent schedules only)
    held: tuple[int, ...]  # option held for each unit, or NONE
    has_run: int = 0  # bit i: unit i has run (only where that costs anything)
    freed: tuple[
        int, ...
    ] = ()  # of each output, bytes that went before the rest (only where options free inputs)
    replayed: int = 0  # bit i: an earlier forward of unit i kept its input (the same)
    ended: int = 0  # bit i: unit i freed its input, so it does not run forward any more (the same)


class Search:
    def __init__(self, problem: Problem, budget_bytes: int, *, persistent: bool) -> None:
        assert not (persistent and problem.has_skips)
        self.problem, self.units, self.n = problem, problem.units, len(problem.units)
        self.budget_bytes, self.persistent = budget_bytes, persistent
        self.fixed_bytes = problem.resident_bytes + problem.input_bytes
        self.counts_runs = any(option.again_s for unit in self.units for option in unit.options)
        self.frees = any(option.freed_input_bytes for unit in self.units for option in unit.options)
        self.skipped_from = {source for unit in self.units for source in unit.skips}
        #: For each output, the last unit that reads it: its backward makes the gradient.
        self.readers = [
            max([i + 1, *(k for k, u in enumerate(self.units) if i in u.skips)]) for i in range(self.n)
        ]

    def gradient_bytes(self, next_backward: int) -> int:
        """Gradients that are there between two backwards."""
        return sum(
            unit.gradient_bytes
            for index, unit in enumerate(self.units[: next_backward + 1])
            if self.readers[index] > next_backward
        )

    def live_bytes(self, state: State) -> int:
        total = self.fixed_bytes - sum(state.freed)
        for index, unit in enumerate(self.units):
            total += unit.output_bytes * (state.outputs >> index & 1)
            if state.held[index] != NONE:
                total += unit.options[state.held[index]].held_bytes
            if index > state.next_backward:
                total += unit.lasting_bytes
        if state.next_backward < 0:
            return total + self.problem.input_gradient_bytes
        return total + state.is_seeded * self.gradient_bytes(state.next_backward)

    def pinned(self, held: tuple[int, ...], index: int) -> bool:
        return index >= 0 and held[index] != NONE and self.units[index].options[held[index]].holds_output

    def has_inputs(self, state: State, index: int) -> bool:
        sources = (index - 1, *self.units[index].skips)
        return all(source < 0 or state.outputs >> source & 1 for source in sources)

    def forwards(self, state: State) -> Iterator[tuple[float, State, Action]]:
        live = self.live_bytes(state)
        for index in range(state.next_backward + 1):
            if not self.has_inputs(state, index) or state.ended >> index & 1:
                continue
            if state.kept >> index:
                continue  # persistent: nothing that leads to a kept value is run again while it is kept
            if self.persistent and state.held[index] != NONE:
                continue  # nor a unit that holds its results
            unit = self.units[index]
            choices: list[Forward] = [] if unit.runs_once else [Forward(index)]
            if index and not unit.runs_once:
                choices.append(Forward(index, keep=Keep.INPUT))
            if state.held[index] == NONE:
                choices += [Forward(index, keep=Keep.OPTION, option=k) for k in range(len(unit.options))]
            for action in choices:
                option = unit.lightest if action.option is None else unit.options[action.option]
                if (
                    live + unit.output_bytes + option.held_bytes + option.forward_transient_bytes
                    > self.budget_bytes
                ):
                    continue
                is_again = action.option is not None and state.has_run >> index & 1
                for after in self.after_forward(state, action):
                    if self.live_bytes(after) <= self.budget_bytes:
                        yield option.forward_s + option.again_s * is_again, after, action

    def after_forward(self, state: State, action: Forward) -> Iterator[State]:
        index, outputs, kept, held = action.unit, state.outputs, state.kept, state.held
        source = 1 << (index - 1) if index else 0
        if action.option is not None:
            held = (*held[:index], action.option, *held[index + 1 :])
        if action.keep is Keep.NOTHING:
            if kept & source:
                return  # the same as keeping the input, which is among the choices
            if not self.pinned(held, index - 1):
                outputs &= ~source
        elif self.persistent:
            kept |= source
        outputs |= 1 << index
        is_read_later = state.next_backward > index and index < self.n - 1
        if not is_read_later and not self.pinned(held, index):
            outputs &= ~(1 << index)
        has_run = state.has_run | self.counts_runs << index
        is_seeded = state.is_seeded or index == self.n - 1
        after = self.settled(
            state._replace(is_seeded=is_seeded, outputs=outputs, kept=kept, held=held, has_run=has_run)
        )
        if action.keep is Keep.INPUT and self.frees:
            after = after._replace(replayed=after.replayed | 1 << index)
        yield after
        freed_bytes = (
            0 if action.option is None else self.units[index].options[action.option].freed_input_bytes
        )
        is_held = (
            after.replayed >> index & 1 or self.pinned(held, index - 1) or index - 1 in self.skipped_from
        )
        if freed_bytes and not is_held:
            # Only the last forward of a unit frees its input: the search decides here that this is the last.
            freed = (*after.freed[: index - 1], freed_bytes, *after.freed[index:])
            yield after._replace(freed=freed, ended=after.ended | 1 << index)

    def settled(self, state: State) -> State:
        """Forgets what went early of outputs that are not there any more."""
        if not self.frees:
            return state
        return state._replace(freed=tuple(state.freed[i] * (state.outputs >> i & 1) for i in range(self.n)))

    def backwards(self, state: State) -> Iterator[tuple[float, State, Action]]:
        index = state.next_backward
        if not (state.is_seeded and self.has_inputs(state, index)):
            return
        unit = self.units[index]
        new = (source for source in (index - 1, *unit.skips) if source < 0 or self.readers[source] == index)
        new_bytes = sum(
            self.units[source].gradient_bytes if source >= 0 else self.problem.input_gradient_bytes
            for source in new
        )
        for k, option in enumerate(unit.options):
            needs_forward = option.needs_forward or unit.runs_once
            if state.held[index] not in (NONE, k) or (state.held[index] == NONE and needs_forward):
                continue
            extra = max(option.replay_transient_bytes, new_bytes + option.backward_transient_bytes)
            if self.live_bytes(state) + extra > self.budget_bytes:
                continue
            held = (*state.held[:index], NONE, *state.held[index + 1 :])
            outputs = state.outputs & ~(1 << index)
            if index and not self.pinned(held, index - 1):
                outputs &= ~(1 << (index - 1))
            done = ~(1 << index)  # it never runs again
            after = self.settled(
                state._replace(
                    next_backward=index - 1,
                    outputs=outputs,
                    kept=state.kept & outputs,
                    held=held,
                    has_run=state.has_run & done,
                    replayed=state.replayed & done,
                    ended=state.ended & done,
                )
            )
            if self.live_bytes(after) <= self.budget_bytes:
                yield option.extra_s + option.backward_s, after, Backward(index, option=k)

    def drops(self, state: State) -> Iterator[tuple[float, State, Action]]:
        for index in range(self.n):
            bit = 1 << index
            if state.outputs & bit and not state.kept & bit and not self.pinned(state.held, index):
                after = self.settled(state._replace(outputs=state.outputs & ~bit))
                yield 0.0, after, Drop(index, value=Value.OUTPUT)
            # What a unit that runs once holds is never dropped: a second forward would not be legal.
            if state.held[index] != NONE and not self.persistent and not self.units[index].runs_once:
                held = (*state.held[:index], NONE, *state.held[index + 1 :])
                is_read_later = state.next_backward > index and index < self.n - 1
                outputs = state.outputs if is_read_later else state.outputs & ~bit
                yield 0.0, state._replace(held=held, outputs=outputs), Drop(index, value=Value.HELD)

    def run(self) -> tuple[float, Schedule] | None:
        start = State(self.n - 1, False, 0, 0, (NONE,) * self.n, freed=(0,) * self.n * self.frees)
        order = count()
        queue: list[tuple[float, int, State]] = [(0.0, next(order), start)]
        reached: dict[State, tuple[float, State | None, Action | None]] = {start: (0.0, None, None)}
        done: set[State] = set()
        while queue:
            seconds, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state.next_backward < 0:
                return seconds, self.schedule(reached, state)
            for moves in (self.backwards(state), self.forwards(state), self.drops(state)):
                for cost_s, after, action in moves:
                    total = seconds + cost_s
                    if after not in reached or total < reached[after][0]:
                        reached[after] = (total, state, action)
                        heapq.heappush(queue, (total, next(order), after))
        return None

    @staticmethod
    def schedule(reached: dict[State, tuple[float, State | None, Action | None]], state: State) -> Schedule:
        actions: list[Action] = []
        while True:
            _, previous, action = reached[state]
            if previous is None or action is None:
                return Schedule(reversed(actions))
            actions.append(action)
            state = previous


def brute_force(problem: Problem, budget_bytes: int, *, persistent: bool) -> tuple[float, Schedule] | None:
    """The least seconds under a budget and a schedule that takes them, or ``None`` if none fits."""
    return Search(problem, budget_bytes, persistent=persistent).run()
