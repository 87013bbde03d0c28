from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from report_subjects import Made, large_subject, make_subject, with_notes

import recoup
from recoup.report import to_html, to_notebook, write_html
from recoup.report.tradeoff import make_tradeoff

VOID = {"meta", "link", "input", "line", "path", "br"}


class Page(HTMLParser):
    """Tags with their attributes, checked to nest; and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def count(self, tag: str, cls: str = "") -> int:
        return sum(
            name == tag and (not cls or cls in (a.get("class") or "").split()) for name, a in self.tags
        )

    def text(self, tag: str) -> str:
        return "".join(data for name, data in self.texts if name == tag)


@pytest.fixture(scope="module")
def small() -> Made:
    return make_subject(8, unsafe=(1, 4), share=0.6)


def test_sections_and_rows(small: Made) -> None:
    page = Page(to_html(small))
    sections = [attrs["id"] for tag, attrs in page.tags if tag == "section"]
    assert sections == ["memory", "frontier", "units-section", "audit"]
    assert page.text("title").startswith("Stack: Fits: 97.0 MiB of 104 MiB, 13 % slower than plain")
    assert "".join(page.text(tag) for tag in ("h1", "span")).count("97.0 MiB of 104 MiB") == 1
    # A head, and the rows: embed, layers.0, .1, .2-3, .4, .5-7, head, loss.
    assert page.count("tr") == 1 + 8
    assert page.count("details") == 2
    assert page.count("button", "recipe") == 7
    assert page.count("button", "this") == 1
    assert page.count("path", "measured") == page.count("path", "plain") == 1
    assert page.count("desc") == 2
    assert page.count("li") > 0


def test_it_needs_nothing_else(small: Made) -> None:
    for text in (to_html(small), to_notebook(small)):
        assert "http" not in text
        assert "//" not in re.sub(r"^ *//.*$", "", text, flags=re.MULTILINE)
        assert "@import" not in text
        assert "url(" not in text
        for tag, attrs in Page(text).tags:
            assert "src" not in attrs
            assert tag != "link" or attrs["href"] == "data:,"


def test_data_for_the_pointer(small: Made) -> None:
    page = Page(to_html(small))
    data = json.loads(next(text for text in page.text("script").splitlines() if text.startswith("{")))
    memory = data["memory"]
    assert max(row[1] for row in memory["predicted"]) == small.plan.predicted_bytes
    assert max(row[1] for row in memory["plain"]) == small.plan.profile.plain_bytes
    assert small.verification is not None
    assert max(row[1] for row in memory["measured"]) == small.verification.peak_bytes
    assert memory["names"]["1"] == "layers.0"
    assert {row[3] for row in memory["predicted"]} == {"f", "r", "b", ""}


def test_names_from_the_model_are_text(small: Made) -> None:
    hostile = "<script>alert('x')</script><b onmouseover=\"alert(1)\">&amp;</script>"
    made = make_subject(4, stem=hostile, model=hostile, unsafe=(1,), share=0.6)
    for text in (to_html(made), to_notebook(made)):
        page = Page(text)
        assert page.count("script") in (0, 2)
        assert page.count("b", "onmouseover") == 0
        assert all("onmouseover" not in attrs for _, attrs in page.tags)
        assert any(hostile in data for _, data in page.texts)
        assert "<script>alert" not in text
    data = json.loads(next(t for t in Page(to_html(made)).text("script").splitlines() if t.startswith("{")))
    assert data["memory"]["names"]["1"] == f"{hostile}.0"


def test_notes_are_sentences_and_text(small: Made) -> None:
    hostile = "Compared with <script>alert('x')</script> off."
    noted = with_notes(small, plan=["The plan counts on it."], verification=[hostile])
    for text in (to_html(noted), to_notebook(noted)):
        page = Page(text)
        assert "The plan counts on it." in page.text("p")
        assert hostile in page.text("p")
        assert "<script>alert" not in text
    assert Page(to_html(small)).count("div", "notes") == 0
    assert Page(to_notebook(small)).count("p", "note") == 0


def test_where_the_frontier_leaves_the_plot() -> None:
    picture = make_tradeoff(make_subject(12, share=0.95).plan)
    lightest = picture.plans[0]
    assert picture.hidden == (lightest,)
    assert picture.beyond is not None
    assert (picture.beyond.peak_bytes, picture.beyond.seconds) == (
        lightest.predicted_bytes,
        lightest.predicted_s,
    )
    assert (picture.beyond.left, picture.beyond.bottom) == (picture.points[0].left, 100)
    assert picture.line.startswith(f"M{picture.beyond.left * 10:.1f} 0.0V")
    page = Page(to_html(make_subject(12, share=0.95)))
    assert page.count("button", "beyond") == 1
    assert "goes on beyond the plot, down to 41.0 MiB at +150 %" in page.text("li")


def test_a_frontier_that_stays_in_the_plot(small: Made) -> None:
    picture = make_tradeoff(small.plan)
    assert picture.beyond is None
    first = picture.points[0]
    # It begins at its lightest plan, not above it.
    assert picture.line.startswith(f"M{first.left * 10:.1f} {1000 - first.bottom * 10:.1f}V")
    assert Page(to_html(small)).count("button", "beyond") == 0


# benchmarks/startup.py measures the same on a real model.
@pytest.mark.slow
def test_a_thousand_units_stay_small(tmp_path: Path) -> None:
    place = write_html(large_subject(), tmp_path / "report.html")
    assert place.stat().st_size <= 2_000_000
    page = Page(place.read_text(encoding="utf-8"))
    assert page.count("tr") <= 100
    assert page.count("path", "area") <= 1200
    assert "layers.999" in page.text("span")


def test_a_thousand_different_units_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows that nothing joins: the worst case for the file's size. Planning it is not what is tested.
    monkeypatch.setattr("recoup.report.rows._WIDEST_GAP", 0)
    monkeypatch.setattr("recoup.report.tradeoff.frontier", lambda *_, **__: ())
    text = to_html(large_subject())
    assert Page(text).count("tr") == 1 + len(large_subject().plan.profile.units)
    assert len(text.encode()) <= 2_000_000


def test_without_a_real_step(small: Made) -> None:
    page = Page(to_html(Made(small.plan)))
    assert page.count("path", "measured") == 0
    assert "not compared" in page.text("dd")
    assert [attrs["id"] for tag, attrs in page.tags if tag == "section"][-1] == "units-section"


def test_a_budget_far_above() -> None:
    made = make_subject(4, share=6.0)
    page = Page(to_html(made))
    assert page.count("line", "budget") == 0
    assert "far above" in page.text("span")
    assert "further right" in page.text("span")


def test_a_fitted_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    fitted = recoup.fit(model, torch.zeros(512, 64), budget="1.4MB", loss=lambda output: output.mean())
    assert str(fitted).startswith("Sequential on cpu. Fits: ")
    place = fitted.to_html(tmp_path / "fitted.html")
    assert place == tmp_path / "fitted.html"
    page = Page(place.read_text(encoding="utf-8"))
    assert page.count("path", "measured") == 1
    notebook = Page(fitted._repr_html_())
    assert notebook.count("table") == 1
    assert notebook.count("path", "measured") == 1
    assert notebook.count("script") == 0
    seen = fitted.verification
    assert seen is not None
    assert max(num_bytes for _, num_bytes in seen.timeline) == seen.peak_bytes
    assert abs(seen.timeline[-1][0] - seen.seconds) < 1e-9
