"""README.md and docs/ are run and checked: Python blocks, commands, links, figures, tables of options.

Each page's Python blocks are one program, run in a folder and a process of its own: forked, so that nothing is imported again.
"""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import lightning.pytorch  # and the rest, before the fork
import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import pytest
import sklearn.datasets  # noqa: F401
import torch
import torchmetrics  # noqa: F401
from externally import externally
from interpreter import ready

from fabric_template import FabricLoop
from fabric_template.config import LoopConfig

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
}
README = PAGES["README.md"]
TRAINERS_WORDS = PAGES["docs/coming-from-trainer.md"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "CUDA_VISIBLE_DEVICES": "",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
}


def run_page(rank, page, sources, check):
    """A page's blocks as one session; warnings are errors, but for what Lightning's own Trainer says."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
    warnings.filterwarnings(
        "ignore", "(?s).*(does not have many workers|smaller than the logging interval|GPU available|args parameter is)"
    )
    torch.manual_seed(torch.initial_seed())
    names = {"__name__": "__main__"}
    for line, source in sources:
        exec(compile("\n" * line + source, page, "exec"), names)
    assert eval(check, {"same": same, "Path": Path}, names), check


def same(net, other):
    net, other = net.state_dict(), other.state_dict()
    return all(torch.equal(net[key], other[key]) for key in net)


CHECKS = {
    "README.md": "history['epoch'].tolist() == list(range(10))",
    "docs/ladder.md": "same(plain_net, net_by_fit) and rest['epoch'] == 2",
    "docs/scale.md": "history['epoch'].tolist() == [0, 1, 2, 3] and not list(Path('checkpoints').rglob('*.ckpt'))",
}
LEFT = {
    "README.md": ("logs/digits/version_0/metrics.csv", "checkpoints/digits/version_0/best.ckpt"),
    "docs/files.md": ("logs/digits/version_1/metrics.csv",),
}


def blocks(text, language):
    """(line, source) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def commands(text):
    lines = [line.split("  #")[0].strip() for _, source in blocks(text, "bash") for line in source.splitlines()]
    return [line for line in lines if line]


ALL_COMMANDS = [line for text in PAGES.values() for line in commands(text)]


def section(text, title):
    """What stands below a title, up to the next of its kind."""
    level = title.split()[0]
    return re.search(rf"^{re.escape(title)}\n(.*?)(?=^{level} |\Z)", text, re.M | re.S)[1]


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if blocks(text, "python")])
def test_every_python_block_runs(page, tmp_path):
    sources = blocks(PAGES[page], "python")
    # the net that fit trained is bound anew by later blocks: keep it under a name of its own
    sources = [(n, s + "\nnet_by_fit = net\n" if 'name="beside"' in s else s) for n, s in sources]
    codes, said = externally(run_page, page, sources, CHECKS.get(page, "True"), ranks=1, is_launched=False)
    assert codes == [0], said[0][-3000:]
    for path in LEFT.get(page, ()):
        assert (tmp_path / path).is_file(), path


def test_there_are_pages_with_python_blocks_and_no_block_is_of_an_unknown_kind():
    assert {page for page, text in PAGES.items() if blocks(text, "python")} >= {
        "README.md",
        "docs/coming-from-trainer.md",
        "docs/files.md",
        "docs/killed-and-resumed.md",
        "docs/ladder.md",
    }
    for page, text in PAGES.items():
        opened = re.findall(r"^```(.*)$", text, re.M)
        assert set(opened[::2]) <= {"python", "bash", "text", "diff"}, page
        assert set(opened[1::2]) <= {""}, page


# ---- the front door ----------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_starts_with_how_to_get_it():
    assert len(README.splitlines()) <= 130
    assert README.index("```bash") < README.index("```diff") < README.index("![") < 2500
    picture = REPOSITORY / re.search(r"!\[.*?\]\((.*?)\)", README)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 100_000


def test_the_terminal_shows_what_is_printed_and_the_files_are_those_that_are_left(tmp_path):
    """A short fit prints the same lines but for numbers; docs/files.md names what it leaves."""
    pages = PAGES["docs/command-line.md"]
    shown = next(source for _, source in blocks(pages, "text") if "trained " in source)
    shown = [line for line in shown.splitlines() if "it/s" not in line]  # the bar is a terminal's
    short = ["--limit_train_batches", "2", "--max_epochs", "2", "--log_every_n_steps", "1"]
    command = [sys.executable, "-m", "fabric_template", "fit", *short]
    done = subprocess.run(ready(command), capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr

    def without_numbers(lines):
        lines = [line.replace(f"{sys.executable} -m fabric_template", "fabric-template") for line in lines]
        lines = [line.replace("python -m fabric_template", "fabric-template") for line in lines]
        lines = [re.sub(r"train_loss.*|val_acc.*", "", line) for line in lines]  # names are compared below
        lines = [re.sub(r"\d[\d.,]*(e-\d+)?\*?", "#", re.sub(" --(limit|max).*", "", line)) for line in lines]
        return "".join(f"{' '.join(line.split())}\n" for line in lines)

    printed = [line for line in done.stdout.splitlines() if line.strip()]
    left_out = r"(?:.*\n)*"  # the table of layers, and where the picture says so
    expected = left_out + re.escape(without_numbers(shown)).replace(re.escape("...\n"), left_out)
    assert re.fullmatch(expected, without_numbers(printed)), without_numbers(printed)
    named = next(source for _, source in blocks(PAGES["docs/files.md"], "text"))
    patterns = [line.split()[0].replace("<name>", "digits").replace("<n>", "0") for line in named.splitlines()]
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    left -= {path for path in left if path.endswith(("/.lock", "history.png"))}
    assert left <= set(patterns)
    assert set(patterns) - left <= {"logs/digits/version_0/steps.csv"}  # the digits log nothing per step


def test_no_figure_that_the_results_do_not_have():
    results = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])", section(README, "## Measured")))
    assert len(figures) > 4
    assert {
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", results)
    } == set()


# ---- what is typed -----------------------------------------------------------------------------------------------------


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
    verbs = set(re.findall(r"^  (\w+) ", done.stdout, re.M))
    assert named <= verbs
    table = re.findall(r"^\| (`.*?`) \|", PAGES["docs/command-line.md"], re.M)
    assert {verb for row in table for verb in re.findall(r"\w+", row)} >= verbs


def test_torch_is_asked_for_first_and_by_the_version_of_the_constraints():
    torch_line = next(line for line in ALL_COMMANDS if line.startswith("pip install"))
    version = re.search(r"^torch==.*$", (REPOSITORY / "constraints.txt").read_text(), re.M)[0]
    assert torch_line == f"pip install {version}"


# ---- Trainer's options -------------------------------------------------------------------------------------------------

OWN = {field.name for field in dataclasses.fields(LoopConfig)}
OF_FABRIC = {name for name, p in inspect.signature(FabricLoop).parameters.items() if name not in OWN} - {"options"}
OF_TRAINER = set(inspect.signature(lightning.pytorch.Trainer.__init__).parameters) - {"self"}


def test_the_table_of_options_is_the_configuration():
    section_rows = section(TRAINERS_WORDS, "## Trainer's options")
    rows = re.findall(r"^\| [^|]+ \| `([a-z_ ]+)`(?:, or .*)? \|$", section_rows, re.M)
    assert {name for row in rows for name in row.split()} == OWN | OF_FABRIC - {"fabric"}


def test_no_option_of_trainer_is_forgotten():
    assert {name for name in OF_TRAINER if not re.search(rf"\b{name}\b", TRAINERS_WORDS)} == set()
    refused = set(re.findall(r"^\| `(?:fit\()?([a-z_]+)=?\)?` \|", TRAINERS_WORDS, re.M))
    assert refused >= OF_TRAINER - OWN - OF_FABRIC


def test_the_road_back():
    """Each argument that Trainer lacks has a row with Trainer's way to write it."""
    rows = section(TRAINERS_WORDS, "## The road back").splitlines()
    left = " ".join(row.split(" | ")[0] for row in rows if row.startswith("| "))
    names = (OWN | OF_FABRIC) - OF_TRAINER
    for method in ("fit", "validate", "test", "predict"):
        kinds = (FabricLoop, lightning.pytorch.Trainer)
        ours, theirs = (set(inspect.signature(getattr(kind, method)).parameters) for kind in kinds)
        names |= ours - theirs
        assert theirs <= ours
    assert {name for name in names if not re.search(rf"\b{name}\b", left)} == set()


# ---- links -------------------------------------------------------------------------------------------------------------


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = ((REPOSITORY / page).parent / path).resolve() if path else REPOSITORY / page
        assert found.exists(), target
        assert REPOSITORY in (found, *found.parents), target
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), target


def test_every_page_is_reached_from_the_front_door():
    """In one step, or by way of the page that says where to begin."""
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", README))
    linked |= {f"docs/{name}" for name in re.findall(r"\]\(([\w-]+\.md)", PAGES["docs/index.md"])}
    assert linked | {"docs/reference.md"} == set(PAGES) - {"README.md"}  # it is for the site


def test_the_site_and_its_first_page_have_every_page():
    """As `make docs` builds it."""
    names = {path.relative_to(REPOSITORY / "docs").as_posix() for path in (REPOSITORY / "docs").rglob("*.md")}
    listed = re.findall(r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(names)
    linked = set(re.findall(r"\]\(([\w-]+\.md)", PAGES["docs/index.md"]))
    assert {name for name in names if "/" not in name} - linked == {"index.md", "reference.md"}
