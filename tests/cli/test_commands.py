"""What each command prints and writes, and its errors for bad input."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slowly import slow_but

import recoup
from recoup.batching import largest_batch
from recoup.cli import main
from recoup.cli.factory import load_factory
from recoup.engines import ModelPlan
from recoup.errors import SampleError
from recoup.measuring import Profile, find_hardware, measure
from recoup.planning.additive_numbers import additive
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


def test_fit_prints_the_table_and_writes_plan_and_report(capsys: Captured) -> None:
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
    report = Path("report.html").read_text(encoding="utf-8")
    headline = out.splitlines()[0].removeprefix("Sequential on cpu. ").removesuffix(".")
    assert f"<title>Sequential: {headline}</title>" in report


@pytest.mark.parametrize("spec", ["by_name", "with_step", "with_optimizer", "Models.make"])
def test_fit_takes_every_kind_of_factory(spec: str, capsys: Captured) -> None:
    assert main(["fit", f"factories:{spec}", "--budget", "50%", "--no-verify"]) == 0
    assert "Sequential" in capsys.readouterr().out


def test_fit_uses_its_options(capsys: Captured) -> None:
    line = "fit factories:sized_with_optimizer --batch 8 --budget 1MB --units 0 1 --accumulates --no-verify"
    assert run(f"{line} --json plan.json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("Sequential on cpu. Predicted to fit: ")
    profile = ModelPlan.from_json(Path("plan.json").read_text()).profile
    assert [unit.module for unit in profile.units if unit.module] == ["0", "1"]
    assert additive(profile.problem).units[0].output_bytes == 8 * 32 * 4
    assert profile.accumulates
    assert profile.residents.optimizer_bytes == 2 * profile.residents.parameter_bytes + 16 * 4
    assert run(f"{line} --quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_fit_passes_engine_and_race_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def fit(*args: Any, engine: str, race: bool, **more: Any) -> Any:
        seen.append((engine, race))
        raise SampleError("no sample")

    monkeypatch.setattr(recoup.fitting, "fit", fit)
    assert run("fit factories:make --budget 1MB") == 2
    assert run("fit factories:make --budget 1MB --engine captured --no-race") == 2
    assert seen == [("auto", True), ("captured", False)]
    with pytest.raises(SystemExit, match="2"):
        run("fit factories:make --budget 1MB --engine jit")


def test_a_budget_that_is_too_small_names_the_smallest(capsys: Captured) -> None:
    assert main(["fit", "factories:make", "--budget", "150kB", "--units", "0", "1", "2", "3"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "recoup: Sequential does not fit 146 KiB (150000 bytes). The smallest feasible budget is"
    )
    assert err.count("\n") == 1


def test_a_budget_above_the_whole_device(capsys: Captured) -> None:
    assert main(["fit", "factories:make", "--budget", "120%"]) == 2
    assert "A budget in per cent lies above 0 % and at most at 100 %" in capsys.readouterr().err


def test_units_that_are_not_there(capsys: Captured) -> None:
    assert main(["fit", "factories:make", "--budget", "1MB", "--units", "layers.*"]) == 2
    assert capsys.readouterr().err.startswith(
        "recoup: The unit pattern 'layers.*' fits no module of the model."
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_in_the_end(option: str, capsys: Captured) -> None:
    assert run(f"fit factories:make --budget 1MB --no-verify {option} /dev/full") == 2
    out, err = capsys.readouterr()
    assert out.startswith("Sequential on cpu.")
    assert err == "recoup: Cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize("command", ["fit --budget 1MB", "frontier", "audit", "measure --json p.json"])
def test_running_out_of_memory_is_one_line(command: str, capsys: Captured) -> None:
    name, *rest = command.split()
    assert main([name, "factories:out_of_memory", *rest]) == 1
    assert capsys.readouterr() == ("", "recoup: out of memory: Tried to allocate 20 GiB.\n")


def test_other_errors_show_where_they_come_from() -> None:
    with pytest.raises(RuntimeError, match="a bug in a backward"):
        run("fit factories:wrong_backward --budget 1MB")


def test_an_interrupt_gives_the_shells_exit_code(capsys: Captured) -> None:
    assert main(["audit", "factories:interrupted"]) == 130
    assert capsys.readouterr() == ("", "recoup: interrupted\n")


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


def unallocated(name: str, *arguments: int) -> dict[str, Any]:
    """What a factory makes without memory, as arguments."""
    made = load_factory(f"factories:{name}").build(*arguments, unallocated=True)
    return {"model": made.model, "sample": made.sample, "loss": made.loss, "optimizer": made.optimizer}


FORMS = ["pair", "make", "with_optimizer", "by_name", "by_name_with_optimizer", "Models.make"]


@pytest.mark.parametrize("name", FORMS)
def test_measure_for_a_gpu_that_is_not_there(name: str, capsys: Captured) -> None:
    units = ["blocks.0", "blocks.1"] if name == "pair" else ["0", "1"]
    line = f"measure factories:{name} --hardware H200 --json profile.json"
    assert run(line) == 0
    plainly = Profile.from_json(Path("profile.json").read_text())
    assert run(f"{line} --ranks 64 --accumulates --units {' '.join(units)}") == 0
    profile = Profile.from_json(Path("profile.json").read_text())
    assert capsys.readouterr().out == f"{plainly}\nProfile: profile.json\n{profile}\nProfile: profile.json\n"
    made = unallocated(name)
    assert plainly == measure(**made, hardware="H200")
    assert profile == measure(**made, hardware="H200", ranks=64, accumulates=True, units=units)
    assert [unit.module for unit in profile.units if unit.module] == units
    assert (profile.ranks, profile.accumulates) == (64, True)
    assert (profile.residents.optimizer_bytes > 0) == name.endswith("with_optimizer")


@pytest.mark.parametrize("name", FORMS)
def test_frontier_for_a_gpu_that_is_not_there(name: str, capsys: Captured) -> None:
    assert run(f"frontier factories:{name} --hardware H200 --ranks 64 --points 3 --json f.json") == 0
    out, err = capsys.readouterr()
    profile = measure(**unallocated(name), hardware="H200", ranks=64)
    assert err == ""
    assert out.splitlines()[0] == str(profile)
    body = json.loads(Path("f.json").read_text())["frontier"]
    assert body["plain"] == {"peak_bytes": profile.plain_bytes, "seconds": profile.plain.seconds}
    plans = recoup.frontier(profile, num_points=3)
    assert [point["budget_bytes"] for point in body["points"]] == [plan.budget_bytes for plan in plans]
    assert body["largest_batches"] == []


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["sized_with_optimizer"],
        ["sized", "sized_pair", "sized_by_default", "sized_with_optimizer", "sized_by_name"],
    ),
)
def test_the_largest_batch_for_a_gpu_that_is_not_there(name: str, capsys: Captured) -> None:
    line = f"frontier factories:{name} --hardware H200 --most 2 --points 2 --json f.json"
    unit = "blocks.0" if name == "sized_pair" else "0"
    given = "--ranks 8 --units", unit, "--accumulates --budget 40MiB --budget 33MiB"
    assert run(line) == 0
    assert run(f"{line} {' '.join(given)}") == 0
    out = capsys.readouterr().out
    make = load_factory(f"factories:{name}")

    def wanted(budget: str, **options: Any) -> recoup.BatchChoice:
        return largest_batch(
            lambda batch: make.build(batch, unallocated=True),
            hardware="H200",
            budget=budget,
            most=2,
            **options,
        )

    choices = [
        wanted("100%"),
        *(wanted(budget, ranks=8, units=[unit], accumulates=True) for budget in ("40MiB", "33MiB")),
    ]
    for choice in choices:
        assert f"\n{choice}\n" in out
    answers = json.loads(Path("f.json").read_text())["frontier"]["largest_batches"]
    assert [answer["text"] for answer in answers] == list(map(str, choices[1:]))
    assert [answer["predicted_bytes"] for answer in answers] == [
        choice.plan.predicted_bytes for choice in choices[1:]
    ]
    assert all(answer["batch_size"] <= 2 for answer in answers)
    profile = choices[1].plan.profile
    assert [entry.module for entry in profile.units if entry.module] == [unit]
    assert (profile.residents.optimizer_bytes > 0) == (name in ("sized_with_optimizer", "sized_by_name"))


def test_a_frontier_says_for_which_batch_it_is(capsys: Captured) -> None:
    assert run("frontier factories:sized --hardware H200 --most 1 --points 2") == 0
    assert " Seconds are estimates. At a batch of 1:\n" in capsys.readouterr().out
    assert run("frontier factories:sized --batch 4 --hardware H200 --most 1 --points 2") == 0
    assert " Seconds are estimates. At a batch of 4:\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit --budget 1MB --json out.json", "measure --json out.json"])
def test_the_forms_of_samples_and_optimizers_that_fit_takes(command: str, capsys: Captured) -> None:
    """A loader's batch with its loss, and several optimizers."""
    name, *rest = command.split()
    for spec in ("loader_batch", "several_optimizers"):
        assert main([name, f"factories:{spec}", *rest, "--quiet"]) == 0, capsys.readouterr().err
        read: Any = ModelPlan if name == "fit" else Profile
        found = read.from_json(Path("out.json").read_text())
        residents = found.profile.residents if name == "fit" else found.residents
        assert (residents.optimizer_bytes > residents.parameter_bytes) == (spec == "several_optimizers")
    assert run("frontier factories:loader_batch --hardware H200 --points 2 --quiet") == 0
    assert run("frontier factories:several_optimizers --hardware H200 --points 2 --quiet") == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "frontier factories:not_sized",
            "make(1) and make(2) return samples of the same size ([64, 32]): let make use its argument",
        ),
        ("frontier factories:at_most_four", "if there are no larger batches, give most=4"),
        (
            "frontier factories:needs_values",
            "factories:needs_values raised RuntimeError (under torch.device('meta'), where tensors have no values):",
        ),
        ("measure factories:needs_values --json p.json", "under torch.device('meta')"),
        ("frontier factories:with_step", "Give sample and loss= instead"),
        ("measure factories:with_step --json p.json", "Give sample and loss= instead"),
        ("measure factories:sized --json p.json", "takes an argument, the batch size; give --batch"),
    ],
)
def test_factories_that_cannot_be_used_for_a_gpu_that_is_not_there(
    line: str, message: str, capsys: Captured
) -> None:
    assert run(f"{line} --hardware H200") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("recoup: ")
    assert err.count("\n") == 1
    assert not Path("p.json").exists()


@pytest.mark.parametrize("line", ["frontier factories:make", "measure factories:make --json p.json"])
def test_an_unknown_gpu_is_refused_before_anything_is_built(line: str, capsys: Captured) -> None:
    assert main([*line.split(), "--hardware", "H2000"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recoup: There is no hardware 'H2000'. Known are B200, H200,")
    assert "factories" not in sys.modules


def test_hardware_from_a_file(capsys: Captured) -> None:
    assert run("hardware --json gpu.json") == 0
    here = find_hardware("gpu.json")
    assert capsys.readouterr() == (f"{here}\nHardware: gpu.json\n", "")
    assert here.name == "CPU" or torch.cuda.is_available()
    assert run("measure factories:make --hardware gpu.json --ranks 2 --json p.json") == 0
    profile = Profile.from_json(Path("p.json").read_text())
    assert profile == measure(**unallocated("make"), hardware=here, ranks=2)
    Path("gpu.json").write_text("{")
    capsys.readouterr()
    assert run("measure factories:make --hardware gpu.json --json p.json") == 2
    assert capsys.readouterr().err.startswith("recoup: 'gpu.json' is not JSON")
    assert run("measure factories:make --hardware other.json --json p.json") == 2
    assert "other.json" in capsys.readouterr().err


# audit


def test_audit_prints_its_findings(capsys: Captured) -> None:
    assert main(["audit", "factories:in_place", "--units", "0", "1", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "1 unit kept" in out
    assert "  1: changes its input in place (argument 'input')" in out
    assert main(["audit", "factories:make", "--units", "0", "2"]) == 0
    assert capsys.readouterr().out == "Nothing found: every unit can be replayed.\n"
    assert main(["audit", "factories:make", "--units", "9"]) == 2
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
    assert main(["plan", "profile.json", "--budget", "1MiB"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"recoup: {message}")
    assert err.count("\n") == 1


def test_a_cut_off_profile_and_no_text_at_all(capsys: Captured) -> None:
    measured(capsys)
    text = Path("profile.json").read_text()
    Path("profile.json").write_text(text[: len(text) // 2])
    assert main(["plan", "profile.json", "--budget", "1MiB"]) == 2
    assert capsys.readouterr().err.startswith("recoup: profile.json: This is not JSON: ")
    Path("profile.json").write_bytes(b"\xff\xfe\x00")
    assert main(["plan", "profile.json", "--budget", "1MiB"]) == 2
    assert capsys.readouterr().err.startswith("recoup: Cannot read profile.json: 'utf-8' codec")


# terminals and pipes


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(recoup.__file__).parent.parent), "TERM": "xterm"}


def run_on_a_terminal(arguments: list[str], folder: Path) -> tuple[int, str]:
    """The exit code, and what a terminal shows of standard error."""
    reading, writing = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "recoup", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=writing,
        env=ENVIRONMENT,
        cwd=folder,
    )
    os.close(writing)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal ends whose last writer has left
        while chunk := os.read(reading, 4096):
            shown += chunk
    os.close(reading)
    return process.wait(), shown.decode()


@pytest.mark.parametrize(("flag", "is_shown"), [([], True), (["--quiet"], False)])
def test_a_terminal_sees_progress_unless_quiet(flag: list[str], is_shown: bool, folder: Path) -> None:
    arguments = ["measure", "factories:make", "--json", "p.json", *flag]
    code, shown = run_on_a_terminal(arguments, folder)
    assert code == 0
    assert ("measuring" in shown) == is_shown
    assert bool(shown) == is_shown


@pytest.mark.parametrize(("flag", "shown"), [([], "recoup: warning: Mind the gap.\n"), (["--quiet"], "")])
def test_a_warning_is_one_line(flag: list[str], shown: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recoup", "audit", "factories:warned", *flag],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, shown)


def test_a_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "recoup", "audit", "factories:make"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=folder,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
