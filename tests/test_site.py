"""The documentation as a site: built without a warning, complete, and readable without a network, also on a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from slowly import slow_but

import recoup

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


def _is_missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


MISSING = [name for name in NEEDED if _is_missing(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: pip install 'recoup[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Without --quiet, which hides warnings also from --strict.
    assert "WARNING" not in result.stdout + result.stderr
    assert "Building documentation" in result.stderr
    return folder


class _Page(HTMLParser):
    """The text of a page's paragraphs, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.prose: list[str] = []
        self._around: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.loaded.append(values.get("href") or "")
        if tag in ("code", "pre", "script", "style"):
            self._around.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._around and tag == self._around[-1]:
            self._around.pop()

    def handle_data(self, data: str) -> None:
        if not self._around:
            self.prose.append(data)


def test_every_page_is_built(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page.name
    for picture in [*DOCS.rglob("*.svg"), *DOCS.rglob("*.png")]:
        assert (site / picture.relative_to(DOCS)).exists(), picture.name
    assert not list(site.rglob("*.py"))


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        outside = [address for address in _Page(path).loaded if re.match(r"(https?:)?//", address)]
        assert not outside, f"{path.name}: {outside}"


def test_markdown_was_understood(site: Path) -> None:
    """A table, a list, a fence or a reference that was taken for prose would show its marks."""
    for path in site.rglob("*.html"):
        for text in _Page(path).prose:
            for mark in ("```", "|---", ">>> ", ":::"):
                assert mark not in text, f"{path.name}: {text.strip()[:80]}"
            assert not re.search(r"^\s*([-*]|\d\.) \S", text, re.MULTILINE), (
                f"{path.name}: {text.strip()[:80]}"
            )


def test_doctests_of_the_reference_are_code(site: Path) -> None:
    """A doctest that Markdown took for prose is a quote in a quote in a quote."""
    for path in (site / "reference").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "<blockquote>" not in text, path.name
        assert ("&gt;&gt;&gt; " in text) == ('<div class="language-pycon highlight">' in text), path.name


@pytest.mark.filterwarnings("ignore")  # of the libraries that are imported
def test_the_reference_has_every_public_name(site: Path) -> None:
    anchors = set()
    for path in (site / "reference").glob("*.html"):
        anchors |= set(re.findall(r'id="(recoup[\w.]*)"', path.read_text(encoding="utf-8")))
    parts = (recoup.planning, recoup.measuring, recoup.stores, recoup.manual, recoup.policies, recoup.report)
    wanted = {f"recoup.{name}" for name in recoup.__all__ if getattr(recoup, name) not in parts}
    wanted |= {f"{part.__name__}.{name}" for part in parts for name in part.__all__}
    wanted |= {f"recoup.errors.{name}" for name in recoup.errors.__all__}
    for library in ("accelerate", "lightning", "transformers"):
        module = import_module(f"recoup.integrations.{library}")
        wanted |= {f"{module.__name__}.{name}" for name in module.__all__}
    # A function that shares its name with its file is shown as the function.
    assert not {"recoup.measure.measure", "recoup.describe.describe", "recoup.planning.plan.plan"} & anchors
    wanted |= {f"recoup.sizes.{name}" for name in recoup.sizes.__all__} | {"recoup.checkpointing.Span"}
    assert wanted - anchors <= {"recoup.planning.graphs", "recoup.measuring.measure"}


# Elements that reach beyond the page and are in no box that scrolls.
BEYOND = """
const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
const isBoxed = e => { while ((e = e.parentElement) !== document.body) if (scrolls(e)) return true; return false };
return [...document.querySelectorAll(".md-header *, .md-container *")].filter(e => {
  const box = e.getBoundingClientRect();
  const isShown = box.width && box.height && e.checkVisibility({ visibilityProperty: true });
  return isShown && box.right > innerWidth + 1 && !isBoxed(e);
}).map(e => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 40)}`)
"""
CUT_OFF = """
return [...document.querySelectorAll("pre > code, .md-typeset__scrollwrap, p")]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 80))
"""
SCALES = """
return [...document.querySelectorAll("img[src$='.svg']")].map(e => e.getBoundingClientRect().width / e.naturalWidth)
"""
FOUND = "return [...document.querySelectorAll('.md-search-result__item a')].map(e => e.href)"


def _resize(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("width", slow_but([400], [1280, 400]))
def test_nothing_is_cut_off(width: int, site: Path, browser: Any) -> None:
    """On a phone code, tables and pictures scroll in boxes of their own; on a desktop nothing has to."""
    _resize(browser, width)
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # for servers: its links begin at their root
            continue
        browser.get(path.as_uri())
        name = path.relative_to(site).as_posix()
        wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
        assert wide <= inner == width, name
        assert browser.execute_script(BEYOND) == [], name
        if width == 1280:
            assert browser.execute_script(CUT_OFF) == [], name
        # Pictures have type of 15 px; it is shown with 13 px or more.
        assert all(15 * scale >= 13 for scale in browser.execute_script(SCALES)), name
    assert browser.get_log("browser") == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_search_works_from_a_folder(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    _resize(browser, 1280)
    for page in ("index.html", "reference/index.html"):
        browser.get((site / page).as_uri())
        field = browser.find_element("css selector", ".md-search__input")
        field.click()
        field.send_keys("minimum_budget")
        found = WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(FOUND))
        assert any(address.startswith((site / "reference").as_uri()) for address in found), found
    assert browser.get_log("browser") == []
