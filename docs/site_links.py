"""For the site: links to files of the repository that the site does not have become their names.

In the repository they lead to the file: what is outside ``docs``, and the scripts in it. A strict build refuses such
links.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+|[^):\s]+\.py)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of every page."""
    folder = Path("docs", page.file.src_uri).parent

    def name(match: re.Match[str]) -> str:
        path, _, _ = normpath((folder / match[2]).as_posix()).partition("#")
        if path.startswith("docs/") and not path.endswith(".py"):
            return match[0]
        words = match[1].strip("`")
        return f"`{path}`" if path.endswith(words) else f"{match[1]} (`{path}`)"

    return _LINK.sub(name, markdown)
