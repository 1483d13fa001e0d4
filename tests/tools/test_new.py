"""A new project trains, passes its own test and shows its notebook, as it was made; it is small, and never over another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import ready
from test_cli import refused, run, typed  # noqa: F401
from upstreams import Newer, edit, tree

from fabric_template import mini, read_logs

FILES = ["train_loop.py", "model.py", "data.py", "train.py", "test_train.py", "train.ipynb"]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def project(capsys):
    """A new one, as it was typed, with all that was said."""
    code, out, _ = run(capsys, "new", "my_digits")
    assert code == 0
    assert out.splitlines() == [
        f"made        my_digits: {', '.join(FILES)}",
        "train       cd my_digits && python train.py",
        "test        cd my_digits && python -m pytest",
        "update      fabric-template update my_digits",
    ]
    return Path("my_digits")


def python(folder, *argv):
    """What it prints, with this package blocked from import."""
    blocker = folder.parent / "blocker"
    (blocker / "fabric_template").mkdir(parents=True, exist_ok=True)
    (blocker / "fabric_template" / "__init__.py").write_text("raise ImportError('blocked')")
    words = {"cwd": folder, "capture_output": True, "text": True}
    done = subprocess.run(
        ready([sys.executable, *argv]), env={**ENVIRONMENT, "PYTHONPATH": str(blocker.resolve())}, **words
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def cells_of(project):
    return json.loads((project / "train.ipynb").read_text())["cells"]


def test_it_trains_and_tests_itself_without_us(project):
    out = python(project, "-W", "error", "train.py", "--max_epochs", "1")
    assert out.startswith("epoch 1/1: train_loss ")
    assert [line.split()[0] for line in out.splitlines()] == ["epoch", "log", "checkpoint"]
    for line in out.splitlines()[1:]:
        assert Path(line.split()[1]).is_file()
    (row,) = read_logs(project / "logs").to_dict("records")
    assert {"name", "epoch", "step", "train_loss", "train_acc", "val_loss", "val_acc", "lr"} <= row.keys()
    assert row["name"] == "my_digits"
    assert "1 passed" in python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    beside = {"train_loop.fabric_template.json", "train_loop.fabric_template.tar.gz", "__pycache__"}
    assert {path.name for path in project.iterdir()} - beside == {*FILES, "logs", "checkpoints"}


def test_it_learns_and_its_notebook_shows_that(project):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(project / "train.ipynb", as_version=4))
    title, *cells = cells_of(project)
    assert title["source"] == "# my_digits"
    last = "\nassert history['val_acc'].max() > 0.9, history\n"
    python(project, "-c", "\n".join(cell["source"] for cell in cells) + last)


def test_it_is_small_and_the_single_file_is_the_packages_own(project):
    own = (project / "train_loop.py").read_text().split("\n", 1)[1]  # below the line that says where it is from
    assert own.startswith(Path(mini.__file__).read_text())
    texts = [(project / name).read_text() for name in FILES if name not in ("train_loop.py", "train.ipynb")]
    texts += [cell["source"] for cell in cells_of(project)]
    lines = [line for text in texts for line in text.splitlines()]
    assert len(lines) < 100
    assert max(map(len, lines)) <= 128
    assert not [line for line in lines if "NAME" in line]


def test_a_new_version_comes_into_it_and_no_other_file_is_touched(capsys, project, tmp_path, monkeypatch):
    """Also into one whose file was changed, and with the project's folder alone."""
    edit(project / "train_loop.py", "import csv\n", "import csv  # mine\n")
    newer = Newer(tmp_path / "upstream")
    newer.edit("mini.py", "PLAIN = bool", "UPSTREAM = 1\nPLAIN = bool")
    newer.install(monkeypatch)
    before = tree(project)
    code, out, _ = run(capsys, "update", "my_digits", "--force")
    assert (code, out.splitlines()) == (
        0,
        [
            "updated     my_digits from 0.1.0 to 0.2.0",
            "merged      train_loop.py",
            "backup      .train_loop.before_0 has what was there before",
        ],
    )
    after = {name: data for name, data in tree(project).items() if not name.startswith(".train_loop.before_0/")}
    beside = {"train_loop.fabric_template.json", "train_loop.fabric_template.tar.gz"}
    assert {name for name in before if after[name] != before[name]} == {"train_loop.py", *beside}
    assert after.keys() == before.keys()
    assert "import csv  # mine\n" in (text := after["train_loop.py"].decode())
    assert "UPSTREAM = 1\n" in text


def test_nothing_is_written_where_something_is(capsys, project):
    before = {path: path.read_bytes() for path in project.iterdir()}
    Path("file").write_text("mine")
    for name in ("my_digits", "file", "."):
        assert refused(capsys, "new", name) == (
            f"new {name}: there is something already, nothing was written: give another name"
        )
    assert {path: path.read_bytes() for path in project.iterdir()} == before
    Path("empty").mkdir()
    assert run(capsys, "new", "empty")[0] == 0
    assert 'name="empty"' in Path("empty/train.py").read_text()
    assert refused(capsys, "new", "my digits") == (
        "new my digits: 'my digits' names no run: expected letters, digits, '_' and '-', such as my_digits"
    )
    assert "new file/project: cannot be written: " in refused(capsys, "new", "file/project")
