"""Test that each benchmark runs at a small size and prints a row for each installed package."""

import re
import sys
from pathlib import Path

import pytest
from parameters import keep

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
ROWS = {
    "epoch": ["the same on Fabric", "Trainer", "by hand, tensors on the device", "ours, TensorLoader, fused"],
    "transformer": ["bare loop", "ours, as it comes"],
    "loader": ["TensorLoader", "DataLoader, 0 workers"],
    "once": ["FabricLoop: once: a fit of one step", "MiniLoop: a validation of one batch", "Trainer: a checkpoint"],
    "scaling": ["64", "grown", "metrics.csv, 5,000", "the last of 23", "among 23", "25", "shuffled, 2 workers"],
    "steps": ["plain, same metrics", "ours, everything on", "MiniLoop, everything on"],
    "tuned": ["current settings", "threads 1, tensor_loader True, fused True", "tune / the best by hand"],
}
TOY = {
    "epoch": ["--device", "cpu", "--toy", "--rounds", "1", "--epochs", "1", "--workers", "0"],
    "transformer": ["--device", "cpu", "--toy", "--rounds", "1", "--steps", "3"],
    "loader": ["--toy"],
    "once": ["--toy"],
    "scaling": ["--toy"],
    "steps": ["--rounds", "1", "--steps", "40"],
    "tuned": ["--toy", "--rounds", "1", "--seconds", "0.05"],
}


@pytest.mark.parametrize("name", keep(ROWS, "transformer", "loader", "steps"))
def test_each_benchmark_prints_all_rows_of_its_table(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [name, *TOY[name]])
    script = __import__(name)
    script.main()
    lines = capsys.readouterr().out.splitlines()
    for row in ROWS[name]:
        assert [line for line in lines if line.startswith(f"{row} ")], row
    assert not [line for line in lines if line.startswith("left out") and "not installed" not in line]


def test_the_makefile_contains_the_command_of_each_benchmark_in_results_md():
    results = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"`python (benchmarks/[^`]*)`", results))
    makefile = (BENCHMARKS.parent / "Makefile").read_text(encoding="utf-8")
    assert commands == set(re.findall(r"^\t\S*/python (benchmarks/.*)$", makefile, re.M))
    scripts = {f"benchmarks/{path.name}" for path in BENCHMARKS.glob("*.py")}
    assert {command.split()[0] for command in commands} == scripts


def test_results_md_shows_the_command_for_each_table():
    results = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    sections = re.split(r"^##+ ", results, flags=re.M)
    tables = [part for part in sections if re.search(r"^(\||```)", part, re.M)]
    assert len(tables) > 8
    command = r"`(python (benchmarks|soak)/|python -m pytest|make soak)"
    assert [
        part.split("\n")[0] for part in tables if not re.search(command, re.split(r"^\|", part, flags=re.M)[0])
    ] == []
