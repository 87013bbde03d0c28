"""What a fit is worth, for a trainer's own logs and its output folder."""

from __future__ import annotations

from pathlib import Path

from recoup.fitting import Fitted
from recoup.report.by_size import axes_in_words, rows_by_size
from recoup.report.summary import summarize

__all__ = ["ONE_SIZE", "figures", "headlines", "write_outcome"]

ONE_SIZE = (
    "All batches that were looked at are of one size: there is one plan for it. If training has others, give"
    " sample=[short, medium, long], or a larger num_batches=."
)


def headlines(fitted: Fitted) -> list[str]:
    """What a trainer's log says: a sentence, and another about the ranges of sizes that have a plan each."""
    found = [summarize(fitted).headline]
    if fitted.by_size is not None:
        ranges = "; ".join(f"up to {row.up_to}: {row.what}" for row in rows_by_size(fitted.by_size))
        found.append(f"Plans by size, {axes_in_words(fitted.by_size)} {ranges}.")
    return found


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
