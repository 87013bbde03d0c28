"""Memory levels: how many, and how large."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from recoup.planning.solvers.chain.costs import ChainCosts
from recoup.planning.solvers.chain.table import Rounding

__all__ = ["Grid"]


@dataclass(frozen=True, slots=True)
class Grid:
    """Memory levels from 0 to ``top_bytes``, about ``num_levels`` of them.

    >>> Grid(1000, num_levels=300).level_bytes
    4
    """

    top_bytes: int
    num_levels: int = field(kw_only=True)

    @property
    def level_bytes(self) -> int:
        """The size of a level, if nothing speaks for another."""
        return max(1, -(-self.top_bytes // max(1, self.num_levels)))

    def fitting_bytes(self, costs: ChainCosts, rounding: Rounding) -> int:
        """A level size near that (two thirds to six fifths) that divides the chain's common sizes best."""
        sizes = Counter(int(size) for size in costs.output_bytes)
        sizes.update(option.kept_bytes for options in costs.first_options.of for option in options)
        sizes.pop(0, None)
        usual = self.level_bytes
        choices = {usual}
        for size, _ in sizes.most_common(32):
            for parts in {max(1, size // usual), size // usual + 1}:
                choices.update({size // parts, -(-size // parts)})

        def loss(level_bytes: int) -> int:
            bias = rounding.bias(level_bytes)
            rounded = {size: (size + bias) // level_bytes * level_bytes for size in sizes}
            return level_bytes + sum(abs(rounded[size] - size) * num for size, num in sizes.items())

        near_enough = [size for size in choices if 2 * usual <= 3 * size and 5 * size <= 6 * usual]
        return min(near_enough, key=lambda size: (loss(size), size))
