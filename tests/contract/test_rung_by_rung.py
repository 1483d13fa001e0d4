"""docs/rung-by-rung.md: each diff applies to the script before it, is short, and leaves weights and measures as they were."""

import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rung-by-rung.md").read_text(encoding="utf-8")
[SCRIPT] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
MOST_LINES = 10


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The script of each rung, the one that nothing was done to first."""
    folder = tmp_path_factory.mktemp("rungs")
    path, found = folder / "mnist.py", [SCRIPT]
    path.write_text(SCRIPT, encoding="utf-8")
    for diff in DIFFS:
        command = ["git", "apply", "-"]
        done = subprocess.run(
            command, input=diff, text=True, cwd=folder, capture_output=True,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(path.read_text(encoding="utf-8"))
    return found


def run(script, folder, monkeypatch):
    """(the weights that it saved, what it measured) in a folder of its own."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    exec(compile(script, f"mnist.py, {folder.name}", "exec"), {"__name__": "__main__"})
    csv = folder / "logs" / "mnist" / "version_0" / "metrics.csv"
    rows = pd.read_csv(csv)[["val_loss", "val_acc"]] if csv.exists() else None
    return torch.load("mnist.pt"), rows


def same(state, other):
    return list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)


def test_each_rung_has_the_weights_of_the_script(scripts, tmp_path, monkeypatch, capsys):
    assert len(scripts) == 5
    weights, _ = run(scripts[0], tmp_path / "script", monkeypatch)
    printed = re.findall(r"^Test: average loss (.*), accuracy (.*)/357$", capsys.readouterr().out, re.M)
    for number, script in enumerate(scripts[1:], 1):
        state, rows = run(script, tmp_path / f"rung{number}", monkeypatch)
        assert same(state, weights), number
        assert [(f"{loss:.4f}", f"{acc * 357:.0f}") for loss, acc in rows.itertuples(index=False)] == printed, number


def test_trainer_goes_on_from_there(scripts, tmp_path, monkeypatch):
    quiet = "max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
    by_trainer = scripts[-1].replace('FabricLoop(max_epochs=EPOCHS, name="mnist")', f"pl.Trainer({quiet})")
    assert by_trainer != scripts[-1]
    by_loop, _ = run(scripts[-1], tmp_path / "loop", monkeypatch)
    state, _ = run(by_trainer, tmp_path / "trainer", monkeypatch)
    assert same(state, by_loop)


def test_the_diffs_are_short_and_the_table_counts_them():
    rows = re.findall(r"^\| \[rung \d\]\(#.*\) \| (\d+) \| (\d+) \|$", PAGE, re.M)
    marks = [[line[0] for line in diff.splitlines() if line[:3] not in ("+++", "---")] for diff in DIFFS]
    assert [tuple(map(int, row)) for row in rows] == [(found.count("+"), found.count("-")) for found in marks]
    assert max(found.count("+") for found in marks) <= MOST_LINES
