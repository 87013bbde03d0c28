"""Hold sets between the corners of the hull: the integer program, on what is open near the price.

A limit between two corners asks for a set that no price makes best. At the price where the hull passes the
limit, nearly everything is decided on both sides of it; what a range of prices around it leaves open
(``PricedCut.narrowed``) is the core (as in knapsack codes: Balas and Zemel, "An algorithm for large zero-one
knapsack problems", Operations Research 1980). The integer program is solved on the core alone. If the core
is the whole problem, its answer is the optimum; if not, the hull bounds what may have been missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from recoup.planning.graphs.hold.cut import NodeSet
from recoup.planning.graphs.hold.priced_cut import PricedCut
from recoup.planning.program import Program

__all__ = ["Core", "best_within"]

_MAX_CORE = 600
_WIDTHS = (Fraction(8), Fraction(3), Fraction(3, 2), Fraction(6, 5), Fraction(21, 20), Fraction(101, 100))


@dataclass(frozen=True, eq=False)
class Core:
    """A better set, if there is one.

    Attributes:
        chosen: the best set found, or None if nothing better than what was known.
        bound_ns: no set within the limit takes less, if the core is the whole problem; else None.
    """

    chosen: NodeSet | None
    bound_ns: float | None


def best_within(
    cut: PricedCut, *, limit_bytes: int, price: Fraction, known: NodeSet, time_limit_s: float
) -> Core:
    """Looks for a set with at most ``limit_bytes`` (in the cut's own count) that is faster than ``known``.

    Args:
        cut: the whole problem.
        limit_bytes: at most this many bytes.
        price: nanoseconds a byte where the hull passes the limit.
        known: a set within the limit.
        time_limit_s: for the integer program.
    """
    size = len(cut.nodes)
    sure, maybe = np.zeros(size, dtype=bool), np.ones(size, dtype=bool)
    for width in _WIDTHS:
        if int((maybe & ~sure).sum()) <= _MAX_CORE:
            break
        sure, maybe = cut.narrowed(np.array([float(price / width)]), np.array([float(price * width)]))
    open_ = maybe & ~sure
    if not 0 < int(open_.sum()) <= 4 * _MAX_CORE:
        return Core(chosen=None, bound_ns=None)
    core = cut.without(sure, maybe)
    decided = sure | (known & open_)
    whole_bytes, whole_ns = (int(cost[0]) for cost in cut.costs(decided, num_parts=1))
    core_bytes, core_ns = (int(cost[0]) for cost in core.costs(known[open_], num_parts=1))
    known_ns = int(cut.costs(known, num_parts=1)[1][0])
    chosen, bound = _solve(
        core,
        free_bytes=limit_bytes - (whole_bytes - core_bytes),
        known_ns=known_ns - (whole_ns - core_ns),
        time_limit_s=time_limit_s,
    )
    if chosen is not None:
        full = sure.copy()
        full[open_] = chosen
        chosen = full
    return Core(chosen=chosen, bound_ns=bound if open_.all() else None)


def _solve(
    core: PricedCut, *, free_bytes: int, known_ns: int, time_limit_s: float
) -> tuple[NodeSet | None, float | None]:
    """The integer program of NOTE [ Hold or recompute as a cut ] with the bytes as a constraint."""
    if known_ns < 0:
        return None, None
    program = Program()
    unit_ns = max(int(core.right_ns.max(initial=0)), 1)
    unit_bytes = max(
        int(core.left_bytes.max(initial=0)),
        int(core.right_bytes.max(initial=0)),
        int(core.pair_bytes.max(initial=0)),
        1,
    )
    columns = [program.column(cost=cost / unit_ns) for cost in core.right_ns.tolist()]
    net = (core.right_bytes - core.left_bytes).tolist()
    terms = [(column, size / unit_bytes) for column, size in zip(columns, net, strict=True) if size]
    for (value, op), size in zip(core.pairs.tolist(), core.pair_bytes.tolist(), strict=True):
        held = program.column(is_binary=False)
        program.row([(held, 1.0), (columns[value], -1.0), (columns[op], 1.0)], lower=0.0)
        terms.append((held, size / unit_bytes))
    for op, value in core.wants.tolist():
        program.row([(columns[value], 1.0), (columns[op], -1.0)], lower=0.0)
    program.row(terms, upper=(free_bytes - int(core.left_bytes.sum())) / unit_bytes)
    solution = program.solve(time_limit_s=time_limit_s, cutoff=known_ns / unit_ns * (1 + 1e-6) + 1e-6)
    if solution.is_infeasible:
        return None, float(known_ns)
    bound = max(0.0, solution.bound) * unit_ns
    if solution.values is None:
        return None, bound
    return np.array(solution.values[: len(columns)]) > 0.5, bound
