"""The package's shape: which part may import which, what is public, and how large a file may grow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import recoup

SOURCE = Path(recoup.__file__).parent

# Everything may import errors, progress and sizes. The drawing is in docs/architecture.md.
ALLOWED = {
    "errors": set(),
    "progress": set(),
    "sizes": set(),
    "policies": set(),
    "planning": set(),
    "stores": set(),
    "tensors": set(),
    "manual": {"planning", "policies", "stores"},
    "devices": {"tensors"},
    "budgets": {"devices", "tensors"},
    "snapshot": {"tensors"},
    "checkpointing": {"snapshot", "tensors"},
    "model": {"checkpointing", "devices", "snapshot", "tensors"},
    "plans": {"budgets", "model", "planning"},
    "measuring": {"checkpointing", "devices", "model", "planning", "plans", "snapshot", "tensors"},
    "engines": {"checkpointing", "devices", "model", "planning", "plans", "policies", "tensors"},
    "auditing": {"checkpointing", "devices", "model", "snapshot", "tensors"},
    "report": {"engines", "model", "planning", "plans"},
    "fitting": {
        "auditing",
        "budgets",
        "devices",
        "engines",
        "measuring",
        "model",
        "planning",
        "plans",
        "report",
    },
    "batching": {"budgets", "fitting", "measuring", "model", "planning", "plans", "tensors"},
    "demo": {"fitting", "measuring"},
    "cli": {"auditing", "batching", "demo", "engines", "fitting", "measuring", "model", "planning", "plans"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = {"errors", "progress", "sizes", "policies", "planning"}


def parts(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "recoup" else {module}
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def test_imports_run_one_way() -> None:
    for path in FILES:
        part = parts(path)
        assert part in ALLOWED, f"{path}: say in tests/test_architecture.py what {part} may import"
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("recoup.")}
        wrong = ours - ALLOWED[part] - {"errors", "progress", "sizes", part}
        assert not wrong, f"{path} imports {sorted(wrong)}"


def test_the_page_says_the_same() -> None:
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {}
    for row in re.findall(r"^\| (`.*)\|$", page, re.MULTILINE):
        names, imported, _ = (re.findall(r"`(\w+)`", cell) for cell in row.split(" | ", 2))
        drawn |= {name: set(imported) for name in names}
    assert drawn == {part: imported for part, imported in ALLOWED.items() if part != "__main__"}


def test_the_planner_knows_nothing_of_torch() -> None:
    for path in FILES:
        if parts(path) in WITHOUT_TORCH:
            roots = {name.partition(".")[0] for name in imports(path)}
            assert "torch" not in roots, path


def test_files_stay_small() -> None:
    for path in FILES:
        num_lines = path.read_text().count("\n")
        assert num_lines <= 600, f"{path}: {num_lines} lines"


def test_public_names() -> None:
    assert recoup.__all__ == [
        "Checkpoint",
        "apply",
        "audit",
        "checkpoint",
        "describe",
        "errors",
        "fit",
        "frontier",
        "is_replaying",
        "largest_batch",
        "manual",
        "measure",
        "measuring",
        "minimum_budget",
        "plan",
        "planning",
        "policies",
        "remove",
        "report",
        "sizes",
        "stores",
        "torch_checkpoint",
        "verify",
    ]
    for name in recoup.__all__:
        assert getattr(recoup, name) is not None


def test_errors_are_public_and_drawn() -> None:
    drawing = recoup.errors.__doc__ or ""
    assert recoup.errors.__all__ == sorted(recoup.errors.__all__)
    for name in recoup.errors.__all__:
        assert name in drawing, name
        assert issubclass(getattr(recoup.errors, name), (recoup.errors.RecoupError, UserWarning)), name
