"""For the reference: doctests and literal blocks in docstrings become fenced code, as Markdown needs them."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)
_LITERAL = re.compile(r"^::\n\n((?:    .*\n|\n)+)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """The text of a docstring as Markdown.

    >>> print(to_markdown("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    text = _LITERAL.sub(lambda match: f"```text\n{dedent(match[1]).rstrip()}\n```\n\n", text)
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
