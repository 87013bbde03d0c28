"""What a fit is worth, for a trainer's own logs and its output folder."""

from __future__ import annotations

from pathlib import Path

from recoup.fitting import Fitted
from recoup.report.summary import summarize

__all__ = ["figures", "headline", "write_outcome"]


def headline(fitted: Fitted) -> str:
    """One sentence."""
    return summarize(fitted).headline


def figures(fitted: Fitted) -> dict[str, float]:
    """Numbers for a trainer's logs: GiB, and the step's seconds by those of the plain step."""
    found = {"recoup/budget_gib": fitted.plan.budget_bytes / 2**30}
    verification = fitted.verification
    if verification is not None:
        found["recoup/peak_gib"] = verification.peak_bytes / 2**30
        if verification.plain_seconds is not None:
            found["recoup/slowdown"] = verification.seconds / verification.plain_seconds
    return found


def write_outcome(fitted: Fitted, folder: str | Path) -> None:
    """Writes ``recoup_plan.json`` and ``recoup_report.html``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recoup_plan.json").write_text(fitted.applied.to_json())
    fitted.to_html(folder / "recoup_report.html")
