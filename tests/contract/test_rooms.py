"""The rooms of the package: imports point downwards only and in no circle, and each file keeps to its size.

Every import counts: those at the top of a file, those under TYPE_CHECKING and those inside functions.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import ready

PACKAGE = Path(__file__).resolve().parents[2] / "fabric_template"

BELOW_PROCESS = {"core", "exact", "data", "files", "record", "trainer"}
ARROWS = {  # a room, and those that it may import beside itself; a file at the top is a room of its own
    "core": set(),
    "exact": {"core"},
    "data": {"core", "exact"},
    "files": {"core", "exact"},
    "record": {"core", "files"},
    "trainer": {"core", "record", "files"},
    "process": BELOW_PROCESS,
    # composes, and may name what is below process, too
    "loop": {"process"} | BELOW_PROCESS,
    # the loop, what a command prints (the configuration's words, logs and checkpoints), and what a trial changes: loaders,
    # random numbers
    "tools": {"loop", "core", "record", "files", "data", "exact"},
    # what a user would write
    "demos": {"data"},  # TensorLoader
    "mini": set(),
    # the public names, looked up on first use
    "__init__": {"loop", "core", "data", "files", "record", "tools", "mini"},
    "__main__": {"tools"},
}

# `from .. import __version__` reads a number that stands there before anything is imported: no arrow and no circle.
NUMBER = "__version__"

MOST_IN_A_RUN = 11_000  # lines that FabricLoop and a fit from its beginning import
MAX_LINES = 400
MAX_LINES_OF = {"core/train.py": 200, "mini.py": 884}  # the one file, which shall come down to 450
MAX_LINES_OF_A_FUNCTION_IN = {"core/train.py": 40}


def files_of(package):
    """Every file of it, by its path from there."""
    return {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*.py"))}


def room_of(file):
    """A file's folder; of one at the top, its name."""
    first, *rest = file.split("/")
    return first if rest else first.removesuffix(".py")


def imports_of(package, file):
    """(line, file) of all that a file imports from the package, wherever in it that stands."""
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    here = [package.name, *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*(here[: len(here) - node.level + 1] if node.level else []), *filter(None, [node.module])])
            dotted = [f"{base}.{alias.name}" for alias in node.names if (base, alias.name) != (package.name, NUMBER)]
        else:
            continue
        for name in dotted:
            parts = name.split(".")
            if parts[0] == package.name:
                yield node.lineno, file_named(package, parts[1:])


def file_named(package, parts):
    """The file that a dotted name lies in: a module, a folder, or a name in one of them."""
    for end in (len(parts), len(parts) - 1):
        if end > 0 and package.joinpath(*parts[:end]).with_suffix(".py").is_file():
            return "/".join(parts[:end]) + ".py"
        if end >= 0 and package.joinpath(*parts[:end], "__init__.py").is_file():
            return "/".join([*parts[:end], "__init__.py"])
    raise AssertionError(f"{'.'.join(parts)}: no file of the package")


def wrong_arrows(package):
    """Each import that points to a room which may not be known there."""
    found = []
    for file in files_of(package):
        for line, target in imports_of(package, file):
            room, other = room_of(file), room_of(target)
            assert room in ARROWS, f"{file}: a room that ARROWS does not know"
            if room != other and other not in ARROWS[room]:
                found.append(f"{file}:{line} -> {target}")
    return found


def circles(package):
    """Files that import each other, directly or by way of others; the shortest way round from each, told once."""
    graph = {file: {target for _, target in imports_of(package, file) if target != file} for file in files_of(package)}
    found = {}
    for start in graph:
        ways, seen = [[start]], set()
        while ways:
            way = ways.pop(0)
            if start in graph[way[-1]]:
                found.setdefault(frozenset(way), " -> ".join([*way, start]))
                break
            ways += [[*way, target] for target in sorted(graph[way[-1]] - seen)]
            seen |= graph[way[-1]]
    return list(found.values())


# ---- the package


def test_no_arrow_runs_up():
    wrong = wrong_arrows(PACKAGE)
    assert not wrong, "\n".join(wrong)


def test_no_circle():
    found = circles(PACKAGE)
    assert not found, "\n".join(found)


def test_a_folder_itself_imports_nothing():
    """Or whoever imports one file of a room had imported others with it. The top one looks its names up when asked."""
    for file, path in files_of(PACKAGE).items():
        if file.endswith("/__init__.py"):
            assert not list(imports_of(PACKAGE, file)), file
        if file == "__init__.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert not [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]


def test_no_file_is_long():
    lengths = {file: len(path.read_text(encoding="utf-8").splitlines()) for file, path in files_of(PACKAGE).items()}
    long = {file: lines for file, lines in lengths.items() if lines > MAX_LINES_OF.get(file, MAX_LINES)}
    assert not long, long


@pytest.mark.parametrize("file", MAX_LINES_OF_A_FUNCTION_IN)
def test_no_function_of_the_page_to_read_is_long(file):
    if not (PACKAGE / file).exists():
        pytest.skip("there is no such page yet")
    assert not long_functions((PACKAGE / file).read_text(encoding="utf-8"), MAX_LINES_OF_A_FUNCTION_IN[file])


def long_functions(source, most):
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(function.name, function.end_lineno - function.lineno + 1) for function in functions]
    return [(name, lines) for name, lines in lengths if lines > most]


def test_the_single_file_imports_nothing_of_us():
    assert not list(imports_of(PACKAGE, "mini.py"))


RUN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fabric_template.loop import FabricLoop


def tell(when):
    print(when, *sorted(name for name in sys.modules if name.startswith("fabric_template.")))


tell("imported")
net = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.ones(8, 4)), 4)
step = lambda net, batch: net(batch[0]).mean()
words = dict(accelerator="cpu", enable_progress_bar=True, enable_model_summary=True, monitor="val_loss")
for epochs, resume in ((1, None), (2, "last")):
    loop = FabricLoop(max_epochs=epochs, **words)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loop.fit(net, loader, loader, optimizer=optimizer, training_step=step, validation_step=step, resume=resume)
    tell("resumed" if resume else "trained")
loop.validate(net, loader, verbose=True)
tell("validated")
"""


def test_what_a_run_imports_is_little_and_lies_in_no_tool_and_no_demo(tmp_path):
    """Those that are imported by the way, inside functions, are seen as well: two runs are made, and one of them resumed."""
    command = ready([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{RUN}"])
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"^(imported|trained|resumed|validated) (fabric_template.*)$", done.stdout, re.M)
    files = {when: [file_named(PACKAGE, name.split(".")[1:]) for name in names.split()] for when, names in told}
    assert {"loop.py", "record/logger.py", "process/resumed.py"} <= set(files["validated"])
    assert not [file for file in files["validated"] if room_of(file) in ("tools", "demos")]
    lines = {
        when: sum(len((PACKAGE / file).read_text().splitlines()) for file in names) for when, names in files.items()
    }
    assert lines["imported"] <= lines["trained"] <= MOST_IN_A_RUN, lines


# ---- the tests can fail


def package_of(tmp_path, **sources):
    package = tmp_path / "fabric_template"
    for name, source in {
        "__init__": "__version__ = '1'\n",
        "core/__init__": "",
        "record/__init__": "",
        **sources,
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


UP = {
    "at the top": "from ..record.bar import Bar\n",
    "of a module": "from ..record import bar\n",
    "of a room": "from .. import record\n",
    "by its whole name": "import fabric_template.record.bar\n",
    "by the package": "from fabric_template import loop\n",
    "for types only": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ..record.bar import Bar\n",
    "in a function": "def run():\n    if 1:\n        from ..record.bar import Bar\n",
}


@pytest.mark.parametrize("where", UP)
def test_an_arrow_that_runs_up_is_found(tmp_path, where):
    downwards = {"core/run": "", "record/bar": "from ..core import run\nfrom .. import __version__\n", "loop": ""}
    assert wrong_arrows(package_of(tmp_path, **downwards)) == []
    (wrong,) = wrong_arrows(package_of(tmp_path, **downwards | {"core/run": UP[where]}))
    assert re.fullmatch(r"core/run\.py:\d -> (record/(bar|__init__)|loop)\.py", wrong), wrong


@pytest.mark.parametrize("back", ["from .a import x\n", "def run():\n    from . import a\n"])
def test_a_circle_is_found(tmp_path, back):
    without = {"core/a": "from .b import y\nfrom .c import z\n", "core/b": "from .c import z\n", "core/c": ""}
    assert circles(package_of(tmp_path, **without)) == []
    found = circles(package_of(tmp_path, **without | {"core/c": back}))
    assert "core/a.py -> core/c.py -> core/a.py" in found
    assert len(found) == 2  # and the one by way of b


def test_a_room_that_nobody_has_named_is_found(tmp_path):
    with pytest.raises(AssertionError, match="a room that ARROWS does not know"):
        wrong_arrows(package_of(tmp_path, **{"attic/old": "from ..core import run\n", "core/run": ""}))


def test_a_long_function_is_found():
    source = "def short():\n    pass\n\n\ndef long():\n" + "    pass\n" * 40
    assert long_functions(source, 40) == [("long", 41)]
