"""Exact bytes for the chain solver: the least with which a part can run, and the most that it can use.

These are not discretised. They make the tables exact at the edge of feasibility, and let them skip all
memory levels at which a part of the chain cannot run or already runs as fast as it ever will.

NOTE [ Units that run once ]
    A part that ends before the chain does is the left part of some cut, or lies in one: it is run after a
    sweep over all of its units. So if one of them ``runs_once``, there is no such part: its least bytes are
    ``NEVER``, its seconds infinite, and with it goes every cut whose sweep would run that unit. In parts that
    reach the end of the chain, a unit that runs once has nothing left but its options.
"""

from __future__ import annotations

import numpy as np

from recoup.planning.solvers.chain.costs import ChainCosts, Ints, OptionCosts

__all__ = ["NEVER", "ChainFloors", "option_bytes"]

#: More bytes than any budget, with room to add a few.
NEVER = 1 << 62


def option_bytes(costs: ChainCosts, option: OptionCosts, first: int, last: int) -> int:
    """What the first unit of a part needs under an option (or to run from its input), whatever follows it."""
    if first == last and option.is_direct:
        return option.backward_bytes
    return max(option.forward_bytes + int(costs.before_bytes[last]), option.backward_bytes)


class ChainFloors:
    """For every part: the least bytes with which it can run, and those with which it keeps everything.

    ``least[h][s][t - s]`` and ``full[h][s][t - s]`` are those of the part s … t whose input is held (h is True) or not:
    see NOTE [ Inputs that go ] in ``costs``. ``right[t][s]`` is the least where it is not, plus the bytes of the
    part's input, which whoever runs it as the right part pays.
    """

    def __init__(self, costs: ChainCosts) -> None:
        self.costs = costs
        n = costs.num_units
        none = np.empty(0, dtype=np.int64)
        self.least: tuple[list[Ints], list[Ints]] = ([none] * n, [none] * n)
        self.full: tuple[list[Ints], list[Ints]] = ([none] * n, [none] * n)
        self.right: list[Ints] = [np.empty(t + 1, dtype=np.int64) for t in range(n)]
        for first in reversed(range(n)):
            self._fill(first)

    @property
    def least_bytes(self) -> int:
        """The least bytes (beyond resident ones and the input) for the whole chain."""
        return int(self.least[True][0][-1])

    @property
    def lowest_bytes(self) -> int:
        """The least of any part: less than nothing where backwards free what was there from the start."""
        return min(int(row.min()) for rows in self.least for row in rows)

    @property
    def full_bytes(self) -> int:
        """The bytes (beyond resident ones and the input) with which the whole chain runs fastest.

        Where keeping everything is not the fastest way, all that could ever be there at once.
        """
        if self.costs.fastest_is_least:
            return int(self.full[True][0][-1])
        options = [option for options in self.costs.first_options.of for option in options]
        kept_bytes = sum(
            max(option.kept_bytes for option in options) for options in self.costs.first_options.of
        )
        swept_bytes = int(self.costs.sweep_bytes.max() + self.costs.before_bytes.max())
        return kept_bytes + swept_bytes + max(o.forward_bytes + o.backward_bytes for o in options)

    def _fill(self, first: int) -> None:
        costs, n = self.costs, self.costs.num_units
        for table in (self.least, self.full):
            table[True][first] = table[False][first] = np.full(n - first, NEVER, dtype=np.int64)
            if costs.frees[first]:
                table[False][first] = table[True][first].copy()
        needs = costs.sweep_needs(first)
        input_bytes = int(costs.output_bytes[first - 1]) if first else 0
        for last in range(first, n):
            if costs.is_never(first, last):
                self.right[last][first] = NEVER
                continue
            num_cuts, by_cut = last - first, NEVER
            if num_cuts:
                swept = needs[:num_cuts] + costs.before_bytes[last]
                right = self.right[last][first + 1 :]
                left = self.least[True][first][:num_cuts]
                by_cut = int(np.maximum(np.maximum(right, swept), left).min())
            for is_held in (True, False) if costs.frees[first] else (True,):
                options = costs.options(last, is_held=is_held)
                by_option = [
                    self._with_option(option, first, last, self.least) for option in options.of[first]
                ]
                self.least[is_held][first][num_cuts] = min(by_cut, *by_option)
                fastest = (options.fastest if num_cuts else options.closing)[first]
                self.full[is_held][first][num_cuts] = self._with_option(fastest, first, last, self.full)
            self.right[last][first] = self.least[False][first][num_cuts] + input_bytes

    def _with_option(
        self, option: OptionCosts, first: int, last: int, table: tuple[list[Ints], list[Ints]]
    ) -> int:
        """The bytes of a part whose first unit runs under an option, and whose rest takes what a table says."""
        own = option_bytes(self.costs, option, first, last)
        if first == last:
            return own
        rest = int(table[option.holds_output][first + 1][last - first - 1])
        return max(own, option.kept_bytes + rest)
