"""The README is run: its Python blocks in order, its tree against the folder, its commands against Makefile and cli."""

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_template.core.config import FABRIC_WORDS, TRAINER_ONLY, LoopConfig

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")

# runs the blocks as one session; warnings are errors, but for what Lightning's own Trainer says in rung 5
RUNNER = """
import json, sys, warnings
import lightning.pytorch, matplotlib, pandas, sklearn.datasets, torch, torchmetrics
torch.set_num_threads(1)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
warnings.filterwarnings("ignore", "(?s).*(does not have many workers|smaller than the logging interval|GPU available)")
names = {"__name__": "__main__"}
for line, source in json.load(sys.stdin):
    exec(compile("\\n" * line + source, "README.md", "exec"), names)
plain, by_fit = names["plain_net"].state_dict(), names["net_by_fit"].state_dict()
assert all(torch.equal(plain[key], by_fit[key]) for key in plain), "the plain loop and fit end with different weights"
assert names["rest"]["epoch"] == 2
print("all ran")
"""


def blocks(language):
    """(line, source) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    return [(README.count("\n", 0, match.start(1)), match[1]) for match in found]


def tree_files():
    """The package's files in the order of the tree."""
    tree = next(source for _, source in blocks("text") if source.startswith("fabric_template/"))
    files, folders = [], {}
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        if name.endswith("/"):
            folders[depth] = name
        else:
            files.append("".join(folders[level] for level in range(depth)) + name)
    return files


def commands():
    lines = [line.split("  #")[0].strip() for _, source in blocks("bash") for line in source.splitlines()]
    return [line for line in lines if line]


def test_every_python_block_runs(tmp_path):
    sources = blocks("python")
    assert len(sources) >= 8
    # the net that fit trained is rebound by later blocks: keep it under a name of its own
    sources = [(n, s + "\nnet_by_fit = net\n" if 'name="beside"' in s else s) for n, s in sources]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
    }
    words = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps(sources), **words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all ran\n")
    for path in ("digits.png", "logs/digits/version_0/metrics.csv", "checkpoints/digits/version_0/best.ckpt"):
        assert (tmp_path / path).is_file(), path


def test_first_block_comes_before_the_picture_and_the_picture_is_small():
    assert README.index("```python") < README.index("![") < 2500
    picture = REPOSITORY / re.search(r"!\[.*?\]\((.*?)\)", README)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 100_000


def test_the_tree_has_every_file_and_no_other():
    package = REPOSITORY / "fabric_template"
    real = {path.relative_to(REPOSITORY).as_posix() for path in package.rglob("*.py")}
    assert set(tree_files()) == real


def test_imports_point_downwards_in_the_tree():
    files = tree_files()
    place = {Path(name).stem: index for index, name in enumerate(files) if name.count("/") == 1}
    for name in files:
        for imported in module_level_imports(REPOSITORY / name):
            if name.count("/") == 1:
                below = place.get(imported, -1)
                assert place[Path(name).stem] < below, f"{name} imports {imported}, which does not stand below it"


def module_level_imports(path):
    """Siblings that a file imports when it is imported itself (TYPE_CHECKING and functions aside)."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (name for name in names if name != "__version__")


def test_the_files_that_can_be_copied_alone_are_those():
    named = re.search(r"^- ((?:`\w+\.py`,? ?)+) import no sibling", README.replace("\n  ", " "), re.M)[1]
    for name in re.findall(r"\w+\.py", named):
        assert not list(module_level_imports(REPOSITORY / "fabric_template" / name)), name


@pytest.mark.parametrize("target", sorted({line.split()[1] for line in commands() if line.startswith("make ")}))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.M)


def test_commands_of_the_command_line_exist():
    pytest.importorskip("fabric_template.tools.cli")
    named = {line.split()[1] for line in commands() if line.startswith("fabric-template")}
    assert named
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "fabric_template.tools.cli", "--help"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    missing = [name for name in named if not re.search(rf"\b{name}\b", done.stdout)]
    assert not missing, f"fabric-template --help does not know {missing}"


def test_torch_is_asked_for_first_and_by_the_version_of_the_constraints():
    torch_line = next(line for line in commands() if line.startswith("pip install"))
    version = re.search(r"^torch==.*$", (REPOSITORY / "constraints.txt").read_text(), re.M)[0]
    assert torch_line == f"pip install {version}"


def test_the_table_of_words_is_the_configuration():
    rows = re.findall(r"^\| [^|]+ \| `([a-z_ ]+)`(?:, or .*)? \|$", README, re.M)
    words = {word for row in rows for word in row.split()}
    assert words == {field.name for field in dataclasses.fields(LoopConfig)} | set(FABRIC_WORDS) - {"fabric"}


def test_the_words_left_out_are_those_that_are_refused():
    rows = set(re.findall(r"^\| `(?:fit\()?([a-z_]+)=?\)?` \|", README, re.M))
    assert set(TRAINER_ONLY) <= rows


def test_no_word_of_trainer_is_forgotten():
    import lightning.pytorch as pl

    words = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert {word for word in words if not re.search(rf"\b{word}\b", README)} == set()


def test_links_lead_somewhere():
    titles = re.findall(r"^## (.*)$", README, re.M)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target and target != "benchmarks/RESULTS.md":  # made by `make bench`
            assert (REPOSITORY / target).exists(), target


def test_the_road_back():
    """What Trainer and its verbs do not take has its row, with Trainer's word for it."""
    import lightning.pytorch as pl

    from fabric_template import FabricLoop

    section = README[README.index("### The road back") : README.index("## Where we differ")]
    left = " ".join(row.split(" | ")[0] for row in section.splitlines() if row.startswith("| "))
    ours = {field.name for field in dataclasses.fields(LoopConfig)} | set(FABRIC_WORDS)
    words = ours - set(inspect.signature(pl.Trainer.__init__).parameters)
    for verb in ("fit", "validate", "test", "predict"):
        mine, theirs = (set(inspect.signature(getattr(kind, verb)).parameters) for kind in (FabricLoop, pl.Trainer))
        words |= mine - theirs
        assert theirs <= mine
    assert {word for word in words if not re.search(rf"\b{word}\b", left)} == set()


def test_the_changelog_has_a_line_for_every_file():
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.split(r"^## ", changes, flags=re.M)[-1]  # 0.1.0, in which every file is new
    named = {f"fabric_template/{name}" for name in re.findall(r"^- `([\w/]+\.py)`: ", latest, re.M)}
    assert named >= {name for name in tree_files() if not name.endswith("demos/__init__.py")}
