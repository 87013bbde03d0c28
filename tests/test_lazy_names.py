"""The package's names are imported when they are first used, and nobody sees a difference."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import recoup

ENVIRONMENT = {"PYTHONPATH": str(Path(recoup.__file__).parent.parent), "PATH": ""}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What this saves, benchmarks/startup.py measures.
def test_importing_recoup_imports_neither_torch_nor_the_planner() -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'highspy', 'rich', 'recoup.planning', 'recoup.checkpointing'}"
    assert run(f"import recoup, sys; print(sorted({heavy} & set(sys.modules)))") == "[]\n"


@pytest.mark.parametrize("name", recoup.__all__)
def test_every_name_is_found_alone_and_stays(name: str) -> None:
    code = (
        f"from recoup import {name}; import recoup; assert recoup.{name} is {name} is vars(recoup)[{name!r}]"
    )
    # One process for each name would take a minute; those that import different parts are enough.
    if name in ("checkpoint", "fit", "measuring", "plan"):
        run(code)
    assert name in dir(recoup)
    assert getattr(recoup, name) is getattr(recoup, name)


def test_a_star_import_brings_everything() -> None:
    namespace: dict[str, object] = {}
    exec("from recoup import *", namespace)
    assert set(recoup.__all__) <= set(namespace)


def test_functions_pickle() -> None:
    for name in ("checkpoint", "describe", "fit", "plan", "torch_checkpoint"):
        value = getattr(recoup, name)
        assert pickle.loads(pickle.dumps(value)) is value


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'recoup' has no attribute 'checkpint'"):
        recoup.checkpint  # noqa: B018
