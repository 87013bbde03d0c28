"""A fitted model as HTML: one file that needs nothing else, or a few lines for a notebook."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recoup.report.by_size import real_steps, rows_by_size, title_of
from recoup.report.memory_picture import MemoryPicture, colours_of
from recoup.report.numbers import format_seconds, format_share
from recoup.report.operations import explanations
from recoup.report.rows import rows_of
from recoup.report.size_picture import make_size_picture
from recoup.report.subject import Subject
from recoup.report.summary import summarize
from recoup.report.tradeoff import make_tradeoff
from recoup.sizes import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["to_html", "to_notebook", "write_html"]


def write_html(subject: Subject, path: str | Path) -> Path:
    """Writes the report into one file; returns its path.

    Args:
        subject: a fitted model.
        path: of the file, which is replaced if it is there.
    """
    place = Path(path)
    place.write_text(to_html(subject), encoding="utf-8")
    return place


def to_html(subject: Subject) -> str:
    """The whole report: memory over the step, the frontier, and every unit with the reason for its treatment."""
    plan, memory = subject.plan, MemoryPicture(subject)
    colours = colours_of(plan.profile)
    return _render(
        "report.html",
        subject,
        memory=memory,
        tradeoff=make_tradeoff(plan),
        sizes=make_size_picture(subject),
        size_title="" if subject.by_size is None else title_of(subject.by_size),
        size_rows=[] if subject.by_size is None else rows_by_size(subject.by_size),
        size_steps=real_steps(subject),
        rows=[(row, colours[row.decision.unit].partition(" ")[0]) for row in rows_of(plan)],
        explanations=explanations(plan),
        findings=sorted(subject.audit.findings, key=lambda finding: not finding.is_unsafe),
        data={"memory": memory.data},
    )


def to_notebook(subject: Subject) -> str:
    """The table and the picture of memory, for a notebook's output."""
    return _render("notebook.html", subject, memory=MemoryPicture(subject))


def _render(template: str, subject: Subject, **values: Any) -> str:
    values |= {"summary": summarize(subject), "plan": subject.plan, "seen": subject.verification}
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    folder = files("recoup.report") / "templates"

    def load(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(load),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=format_bytes, time=format_seconds, share=format_share)
    texts: dict[str, Any] = {name: Markup(load(name)) for name in ("charts.css", "page.css", "page.js")}
    environment.globals["inline"] = texts
    return environment
