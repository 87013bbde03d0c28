from __future__ import annotations

import ast
from pathlib import Path

import recoup.planning

ROOT = Path(recoup.planning.__file__).parent
ALLOWED = {"numpy", "scipy", "highspy", "ortools"}


def test_the_planner_imports_only_errors_sizes_and_itself() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("torch"), path
                if name.startswith("recoup"):
                    assert name in ("recoup.errors", "recoup.sizes") or name.startswith("recoup.planning"), (
                        path
                    )


def test_public_names() -> None:
    names = recoup.planning.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(hasattr(recoup.planning, name) for name in names)
    assert {"Plan", "Problem", "Schedule", "frontier", "minimum_budget", "plan", "simulate", "trace"} <= set(
        names
    )


def test_files_and_functions_stay_small() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
