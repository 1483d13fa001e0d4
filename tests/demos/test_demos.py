"""Each demo is trained by its short name, as a user types it, and is well above chance; what it makes is looked at."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from fabric_template import FabricLoop, read_logs
from fabric_template.demos import autoencoder, detection, gan, language_model, tabular
from fabric_template.demos.digits import DigitsData
from fabric_template.files.reading import read_checkpoint
from fabric_template.tools.cli import main
from fabric_template.tools.demos import DEMOS

QUIET = ["--accelerator", "cpu", "--enable_progress_bar", "false", "--enable_model_summary", "false"]


def typed(*words):
    assert main([*map(str, words), *QUIET]) == 0


def trained(capsys, name, *words):
    """The rows of a fit whose picture and checkpoint are where it says."""
    typed("fit", "--model", f"demos.{name}", *words)
    said = capsys.readouterr().out
    for file in re.findall(r"^(?:picture|checkpoint) +(\S+)$", said, re.M):
        assert Path(file).stat().st_size > 1000, file
    assert re.search(rf"^go on .* --model demos\.{name} ", said, re.M)
    return read_logs("logs")


def test_tabular(capsys):
    rows = trained(capsys, "tabular", "--max_epochs", 4)
    assert rows["val_r2"].iloc[-1] > 0.85
    typed("predict", "--model", "demos.tabular", "--load", "best", "--out", "rents.csv")
    rents = pd.read_csv("rents.csv")
    assert list(rents) == ["predicted", "true"]
    assert len(rents) == 200
    assert 1 - ((rents["predicted"] - rents["true"]) ** 2).mean() / rents["true"].var() > 0.8  # in the table's unit


def test_tabular_learns_its_preprocessing_of_the_training_part_only():
    data = tabular.TabularData()
    data.setup("fit")
    train, val = data.parts["train"].tensors[0], data.parts["val"].tensors[0]
    assert (len(train), len(val), len(data.parts["test"])) == (1400, 400, 200)
    assert train[:, :4].mean(0).abs().max() < 1e-6
    assert train[:, :4].std(0, correction=0).tolist() == pytest.approx([1] * 4)
    assert val[:, :4].mean(0).abs().min() > 1e-4  # scaled by another part's mean
    assert {"number__missingindicator_rooms", "word__district_hills", "word__lift_nan"} <= {*data.columns}


def test_tabular_takes_a_table_of_ones_own(capsys):
    table = pd.DataFrame({"price": [1.0, 2.0, None, 4.0] * 20, "size": range(80), "colour": ["red", None] * 40})
    table.to_csv("mine.csv", index=False)
    own = ["fit", "--model", "demos.tabular", "--data.path", "mine.csv", "--data.target", "price", "--max_epochs", "1"]
    assert main([*own, *QUIET]) == 2
    said = "TabularNet: features=13, but a row of this table has 3: give features=3 (--model.features 3)\n"
    assert capsys.readouterr().err.endswith(said)
    assert main([*own, *QUIET, "--model.features", "3"]) == 0
    for words, said in (
        (["--data.target", "colour"], "target='colour' is no column of numbers of the table; it has price, size"),
        (["--data.path", "nowhere.csv"], "path='nowhere.csv' cannot be read as a CSV file with a head line: "),
    ):
        assert main([*own, *QUIET, *words]) == 2
        assert f"fabric_template: TabularData: {said}" in capsys.readouterr().err


def test_language_model(capsys):
    words = ["--data.block", 32, "--model.block", 32, "--model.width", 32, "--model.layers", 1]
    rows = trained(capsys, "language_model", *words, "--max_epochs", 1, "--limit_train_batches", 150)
    data = language_model.TextData(block=32)
    data.setup()
    assert 4 < data.unigram_bits() < 5
    assert rows["val_bits"].iloc[-1] < data.unigram_bits() - 0.8
    typed("predict", "--model", "demos.language_model", *words, "--model.length", 20, "--load", "best", "--out", "t.pt")
    (texts,) = torch.load("t.pt")
    assert [len(text) for text in texts] == [33 + 20] * 3
    begun = bytes(next(iter(data.predict_dataloader()))[0].tolist()).decode()
    assert texts[0].startswith(begun)


def test_language_model_says_what_does_not_fit():
    Path("short.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"3 characters leave 1 for one of the two parts: too few for block=64"):
        language_model.TextData("short.txt").setup()
    with pytest.raises(ValueError, match=r"TextData: path='no.txt' cannot be read: No such file or directory"):
        language_model.TextData("no.txt").setup()
    with pytest.raises(ValueError, match=r"GPT: a text of 65 characters, but block=64: give block=, at least that"):
        language_model.GPT()(torch.zeros(1, 65, dtype=torch.int64))


def test_autoencoder(capsys):
    """A linear probe reads the digits from the codes of a loaded checkpoint: far better than of a net that has not learnt."""
    rows = trained(capsys, "autoencoder", "--max_epochs", 15)
    assert rows["val_explained"].iloc[-1] > 0.5
    loop = FabricLoop(name="autoencoder", accelerator="cpu", enable_progress_bar=False, seed=0)
    found = {
        load: loop.predict(autoencoder.Autoencoder(), datamodule=DigitsData(), load=load) for load in (None, "best")
    }
    assert found["best"][0]["code"].shape == (64, 8)
    assert autoencoder.probe(found["best"]) > max(0.75, autoencoder.probe(found[None]) + 0.1)
    model = autoencoder.Autoencoder()
    model.load_state_dict(read_checkpoint("checkpoints/autoencoder/version_0/best.ckpt")["state_dict"])
    autoencoder.draw(model, torch.rand(4, 1, 8, 8)).savefig("digits.png")


def test_gan(capsys):
    rows = trained(capsys, "gan", "--max_epochs", 4)
    assert rows["step"].iloc[-1] == 800  # two optimizers, 100 batches, four epochs
    assert rows["val_places"].iloc[-1] >= 0.875
    assert rows["val_good"].iloc[-1] > 0.4
    assert gan.judge(gan.GAN()(torch.randn(2000, 8)))["places"] == 0  # of a net that has not learnt
    gan.draw(gan.make_points(50)).savefig("points.png")


def test_detection(capsys):
    rows = trained(capsys, "detection", "--data.count", 400, "--max_epochs", 4, "--check_val_every_n_epoch", 4)
    assert rows["val_iou"].iloc[-1] > 0.3  # 0 of a net that has not learnt
    typed("predict", "--model", "demos.detection", "--data.count", 8, "--load", "best", "--out", "boxes.pt")
    (images,) = torch.load("boxes.pt")
    assert [sorted(found) for found in images] == [["boxes", "labels", "scores"]] * 2


def test_mean_iou_counts_what_is_missed_and_what_is_not_there():
    target = {"boxes": torch.tensor([[0.0, 0, 4, 4], [8, 8, 12, 12]]), "labels": torch.tensor([1, 2])}
    right = {**target, "scores": torch.ones(2)}
    half = {name: values[:1] for name, values in right.items()}
    both = {name: torch.cat([values, values]) for name, values in right.items()}
    wrong = {**right, "labels": torch.tensor([2, 1])}
    unsure = {**right, "scores": torch.tensor([0.9, 0.1])}
    assert [detection.mean_iou(found, target) for found in (right, half, both, wrong, unsure)] == [1, 0.5, 0.5, 0, 0.5]


def test_a_detector_of_torchvision_is_asked_for_by_its_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision.models", None)  # as if it were not installed
    with pytest.raises(
        ValueError, match=r"net='ssd300_vgg16' needs torchvision: pip install torchvision, or take net='tiny'"
    ):
        detection.Detector("ssd300_vgg16")


def test_every_demo_has_its_short_name_and_no_other_is_one(capsys):
    files = {path.stem for path in Path(gan.__file__).parent.glob("[a-z]*.py")}
    assert {*DEMOS} == files
    assert main(["fit", "--model", "demos.gna"]) == 2
    assert capsys.readouterr().err.endswith(f"; the package's own are {', '.join(f'demos.{name}' for name in DEMOS)}\n")


def test_a_demo_can_be_named_in_a_file_and_takes_what_stands_there(capsys):
    Path("gan.yaml").write_text("model: {class: demos.gan, hidden: 4}\nmax_epochs: 1\nlimit_train_batches: 1\n")
    typed("fit", "--config", "gan.yaml")
    assert "fit --resume last --config gan.yaml --accelerator" in capsys.readouterr().out
    weights = read_checkpoint("checkpoints/gan/version_0/last.ckpt")["state_dict"]
    assert weights["generator.0.weight"].shape == (4, 8)
    typed("validate", "--run", "logs/gan/version_0", "--load", "last")
