"""What an audit can find, and what recoup does about each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Audit", "Finding", "Kind", "make_finding", "some_of"]


class Kind(str, Enum):
    """What a finding is about."""

    RANDOMNESS = "foreign random numbers"
    OBJECT = "changes an object"
    DRIFT = "values drift"
    INPUT = "changes its input in place"
    BACKWARD = "backward inside its forward"
    REPLAY = "replay fails"
    ROUNDING = "rounding differs"
    BUFFERS = "updates buffers"
    DECISIONS = "keeps decisions"
    SHAPES = "memory depends on the data"
    READS = "reads saved tensors again"
    ALIAS = "output shares memory with an input"
    NOT_EXAMINED = "not examined"

    def __str__(self) -> str:
        return self.value


_ACTIONS = {
    Kind.RANDOMNESS: "Kept whatever the budget. Draw from torch's generators, whose state a replay restores.",
    Kind.OBJECT: "Kept whatever the budget: a replay would change it a second time. Return the change instead,"
    " or make it only if not recoup.is_replaying().",
    Kind.DRIFT: "Kept whatever the budget: a replay would give wrong gradients. Pass what the unit depends on as an"
    " argument.",
    Kind.INPUT: "Kept whatever the budget: a replay could not start from the same input. Work on a copy, or use the"
    " operation that is not in place.",
    Kind.BACKWARD: "Kept whatever the budget. Name the modules inside it as units instead.",
    Kind.REPLAY: "Kept whatever the budget.",
    Kind.ROUNDING: "May be replayed; gradients then agree up to rounding, not bit for bit."
    " torch.use_deterministic_algorithms(True) makes them equal.",
    Kind.BUFFERS: "May be replayed: they are updated once, and the replay sees the values that the forward saw.",
    Kind.DECISIONS: "May be replayed: they are kept from the forward, and the replay is given them.",
    Kind.SHAPES: "May be replayed: the same input takes the same way again. Leave a margin in the budget, since"
    " its memory varies with the data.",
    Kind.READS: "May be replayed; the second read costs a second replay. Read ctx.saved_tensors once.",
    Kind.ALIAS: "May be replayed. Code that changes the output in place changes the input too, and the replay then"
    " refuses.",
    Kind.NOT_EXAMINED: "May be replayed; each replay is compared with its forward by the shapes that it saves.",
}
_UNSAFE = frozenset({Kind.RANDOMNESS, Kind.OBJECT, Kind.DRIFT, Kind.INPUT, Kind.BACKWARD, Kind.REPLAY})


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a unit's call that matters for its replay.

    Attributes:
        unit: the call's name, as in a profile.
        what: its kind.
        detail: which argument, buffer or module it is about.
        action: what recoup does about it, and what the user may change.
        is_unsafe: whether the unit must be kept.
    """

    unit: str
    what: Kind
    detail: str
    action: str
    is_unsafe: bool


def make_finding(unit: str, what: Kind, detail: str) -> Finding:
    """A finding with the action that goes with its kind."""
    return Finding(unit, what, detail, _ACTIONS[what], what in _UNSAFE)


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found, in the order of the calls.

    >>> print(Audit(()))
    Nothing found: every unit can be replayed.
    >>> print(Audit((make_finding("norm", Kind.BUFFERS, "running_mean"),)))
    1 finding, all units can be replayed:
      norm: updates buffers (running_mean)
        May be replayed: they are updated once, and the replay sees the values that the forward saw.
    """

    findings: tuple[Finding, ...]

    @property
    def unsafe(self) -> dict[str, str]:
        """By name, the units that must be kept, and why."""
        reasons: dict[str, list[str]] = {}
        for finding in self.findings:
            if finding.is_unsafe:
                reasons.setdefault(finding.unit, []).append(f"{finding.what}: {finding.detail}")
        return {unit: "; ".join(texts) for unit, texts in reasons.items()}

    def __str__(self) -> str:
        if not self.findings:
            return "Nothing found: every unit can be replayed."
        num_findings, num_kept = len(self.findings), len(self.unsafe)
        kept = f"{num_kept} unit{'s' * (num_kept != 1)} kept" if num_kept else "all units can be replayed"
        return "\n".join((f"{num_findings} finding{'s' * (num_findings != 1)}, {kept}:", *self._lines()))

    def _lines(self) -> Iterable[str]:
        """What must be kept comes first; units with the same finding share an entry."""
        units: dict[tuple[bool, Kind, str, str], list[str]] = {}
        for finding in sorted(self.findings, key=lambda finding: not finding.is_unsafe):
            key = (finding.is_unsafe, finding.what, finding.detail, finding.action)
            units.setdefault(key, []).append(finding.unit)
        for (_, what, detail, action), names in units.items():
            yield f"  {some_of(names)}: {what} ({detail})"
            yield f"    {action}"


def some_of(names: Sequence[str], *, most: int = 4) -> str:
    """The first few names, and how many more there are.

    >>> some_of(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
