"""What ``spill`` may choose: ``select``'s choices, and the same with values that leave over a link.

The bytes that a unit's option holds may leave when its forward has run. The output of a unit may leave when
its last reader's forward has run, so it belongs to that reader's choices; it must be back for that reader's
backward, and then stays. A choice with moves holds so much less, and costs a price for the time on the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from recoup.planning.actions import Value
from recoup.planning.problem import Problem
from recoup.planning.solvers.select.levels import Choice, Levels, Move, Run, all_choices

__all__ = ["LATE_WEIGHT", "SpillChoices"]

LATE_WEIGHT = 1.5


class SpillChoices:
    """All choices of a problem with links.

    >>> from recoup.planning.problem import Link, Option, Unit
    >>> keep = Option("keep", forward_s=1, backward_s=2, held_bytes=60, held_links=("host",))
    >>> units = [Unit(name, [keep], output_bytes=10) for name in "ab"]
    >>> link = Link("host", send_bytes_per_s=30.0, fetch_bytes_per_s=20.0)
    >>> choices = SpillChoices(Problem(units, links=[link]))
    >>> [(choice.held_bytes, choice.moves[:1] and choice.moves[0].link) for choice in choices.choices[0]]
    [(60, ()), (0, ()), (0, 'host')]
    >>> choices.link_s(choices.choices[0][2])
    3.0
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # Seconds on a link per byte; a move takes its slower direction at least.
        self.seconds_per_byte = {
            link.name: 1.0 / min(link.send_bytes_per_s, link.fetch_bytes_per_s) for link in problem.links
        }
        outputs = _outputs_by_reader(problem)
        self.choices: list[list[Choice]] = []
        # Schedules are simulated, whatever they count on; bounds are not.
        for unit, plain in enumerate(all_choices(problem, is_bound=True)):
            moved = list(self._with_moves(unit, plain, outputs[unit]))
            # Without moves first: of equal choices the first stays.
            self.choices.append([*plain, *moved])
        self._known = [{one._replace(seconds=0.0): one for one in choices} for choices in self.choices]

    def link_s(self, choice: Choice) -> float:
        """Seconds that a choice's moves take on their links, in the slower direction."""
        return sum(move.num_bytes * self.seconds_per_byte[move.link] for move in choice.moves)

    def levels(self, price: float) -> Levels:
        """The choices with a price: so many seconds of computation for a second on a link.

        Late units pay up to ``LATE_WEIGHT`` times as much: what leaves late has little time to come back.
        """
        step = (LATE_WEIGHT - 1) / max(self.problem.num_units - 1, 1)

        def priced(unit: int, choice: Choice) -> Choice:
            return choice._replace(seconds=choice.seconds + price * (1 + step * unit) * self.link_s(choice))

        return self._levels(priced)

    def turn_levels(self, price: float) -> Levels:
        """The same for what must be away as the last backward starts, with that moment as the only one.

        Such a value has been sent before and is fetched after, so it pays for its time in both directions.
        """
        both_ways = {
            link.name: 1.0 / link.send_bytes_per_s + 1.0 / link.fetch_bytes_per_s
            for link in self.problem.links
        }
        last = self.problem.num_units - 1

        def priced(unit: int, choice: Choice) -> Choice:
            moves_s = sum(move.num_bytes * both_ways[move.link] for move in choice.moves)
            return choice._replace(
                forward_need_bytes=0,
                backward_need_bytes=choice.backward_need_bytes if unit == last else 0,
                seconds=choice.seconds + price * moves_s,
            )

        return self._levels(priced)

    def _levels(self, priced: Callable[[int, Choice], Choice]) -> Levels:
        changed = [[priced(unit, one) for one in choices] for unit, choices in enumerate(self.choices)]
        return Levels(self.problem, changed)

    def chosen(self, levels: Levels, positions: Sequence[int]) -> tuple[Choice, ...]:
        """A selection of ``levels(price)``, with the seconds that its choices take."""
        priced = [choices[position] for choices, position in zip(levels.choices, positions, strict=True)]
        return tuple(known[one._replace(seconds=0.0)] for known, one in zip(self._known, priced, strict=True))

    def break_even_prices(self) -> list[float]:
        """Prices at which, for some unit, keeping nothing costs as much as moving what is held; ascending."""
        prices = set()
        for choices in self.choices:
            moved = [choice for choice in choices if choice.moves and self.link_s(choice) > 0]
            held = [choice for choice in choices if not choice.moves]
            for one in moved:
                for other in held:
                    if other.seconds > one.seconds and other.held_bytes <= max(one.held_bytes, 0):
                        prices.add((other.seconds - one.seconds) / self.link_s(one))
        return sorted(prices)

    def _with_moves(self, unit: int, plain: list[Choice], outputs: Sequence[int]) -> Iterator[Choice]:
        if unit == self.problem.num_units - 1:
            return
        leaving: list[list[Move | None]] = []
        for source in outputs:
            owner = self.problem.units[source]
            away = [Move(source, Value.OUTPUT, link, owner.output_bytes) for link in owner.output_links]
            leaving.append([None, *away])
        for choice in plain:
            links = self.problem.units[unit].options[choice.option].held_links
            can_leave = choice.run is Run.KEPT and choice.held_bytes > 0
            held = [Move(unit, Value.HELD, link, choice.held_bytes) for link in links if can_leave]
            for moves in product([None, *held], *leaving):
                chosen = tuple(move for move in moves if move is not None)
                if chosen:
                    away_bytes = sum(move.num_bytes for move in chosen)
                    yield choice._replace(held_bytes=choice.held_bytes - away_bytes, moves=chosen)


def _outputs_by_reader(problem: Problem) -> list[list[int]]:
    """For each unit, the outputs that may leave when its forward, the last to read them, has run."""
    reader = [unit + 1 for unit in range(problem.num_units)]
    for index, unit in enumerate(problem.units):
        for source in unit.skips:
            reader[source] = max(reader[source], index)
    found: list[list[int]] = [[] for _ in range(problem.num_units + 1)]
    for source, unit in enumerate(problem.units):
        if unit.output_links and unit.output_bytes:
            found[reader[source]].append(source)
    return found
