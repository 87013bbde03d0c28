from __future__ import annotations

import subprocess
import sys

import pytest

from recoup.errors import PlanningError
from recoup.planning.lazy import LazyModule


def test_heavy_solvers_are_imported_when_they_are_used() -> None:
    code = "import recoup.planning, sys; print(sorted({'scipy', 'highspy'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_a_missing_module_says_how_to_get_it() -> None:
    with pytest.raises(
        PlanningError, match=r"needs no_such_solver, which cannot.*pip install no_such_solver"
    ):
        LazyModule("no_such_solver.core").Thing  # noqa: B018
