"""What a release says of itself: one version everywhere, and a promise for each public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import recoup

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
PARTS = [getattr(recoup, name) for name in recoup.__all__]
PUBLIC = [recoup, *(part for part in PARTS if isinstance(part, ModuleType))]


def levels(title: str) -> dict[str, str]:
    """Every name in the table under a heading, with its level."""
    text = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, str] = {}
    for names, level in re.findall(r"^\| (`.*`.*|the .*) \| (.*) \|$", text, re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", re.sub(r"\([^)]*\)", "", names)):
            assert name not in found, name
            found[name] = level
    return found


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_has_a_level(module: ModuleType) -> None:
    found = levels(f"`{module.__name__}`")
    assert set(found) == set(module.__all__)
    for name, level in found.items():
        assert re.match("stable|provisional", level), f"{name}: {level}"


def test_names_of_other_modules_exist() -> None:
    for path in levels("What other modules show"):
        if "." in path:
            module, _, name = path.rpartition(".")
            assert hasattr(import_module(module), name), path


def test_attributes_that_are_promised_exist() -> None:
    """``Profile`` (`to_json`, …): each name in brackets is an attribute or a field of the class before them."""
    places = {"Profile": recoup.measuring}
    seen = 0
    for path, names in re.findall(r"`([\w.]+)` \((`[^)]*)\)", PAGE):
        module, _, name = path.rpartition(".")
        promised = getattr(import_module(module) if module else places[name], name)
        for attribute in re.findall(r"`(\w+)`", names):
            known = {*dir(promised), *promised.__dataclass_fields__}
            assert attribute in known, f"{path}.{attribute}"
            seen += 1
    assert seen > 15


def test_one_version_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert released is not None
    assert released[1] == recoup.__version__
    assert f"\nversion: {released[1]}\n" in citation
    assert f"\ndate-released: {released[2]}\n" in citation
