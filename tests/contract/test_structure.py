"""Imports between the package's files point down: tools and demos may import the loop, the loop the engine, never back."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fabric_template"

# A file may import files of its own level and of lower levels. mini.py imports nothing of the package.
LEVELS = {
    "__main__": 3,
    "tools": 2,
    "demos": 2,
    "loop": 1,
    "custom_loop": 0,
    "training": 0,
    "data": 0,
    "loggers": 0,
    "checkpoint": 0,
    "distributed": 0,
    "lightning_compat": 0,
    "config": 0,
    "errors": 0,
}
# __init__.py looks public names up on first use, so any file may read the version from it.
LEVELS["__init__"] = 0


def area(file):
    """Return the folder of a file, or its name if it lies at the top."""
    first, *rest = file.split("/")
    return first if rest else first.removesuffix(".py")


def imported_files(package, file):
    """Yield (line, file of the package) for each import that runs; imports for type checkers do not count."""
    here = file.split("/")[:-1]
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types.update(id(inner) for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [package.name, *here[: len(here) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == package.name:
                yield node.lineno, file_of(package, parts[1:])


def file_of(package, parts):
    """Return the file of a dotted name: a module, a package, or a name in one of them."""
    for end in (len(parts), len(parts) - 1):
        path = package.joinpath(*parts[:end])
        if end > 0 and path.with_suffix(".py").is_file():
            return "/".join(parts[:end]) + ".py"
        if end >= 0 and (path / "__init__.py").is_file():
            return "/".join([*parts[:end], "__init__.py"])
    raise AssertionError(f"{'.'.join(parts)}: no file of the package")


def upward_imports(package):
    """Return each import of a file from a higher level."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if file == "__init__.py":
            continue
        for line, target in imported_files(package, file):
            is_mini = "mini.py" in (file, target) and file != target
            if is_mini or LEVELS[area(target)] > LEVELS[area(file)]:
                found.append(f"{file}:{line} -> {target}")
    return found


def test_imports_point_down():
    assert upward_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("source", "is_upward"),
    [
        ("from ..loop import FabricLoop\n", True),
        ("import fabric_template.loop\n", True),
        ("def run():\n    from .. import loop\n", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..loop import FabricLoop\n", False),
        ("from .. import __version__\n", False),
    ],
)
def test_an_upward_import_is_found(tmp_path, source, is_upward):
    package = tmp_path / "fabric_template"
    files = {"__init__.py": "__version__ = '1'\n", "loop.py": "", "data/__init__.py": "", "data/loaders.py": source}
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert bool(upward_imports(package)) == is_upward
