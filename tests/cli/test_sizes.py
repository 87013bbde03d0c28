"""Batches of several sizes on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import recoup
from recoup.cli import main
from recoup.engines import PlansBySize
from recoup.sizes import format_bytes

Captured = pytest.CaptureFixture[str]


def run(line: str) -> int:
    return main(line.split())


def test_fit_makes_a_plan_for_each_range(capsys: Captured) -> None:
    line = (
        "fit factories:make --budget 270KB --sizes 16,64 --units 0 1 2 3 --json plan.json --html report.html"
    )
    assert run(line) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Plans by size, input.shape[0]; predicted peak" in out
    assert out.endswith("Report: report.html\nPlan: plan.json\n")
    plans = PlansBySize.from_json(Path("plan.json").read_text())
    assert plans.profiles.sizes == ((16,), (64,))
    assert plans.budget_bytes == 270_000
    assert plans.ranges[0].plan.keeps_everything
    assert not plans.plan.keeps_everything
    assert '<section id="sizes">' in Path("report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("hardware", ["", " --hardware H200"])
def test_frontier_by_size(hardware: str, capsys: Captured) -> None:
    assert run(f"frontier factories:make --sizes 64,16 --points 4 --json f.json{hardware}") == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, title, heading, *rows, last = out.splitlines()
    assert first.startswith("Sequential on ")
    assert first.endswith(" At a size of 64.")
    assert title == "Seconds per 1,000 of the batch's size, by budget and size:"
    assert heading.split() == ["budget", "16", "64"]
    assert last == "Frontier: f.json"
    document = json.loads(Path("f.json").read_text())
    assert (document["version"], document["kind"]) == (1, "frontier_by_size")
    small, large = document["frontier_by_size"]["sizes"]
    assert (small["size"], large["size"]) == (16, 64)
    assert len(rows) == len(small["points"]) == len(large["points"]) == 4
    assert small["plain"]["peak_bytes"] < large["plain"]["peak_bytes"]
    # The smallest budget is that of the small batch, the largest the plain peak of the large one.
    assert small["points"][0]["seconds"] is not None
    assert large["points"][0]["seconds"] is None
    assert large["points"][-1]["seconds"] == pytest.approx(large["plain"]["seconds"])
    assert large["points"][-1]["overhead"] == pytest.approx(0)
    for row, few, many in zip(rows, small["points"], large["points"], strict=True):
        cells = [
            "nothing fits" if point["seconds"] is None else f"{1000 * point['seconds'] / size:.4g}"
            for size, point in ((16, few), (64, many))
        ]
        assert row == f"{format_bytes(few['budget_bytes']):>14}{cells[0]:>14}{cells[1]:>14}"
        assert few["budget_bytes"] == many["budget_bytes"]
    assert rows[0].endswith("  nothing fits")


def test_frontier_by_size_looks_at_the_budgets_it_is_given(capsys: Captured) -> None:
    line = "frontier factories:make --sizes 16,64 --budget 1MB --budget 150kB --json f.json --quiet"
    assert run(line) == 0
    assert capsys.readouterr() == ("", "")
    small, large = json.loads(Path("f.json").read_text())["frontier_by_size"]["sizes"]
    assert [point["budget_bytes"] for point in small["points"]] == [150_000, 1_000_000]
    assert large["points"][0] == {"budget_bytes": 150_000, "seconds": None, "overhead": None}
    assert large["points"][1]["overhead"] == pytest.approx(0)


def test_where_nothing_fits_the_error_names_the_smallest(capsys: Captured) -> None:
    assert run("frontier factories:make --sizes 16,64 --budget 100B") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "recoup: Apart from activations, the step needs 133 KiB (136192 bytes: 65.5 KiB parameters and buffers"
    )


@pytest.mark.parametrize("command", ["frontier", "fit --budget 1MB"])
@pytest.mark.parametrize(
    ("factory", "sizes", "message"),
    [
        ("make", "16,128", "No tensor of the sample has a dimension of 128"),
        ("with_step", "16,64", "sizes= goes with a sample as long as the longest of them"),
    ],
)
def test_samples_that_cannot_be_cut(
    command: str, factory: str, sizes: str, message: str, capsys: Captured
) -> None:
    name, *rest = command.split()
    assert main([name, f"factories:{factory}", *rest, "--sizes", sizes]) == 2
    assert message in capsys.readouterr().err


def test_fit_without_sizes_writes_one_plan(capsys: Captured) -> None:
    assert run("fit factories:make --budget 1MB --json plan.json --no-verify --quiet") == 0
    assert recoup.engines.ModelPlan.from_json(Path("plan.json").read_text()).keeps_everything
