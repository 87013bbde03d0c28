"""What the command line takes, and what it refuses before anything is imported."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import recoup
from recoup.cli import main
from recoup.cli.parser import make_parser, parse

FACTORY = ["--accumulates", "--batch", "--units"]
ALWAYS = ["--debug", "--help", "--quiet", "-h"]
OPTIONS = {
    "audit": ["--batch", "--units"],
    "demo": [],
    "fit": ["--budget", "--engine", "--html", "--json", "--no-race", "--no-verify", "--sizes", *FACTORY],
    "frontier": ["--budget", "--hardware", "--json", "--most", "--points", "--ranks", "--sizes", *FACTORY],
    "hardware": ["--json"],
    "measure": ["--hardware", "--json", "--ranks", *FACTORY],
    "plan": ["--budget", "--json"],
}
POSITIONAL = {"audit": ["factory"], "fit": ["factory"], "frontier": ["factory"], "measure": ["factory"]}
POSITIONAL |= {"demo": [], "hardware": [], "plan": ["profile"]}


def commands() -> dict[str, argparse.ArgumentParser]:
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("no commands")


def test_the_commands_and_their_options_are_pinned() -> None:
    assert commands().keys() == OPTIONS.keys()
    for name, command in commands().items():
        flags = [flag for action in command._actions for flag in action.option_strings]
        assert sorted(flags) == sorted([*OPTIONS[name], *ALWAYS]), name
        given = [action.dest for action in command._actions if not action.option_strings]
        assert given == POSITIONAL[name], name
        required = [action.dest for action in command._actions if action.option_strings and action.required]
        assert required == {"fit": ["budget"], "measure": ["json"], "plan": ["budget"]}.get(name, []), name


def test_every_command_and_option_says_what_it_does() -> None:
    for name, command in commands().items():
        assert command.description, name
        for action in command._actions:
            assert action.help, (name, action.dest)
        assert name in command.format_help()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(recoup.__file__).parent.parent), "COLUMNS": "100"}


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["--version"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['recoup', *{arguments}]\ntry:\n    import recoup.cli; recoup.cli.main()\n"
    )
    code += "finally:\n    assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("recoup 0." if arguments == ["--version"] else "usage: recoup")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recoup", "plan", "no.json", "--budget", "1MiB"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "recoup: Cannot read no.json: [Errno 2] No such file or directory: 'no.json'\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("fitt factories:make", "invalid choice: 'fitt'"),
        ("fit factories:make", "the following arguments are required: --budget"),
        ("fit --budget 8GiB", "the following arguments are required: MODULE:MAKE"),
        ("fit factories --budget 8GiB", "'factories' is not of the form package.module:function"),
        ("fit :make --budget 8GiB", "':make' is not of the form package.module:function"),
        ("fit a/factories.py:make --budget 8GiB", "names a file; name the module: a.factories:make"),
        ("fit factories:make --budget 8", "argument --budget: Cannot read '8' as a size"),
        ("fit factories:make --budget 8apples", "argument --budget: Cannot read '8apples' as a size"),
        ("plan p.json --budget much", "argument --budget: Cannot read 'much' as a size"),
        ("plan p.json --budget auto", "argument --budget: Cannot read 'auto' as a size"),
        ("frontier factories:make --budget -1GiB", "argument --budget: expected one argument"),
        ("frontier factories:make --budget 1GiB --budget huge", "Cannot read 'huge' as a size"),
        ("frontier factories:make --points 0", "argument --points: '0' is not a whole number from 1 up"),
        ("frontier factories:make --hardware H200 --ranks two", "'two' is not a whole number from 1 up"),
        ("frontier factories:make --ranks 8", "--ranks goes with --hardware"),
        ("frontier factories:make --most 8", "--most goes with --hardware"),
        ("frontier factories:make --hardware H200 --most 8 --sizes 8,64", "--most goes without --sizes"),
        ("fit factories:make --budget 1MB --sizes 64", "'64' is one size; name at least two"),
        ("fit factories:make --budget 1MB --sizes 64,64", "'64,64' is one size; name at least two"),
        ("fit factories:make --budget 1MB --sizes 8,all", "'all' is not a whole number from 1 up"),
        ("frontier factories:make --sizes 8,0", "'0' is not a whole number from 1 up"),
        (
            "fit factories:make --budget 1MB --json no/such/f.json",
            "'no/such/f.json' cannot be written: No such file or directory",
        ),
        ("fit factories:make --budget 1MB --json factories.py/f.json", "cannot be written: Not a directory"),
        ("fit factories:make --budget 1MB --html .", "'.' cannot be written: Is a directory"),
        ("measure factories:make", "the following arguments are required: --json"),
        ("audit factories:make --budget 1MB", "unrecognized arguments: --budget 1MB"),
        ("demo now", "unrecognized arguments: now"),
        ("hardware H200", "unrecognized arguments: H200"),
    ],
)
def test_a_wrong_command_line_is_refused_with_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(line.split())
    assert raised.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recoup")
    assert err.count("\n") == 1
    assert err.endswith(" --help)\n")
    assert message in err


def test_files_to_be_written_are_tried_first_and_left_as_they_are(folder: Path) -> None:
    (folder / "old.json").write_text("old")
    parse(["fit", "factories:make", "--budget", "1MB", "--json", "old.json", "--html", "new.html"])
    assert (folder / "old.json").read_text() == "old"
    assert not (folder / "new.html").exists()
