"""Exact bytes for the chain solver: the least with which a part can run, and the most that it can use.

These are not discretised. They make the tables exact at the edge of feasibility, and let them skip all
memory levels at which a part of the chain cannot run or already runs as fast as it ever will.
"""

from __future__ import annotations

import numpy as np

from recoup.planning.solvers.chain_costs import ChainCosts, Ints, OptionCosts

__all__ = ["ChainFloors", "ChainShape"]


class ChainShape:
    """Which parts (s … t) of a chain the tables know, and where a part may be cut.

    With ``group=1`` all parts and all cuts: the solution is optimal among persistent schedules. With larger
    groups, parts end and checkpoints lie at multiples of ``group``, or anywhere within the first unit's
    group; this keeps long chains affordable and is a restriction.

    >>> ChainShape(7, group=3).ends(1)
    [1, 2, 5, 6]
    """

    def __init__(self, num_units: int, *, group: int = 1) -> None:
        self.num_units = num_units
        self.group = group

    def group_end(self, first: int) -> int:
        """The last unit of a unit's group."""
        return min((first // self.group + 1) * self.group, self.num_units) - 1

    def ends(self, first: int) -> list[int]:
        """The possible last units of parts that start at ``first``."""
        near = self.group_end(first)
        ends = [*range(first, near + 1), *range(near + self.group, self.num_units - 1, self.group)]
        if ends[-1] != self.num_units - 1:
            ends.append(self.num_units - 1)
        return ends

    def position(self, first: int, last: int) -> int:
        """Where ``last`` is in ``ends(first)``."""
        near = self.group_end(first)
        if last <= near:
            return last - first
        return near - first + -(-(last - near) // self.group)

    def base(self, last: int) -> int:
        """The first unit of the longest part that ends at ``last``."""
        is_end = last == self.num_units - 1 or (last + 1) % self.group == 0
        return 0 if is_end else last // self.group * self.group

    def num_parts(self) -> int:
        """How many parts there are, roughly."""
        return self.num_units * (self.group + self.num_units // self.group) // 2


class ChainFloors:
    """For every part: the least bytes with which it can run, and those with which it keeps everything.

    ``least[s][position]`` and ``full[s][position]`` follow ``shape.ends(s)``; ``right[t][s - shape.base(t)]``
    is ``least`` of the part s … t plus the bytes of its input, which whoever runs it as the right part pays.
    """

    def __init__(self, costs: ChainCosts, shape: ChainShape) -> None:
        self.costs, self.shape = costs, shape
        n = costs.num_units
        self.least: list[Ints] = [np.empty(0, dtype=np.int64)] * n
        self.full: list[Ints] = [np.empty(0, dtype=np.int64)] * n
        self.right: list[Ints] = [np.empty(t + 1 - shape.base(t), dtype=np.int64) for t in range(n)]
        for first in reversed(range(n)):
            self._fill(first)

    @property
    def least_bytes(self) -> int:
        """The least bytes (beyond resident ones and the input) for the whole chain."""
        return int(self.least[0][-1])

    @property
    def full_bytes(self) -> int:
        """The bytes (beyond resident ones and the input) with which the whole chain runs fastest."""
        return int(self.full[0][-1])

    def _fill(self, first: int) -> None:
        costs, shape = self.costs, self.shape
        ends = shape.ends(first)
        least, full = np.empty(len(ends), dtype=np.int64), np.empty(len(ends), dtype=np.int64)
        needs = costs.sweep_needs(first)
        input_bytes = int(costs.output_bytes[first - 1]) if first else 0
        cuts = np.array(ends[:-1], dtype=np.int64) + 1
        for position, last in enumerate(ends):
            before = int(costs.before_bytes[last])
            floor = min(self._option_floor(option, first, last) for option in costs.options[first])
            if position:
                at = cuts[:position]
                right = self.right[last][at - shape.base(last)]
                swept = needs[at - 1 - first] + before
                floor = min(floor, int(np.maximum(np.maximum(right, swept), least[:position]).min()))
            least[position] = floor
            full[position] = self._full(first, last)
            self.right[last][first - shape.base(last)] = floor + input_bytes
        self.least[first], self.full[first] = least, full

    def _option_floor(self, option: OptionCosts, first: int, last: int) -> int:
        """The least bytes if unit ``first`` keeps everything under an option (or runs from its input)."""
        if first == last and option.is_direct:
            return option.backward_bytes
        own = max(option.forward_bytes + int(self.costs.before_bytes[last]), option.backward_bytes)
        if first == last:
            return own
        rest = int(self.least[first + 1][self.shape.position(first + 1, last)])
        return max(own, option.kept_bytes + rest)

    def _full(self, first: int, last: int) -> int:
        if first == last:
            return self._option_floor(self.costs.closing[first], first, last)
        option = self.costs.fastest[first]
        own = max(option.forward_bytes + int(self.costs.before_bytes[last]), option.backward_bytes)
        rest = int(self.full[first + 1][self.shape.position(first + 1, last)])
        return max(own, option.kept_bytes + rest)
