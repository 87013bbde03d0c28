"""Plain matplotlib figures for papers: frontiers, memory over a step, plans by size. They need the extra ``plots``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING, Any

from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.report.by_hand import recipes_by_hand
from recoup.report.memory_picture import MemoryPicture
from recoup.report.numbers import byte_ticks
from recoup.report.size_picture import make_size_picture
from recoup.report.subject import Subject
from recoup.report.tradeoff import plans_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_frontier", "plot_memory", "plot_sizes"]

_MARKERS = "sDov^<>Pp*"


def plot_frontier(profile_or_plans: Profile | Iterable[ModelPlan], ax: Axes | None = None) -> Axes:
    """Draws the best seconds for every budget, and what people do by hand beside it.

    Args:
        profile_or_plans: a measured step, or what `frontier` made of it.
        ax: where to draw; a new figure unless given.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: there is nothing to draw.
    """
    ax = _axes(ax)
    if isinstance(profile_or_plans, Profile):
        recipes = recipes_by_hand(profile_or_plans)
        plans = plans_beside(profile_or_plans, recipes)
    else:
        plans = tuple(profile_or_plans)
        if not plans:
            raise ValueError("A frontier needs plans. Give a profile, or plans from recoup.frontier.")
        recipes = recipes_by_hand(plans[0].profile)
    sizes = [plan.predicted_bytes for plan in plans]
    times_ms = [plan.predicted_s * 1e3 for plan in plans]
    ax.step(sizes, times_ms, where="post", marker="o", ms=3, label="best plan")
    style: dict[str, Any] = {"color": "0.35", "markersize": 5, "fillstyle": "none"}
    for marker, recipe in zip(cycle(_MARKERS), recipes, strict=False):
        ax.plot(recipe.peak_bytes, recipe.seconds * 1e3, marker, label=recipe.name, **style)
    _byte_axis(ax.xaxis, min(sizes), max([*sizes, *(recipe.peak_bytes for recipe in recipes)]))
    ax.set(xlabel="peak memory", ylabel="step (ms)")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_memory(fitted: Subject, ax: Axes | None = None) -> Axes:
    """Draws memory over a fitted step: plain, predicted, measured, and the budget.

    Args:
        fitted: what `fit` returned.
        ax: where to draw; a new figure unless given.

    Raises:
        ImportError: matplotlib is not there.
    """
    ax = _axes(ax)
    picture = MemoryPicture(fitted)
    curves = [
        ("plain, predicted", picture.plain, "0.6"),
        ("fitted, predicted", picture.predicted, "C0"),
        ("fitted, measured", picture.measured, "C1"),
    ]
    for label, curve, colour in curves:
        if curve is not None:
            times_ms = [point[0] * 1e3 for point in curve.points] + [curve.end * 1e3]
            levels = [point[1] for point in curve.points]
            ax.step(times_ms, [*levels, levels[-1]], where="post", linewidth=1, label=label, color=colour)
    ax.axhline(fitted.plan.budget_bytes, color="C3", linestyle="--", linewidth=1, label="budget")
    ax.set(xlabel="time (ms)", ylabel="memory", xlim=(0, picture.axes[0].high * 1e3), ylim=(0, None))
    _byte_axis(ax.yaxis, 0, ax.get_ylim()[1])
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_sizes(fitted: Subject, ax: Axes | None = None) -> Axes:
    """Draws predicted peaks by the size of the batch: under the plan for each, plain, and the budget; real steps, too.

    Seconds per 1,000 elements are on the right-hand axis.

    Args:
        fitted: what `fit` returned for batches of several sizes that vary in one way.
        ax: where to draw; a new figure unless given.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: it was fitted to one size, or to sizes that vary in two ways.
    """
    picture = make_size_picture(fitted)
    if picture is None:
        raise ValueError("Plans by size are drawn along one axis: fit with samples= that differ in one way.")
    ax = _axes(ax)
    sizes = [place.size for place in picture.places]
    ax.plot(sizes, [place.plain_bytes for place in picture.places], color="0.6", lw=1, label="peak, plain")
    ax.plot(sizes, [place.peak_bytes for place in picture.places], color="C0", lw=1, label="peak, fitted")
    if picture.steps:
        seen = [(step.size[0], step.seen.peak_bytes) for step in picture.steps]
        ax.plot(*zip(*seen, strict=True), "o", color="C1", ms=4, label="peak, measured")
    ax.axhline(picture.plans.budget_bytes, color="C3", linestyle="--", linewidth=1, label="budget")
    ax.set(xlabel=picture.axis_name, ylabel="memory", ylim=(0, picture.bytes_axis.high))
    _byte_axis(ax.yaxis, 0, picture.bytes_axis.high)
    right = ax.twinx()
    times_ms = [place.per_thousand_s * 1e3 for place in picture.places]
    right.plot(sizes, times_ms, color="C2", lw=1, linestyle=":", label="step per 1,000")
    right.set(ylabel="step per 1,000 (ms)", ylim=(0, None))
    lines = [*ax.get_lines(), *right.get_lines()]
    ax.legend(handles=lines, frameon=False, fontsize="small")
    return ax


def _byte_axis(axis: Any, low: float, high: float) -> None:
    ticks = byte_ticks(low, high)
    axis.set_ticks([value for value, _ in ticks], labels=[text for _, text in ticks])


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Plots need matplotlib. Install it with: pip install 'recoup[plots]'") from error
    return pyplot.subplots(layout="constrained")[1]
