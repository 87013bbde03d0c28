"""The audit of one unit's call: about four forwards and one backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recoup.auditing.findings import Finding, Kind, make_finding, some_of
from recoup.auditing.given import copied, with_other_values
from recoup.auditing.replays import Trial, try_replay
from recoup.auditing.rounding import differs_by_rounding
from recoup.auditing.saved import SavedLog, first_difference, run_logged
from recoup.devices.meter import device_of, make_meter
from recoup.errors import CheckpointError, ReplayMismatchError
from recoup.model.named_arguments import named_tensors
from recoup.model.preserve import preserving
from recoup.model.streaming import UnitCall
from recoup.model.undo import undone
from recoup.sizes import format_bytes
from recoup.tensors import storages, tensors_in

__all__ = ["examine"]

_Found = list[tuple[Kind, str]]
_TOO_LARGE = "its replay alone does not fit the memory"


def examine(call: UnitCall) -> tuple[Any, list[Finding]]:
    """Runs a call's experiments on copies, then the call itself; returns its output and what was found."""
    found: _Found
    try:
        found = _replayed(call)
        other = None if _explained(found) else _on_other_values(call)
    except torch.OutOfMemoryError:
        found, other = [(Kind.NOT_EXAMINED, _TOO_LARGE)], None
    except Exception as error:
        # An argument that cannot be taken apart or copied; a checkpoint cannot do so either.
        found, other = [(Kind.REPLAY, _first_line(error))], None
    if (Kind.NOT_EXAMINED, _TOO_LARGE) in found:
        make_meter(device_of(call.module, (call.args, call.kwargs))).make_room()
    output, log = _run_plainly(call)
    if log is not None and log.is_read:
        found = [(Kind.BACKWARD, "its own backward runs before the step's")]
    elif log is not None:
        found += _decisions(log) + _compared(log, other) + _aliases(call, output, found)
    return output, [make_finding(call.name, kind, detail) for kind, detail in found]


def _run_plainly(call: UnitCall) -> tuple[Any, SavedLog | None]:
    """Runs a call once, as the model does, also where its arguments cannot be detached from the code before."""
    try:
        call.fresh()
    except CheckpointError:
        return call.fn(*call.args, **call.kwargs), None
    return run_logged(call)


@contextmanager
def _unchanged(call: UnitCall) -> Iterator[None]:
    """Puts back what a run changes, in the unit and elsewhere."""
    with preserving(call.module), undone(call):
        yield


def _replayed(call: UnitCall) -> _Found:
    """What a replay shows."""
    with _unchanged(call):
        trial = try_replay(copied(call))
    found: _Found = []
    if trial.draws:
        found.append((Kind.RANDOMNESS, f"draws from {' and '.join(trial.draws)}"))
    if trial.objects:
        found.append((Kind.OBJECT, f"argument {trial.objects[0]}"))
    if trial.inputs:
        found.append((Kind.INPUT, f"argument {', '.join(trial.inputs)}"))
    if not found and trial.is_mismatch:
        found.append(_difference(call, trial))
    elif not found and trial.error is not None:
        found.append((Kind.REPLAY, _first_line(trial.error)))
    if trial.buffers:
        found.append((Kind.BUFFERS, ", ".join(trial.buffers)))
    if trial.readers:
        found.append((Kind.READS, ", ".join(dict.fromkeys(trial.readers))))
    return found


def _difference(call: UnitCall, trial: Trial) -> tuple[Kind, str]:
    detail = "its output has other values than in the forward"
    if isinstance(trial.error, ReplayMismatchError):
        detail = _first_line(trial.error).partition("does not repeat the forward. ")[2]
    with _unchanged(call):
        return (Kind.ROUNDING if differs_by_rounding(copied(call)) else Kind.DRIFT), detail


def _explained(found: _Found) -> bool:
    """Whether runs differ for another reason than their input."""
    return any(kind in (Kind.RANDOMNESS, Kind.OBJECT, Kind.DRIFT, Kind.REPLAY) for kind, _ in found)


def _on_other_values(call: UnitCall) -> SavedLog | None:
    """What the call saves on other values; None if it takes no others."""
    with _unchanged(call):
        changed = with_other_values(call)
        if changed is None:
            return None
        try:
            return run_logged(changed.again())[1]
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None


def _decisions(log: SavedLog) -> _Found:
    """What a replay is given, by operation and module."""
    sizes: dict[str, int] = {}
    for module, kept in log.kept:
        if kept.value is not None:
            what = f"{kept.operation} in {module}" if module else kept.operation
            sizes[what] = sizes.get(what, 0) + kept.num_bytes
    named = [f"{format_bytes(size)} of {what}" for what, size in sizes.items()]
    return [(Kind.DECISIONS, some_of(named))] if named else []


def _compared(log: SavedLog, other: SavedLog | None) -> _Found:
    module = None if other is None else first_difference(log, other)
    if module is None:
        return []
    return [(Kind.SHAPES, f"other values save other shapes, first in {module or 'its own forward'}")]


def _aliases(call: UnitCall, output: Any, found: _Found) -> _Found:
    if any(kind is Kind.INPUT for kind, _ in found):
        return []  # a finding already
    made = {storage._cdata for tensor in tensors_in(output) for storage in storages(tensor)}
    shared = [
        name
        for name, tensor in named_tensors(call, call.args, call.kwargs)
        if any(storage._cdata in made for storage in storages(tensor))
    ]
    return [(Kind.ALIAS, f"argument {', '.join(shared)}")] if shared else []


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0].rstrip(".")
    return text or type(error).__name__
