"""The package's shape: which part may import which, what is public, and how large a file may grow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import recoup
from recoup.torch_private.attributes import ATTRIBUTES

SOURCE = Path(recoup.__file__).parent

# Everything may import errors, given, numbers, progress and sizes, and what has torch torch_private. The drawing is in
# docs/architecture.md.
ALLOWED = {
    "errors": set(),
    "given": set(),
    "numbers": set(),
    "progress": set(),
    "sizes": set(),
    "torch_private": set(),
    "policies": set(),
    "planning": set(),
    "stores": set(),
    "tensors": set(),
    "ranks": set(),
    "manual": {"planning", "policies", "stores"},
    "devices": {"tensors"},
    "budgets": {"devices", "tensors"},
    "snapshot": {"tensors"},
    "checkpointing": {"snapshot", "tensors"},
    "capture": {"checkpointing", "devices", "planning", "tensors"},
    "model": {"capture", "checkpointing", "devices", "ranks", "snapshot", "tensors"},
    "plans": {"budgets", "model", "planning", "ranks"},
    "measuring": {
        "capture",
        "checkpointing",
        "devices",
        "model",
        "planning",
        "plans",
        "ranks",
        "snapshot",
        "tensors",
    },
    "engines": {"capture", "checkpointing", "devices", "model", "planning", "plans", "policies", "tensors"},
    "auditing": {"checkpointing", "devices", "model", "snapshot", "tensors"},
    "report": {"auditing", "capture", "engines", "model", "planning", "plans"},
    "fitting": {
        "auditing",
        "budgets",
        "devices",
        "engines",
        "measuring",
        "model",
        "planning",
        "plans",
        "ranks",
        "report",
    },
    "batching": {"budgets", "devices", "fitting", "measuring", "model", "planning", "plans", "tensors"},
    "piloting": {"devices", "engines", "fitting", "model", "plans", "ranks", "snapshot", "tensors"},
    "demo": {"fitting", "measuring"},
    "integrations": {"engines", "fitting", "piloting", "plans", "report", "snapshot", "tensors"},
    "cli": {"auditing", "batching", "demo", "engines", "fitting", "measuring", "model", "planning", "plans"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = {"errors", "given", "numbers", "progress", "sizes", "policies", "planning"}


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
        wrong = ours - ALLOWED[part] - {"errors", "given", "numbers", "progress", "sizes", part}
        wrong -= {"torch_private"} if part not in WITHOUT_TORCH else set()
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


def private_names_of_torch(tree: ast.AST, own: set[str]) -> list[str]:
    """Imports and attributes of torch with a private part, and private attributes of anything that is not ours."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                alias.name for alias in node.names if is_torch(alias.name) and has_private_part(alias.name)
            ]
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if has_private_part(name)]
        elif isinstance(node, ast.Attribute) and has_private_part(node.attr):
            name = ast.unparse(node)
            if name.split(".")[0] in ("torch", "nn", "Tensor") or node.attr not in own:
                found.append(name)
    return found


def is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def has_private_part(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a file defines: functions, variables, fields, attributes of ``self`` and slots."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return found


# Private only by their spelling: named tuples, and the standard library's and NumPy's own.
NOT_OF_TORCH = {"_replace", "_getframe", "_DummyThread", "_bit_generator", "_make_closure", "_zero_grad_fn"}


def test_private_names_of_torch_are_in_one_file() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES if "torch_private" not in path.parts}
    listed = {name for names in ATTRIBUTES.values() for name in names}
    own = set().union(*map(own_names, trees.values()), listed, NOT_OF_TORCH)
    for path, tree in trees.items():
        found = private_names_of_torch(tree, own)
        assert not found, f"{path} uses {found}: bind or list it in src/recoup/torch_private"


def test_private_names_of_torch_are_found() -> None:
    code = """
import torch.utils._device
from torch.fx import _symbolic_trace
torch._C._set_grad_enabled(True)
tensor._version
tensor._unheard_of
self._ours
"""
    found = private_names_of_torch(ast.parse(code), {"_version", "_ours"})
    assert sorted(found) == [
        "tensor._unheard_of",
        "torch._C",
        "torch._C._set_grad_enabled",
        "torch.fx._symbolic_trace",
        "torch.utils._device",
    ]


def test_files_stay_small() -> None:
    for path in FILES:
        num_lines = path.read_text().count("\n")
        assert num_lines <= 600, f"{path}: {num_lines} lines"


def test_public_names() -> None:
    assert recoup.__all__ == [
        "Checkpoint",
        "apply",
        "audit",
        "autopilot",
        "checkpoint",
        "describe",
        "errors",
        "explain",
        "fit",
        "frontier",
        "is_replaying",
        "keep",
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
