"""What each command prints and writes, and its errors for bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import recoup
import recoup.batching
import recoup.demo
from recoup.cli import main
from recoup.engines import ModelPlan
from recoup.errors import RecoupError
from recoup.fitting import Fitted
from recoup.measuring import Profile, find_hardware, measure
from recoup.sizes import format_bytes

Captured = pytest.CaptureFixture[str]


def run(line: str) -> int:
    return main(line.split())


def smallest() -> int:
    from factories import make  # type: ignore[import-not-found]

    model, sample, loss = make()
    return recoup.minimum_budget(measure(model, sample, loss=loss))


def measured(capsys: Captured) -> Profile:
    assert main(["measure", "factories:make", "--json", "profile.json", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    return Profile.from_json(Path("profile.json").read_text())


# fit


def test_fit_prints_the_table_and_writes_plan_and_report(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fitted, "to_html", lambda self, path: Path(path).write_text("<html>"), raising=False)
    line = "fit factories:make --budget 270KB --json plan.json --html report.html --units 0 1 2 3"
    assert run(line) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Sequential" in out
    assert "264 KiB" in out
    assert out.endswith("Report: report.html\nPlan: plan.json\n")
    assert "\x1b" not in out, "plain lines in logs"
    chosen = ModelPlan.from_json(Path("plan.json").read_text())
    assert chosen.budget_bytes == 270_000
    assert not chosen.keeps_everything
    assert [unit.name for unit in chosen.profile.units][:4] == ["0", "1", "2", "3"]
    assert Path("report.html").read_text() == "<html>"


@pytest.mark.parametrize("spec", ["by_name", "with_step", "with_optimizer", "Models.make"])
def test_fit_takes_every_kind_of_factory(spec: str, capsys: Captured) -> None:
    assert main(["fit", f"factories:{spec}", "--budget", "50%", "--no-verify"]) == 0
    assert "Sequential" in capsys.readouterr().out


def test_fit_hands_its_options_over(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fit(model: torch.nn.Module, sample: torch.Tensor, **options: Any) -> Fitted:
        seen.update(options, sample=sample)
        return real(model, sample, **options)

    real = recoup.fitting.fit
    monkeypatch.setattr(recoup.fitting, "fit", fit)
    line = "fit factories:sized --batch 8 --budget 1MB --units 0 1 --accumulates --no-verify --quiet"
    assert run(line) == 0
    assert capsys.readouterr() == ("", "")
    assert seen["sample"].shape == (8, 32)
    assert (seen["units"], seen["accumulates"], seen["verify"]) == (["0", "1"], True, False)


def test_a_budget_that_is_too_small_names_the_smallest(capsys: Captured) -> None:
    assert main(["fit", "factories:make", "--budget", "150kB", "--units", "0", "1", "2", "3"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "recoup: Sequential does not fit 146 KiB (150000 bytes). The smallest feasible budget is"
    )
    assert err.count("\n") == 1


def test_a_budget_above_the_whole_device(capsys: Captured) -> None:
    assert main(["fit", "factories:make", "--budget", "120%"]) == 1
    assert "A budget in per cent lies above 0 % and at most at 100 %" in capsys.readouterr().err


def test_units_that_are_not_there(capsys: Captured) -> None:
    assert main(["fit", "factories:make", "--budget", "1MB", "--units", "layers.*"]) == 1
    assert "layers.*" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert run("fit factories:make --budget 1MB --no-verify --json plan.json") == 1
    assert "recoup: Cannot write plan.json: [Errno 13] Permission denied" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Fitted, path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Fitted, "to_html", refuse, raising=False)
    assert run("fit factories:make --budget 1MB --no-verify --html report.html") == 1
    assert capsys.readouterr().err == "recoup: [Errno 13] Permission denied: 'report.html'\n"


def test_running_out_of_memory_is_one_line_and_other_errors_are_not(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("Unit '0' alone does not fit the memory.")

    monkeypatch.setattr(recoup.fitting, "fit", run_out)
    assert run("fit factories:make --budget 1MB") == 1
    assert capsys.readouterr().err == "recoup: out of memory: Unit '0' alone does not fit the memory.\n"

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(recoup.fitting, "fit", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("fit factories:make --budget 1MB")


def test_an_interrupt_gives_the_shells_exit_code(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recoup.auditing, "audit", interrupt)
    assert main(["audit", "factories:make"]) == 130
    assert capsys.readouterr().err == "recoup: interrupted\n"


# frontier


def test_frontier_prints_a_table(capsys: Captured) -> None:
    assert run("frontier factories:make --points 4 --json frontier.json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, heading, *rows, last = out.splitlines()
    assert first.startswith("Sequential on cpu: 4 unit calls of 2 kinds")
    assert heading.split() == ["budget", "seconds", "overhead"]
    assert last == "Frontier: frontier.json"
    document = json.loads(Path("frontier.json").read_text())
    assert (document["format"], document["version"], document["kind"]) == ("recoup.cli", 1, "frontier")
    body = document["frontier"]
    assert (body["model"], body["device"], body["largest_batches"]) == ("Sequential", "cpu", [])
    assert 1 <= len(rows) == len(body["points"]) <= 4
    for row, point in zip(rows, body["points"], strict=True):
        assert row.startswith(f"{format_bytes(point['budget_bytes']):>12}{point['seconds']:>12.4g}")
        assert row.endswith("%")
        assert point["overhead"] == point["seconds"] / body["plain"]["seconds"] - 1
    budgets = [point["budget_bytes"] for point in body["points"]]
    assert budgets == sorted(budgets)


def test_frontier_looks_at_the_budgets_it_is_given(capsys: Captured, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    low = smallest()
    line = f"frontier factories:make --budget {low}B --budget 100B --budget 1MB --json f.json --quiet"
    assert run(line) == 0
    assert capsys.readouterr() == ("", "")
    points = json.loads(Path("f.json").read_text())["frontier"]["points"]
    assert points[0]["budget_bytes"] <= low
    assert main(["frontier", "factories:make", "--budget", "150kB"]) == 1
    assert "does not fit 146 KiB (150000 bytes)" in capsys.readouterr().err


HERE = dataclasses.replace(find_hardware("T4"), name="this machine")
"""Stands in for the present device, which takes seconds to measure."""


@dataclass(frozen=True)
class Answer:
    batch_size: int
    samples_per_s: float
    plan: object = None

    def __str__(self) -> str:
        return f"The largest batch is {self.batch_size}."


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-ins for estimating; returns what they are called with."""
    calls: list[dict[str, Any]] = []
    real = measure

    def estimate(model: torch.nn.Module, sample: torch.Tensor, **options: Any) -> Profile:
        where = options.pop("hardware", None), options.pop("ranks", None)
        calls.append({"where": where, "device": sample.device.type, "batch": sample.shape[0]})
        made = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2)))
        return real(made, torch.ones(sample.shape), loss=options["loss"])

    def largest(make: Any, **options: Any) -> Answer:
        calls.append({"make": make.__name__, **options})
        return Answer(96, 12.5)

    monkeypatch.setattr(recoup.measuring, "measure_hardware", lambda: HERE)
    monkeypatch.setattr(recoup.measuring, "measure", estimate)
    monkeypatch.setattr(recoup.batching, "largest_batch", largest)
    return calls


def test_frontier_answers_for_a_gpu_that_is_not_there(
    capsys: Captured, estimates: list[dict[str, Any]]
) -> None:
    line = "frontier factories:sized --hardware H200 --ranks 64 --json f.json"
    assert run(line) == 0
    out = capsys.readouterr().out
    assert " At a batch of 1:\n" in out
    assert "\nThe largest batch is 96.\n" in out
    assert estimates == [
        {"where": (find_hardware("H200"), 64), "device": "meta", "batch": 1},
        {
            "make": "sized",
            "budget": find_hardware("H200").memory_bytes,
            "hardware": find_hardware("H200"),
            "ranks": 64,
        },
    ]
    answers = json.loads(Path("f.json").read_text())["frontier"]["largest_batches"]
    assert answers == [{"text": "The largest batch is 96.", "batch_size": 96, "samples_per_s": 12.5}]


def test_frontier_for_a_gpu_with_budgets_and_without_a_batch_size(
    capsys: Captured, estimates: list[dict[str, Any]]
) -> None:
    assert run("frontier factories:sized --batch 4 --hardware H200 --budget 8GiB") == 0
    assert estimates == [
        {"where": (find_hardware("H200"), None), "device": "meta", "batch": 4},
        {"make": "sized", "budget": "8GiB", "hardware": find_hardware("H200")},
    ]
    estimates.clear()
    assert run("frontier factories:make --hardware H200") == 0
    assert estimates == [{"where": (find_hardware("H200"), None), "device": "meta", "batch": 64}]
    assert "largest batch" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("line", ["frontier factories:make", "measure factories:make --json p.json"])
def test_an_unknown_gpu_is_refused_before_anything_is_built(
    line: str, capsys: Captured, estimates: list[dict[str, Any]]
) -> None:
    assert main([*line.split(), "--hardware", "H2000"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recoup: There is no hardware 'H2000'. Known are B200, H200,")
    assert estimates == []
    assert "factories" not in sys.modules


def test_hardware_from_a_file(capsys: Captured, estimates: list[dict[str, Any]]) -> None:
    assert run("hardware --json gpu.json") == 0
    assert capsys.readouterr().out == f"{HERE}\nHardware: gpu.json\n"
    assert run("measure factories:make --hardware gpu.json --ranks 2 --json p.json") == 0
    assert estimates[-1]["where"] == (HERE, 2)
    Path("gpu.json").write_text("{")
    assert run("measure factories:make --hardware gpu.json --json p.json") == 1
    assert capsys.readouterr().err.startswith("recoup: 'gpu.json' is not JSON")
    assert run("measure factories:make --hardware other.json --json p.json") == 1
    assert "other.json" in capsys.readouterr().err


def test_hardware_alone_prints_it(capsys: Captured, estimates: list[dict[str, Any]]) -> None:
    assert main(["hardware"]) == 0
    assert capsys.readouterr().out == f"{HERE}\n"


def test_hardware_that_cannot_be_measured(
    capsys: Captured, estimates: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RecoupError("There is no accelerator.")

    monkeypatch.setattr(recoup.measuring, "measure_hardware", refuse)
    assert main(["hardware"]) == 1
    assert capsys.readouterr() == ("", "recoup: There is no accelerator.\n")


# audit


def test_audit_prints_its_findings(capsys: Captured) -> None:
    assert main(["audit", "factories:in_place", "--units", "0", "1", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "1 unit kept" in out
    assert "  1: changes its input in place (argument 'input')" in out
    assert main(["audit", "factories:make", "--units", "0", "2"]) == 0
    assert capsys.readouterr().out == "Nothing found: every unit can be replayed.\n"
    assert main(["audit", "factories:make", "--units", "9"]) == 1
    assert "'9'" in capsys.readouterr().err


# measure and plan


def test_measure_and_plan_in_two_steps(capsys: Captured) -> None:
    profile = measured(capsys)
    assert [unit.module for unit in profile.units] == ["0", "1", "2", "3", None]
    low = recoup.minimum_budget(profile)
    assert main(["plan", "profile.json", "--budget", f"{low}B", "--json", "plan.json"]) == 0
    chosen = recoup.plan(profile, low)
    assert capsys.readouterr() == (f"{chosen}\nPlan: plan.json\n", "")
    assert ModelPlan.from_json(Path("plan.json").read_text()) == chosen


def test_measure_prints_the_profile(capsys: Captured) -> None:
    assert run("measure factories:with_optimizer --accumulates --json profile.json") == 0
    profile = Profile.from_json(Path("profile.json").read_text())
    assert capsys.readouterr().out == f"{profile}\nProfile: profile.json\n"
    assert profile.accumulates
    assert profile.residents.optimizer_bytes > 0


def test_a_plan_for_too_small_a_budget(capsys: Captured) -> None:
    measured(capsys)
    assert main(["plan", "profile.json", "--budget", "150kB"]) == 1
    assert "recoup: Sequential does not fit 146 KiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "profile.json: This is not JSON: "),
        ("{}", "profile.json: This JSON is not recoup's"),
        (
            '{"format": "recoup.engines", "kind": "plan"}',
            "profile.json: This JSON is another kind of recoup's",
        ),
        ('{"format": "recoup.measuring", "version": 9}', "profile.json: This is version 9 of the format"),
    ],
)
def test_a_damaged_profile_is_refused(text: str, message: str, capsys: Captured) -> None:
    Path("profile.json").write_text(text)
    assert main(["plan", "profile.json", "--budget", "1MiB"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"recoup: {message}")
    assert err.count("\n") == 1


def test_a_cut_off_profile_and_no_text_at_all(capsys: Captured) -> None:
    measured(capsys)
    text = Path("profile.json").read_text()
    Path("profile.json").write_text(text[: len(text) // 2])
    assert main(["plan", "profile.json", "--budget", "1MiB"]) == 1
    assert capsys.readouterr().err.startswith("recoup: profile.json: This is not JSON: ")
    Path("profile.json").write_bytes(b"\xff\xfe\x00")
    assert main(["plan", "profile.json", "--budget", "1MiB"]) == 1
    assert capsys.readouterr().err.startswith("recoup: Cannot read profile.json: 'utf-8' codec")


# demo


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_WIDTH": 32, "_NUM_BLOCKS": 3, "_LENGTH": 64, "_NUM_STEPS": 2}.items():
        monkeypatch.setattr(recoup.demo, name, value)


def test_demo_prints_what_it_shows(capsys: Captured, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(Fitted, "to_html", lambda self, path: Path(path).write_text("<html>"), raising=False)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("A GPT of 3 blocks on the CPU, fitted to half its activation memory: a budget of")
    steps = [line.split() for line in out.splitlines() if line.strip()[:1] in ("1", "2")]
    assert [step for step, _, _ in steps] == ["1", "2"]
    assert all(plain == ours for _, plain, ours in steps)
    assert out.endswith("bit for bit.\nReport: recoup-demo.html\n")
    assert (folder / "recoup-demo.html").read_text() == "<html>"


def test_a_demo_that_goes_wrong_says_so(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    losses = iter(range(100))
    monkeypatch.setattr(recoup.demo, "_train", lambda *args: float(next(losses)))
    assert main(["demo"]) == 1
    assert "trained to other losses or parameters: please report this" in capsys.readouterr().err


# terminals and pipes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("flag", "is_shown"), [([], True), (["--quiet"], False)])
def test_a_terminal_sees_progress_unless_quiet(
    flag: list[str], is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["measure", "factories:make", "--json", "p.json", *flag]) == 0
    assert ("measuring" in terminal.getvalue()) == is_shown
    assert bool(terminal.getvalue()) == is_shown


def test_a_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(Path(recoup.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "recoup", "audit", "factories:make"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
