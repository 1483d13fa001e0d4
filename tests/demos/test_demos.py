"""Test that each demo can be trained by its short name and scores better than chance."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from fabric_template import FabricLoop, read_logs
from fabric_template.demos import DEMOS, gan
from fabric_template.demos.autoencoder import Autoencoder
from fabric_template.demos.digits import DigitsData
from fabric_template.demos.language_model import TextData
from fabric_template.demos.tabular import TabularData
from fabric_template.tools.cli import main

QUIET = ["--accelerator", "cpu", "--enable_progress_bar", "false", "--enable_model_summary", "false"]
SMALL_GPT = "--data.block 32 --model.block 32 --model.width 32 --model.layers 1 --model.length 20"


def run(command, demo, options=""):
    assert main([command, "--model", f"demos.{demo}", *options.split(), *QUIET]) == 0


@pytest.mark.parametrize(
    ("demo", "options", "column", "least"),
    [
        # A random guess has an accuracy of 0.1.
        ("digits", "--max_epochs 3", "val_acc", 0.95),
        # A constant prediction has an R² of 0.
        ("tabular", "--max_epochs 4", "val_r2", 0.85),
        # An autoencoder that always returns the mean image has a score of 0.
        pytest.param("autoencoder", "--max_epochs 15", "val_explained", 0.5, marks=pytest.mark.soak),
        # An untrained generator has a score of 0.
        pytest.param("gan", "--max_epochs 4", "val_places", 0.875, marks=pytest.mark.soak),
    ],
)
def test_each_demo_reaches_its_minimum_validation_score(demo, options, column, least):
    run("fit", demo, options)
    assert read_logs("logs")[column].iloc[-1] >= least
    run("validate", demo, "--load best")
    if demo == "tabular":
        run("predict", demo, "--load best --out rents.csv")
        rents = pd.read_csv("rents.csv")
        assert 1 - ((rents["predicted"] - rents["true"]) ** 2).mean() / rents["true"].var() > 0.8
    if demo == "autoencoder":
        assert probe("best") > max(0.75, probe(None) + 0.1)


@pytest.mark.parametrize("demo", ["autoencoder", "gan"])
def test_the_validate_command_accepts_the_best_checkpoint_of_a_demo_run(demo):
    run("fit", demo, "--max_epochs 1 --limit_train_batches 3")
    run("validate", demo, "--load best")


def probe(load):
    """Return the accuracy of a linear classifier that predicts the digits from the autoencoder's codes."""
    loop = FabricLoop(name="autoencoder", accelerator="cpu", enable_progress_bar=False, seed=0)
    batches = loop.predict(Autoencoder(), datamodule=DigitsData(), load=load)
    codes, labels = (torch.cat([batch[key] for batch in batches]) for key in ("code", "label"))
    return cross_val_score(LogisticRegression(max_iter=5000), codes, labels, cv=5).mean()


def test_the_language_model_demo_trains_for_240_steps_and_generates_text(capsys):
    run("fit", "language_model", f"{SMALL_GPT} --max_steps 240 --validate_every_n_steps 80 --log_every_n_steps 10")
    data = TextData(block=32)
    data.setup()
    frequency = torch.bincount(data.splits["train"].flatten(), minlength=256).double() + 1e-3
    bits = -(frequency / frequency.sum()).log2()[data.splits["val"]].mean()
    rows, steps = read_logs("logs"), read_logs("logs", steps=True)
    assert rows["step"].tolist() == [80, 160, 240]
    assert rows["val_bits"].iloc[-1] < bits - 0.7
    assert steps["tokens_per_second"].min() > 0
    # The learning rate rises for 24 steps. Then it falls along a cosine to a tenth of its largest value.
    assert steps["lr"].idxmax() in (1, 2)
    assert rows["lr"].iloc[-1] == pytest.approx(3e-4, rel=0.01)
    assert re.search(r"^generated   'The .{20,}'$", capsys.readouterr().out, re.M)
    run("predict", "language_model", f"{SMALL_GPT} --load best --out t.pt")
    start, texts = bytes(data.splits["test"][0].tolist()).decode(), torch.load("t.pt")[0]
    assert [texts[0][:33], *map(len, texts)] == [start, 33 + 20, 33 + 20, 33 + 20]


def test_data_splits_are_stratified_and_seeded_and_do_not_leak():
    first, again, other = (DigitsData(seed=seed) for seed in (0, 0, 1))
    table = TabularData()
    for data in (first, again, other, table):
        data.setup()
    labels = first.splits["val"].tensors[1]
    assert [len(first.splits[split]) for split in ("train", "val", "test")] == [1257, 360, 180]
    assert torch.bincount(labels).min() >= 34
    assert torch.equal(labels, again.splits["val"].tensors[1])
    assert not torch.equal(labels, other.splits["val"].tensors[1])
    means = {split: table.splits[split].tensors[0][:, :2].mean(0).abs() for split in ("train", "val")}
    # The scaler must be fitted only on the training split, so only this split has means of zero.
    assert means["train"].max() < 1e-6 < 1e-4 < means["val"].min()


def test_the_tabular_demo_reads_a_csv_file(capsys):
    table = pd.DataFrame({"price": [1.0, 2.0, None, 4.0] * 20, "size": range(80), "colour": ["red", None] * 40})
    table.to_csv("mine.csv", index=False)
    own = ["fit", "--model", "demos.tabular", "--max_epochs", "1", *QUIET, "--data.path", "mine.csv", "--data.target"]
    assert main([*own, "price"]) == 2
    assert "TabularNet(features): got 10, expected 3. Write features=3 (--model.features 3)" in capsys.readouterr().err
    assert main([*own, "price", "--model.features", "3"]) == 0


def test_every_demo_file_is_tested():
    files = {path.stem for path in Path(gan.__file__).parent.glob("[a-z]*.py")}
    assert {*DEMOS, "data"} == files
