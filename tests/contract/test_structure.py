"""Imports between the package's files point down: tools and demos may import the loop, the loop the engine, never back."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "fabric_template"
# A file may import files of its own level and of lower levels. mini.py imports nothing of the package.
LEVELS = {"__main__": 3, "tools": 2, "demos": 2, "loop": 1}


def imported_areas(path):
    """Yield the folder, or the file at the top, of each relative import that runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types.update(id(inner) for statement in node.body for inner in ast.walk(statement))
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert "fabric_template" not in ast.unparse(node), f"{path}: write a relative import"
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types or not node.level:
            continue
        if node.level < depth:
            yield path.parent.name
        elif node.module:
            yield node.module.split(".")[0]
        else:
            yield from (alias.name for alias in node.names)


def test_imports_point_down():
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        areas = set(imported_areas(path))
        assert here != "mini" or not areas - {"mini"}
        upward = [area for area in areas if LEVELS.get(area, 0) > LEVELS.get(here, 0)]
        assert not upward, f"{path}: imports {upward}"
        assert here == "mini" or "mini" not in areas, path
