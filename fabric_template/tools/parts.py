"""Parts: what can be taken out of the package by a name, with the files that each needs: those that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

PARTS = {  # what each is taken for, and the file that has it; a room's name means all of its files
    "tensors": ("TensorLoader, batches cut from tensors in memory", "data/tensors.py"),
    "csv": ("the CSV logger with a complete row per epoch", "record/logger.py"),
    "logs": ("read_logs, the rows of one run or of many as a table", "record/read_back.py"),
    "reading": ("checkpoints read without trusting them", "files/reading.py"),
    "checkpoints": ("checkpoints that are never half written", "files/storage.py"),
    "random": ("random numbers of every library, saved and put back", "exact/randomness.py"),
    "locks": ("one writer for a folder, by a lock that a crash cannot leave", "files/locks.py"),
    "config": ("the words of the loop, checked all together", "core/config.py"),
    "signals": ("Ctrl-C, SIGTERM and SIGUSR1 that let a step finish", "process/signals.py"),
    "bar": ("a progress bar that costs a look at the clock per step", "record/bar.py"),
    "plots": ("plot_logs, the curves of one run or of many", "tools/plots.py"),
}
ROOMS = ("core", "exact", "data", "files", "record", "trainer", "process")
MINI = "mini.py"


def part_files(parts: list[str], sources: Mapping[str, bytes]) -> list[str]:
    """The files of these parts and all that they import, anywhere in them but for the type checker.

    Args:
        parts: Names of `PARTS`, or rooms.
        sources: The package's files by their names.

    Example:
        >>> sources = {"data/tensors.py": b"", "core/a.py": b"from . import b", "core/b.py": b"import torch"}
        >>> part_files(["tensors", "core"], sources)
        ['core/a.py', 'core/b.py', 'data/tensors.py']
    """
    return needed([name for part in parts for name in _roots(part, sources)], sources)


def needed(names: list[str], sources: Mapping[str, bytes]) -> list[str]:
    """These files and all that they import, and so on."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imported(name, sources)
    return sorted(found)


def _roots(part: str, sources: Mapping[str, bytes]) -> list[str]:
    if part in PARTS:
        return [PARTS[part][1]]
    if part in ROOMS:
        return [name for name in sources if name.startswith(f"{part}/") and name.endswith(".py")]
    raise ValueError(
        f"--parts {part}: there is no such part: expected {', '.join(PARTS)}, or a room: {', '.join(ROOMS)}"
    )


def _imported(name: str, sources: Mapping[str, bytes]) -> Iterator[str]:
    """The files of the package that a file imports, at its top and inside functions."""
    folder = name.split("/")[:-1]
    for node in _nodes(ast.parse(sources[name])):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            # `from .room import file`, or `from .file import name`
            files = ["/".join([*base, alias.name]) + ".py" for alias in node.names] + ["/".join(base) + ".py"]
            yield from (file for file in files if file in sources)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for what is imported under TYPE_CHECKING alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _nodes(node)
