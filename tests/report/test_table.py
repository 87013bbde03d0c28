from __future__ import annotations

from dataclasses import replace

import pytest
from report_subjects import Made, make_profile, make_subject, with_notes

from recoup.auditing.findings import Audit, Kind, make_finding
from recoup.engines.drift import Drift
from recoup.planning import Bound, Plan, simulate
from recoup.planning.solvers.baselines import every
from recoup.plans.model_plan import ModelPlan
from recoup.report import to_text
from recoup.report.summary import summarize

TABLE = """\
Stack on cpu. Fits: 97.0 MiB of 104 MiB, 13 % slower than plain.
                 predicted    measured
  peak, plain      129 MiB     129 MiB
  peak, fitted     103 MiB    97.0 MiB
  budget           104 MiB
  step, plain       137 ms      140 ms
  step, fitted      151 ms      158 ms
  overhead           9.8 %        13 %
  gradients                  bit-equal

  embed: keep
  layers.0: recompute
  layers.1: keep
  layers.2-3: segment of 2, recomputed together
  layers.4 to head: keep

  kept, because unsafe: layers.1, layers.4 (values drift: its output)"""


def test_the_whole_table() -> None:
    assert to_text(make_subject(8, unsafe=(1, 4), share=0.6)) == TABLE


def test_without_a_real_step() -> None:
    text = to_text(make_subject(8, is_verified=False))
    assert "Predicted to fit: 85.0 MiB of 85.0 MiB, 17 % slower than plain." in text
    assert "  peak, fitted    85.0 MiB           -\n" in text
    assert "  gradients                          -\n" in text


def test_with_room_for_everything() -> None:
    text = to_text(make_subject(8, share=1.0))
    assert text.startswith("Stack on cpu. Fits: 123 MiB of 129 MiB, nothing is recomputed.\n")
    assert text.endswith("\n\n  embed to head: keep")


def test_a_plain_step_that_could_not_run() -> None:
    made = make_subject(8)
    assert made.verification is not None
    seen = replace(made.verification, plain_peak_bytes=None, plain_seconds=None)
    text = to_text(replace(made, verification=seen))
    assert "expected 17 % slower than plain" in text
    assert "  peak, plain      129 MiB           -\n" in text
    assert "  overhead            17 %           -\n" in text


def test_notes() -> None:
    made = make_subject(8)
    assert made.verification is not None
    made = replace(
        made,
        audit=Audit((make_finding("layers.1", Kind.OBJECT, "cache"),)),
        verification=replace(
            made.verification,
            drifting=tuple(Drift(f"layers.{i}.weight", 0.0012 * i, 1 - 1e-4 * i) for i in range(6)),
        ),
    )
    lines = to_text(made).splitlines()
    assert lines[-2] == "  unsafe, but not to be kept for that (insist): layers.1 (changes an object: cache)"
    assert lines[-1] == (
        "  not deterministic in plain steps either: layers.0.weight (relative error 0, cosine 1.0000),"
        " layers.1.weight (relative error 0.0012, cosine 0.9999),"
        " layers.2.weight (relative error 0.0024, cosine 0.9998),"
        " layers.3.weight (relative error 0.0036, cosine 0.9997) and 2 more"
    )


HELD = "The plan counts on the model's output (12.0 MiB) being let go before the backward."
CACHE = "Compared with the baseline step with use_cache off."


def test_notes_below_the_figures() -> None:
    made = make_subject(8, unsafe=(1, 4), share=0.6)
    text = to_text(with_notes(made, plan=[HELD], verification=[CACHE, HELD]))
    figures = "  gradients                  bit-equal\n"
    assert text == TABLE.replace(figures, f"{figures}\n  {HELD}\n  {CACHE}\n")
    assert to_text(with_notes(made)) == TABLE


def test_a_long_note_is_wrapped() -> None:
    sentence = " ".join(["scratch-buffers"] * 20) + "."
    lines = to_text(with_notes(make_subject(8), verification=[sentence])).splitlines()
    wrapped = [line for line in lines if "scratch-buffers" in line]
    assert len(wrapped) == 4
    assert max(map(len, wrapped)) <= 100
    assert " ".join(line.strip() for line in wrapped) == sentence
    # Without a real step the plan's own are left.
    unverified = with_notes(make_subject(8, is_verified=False), plan=[HELD])
    assert f"\n\n  {HELD}\n\n" in to_text(unverified)


def test_many_groups_are_cut() -> None:
    text = to_text(make_subject(60, unsafe=range(0, 60, 3), share=0.3))
    groups = [line for line in text.splitlines() if line.startswith("  layers")]
    assert len(groups) <= 16
    assert "more groups of units; the HTML report shows all" in text


def test_equal_segments_share_a_line() -> None:
    profile = make_profile(8)
    schedule = every(profile.problem, 3)
    predicted = simulate(profile.problem, schedule)
    planned = Plan(profile.problem, 2**30, schedule, "hand", Bound(0.0, schedules="all"), predicted)
    text = to_text(Made(ModelPlan(profile, planned, 2**30)))
    assert text.endswith("\n\n  embed to layers.7: 3 segments of 3, each recomputed together\n  head: keep")


@pytest.mark.parametrize(
    ("measured_s", "speed"),
    [(0.9, "as fast as plain"), (1.004, "as fast as plain"), (1.25, "25 % slower than plain")],
)
def test_headline(measured_s: float, speed: str) -> None:
    made = make_subject(8)
    assert made.verification is not None
    seen = replace(made.verification, seconds=measured_s, plain_seconds=1.0)
    summary = summarize(replace(made, verification=seen))
    assert summary.headline == f"Fits: 79.0 MiB of 85.0 MiB, {speed}"
    too_much = replace(summary, seen=replace(seen, peak_bytes=86 * 2**20))
    assert too_much.headline.startswith("Does not fit: 86.0 MiB of 85.0 MiB,")
