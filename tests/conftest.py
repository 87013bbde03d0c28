from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis  # noqa: F401 (its plugin would import it after the freeze, and miss a generator that it looks for)
import pytest
import torch


def pytest_configure() -> None:
    # Small operations: a second thread costs more than it brings.
    torch.set_num_threads(1)
    # Some virtual machines announce AMX and forbid it: a product of bfloat16 matrices then ends the process.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Takes what lives by now, above all imported modules, from the garbage collector.

    recoup collects garbage before it measures. With the modules of the whole suite a collection takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Reference counting alone must free everything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; the driver's own sockets and log files are closed when Python pleases."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
        )
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
