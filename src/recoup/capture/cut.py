"""A cut of a captured unit: which results of its operations the forward keeps for the backward."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Cut"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which results of a captured unit's operations its forward keeps; its backward recomputes the rest.

    Attributes:
        engine: ``"captured"`` runs the operations as they were captured, ``"compiled"`` runs generated code.
        graph: digest of the unit's graph, in which the names of operations are unique.
        saves: the operations whose results are kept. ``None`` if the engine's own choice is: all that the backward
            reads where operations run as captured, and torch's own cut where code is generated.
        number: among the cuts of the graph; the engine's own is 0.
        settings: of the compiler, where they are not its defaults, as JSON.
        draws: whether the graph draws random numbers, which its digest says already.
        by_seconds: whether measured seconds have chosen it: another measurement may have another one in its place.

    >>> Cut("captured", "a1b2", ("addmm", "gelu"), number=1).name
    'captured, cut 1: keeps 2 results'
    """

    engine: str
    graph: str
    saves: tuple[str, ...] | None = None
    number: int = 0
    settings: str = ""
    draws: bool = field(default=False, compare=False)
    by_seconds: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """Its name in plans and reports."""
        if self.saves is None:
            return self.engine
        results = "result" if len(self.saves) == 1 else "results"
        return f"{self.engine}, cut {self.number}: keeps {len(self.saves)} {results}"
