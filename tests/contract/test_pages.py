"""README.md and docs/ are run and checked: Python blocks, commands, links, figures, tables of options.

The Python blocks of a page are one program. It runs in a process and a folder of its own.
"""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

# Imported before the fork, because each import costs seconds in every page.
import lightning.pytorch
import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import pytest
import sklearn.datasets  # noqa: F401
import torch
from externally import externally
from interpreter import ready
from lightning_utilities.core.imports import RequirementCache

from fabric_template import FabricLoop
from fabric_template.config import LoopConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
}
README = PAGES["README.md"]
TRAINER_PAGE = PAGES["docs/coming-from.md"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "CUDA_VISIBLE_DEVICES": "",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
}
# A block that imports one of these is left out where the package is not installed.
OPTIONAL = ("transformers", "optuna")
# A line with this comment is left out where Lightning is older.
NEWER_LINE = re.compile(r"^.*  # needs (lightning>=[\d.]+).*$", re.M)


def run_page(rank, page, sources, check):
    """Run a page's blocks as one program. Warnings are errors, except those that Trainer gives, too."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
    of_trainer = "does not have many workers|smaller than the logging interval|GPU available"
    of_trainer += "|args parameter is|requested to overfit"
    warnings.filterwarnings("ignore", f"(?s).*({of_trainer}|not supported by the model summary)")
    torch.manual_seed(torch.initial_seed())
    names = {"__name__": "__main__"}
    for line, source in sources:
        exec(compile("\n" * line + source, page, "exec"), names)
    assert eval(check, {"same": same, "Path": Path}, names), check


def same(net, other):
    net, other = net.state_dict(), other.state_dict()
    return all(torch.equal(net[key], other[key]) for key in net)


# What holds after the blocks of a page have run.
CHECKS = {
    "README.md": "history['epoch'].tolist() == list(range(10))",
    "docs/callbacks.md": "history['noisy_norm'].iloc[0] > 0",
    "docs/checkpoints.md": "counted.meter.images > 0 and state['global_step'] > 0",
    "docs/levels.md": "same(plain_net, net_by_fit) and rest['epoch'] == 2",
    "docs/recipes.md": (
        "gan_history['step'].tolist() == [16, 32, 48] and lbfgs_history['train_loss'].iloc[-1] < 1e-3"
        " and wave_history['train_loss'].iloc[-1] < wave_history['train_loss'].iloc[0] / 2"
        " and 0 < folds['mean'] < 1"
        " and f1_history['val_f1'].iloc[-1] > f1_history['val_f1'].iloc[0] > 0"
        " and sklearn_history['val_f1'].iloc[-1] > sklearn_history['val_f1'].iloc[0] > 0"
        " and stored_history['epoch'].tolist() == [0, 1, 2, 3] and not list(Path('checkpoints/stored').rglob('*.ckpt'))"
    ),
}


def blocks(text, language):
    """Return (line, source) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def commands(text):
    lines = [line.split("  #")[0].strip() for _, source in blocks(text, "bash") for line in source.splitlines()]
    return [line for line in lines if line]


ALL_COMMANDS = [line for text in PAGES.values() for line in commands(text)]


def section(text, title):
    """Return what is below a title, up to the next one of its level."""
    level = title.split()[0]
    return re.search(rf"^{re.escape(title)}\n(.*?)(?=^{level} |\Z)", text, re.M | re.S)[1]


# tests/distributed/test_ray.py runs docs/ray.md, because Ray's workers need a script.
@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if blocks(text, "python") and page != "docs/ray.md"]
)
def test_every_python_block_runs(page, tmp_path):
    missing = {package for package in OPTIONAL if not find_spec(package)}
    text = NEWER_LINE.sub(lambda line: line[0] if RequirementCache(line[1]) else "", PAGES[page])
    sources = [
        (line, source)
        for line, source in blocks(text, "python")
        if not missing & set(re.findall(r"^(?:import|from) (\w+)", source, re.M))
    ]
    codes, errors = externally(run_page, page, sources, CHECKS.get(page, "True"), ranks=1, is_launched=False)
    assert codes == [0], errors[0][-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_starts_with_a_block_and_renders_as_written(page):
    """On the site, longer lines of a block are cut off, <name> is a tag, and four spaces nest a list."""
    opened = re.findall(r"^```(.*)$", PAGES[page], re.M)
    assert set(opened[::2]) <= {"python", "bash", "text", "diff"}
    assert set(opened[1::2]) <= {""}
    if page != "README.md":
        assert re.match(r"# .*\n\n```(python|bash)\n", PAGES[page])
    code = "".join(source for _, source in blocks(PAGES[page], r"\w+"))
    assert [line for line in code.splitlines() if len(line) > 100] == []
    assert re.findall(r"<\w+", re.sub(r"`[^`]*`", "", prose_of(PAGES[page]))) == []
    assert re.findall(r"^ {1,3}[-*] .*", prose_of(PAGES[page]), re.M) == []


def prose_of(text):
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


# README


def test_the_readme_is_short_and_starts_with_how_to_get_it():
    assert len(README.splitlines()) <= 130
    assert README.index("```bash") < README.index("```diff") < README.index("![") < 2500
    picture = REPOSITORY / re.search(r"!\[.*?\]\((.*?)\)", README)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 100_000


def test_no_figure_that_the_results_do_not_have():
    results = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])", section(README, "## Measured")))
    assert len(figures) > 4
    assert {
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", results)
    } == set()


# Commands


def test_the_page_names_the_files_of_a_run(tmp_path):
    short = ["--limit_train_batches", "2", "--max_epochs", "2", "--log_every_n_steps", "1"]
    command = [sys.executable, "-m", "fabric_template", "fit", *short]
    done = subprocess.run(ready(command), capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    tree = next(source for _, source in blocks(PAGES["docs/logging-and-plots.md"], "text"))
    named = {line.split()[0].replace("<name>", "digits").replace("<n>", "0") for line in tree.splitlines()}
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in left if not path.endswith(("/.lock", "history.png"))} <= named


@pytest.mark.parametrize("target", sorted({line.split()[1] for line in ALL_COMMANDS if line.startswith("make ")}))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.M)


def test_commands_of_the_command_line_exist():
    named = {line.split()[1] for line in ALL_COMMANDS if line.startswith("fabric-template")}
    assert named >= {"fit", "validate", "plot", "verify", "copy", "diff", "update"}
    done = subprocess.run(
        [sys.executable, "-m", "fabric_template", "--help"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    existing = set(re.findall(r"^  (\w+) ", done.stdout, re.M))
    assert named <= existing
    table = re.findall(r"^\| (`.*?`) \|", PAGES["docs/command-line.md"], re.M)
    assert {name for row in table for name in re.findall(r"\w+", row)} >= existing


def test_torch_is_installed_by_the_version_of_the_constraints():
    torch_line = next(line for line in ALL_COMMANDS if line.startswith("pip install"))
    version = re.search(r"^torch==.*$", (REPOSITORY / "constraints.txt").read_text(), re.M)[0]
    assert torch_line == f"pip install {version}"


# Options

OWN = {field.name for field in dataclasses.fields(LoopConfig)}
OF_FABRIC = {name for name, p in inspect.signature(FabricLoop).parameters.items() if name not in OWN} - {"options"}
OF_TRAINER = set(inspect.signature(lightning.pytorch.Trainer.__init__).parameters) - {"self"}


def test_the_reference_has_the_table_of_options(monkeypatch):
    """If this fails, run python docs/options_table.py."""
    monkeypatch.syspath_prepend(DOCS)
    import options_table

    assert options_table.insert_table(PAGES["docs/reference.md"]) == PAGES["docs/reference.md"]
    assert set(re.findall(r"^\| `(\w+)` \| `", PAGES["docs/reference.md"], re.M)) == OWN | OF_FABRIC


def test_no_option_of_trainer_is_forgotten():
    refused = set(re.findall(r"^\| `(?:fit\()?([a-z_]+)=?\)?` \|", TRAINER_PAGE, re.M))
    assert refused >= OF_TRAINER - OWN - OF_FABRIC


def test_the_way_back_to_trainer():
    """Each argument that Trainer lacks has a row with Trainer's way to write it."""
    rows = section(TRAINER_PAGE, "## The way back to Trainer").splitlines()
    left = " ".join(row.split(" | ")[0] for row in rows if row.startswith("| "))
    names = (OWN | OF_FABRIC) - OF_TRAINER
    for method in ("fit", "validate", "test", "predict"):
        kinds = (FabricLoop, lightning.pytorch.Trainer)
        ours, theirs = (set(inspect.signature(getattr(kind, method)).parameters) for kind in kinds)
        names |= ours - theirs
        assert theirs <= ours
    assert {name for name in names if not re.search(rf"\b{name}\b", left)} == set()


# Links


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", prose_of(text), re.M)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", prose_of(PAGES[page])):
        path, _, anchor = target.partition("#")
        found = ((REPOSITORY / page).parent / path).resolve() if path else REPOSITORY / page
        assert found.exists(), target
        assert REPOSITORY in (found, *found.parents), target
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), target


def test_the_first_page_and_the_site_have_every_page():
    names = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = re.findall(r"^ +- (?:[^:]+: )?([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(names)
    assert set(re.findall(r"\]\(([\w/-]+\.md)", PAGES["docs/index.md"])) == names - {"index.md"}
