"""The page about the command line names commands that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from recoup.cli.parser import parse

PAGE = Path(__file__).parent.parent.parent / "docs" / "cli.md"


def test_every_command_on_the_page_parses() -> None:
    lines = re.findall(r"^\$ recoup (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    seen = {parse(shlex.split(line)).command for line in lines}
    assert seen == {"audit", "demo", "fit", "frontier", "hardware", "measure", "plan"}
