"""Bytes and seconds of cuts that have not run yet, by those of the engine's own cut and by the unit's graph."""

from __future__ import annotations

from dataclasses import replace

from recoup.capture.cut import Cut
from recoup.capture.options import recompute_s
from recoup.capture.run import graph_of
from recoup.measuring.unit.one_unit import CallBytes, CallTiming

__all__ = ["foresee_bytes", "foresee_timing"]


_AT_ONCE = 0.5
"""Of what a cut frees, the share that the forward's peak has less, and that the backward has at once when it makes it
again: 0.3 to 0.7 in blocks of transformers. It only decides which cuts are measured."""


def foresee_bytes(cut: Cut, own: CallBytes) -> CallBytes:
    """What a cut will hold and need.

    Args:
        cut: that has not run.
        own: measured under the engine's own cut.
    """
    graph = graph_of(cut)
    assert graph is not None, "a cut of a graph that was captured"
    more_bytes = graph.num_bytes(cut.saves or ()) - graph.num_bytes(graph.own_saves)
    held_bytes = max(0, own.held_bytes + more_bytes)
    moved_bytes = round(_AT_ONCE * (held_bytes - own.held_bytes))
    return replace(
        own,
        held_bytes=held_bytes,
        forward_peak_bytes=own.forward_peak_bytes + moved_bytes,
        backward_peak_bytes=max(0, own.backward_peak_bytes - moved_bytes),
    )


def foresee_timing(cut: Cut, own: CallTiming) -> CallTiming:
    """The seconds of a cut: its backward also takes those of the operations that only it runs again."""
    graph = graph_of(cut)
    assert graph is not None, "a cut of a graph that was captured"
    more_s = recompute_s(graph, cut) - recompute_s(graph, replace(cut, saves=None))
    backward = own.backward._replace(device_s=own.backward.device_s + max(0.0, more_s))
    return own._replace(backward=backward)
