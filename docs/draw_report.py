"""Takes the picture of the HTML report, ``docs/report.png``: a small GPT on a CPU within half its activation memory.

Run it with ``python docs/draw_report.py`` on a machine that does nothing else: the seconds in the picture are measured.
It needs chromium, chromedriver, and the packages of ``recoup[dev]``.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

import recoup
from recoup.demo import make

PATH = Path(__file__).resolve().parent / "report.png"
WIDTH = 1200
# Down to the end of the memory over the step, and some room.
HEIGHT = (
    "return document.querySelector('#memory-plot').closest('section').getBoundingClientRect().bottom + 24"
)


def write_report(path: Path) -> None:
    """The report of the model of ``recoup demo``."""
    torch.set_num_threads(1)
    made = make()
    model, tokens, optimizer = made["model"], made["sample"], made["optimizer"]
    profile = recoup.measure(model, tokens, optimizer=optimizer)
    budget = profile.plain_bytes - profile.activation_bytes // 2
    recoup.fit(model, tokens, budget=budget, optimizer=optimizer).to_html(path)


def take(address: str) -> bytes:
    """What a browser shows there, as PNG."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        metrics = {"width": WIDTH, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(address)
        metrics["height"] = round(driver.execute_script(HEIGHT))
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        return driver.get_screenshot_as_png()
    finally:
        driver.quit()


def main() -> None:
    """Fits, takes the picture, and makes it small."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        write_report(report)
        shown = take(report.as_uri())
    # A page has few colours: with a palette the file is small.
    Image.open(io.BytesIO(shown)).convert("RGB").quantize(128).save(PATH, optimize=True)
    print(f"{PATH.name}: {PATH.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
