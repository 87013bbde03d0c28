"""When values leave and when they come back: a selection with moves as a schedule.

NOTE [ Transfers ]
    1. A value is sent as soon as its last reader's forward has run. A forward that finds too little room
       waits for the sends under way, oldest first; nothing else could make room.
    2. The way back is the way out with time running backwards: a backward "produces" the value that it will
       read, which then "leaves" at the fetch bandwidth, and a backward without room waits. Whatever this
       mirror says ends at time e has to be fetched before the action in whose course e falls: the latest
       moment at which the fetch still hides, and the fewest bytes on the device. Waits of the mirror are
       stalls for a fetch that found no room earlier.
    3. Around the turn, sends may still be under way when backwards begin; these wait for them if they must.

    Fetches thus go in the order of need, sends in the order of production, one queue each way per link. It is
    a rule and not a search: another order of sends may do better where sizes differ much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recoup.planning.actions import Action, Fetch, Send, Wait
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.solvers.select.levels import Choice, Move, Run, backward_actions, forward_action

__all__ = ["place_moves"]


def place_moves(problem: Problem, chosen: Sequence[Choice], *, budget_bytes: int | None) -> Schedule | None:
    """The schedule of a selection whose moves hide as well as rules 1 to 3 can; ``None`` if it cannot fit.

    Args:
        problem: with the links that the moves use.
        chosen: the choice of every unit.
        budget_bytes: what waits are made for; without one, nothing waits for room.

    >>> from recoup.planning.problem import Link, Option, Unit
    >>> from recoup.planning.solvers.spill.choices import SpillChoices
    >>> keep = Option("keep", forward_s=1, backward_s=2, held_bytes=60, held_links=("host",))
    >>> units = [Unit(name, [keep], output_bytes=10) for name in "abc"]
    >>> problem = Problem(units, links=[Link("host", send_bytes_per_s=60.0, fetch_bytes_per_s=60.0)])
    >>> choices = SpillChoices(problem).choices
    >>> print(place_moves(problem, [choices[0][2], choices[1][0], choices[2][0]], budget_bytes=None))
    F0:0 S0h F1:0 F2:0 B2 R0h B1 B0
    """
    builder = _Builder(problem, chosen, budget_bytes)
    if not builder.has_capacity() or not builder.forwards():
        return None
    before = builder.fetch_points()
    if before is None or not builder.backwards(before):
        return None
    return Schedule(builder.actions)


@dataclass
class _Queue:
    """The moves in one direction: when each link is free, and what is under way."""

    bytes_per_s: dict[str, float]
    free_s: dict[str, float] = field(default_factory=dict)
    ends: list[tuple[float, Move]] = field(default_factory=list)

    def add(self, move: Move, ready_s: float) -> float:
        """Queues a move; returns when it ends."""
        start_s = max(ready_s, self.free_s.get(move.link, 0.0))
        end_s = start_s + move.num_bytes / self.bytes_per_s[move.link]
        self.free_s[move.link] = end_s
        self.ends.append((end_s, move))
        return end_s

    def under_way_bytes(self, time_s: float) -> int:
        """Bytes whose moves have not ended."""
        self.ends = [(end_s, move) for end_s, move in self.ends if end_s > time_s]
        return sum(move.num_bytes for _, move in self.ends)

    def make_room(
        self, need_bytes: int, room_bytes: int | None, time_s: float
    ) -> list[tuple[float, Move]] | None:
        """The moves to wait for until a need fits beside what is under way; ``None`` if it never does."""
        if room_bytes is None:
            return []
        waits = []
        excess = need_bytes + self.under_way_bytes(time_s) - room_bytes
        for end_s, move in sorted(self.ends, key=lambda entry: entry[0]):
            if excess <= 0:
                break
            waits.append((end_s, move))
            excess -= move.num_bytes
        return waits if excess <= 0 else None


class _Builder:
    """Walks through the step once forwards, once mirrored and once backwards."""

    def __init__(self, problem: Problem, chosen: Sequence[Choice], budget_bytes: int | None) -> None:
        self.problem, self.chosen, self.budget_bytes = problem, chosen, budget_bytes
        self.actions: list[Action] = []
        self.clock_s = 0.0
        self.sends = _Queue({link.name: link.send_bytes_per_s for link in problem.links})
        self.sent_s: dict[Move, float] = {}
        self.held_before = [0]
        for choice in chosen:
            self.held_before.append(self.held_before[-1] + choice.held_bytes)

    def has_capacity(self) -> bool:
        """Whether the stores can take all that is sent."""
        moves = [move for choice in self.chosen for move in choice.moves]
        for link in self.problem.links:
            total = sum(move.num_bytes for move in moves if move.link == link.name)
            if link.capacity_bytes is not None and total > link.capacity_bytes:
                return False
        return True

    def forwards(self) -> bool:
        """Rule 1."""
        for unit, choice in enumerate(self.chosen):
            need = self.held_before[unit] + choice.forward_need_bytes
            if not self._wait_for_room(need):
                return False
            self.actions.append(forward_action(unit, choice))
            self.clock_s += self._forward_s(unit)
            for move in choice.moves:
                self.actions.append(Send(move.unit, value=move.value, link=move.link))
                self.sent_s[move] = self.sends.add(move, self.clock_s)
        return True

    def fetch_points(self) -> dict[int, list[Move]] | None:
        """Rule 2: the moves to fetch before each backward, in the order of need."""
        mirror = _Queue({link.name: link.fetch_bytes_per_s for link in self.problem.links})
        time_s, starts_s, ends = 0.0, [], list[tuple[float, int, Move]]()
        for unit, choice in enumerate(self.chosen):
            need = self.held_before[unit] + choice.backward_need_bytes
            waits = mirror.make_room(need, self.budget_bytes, time_s)
            if waits is None:
                return None
            time_s = max([time_s, *(end_s for end_s, _ in waits)])
            starts_s.append(time_s)
            time_s += self._backward_s(unit)
            ends += ((mirror.add(move, time_s), unit, move) for move in choice.moves)
        points: dict[int, list[Move]] = {}
        before = 0
        for end_s, unit, move in ends:
            before = max(before, unit)
            while before + 1 < len(starts_s) and starts_s[before + 1] < end_s:
                before += 1
            # The mirror runs from the last need to the first.
            points.setdefault(before, []).insert(0, move)
        return points

    def backwards(self, points: dict[int, list[Move]]) -> bool:
        """Rule 3, with the fetches of rule 2."""
        fetches = _Queue({link.name: link.fetch_bytes_per_s for link in self.problem.links})
        early_bytes, arrival_s = 0, dict[Move, float]()
        for unit in reversed(range(len(self.chosen))):
            choice, due = self.chosen[unit], points.get(unit, [])
            early_bytes += sum(move.num_bytes for move in due) - sum(move.num_bytes for move in choice.moves)
            need = self.held_before[unit] + choice.backward_need_bytes + early_bytes
            if not self._wait_for_room(need):
                return False
            for move in due:
                self.actions.append(Fetch(move.unit, value=move.value, link=move.link))
                arrival_s[move] = fetches.add(move, max(self.clock_s, self.sent_s[move]))
            self.clock_s = max([self.clock_s, *(arrival_s[move] for move in choice.moves)])
            self.actions += backward_actions(unit, choice)
            self.clock_s += self._backward_s(unit)
        return True

    def _wait_for_room(self, need_bytes: int) -> bool:
        """Waits for sends until a need fits; says whether it does."""
        waits = self.sends.make_room(need_bytes, self.budget_bytes, self.clock_s)
        if waits is None:
            return False
        self.actions += (Wait(move.unit, value=move.value) for _, move in waits)
        self.clock_s = max([self.clock_s, *(end_s for end_s, _ in waits)])
        return True

    def _forward_s(self, unit: int) -> float:
        owner, choice = self.problem.units[unit], self.chosen[unit]
        return (owner.options[choice.option] if choice.run is Run.KEPT else owner.lightest).forward_s

    def _backward_s(self, unit: int) -> float:
        choice = self.chosen[unit]
        option = self.problem.units[unit].options[choice.option]
        replay_s = option.forward_s + option.again_s if choice.run is Run.REPLAYED else 0.0
        return replay_s + option.extra_s + option.backward_s
