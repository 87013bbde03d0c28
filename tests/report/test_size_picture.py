"""Plans by size as a picture: in the page, and with matplotlib."""

from __future__ import annotations

import pytest
from report.test_page import Page
from report_subjects import make_subject
from sized_subjects import make_sized_subject

from recoup.report import plot_sizes, to_html
from recoup.report.by_size import treatments
from recoup.report.size_picture import SizePicture, make_size_picture


@pytest.fixture(scope="module")
def picture() -> SizePicture:
    found = make_size_picture(make_sized_subject())
    assert found is not None
    return found


def test_only_sizes_along_one_axis_are_drawn() -> None:
    assert make_size_picture(make_subject(8)) is None
    assert make_size_picture(make_sized_subject((2, 100), (1, 400), (2, 1000))) is None


def test_ranges_leave_no_gap(picture: SizePicture) -> None:
    lows, highs = [low for low, _, _ in picture.ranges], [high for _, high, _ in picture.ranges]
    assert (lows[0], highs[-1]) == (100, 1000)
    assert lows[1:] == [high + 1 for high in highs[:-1]]
    assert highs == [one.up_to[0] for one in picture.plans.ranges]


def test_curves_show_what_is_predicted(picture: SizePicture) -> None:
    places = {place.size: place for place in picture.places}
    for one in picture.plans.ranges:
        place = places[one.up_to[0]]
        assert place.peak_bytes == one.plan.predicted_bytes
        assert place.per_thousand_s == pytest.approx(1000 * one.seconds_per_element)
    # A real profile is at hand for measured sizes: under the plan that keeps everything, peaks are the plain ones.
    measured = picture.plans.profiles.profiles[0]
    assert places[100].peak_bytes == places[100].plain_bytes == measured.plain_bytes
    assert places[1000].per_thousand_s == pytest.approx(places[1000].largest_per_thousand_s)
    assert places[100].per_thousand_s < places[100].largest_per_thousand_s
    assert all(place.peak_bytes <= picture.plans.budget_bytes for place in picture.places)
    assert [place.size for place in picture.places] == sorted(places)


def test_every_unit_is_in_one_strip_with_its_treatment(picture: SizePicture) -> None:
    units = [unit for unit in picture.plan.profile.units if not unit.is_code]
    assert picture.num_hidden == 0
    assert picture.strips[0].name.startswith(units[0].name)
    assert picture.strips[-1].name.endswith(units[-1].name)
    for strip in picture.strips:
        assert float(strip.parts[0][0]) == 0
        for before, after in zip(strip.parts, strip.parts[1:], strict=False):
            assert float(before[0]) + float(before[1]) == pytest.approx(float(after[0]), abs=0.2)
            assert before[2] != after[2]
        last = strip.parts[-1]
        assert float(last[0]) + float(last[1]) == pytest.approx(1000, abs=0.2)
    names = {unit.name: index for index, unit in enumerate(picture.plan.profile.units)}
    largest = treatments(picture.plan)
    alone = [strip for strip in picture.strips if strip.name in names]
    assert alone
    for strip in alone:
        assert strip.parts[-1][2] == largest[names[strip.name]]


def test_many_groups_are_cut(monkeypatch: pytest.MonkeyPatch, picture: SizePicture) -> None:
    number = len(picture.strips)
    monkeypatch.setattr("recoup.report.size_picture._MOST_STRIPS", 2)
    assert len(picture.strips) == 2
    assert picture.num_hidden == number - 2


def test_a_budget_far_above() -> None:
    made = make_sized_subject(share=6.0)
    found = make_size_picture(made)
    assert found is not None
    assert found.budget_percent is None
    assert len(found.ranges) == 1
    assert "far above" in Page(to_html(made)).text("span")


def test_the_page_has_a_section() -> None:
    made = make_sized_subject()
    page = Page(to_html(made))
    sections = [attrs["id"] for tag, attrs in page.tags if tag == "section"]
    assert sections == ["sizes", "memory", "frontier", "units-section"]
    assert page.count("button", "seen") == 3
    assert made.by_size is not None
    assert "7 of 10 units recomputed in segments" in page.text("td")
    picture = make_size_picture(made)
    assert picture is not None
    assert page.count("rect", "segment") == sum(
        kind == "segment" for strip in picture.strips for _, _, kind, _ in strip.parts
    )
    assert "Plans by size, ids.shape[1]" in page.text("h2")


def test_two_axes_have_tables_only() -> None:
    page = Page(to_html(make_sized_subject((2, 100), (1, 400), (2, 1000))))
    assert page.count("div", "by-size") == 0
    assert "2 by 1000" in page.text("td")
    assert page.count("button", "seen") == 0


def test_without_real_steps() -> None:
    page = Page(to_html(make_sized_subject(is_verified=False)))
    assert page.count("div", "by-size") == 1
    assert page.count("button", "seen") == 0
    assert "Real steps" not in page.text("h3")


def test_plot_sizes() -> None:
    matplotlib = pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: pip install 'recoup[plots]'"
    )
    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = make_sized_subject()
    ax = plot_sizes(made)
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines) == ["peak, plain", "peak, fitted", "peak, measured", "budget"]
    assert list(lines["peak, measured"].get_xdata()) == [100, 400, 1000]
    assert max(lines["peak, fitted"].get_ydata()) <= made.plan.budget_bytes
    assert ax.get_xlabel() == "ids.shape[1]"
    ax.figure.canvas.draw()
    _, given = pyplot.subplots()
    assert plot_sizes(make_sized_subject(is_verified=False), given) is given
    assert len(given.get_lines()) == 3
    with pytest.raises(ValueError, match="fit with samples= that differ in one way"):
        plot_sizes(make_subject(8))
    pyplot.close("all")
