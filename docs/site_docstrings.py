"""For the reference: docstrings as Markdown, and functions that share their name with their module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)
_LITERAL = re.compile(r"^::\n\n((?:    .*\n|\n)+)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """The text of a docstring as Markdown: doctests and literal blocks become fenced code.

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


class Reference(griffe.Extension):
    """Makes docstrings Markdown, and lets ``recoup.measuring.measure`` be the function, not the file that it is in."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once the whole package is loaded."""
        # First: what a function of the same name hides is not found any more.
        _rewrite(pkg)
        _show_namesakes(list(_modules(pkg)))


def _rewrite(part: griffe.Object) -> None:
    """Makes the docstrings of an object and of all that is in it Markdown."""
    if part.docstring is not None:
        part.docstring.value = to_markdown(part.docstring.value)
    for member in part.members.values():
        if not isinstance(member, griffe.Alias):
            _rewrite(member)


def _show_namesakes(modules: list[griffe.Module]) -> None:
    """Puts functions in the place of the modules that have their name."""
    functions = {
        f"{module.path}.{name}": module.members[name].members[name]
        for module in modules
        for name, path in module.imports.items()
        if path == f"{module.path}.{name}.{name}"
    }
    hiding = []
    for module in modules:
        for name, member in module.members.items():
            path = member.target_path if isinstance(member, griffe.Alias) else member.path
            if path in functions:
                hiding.append((module, name, functions[path]))
            elif isinstance(member, griffe.Alias) and path.rpartition(".")[0] in functions:
                # Another name from such a file: it must be found before the function hides the file.
                member.resolve_target()
    for module, name, function in hiding:
        module.members[name] = griffe.Alias(name, function, parent=module)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _modules(member)
