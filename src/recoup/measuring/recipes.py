"""Which recipes are worth measuring for a unit: everything, nothing, and the cheapest things inside it to redo."""

from __future__ import annotations

from collections.abc import Mapping

from recoup.measuring.options import KEEP, RECOMPUTE, Recipe

__all__ = ["promising_recipes"]

_MOST_PARTIAL = 4
_WORTH_SHARE = 0.02


def promising_recipes(saved_bytes: Mapping[str, int], forward_s: Mapping[str, float]) -> list[Recipe]:
    """Recipes for a unit, given what the modules inside it save and how long they take.

    In order of bytes freed for each second of replay, each next recipe recomputes one module more. The last
    one recomputes the whole unit and, inside its replay, each of them again: the least memory of all.

    >>> [recipe.name for recipe in promising_recipes({"norm": 80, "mlp": 90}, {"norm": 1.0, "mlp": 9.0})]
    ['keep', 'recompute', 'recompute norm', 'recompute norm, mlp', 'recompute, then again norm, mlp']
    """
    total_bytes = sum(saved_bytes.values())
    worth = [name for name, size in saved_bytes.items() if size > _WORTH_SHARE * total_bytes]
    worth.sort(key=lambda name: -saved_bytes[name] / max(forward_s.get(name, 0.0), 1e-9))
    prefixes = [tuple(worth[:count]) for count in range(1, len(worth) + 1)]
    if len(prefixes) > _MOST_PARTIAL:
        step = (len(prefixes) - 1) / (_MOST_PARTIAL - 1)
        prefixes = [prefixes[round(index * step)] for index in range(_MOST_PARTIAL)]
    partial = [Recipe(inner=prefix) for prefix in prefixes]
    nested = [Recipe(whole=True, inner=tuple(worth))] if len(worth) > 1 else []
    return [KEEP, RECOMPUTE, *partial, *nested]
