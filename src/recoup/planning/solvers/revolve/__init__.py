"""Equal steps under a number of slots: known in advance, or not."""

from recoup.planning.solvers.revolve.solver import (
    RevolveSolver,
    extra_forwards,
    num_repetitions,
    reverse_part,
    revolve,
)

__all__ = ["RevolveSolver", "extra_forwards", "num_repetitions", "reverse_part", "revolve"]
