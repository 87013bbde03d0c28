"""For the site: links that leave ``docs`` for other files of the repository become their names.

In the repository they lead to the file. The site does not have those files, and a strict build refuses such links.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of every page."""
    folder = Path("docs", page.file.src_uri).parent

    def name(match: re.Match[str]) -> str:
        path, _, _ = normpath((folder / match[2]).as_posix()).partition("#")
        if path.startswith("docs/"):
            return match[0]
        words = match[1].strip("`")
        return f"`{path}`" if path.endswith(words) else f"{match[1]} (`{path}`)"

    return _LINK.sub(name, markdown)
