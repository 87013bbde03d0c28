"""One profile from several of the same step, number by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["combined"]

_MEASURED = {"scratch", "shapes", "num_stored"}
"""Further fields of numbers that may differ, beside bytes and seconds."""
_OWN = {"device", "kind", "output_names", "unsafe", "uncaptured"}
"""Words and marks of each profile's own: one's are taken."""


def combined(
    documents: Sequence[Any],
    number: Callable[[Sequence[Any]], Any],
    refuse: Callable[[str], Exception],
    *,
    own: int = 0,
    where: str = "profile",
    is_measured: bool = False,
) -> Any:
    """A document whose measured numbers are made of those of several documents.

    Args:
        documents: what `encode` makes of profiles, or the same part of each.
        number: from the numbers of all documents, in their order, to the combined one.
        refuse: from the place of something else in which they differ to the error that is raised.
        own: the index of the document whose own words are taken.
        where: the place of these parts.
        is_measured: whether numbers at this place were measured.

    >>> parts = [{"name": "block", "held_bytes": 3}, {"name": "block"}]
    >>> combined(parts, max, ValueError)
    {'name': 'block', 'held_bytes': 3}
    """
    first = documents[0]
    if isinstance(first, dict) and all(isinstance(part, dict) for part in documents):
        keys = dict.fromkeys(key for part in documents for key in part)
        return {key: _at(key, documents, number, refuse, own, where) for key in keys}
    if isinstance(first, list) and all(
        isinstance(part, list) and len(part) == len(first) for part in documents
    ):
        columns = enumerate(zip(*documents, strict=True))
        return [
            combined(column, number, refuse, own=own, where=f"{where}[{index}]", is_measured=is_measured)
            for index, column in columns
        ]
    if is_measured and all(isinstance(part, (int, float)) for part in documents):
        return number(documents)
    if any(part != first for part in documents):
        raise refuse(where)
    return first


def _at(
    key: str,
    parts: Sequence[dict[str, Any]],
    number: Callable[[Sequence[Any]], Any],
    refuse: Callable[[str], Exception],
    own: int,
    where: str,
) -> Any:
    there = next(part[key] for part in parts if key in part)
    if key in _OWN:
        return parts[own].get(key, there)
    is_measured = key.endswith(("_bytes", "_s")) or key in _MEASURED
    # Left out where it is at its default: of numbers, that is 0.
    default = _zero(there) if is_measured else None
    found = [part.get(key, default) for part in parts]
    return combined(found, number, refuse, own=own, where=f"{where}.{key}", is_measured=is_measured)


def _zero(part: Any) -> Any:
    return [_zero(item) for item in part] if isinstance(part, list) else 0
