"""Test that imports between folders follow one order, so that no two folders import each other."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fabric_template"
# Each folder or file may import only from folders and files before it in this list.
ORDER = [
    "metric_names", "errors", "config", "files", "rng_state", "plain_values", "plain_state",
    "lightning_compat", "distributed", "data", "loggers", "checkpoint", "training",
    "trainer_api", "loop", "tools", "demos", "__main__",
]  # fmt: skip


def runtime_imports(path):
    """Yield the path of each file that ``path`` imports at run time, not only for type checks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types.update(id(inner) for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert "fabric_template" not in ast.unparse(node), f"{path}: write a relative import"
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types or not node.level:
            continue
        folder = path.parents[node.level - 1]
        target = folder.joinpath(*(node.module or "").split("."))
        if target.with_suffix(".py").exists():
            yield target.with_suffix(".py")
        else:
            yield from ((target / f"{alias.name}.py") for alias in node.names)


def area_of(path):
    """Return the top folder of a file in the package, or the name of a file that is in no folder."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_module_imports_only_from_lower_layers(path):
    areas = {area_of(target) for target in runtime_imports(path) if target.exists()}
    own = area_of(path)
    if own == "mini":
        assert areas == set()
        return
    assert "mini" not in areas
    higher = [area for area in areas if ORDER.index(area) > ORDER.index(own)]
    assert higher == [], f"{path}: imports from {higher}"


def test_the_import_order_lists_every_folder_of_the_package():
    areas = {area_of(path) for path in FILES}
    assert areas - {"mini"} == set(ORDER)
