"""The report in a real browser: what one can do with it works, and it fits a desktop and a phone, light and dark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_subjects import large_subject, make_subject, with_notes
from sized_subjects import make_sized_subject

from recoup.report import to_notebook, write_html

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = make_subject(8, unsafe=(1, 4), share=0.6)
    return write_html(made, tmp_path_factory.mktemp("report") / "report.html").as_uri()


def set_width(browser: Any, width: int, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    set_width(browser, *WIDTHS[request.param])
    # By the browser itself: what a page clears may be cleared after the next page has stored something.
    stored = {"origin": "file://", "storageTypes": "local_storage"}
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", stored)
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []


def names(page: Any) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#units tbody tr')].filter(r => r.offsetParent)"
        ".map(r => (r.querySelector('summary') || r.cells[0]).textContent.trim())"
    )
    # A group's name is followed by how many it has.
    return [text.split()[0] for text in page.execute_script(script)]


ROWS = ["embed", "layers.0", "layers.1", "layers.2-3", "layers.4", "layers.5-7", "head", "loss"]


def test_nothing_overflows(page: Any, tmp_path: Path) -> None:
    for theme in ("light", "dark"):
        page.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        wide, inner = page.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
        assert wide <= inner
        # Only the table may be wider than the page, and it scrolls by itself.
        beyond = page.execute_script(
            "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, [hidden]')"
            " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"
        )
        assert beyond == []
        assert page.save_screenshot(str(tmp_path / f"{theme}.png"))


@pytest.mark.parametrize("width", [320, 390, 600, 768, 1024, 1181, 1280])
def test_every_figure_of_every_unit_can_be_read(browser: Any, address: str, width: int) -> None:
    set_width(browser, width)
    browser.get(address)
    # In the window without scrolling sideways, not narrower than its text, and under no other cell.
    cells = browser.execute_script("""
      return [...document.querySelectorAll('#units tbody td')].map(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        const [box, text] = [cell.getBoundingClientRect(), range.getBoundingClientRect()];
        cell.scrollIntoView({block: 'center', inline: 'nearest'});
        const [x, y] = [text.left + text.width / 2, cell.getBoundingClientRect().top + (text.top - box.top) + 4];
        return {
          label: cell.textContent.trim().slice(0, 20), left: text.left, right: text.right,
          fits: cell.scrollWidth <= cell.clientWidth, isOnTop: cell.contains(document.elementFromPoint(x, y)),
        };
      });
    """)
    assert len(cells) == 8 * 9
    poor = [
        cell
        for cell in cells
        if cell["left"] < 0 or cell["right"] > width or not cell["fits"] or not cell["isOnTop"]
    ]
    assert poor == []
    scrolled = browser.execute_script("return document.querySelector('.scroll').scrollLeft")
    assert scrolled == 0


def test_figures_are_named_where_columns_are_not(browser: Any, address: str) -> None:
    set_width(browser, 390)
    browser.get(address)
    names_of = "return [...document.querySelectorAll('#units tbody tr:first-child td.num')].map(cell => " + (
        "getComputedStyle(cell, '::before').content.replaceAll('\"', ''))"
    )
    columns = ["Held, plain", "Held", "Output", "Transient", "Forward", "Backward", "Extra"]
    assert browser.execute_script(names_of) == columns
    set_width(browser, 1280)
    assert browser.execute_script(names_of) == ["none"] * 7


def test_where_the_frontier_leaves_the_plot(browser: Any, tmp_path: Path) -> None:
    browser.get(write_html(make_subject(12, share=0.95), tmp_path / "report.html").as_uri())
    for width in (390, 1280):
        set_width(browser, width)
        mark, plot = browser.execute_script(
            "return ['.frontier .mark.beyond', '.plot.frontier'].map(name =>"
            " document.querySelector(name).getBoundingClientRect().toJSON())"
        )
        assert mark["top"] <= plot["top"] <= mark["bottom"]
        assert plot["left"] <= mark["left"]
        assert mark["right"] <= plot["right"]
        assert mark["width"] >= 16
    tip = browser.find_element("id", "tip")
    browser.execute_script("document.querySelector('.frontier .mark.beyond').focus()")
    assert tip.text.splitlines()[0] == "lightest plan, beyond the plot"
    assert "41.0 MiB" in tip.text


def set_scheme(browser: Any, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


@pytest.mark.parametrize(
    ("body", "scheme", "is_dark"),
    [
        ('data-jp-theme-light="false"', "light", True),
        ('data-jp-theme-light="true"', "dark", False),
        ('class="vscode-dark"', "light", True),
        ('class="vscode-high-contrast"', "light", True),
        ('class="vscode-light"', "dark", False),
        ('class="vscode-high-contrast vscode-high-contrast-light"', "dark", False),
        ("", "dark", True),
        ("", "light", False),
    ],
)
def test_a_card_is_as_dark_as_its_notebook(
    browser: Any, tmp_path: Path, body: str, scheme: str, is_dark: bool
) -> None:
    card = to_notebook(with_notes(make_subject(8), verification=["A note."]))
    # As JupyterLab stripes tables.
    stripes = ".out tbody tr:nth-child(odd) { background: #abcdef; }"
    place = tmp_path / "notebook.html"
    place.write_text(
        f'<!doctype html><meta charset="utf-8"><style>{stripes}</style><body {body}><div class="out">{card}</div>',
        encoding="utf-8",
    )
    set_width(browser, 1280)
    set_scheme(browser, scheme)
    browser.get(place.as_uri())
    backgrounds, colours = browser.execute_script("""
      const style = (name) => [...document.querySelectorAll(name)].map(element => getComputedStyle(element));
      return [
        [...new Set(style('.recoup').map(s => s.backgroundColor))],
        [...new Set(style('.recoup td, .recoup p.note, .recoup li b').map(s => s.color))],
      ];
    """)
    set_scheme(browser, "")
    assert backgrounds == ["rgb(28, 32, 36)" if is_dark else "rgb(255, 255, 255)"]
    assert colours == ["rgb(232, 234, 237)" if is_dark else "rgb(31, 35, 40)"]
    striped = browser.execute_script(
        "return [...document.querySelectorAll('.recoup tr')].map(row => getComputedStyle(row).backgroundColor)"
    )
    assert set(striped) == {"rgba(0, 0, 0, 0)"}


def test_pointing_at_the_memory(page: Any) -> None:
    from selenium.webdriver import ActionChains

    plot, tip = page.find_element("id", "memory-plot"), page.find_element("id", "tip")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    assert not tip.is_displayed()
    ActionChains(page).move_to_element_with_offset(plot, -plot.size["width"] // 4, 0).perform()
    assert tip.is_displayed()
    assert tip.text.splitlines()[0].endswith(", forward")
    for word in ("predicted", "plain", "measured", "MiB", "ms"):
        assert word in tip.text
    ActionChains(page).move_to_element_with_offset(plot, plot.size["width"] // 4, 0).perform()
    assert tip.text.splitlines()[0].endswith((", backward", ", replay"))
    box = page.execute_script("return arguments[0].getBoundingClientRect().toJSON()", tip)
    assert box["left"] >= 0
    assert box["right"] <= page.execute_script("return innerWidth")
    ActionChains(page).move_to_element(page.find_element("tag name", "h1")).perform()
    assert not tip.is_displayed()


def test_reading_the_memory_with_the_keyboard(page: Any) -> None:
    from selenium.webdriver import Keys

    plot, tip = page.find_element("id", "memory-plot"), page.find_element("id", "tip")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.splitlines()[0] == "layers.0, forward"
    plot.send_keys(Keys.ARROW_LEFT)
    assert tip.text.splitlines()[0] == "embed, forward"
    plot.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_pointing_at_the_frontier(page: Any) -> None:
    from selenium.webdriver import ActionChains

    mark, tip = page.find_element("css selector", "button.mark.this"), page.find_element("id", "tip")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    ActionChains(page).move_to_element(mark).perform()
    assert tip.text.splitlines()[0] == "this plan"
    assert "103 MiB" in tip.text


def _refresh(page: Any, element: Any) -> None:
    """Until the new document is there as a whole: on a busy machine the driver may return before."""
    from selenium.webdriver.support.expected_conditions import staleness_of
    from selenium.webdriver.support.wait import WebDriverWait

    time.sleep(2)  # the browser writes what a page stores from another process, in its own time
    page.refresh()
    wait = WebDriverWait(page, 60)
    wait.until(staleness_of(element))
    wait.until(lambda page: page.execute_script("return document.readyState") == "complete")


def test_dark_and_light(page: Any) -> None:
    paint = "return getComputedStyle(document.documentElement).backgroundColor"
    button = page.find_element("id", "theme")
    assert button.text == "Dark"
    light = page.execute_script(paint)
    button.click()
    dark = page.execute_script(paint)
    assert (light, dark) == ("rgb(247, 247, 245)", "rgb(20, 23, 26)")
    assert button.text == "Light"
    _refresh(page, button)
    assert page.execute_script(paint) == dark
    page.find_element("id", "theme").click()
    assert page.execute_script(paint) == light


def test_what_the_system_prefers(page: Any) -> None:
    paint = "return getComputedStyle(document.documentElement).backgroundColor"
    for scheme, colour in (("dark", "rgb(20, 23, 26)"), ("light", "rgb(247, 247, 245)")):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        assert page.execute_script(paint) == colour
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_texts_can_be_read(page: Any) -> None:
    """Contrast of at least 4.5 to 1, as WCAG AA asks for."""
    script = """
      const light = (css) => {
        const [r, g, b] = css.match(/[0-9.]+/g).map(Number).map(v => v / 255)
          .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const poor = [];
      const texts = 'h1, h2, p, dt, dd, small, .yt, .xt, .tag, .why, .badge, th, .over';
      const back = (element) => getComputedStyle(element).backgroundColor;
      for (const element of document.querySelectorAll(texts)) {
        let behind = element;
        while (/rgba\\(0, 0, 0, 0\\)|color\\(/.test(back(behind))) behind = behind.parentElement;
        const pair = [light(getComputedStyle(element).color), light(back(behind))];
        const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        if (contrast < 4.5) poor.push(element.tagName + '.' + element.className + ' ' + contrast.toFixed(2));
      }
      return poor;
    """
    for theme in ("light", "dark"):
        page.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        assert page.execute_script(script) == []
    # The check itself sees what is too faint.
    page.execute_script("document.querySelector('h1').style.color = '#3a4046'")
    assert len(page.execute_script(script)) == 1


def test_sorting(page: Any) -> None:
    assert names(page) == ROWS
    headers = page.find_elements("css selector", "#units th button")
    click = "arguments[0].click()"
    held = next(header for header in headers if header.get_attribute("textContent") == "Held, plain")
    page.execute_script(click, held)
    assert names(page)[:2] == ["layers.4", "layers.5-7"]
    assert names(page)[-1] == "head"
    page.execute_script(click, held)
    assert names(page)[0] == "head"
    page.execute_script(click, headers[0])
    assert names(page) == ROWS
    page.execute_script(click, headers[0])
    assert names(page) == ROWS[::-1]
    assert page.find_element("css selector", "th[aria-sort]").get_attribute("aria-sort") == "descending"


def test_filtering(page: Any) -> None:
    box, count = page.find_element("id", "filter"), page.find_element("id", "count")
    assert count.text == "8 rows"
    box.send_keys("unsafe")
    assert names(page) == ["layers.1", "layers.4"]
    assert count.text == "2 of 8 rows"
    box.clear()
    # Names inside a group are found too.
    box.send_keys("layers.6")
    assert names(page) == ["layers.5-7"]


def test_a_thousand_units_open(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recoup.report.tradeoff.frontier", lambda *_, **__: ())
    browser.get(write_html(large_subject(), tmp_path / "report.html").as_uri())
    rows = len(browser.find_elements("css selector", "#units tbody tr"))
    assert 20 <= rows <= 100
    wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= inner
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_plans_by_size(browser: Any, tmp_path: Path, width: int) -> None:
    set_width(browser, width)
    browser.get(write_html(make_sized_subject(), tmp_path / "report.html").as_uri())
    for theme in ("light", "dark"):
        browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
        assert wide <= inner
        # Plots and strips share their left and right edges, names begin in the card, and treatments differ in colour.
        edges, names, colours = browser.execute_script("""
          const boxes = (name) => [...document.querySelectorAll(name)].map(e => e.getBoundingClientRect());
          const fills = ['keep', 'part', 'recompute', 'segment'].map(kind =>
            getComputedStyle(document.querySelector(`#sizes .key.${kind}`)).backgroundColor);
          return [
            boxes('.by-size .plot, .by-size .units svg').map(box => [box.left, box.right].map(Math.round).join()),
            boxes('.by-size .units span').map(box => box.left), fills,
          ];
        """)
        assert len(set(edges)) == 1
        assert len(edges) > 5
        assert min(names) >= 0
        assert len(set(colours)) == 4
    tip = browser.find_element("id", "tip")
    browser.execute_script("document.querySelector('#sizes .mark.seen').focus()")
    assert tip.text.splitlines()[0] == "real step at 100"
    assert "31.7 MiB" in tip.text
    assert browser.get_log("browser") == []
