from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from report_subjects import make_subject

import recoup
from recoup.report import plot_frontier, plot_memory


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    matplotlib = pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: pip install 'recoup[plots]'"
    )
    matplotlib.use("Agg")
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def test_memory() -> None:
    made = make_subject(8)
    ax = plot_memory(made)
    labels = [line.get_label() for line in ax.get_lines()]
    assert labels == ["plain, predicted", "fitted, predicted", "fitted, measured", "budget"]
    plain, fitted, _, budget = ax.get_lines()
    assert max(plain.get_ydata()) == made.plan.profile.plain_bytes
    assert max(fitted.get_ydata()) == made.plan.predicted_bytes
    assert budget.get_ydata()[0] == made.plan.budget_bytes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "50 MiB", "100 MiB"]
    ax.figure.canvas.draw()


def test_memory_without_a_real_step_on_given_axes() -> None:
    from matplotlib import pyplot

    _, ax = pyplot.subplots()
    assert plot_memory(make_subject(8, is_verified=False), ax) is ax
    assert len(ax.get_lines()) == 3


def test_frontier_of_a_profile_and_of_plans() -> None:
    profile = make_subject(8).plan.profile
    ax = plot_frontier(profile)
    best, *recipes = ax.get_lines()
    assert best.get_label() == "best plan"
    assert [line.get_label() for line in recipes][:2] == ["keep everything", "recompute every unit"]
    assert best.get_xdata()[-1] == profile.plain_bytes
    plans = recoup.frontier(profile, num_points=3)
    assert len(plot_frontier(plans).get_lines()[0].get_xdata()) == len(plans)
    ax.figure.canvas.draw()


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="A frontier needs plans"):
        plot_frontier([])


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'recoup\[plots\]'"):
        plot_memory(make_subject(8))
