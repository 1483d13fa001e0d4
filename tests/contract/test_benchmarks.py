"""The benchmarks run at a toy's size: every contestant that is installed, every row, is in its table."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
ROWS = {
    "epoch": ["the same on Fabric", "Trainer", "by hand, tensors on the device", "ours, TensorLoader, fused"],
    "transformer": ["bare loop", "ours, as it comes"],
    "loader": ["TensorLoader", "DataLoader, 0 workers"],
    "once": ["FabricLoop: once: a fit of one step", "MiniLoop: a validation of one batch", "Trainer: a checkpoint"],
    "scaling": ["64", "grown", "metrics.csv, 5,000", "the last of 23", "among 23", "25", "shuffled, 2 workers"],
    "steps": ["plain, same metrics", "ours, everything on", "MiniLoop, everything on"],
    "tuned": ["as it is", "threads 1, tensor_loader True, fused True", "tune / the best by hand"],
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


@pytest.mark.parametrize("name", ROWS)
def test_it_runs(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [name, *TOY[name]])
    script = __import__(name)
    script.main()
    lines = capsys.readouterr().out.splitlines()
    for row in ROWS[name]:
        assert [line for line in lines if line.startswith(f"{row} ")], row
    assert not [line for line in lines if line.startswith("left out") and "not installed" not in line]


def test_instructions_are_counted_by_valgrind(monkeypatch, tmp_path):
    """The script reads cachegrind's files, and names valgrind where it is not installed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["instructions"])
    monkeypatch.setenv("PATH", str(tmp_path))
    import instructions

    with pytest.raises(SystemExit, match="valgrind is not installed: expected it on the PATH"):
        instructions.main()
    counts = {"plain": (1_000, 2_000), "plain, same metrics": (1_500, 3_500), "ours, barebones": (1_100, 2_130)}
    names = [(name, steps) for name in counts for steps in instructions.STEPS]
    for child, (name, steps) in enumerate(names):
        count = 100 * counts[name][instructions.STEPS.index(steps)]
        (tmp_path / str(child)).write_text(f"events: Ir\nfn=f\n1 5\nsummary: {count} \n")
    (tmp_path / "names").write_text("".join(f"{child} {steps} {name}\n" for child, (name, steps) in enumerate(names)))
    rows = [line.split("  ") for line in instructions.table(tmp_path).splitlines()[1:]]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["plain", "1,000", "1.000", "0.500"],
        ["plain, same metrics", "2,000", "2.000", "1.000"],
        ["ours, barebones", "1,030", "1.030", "0.515"],
    ]
    for child, count in enumerate((300, 50_300, 350_300)):
        (tmp_path / str(child)).write_text(f"events: Ir\nsummary: {count} \n")
    (tmp_path / "names").write_text("0 0 FabricLoop\n1 1 FabricLoop\n2 11 FabricLoop\n")
    assert instructions.table_once(tmp_path).splitlines()[1].split() == ["FabricLoop", "50,000", "30,000"]
