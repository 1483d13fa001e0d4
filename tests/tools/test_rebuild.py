"""--run: a run is repeated, continued and evaluated from its folder alone."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from runs import without_time
from test_cli import FIT, QUIET, refused, run, typed, weights  # noqa: F401

from fabric_template import FabricLoop, LoopConfig

OPTIONS = ["--max_epochs", 3, "--model.hidden", 6, "--data.batch_size", 16, "--seed", 7, "--monitor", "val_loss"]
FOLDER = ["--run", "logs/run/version_0"]


def assert_same_run(one, other):
    """Compare weights bit for bit, and every row but its time."""
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert without_time(Path("logs", one, "metrics.csv")) == without_time(Path("logs", other, "metrics.csv"))


def config_of(place):
    return yaml.safe_load(Path("logs", place, "config.yaml").read_text("utf-8"))


def test_a_run_is_repeated_bit_for_bit(capsys):
    assert run(capsys, *FIT, *QUIET, *OPTIONS)[0] == 0
    torch.rand(3)
    assert run(capsys, "fit", "--config", "logs/run/version_0/config.yaml")[0] == 0
    assert run(capsys, "fit", *FOLDER)[0] == 0
    assert_same_run("run/version_0", "run/version_1")
    assert_same_run("run/version_0", "run/version_2")
    assert run(capsys, "fit", *FOLDER, "--seed", 8)[0] == 0
    with pytest.raises(AssertionError):
        assert_same_run("run/version_0", "run/version_3")


def test_the_configuration_of_a_run(capsys):
    run(capsys, *FIT, *QUIET, *OPTIONS, "--callbacks+=EarlyStopping", "--callbacks.monitor=val_loss")
    found = config_of("run/version_0")
    assert {*LoopConfig.__dataclass_fields__} <= {*found}
    assert found["model"] == {"class": "lit:Lit", "hidden": 6, "lr": 0.1, "act": None}
    assert found["data"] == {"class": "lit:Data", "batch_size": 16}
    assert (found["max_epochs"], found["seed"], found["accelerator"], found["devices"]) == (3, 7, "cpu", 1)
    assert found["callbacks"][0]["class_path"] == "lightning.pytorch.callbacks.EarlyStopping"
    assert found["callbacks"][0]["init_args"]["monitor"] == "val_loss"
    assert found["about"]["command"].startswith("fabric-template fit --model lit:Lit --data lit:Data --accelerator cpu")


def test_every_command_works_in_the_run(capsys):
    run(capsys, *FIT, *QUIET, *OPTIONS)
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)  # a newer version, of another model
    for load in ("best", "last"):
        code, out, _ = run(capsys, "validate", *FOLDER, "--load", load)
        row = Path("logs/run/version_0/metrics.csv").read_text().splitlines()[-1]
        assert code == 0
        assert float(re.search(r"val_loss +([\d.]+)", out)[1]) == pytest.approx(float(row.split(",")[3]), rel=1e-6)
    assert "test_loss" in run(capsys, "test", *FOLDER, "--load", "best")[1]
    assert "predicted   4 batches" in run(capsys, "predict", *FOLDER, "--data.batch_size", 8, "--load", "best")[1]
    assert not Path("logs/run/version_2").exists()


def test_a_new_training_with_the_weights_of_a_run(capsys):
    run(capsys, *FIT, *QUIET, *OPTIONS)
    begun = Path("logs/run/version_0/config.yaml").read_bytes()
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)  # a newer version, of another model
    code, out, _ = run(capsys, "fit", *FOLDER, "--resume", "last", "--max_epochs", 4)
    assert (code, "4 epochs, 8 steps" in out, "logs/run/version_0/metrics.csv" in out) == (0, True, True)
    assert Path("logs/run/version_0/config.yaml").read_bytes() == begun
    code, out, _ = run(capsys, "fit", *FOLDER, "--load", "last", "--max_epochs", 1)
    assert (code, "logs/run/version_2/metrics.csv" in out) == (0, True)
    assert config_of("run/version_2")["load"].endswith("checkpoints/run/version_0/last.ckpt")
    assert run(capsys, "fit", "--run", "logs/run/version_2")[0] == 0
    assert_same_run("run/version_2", "run/version_3")
    assert "the weights are new" in run(capsys, "validate", "--run", "logs/run/version_2")[2]


def test_from_another_folder(capsys, monkeypatch):
    run(capsys, *FIT, *QUIET, *OPTIONS)
    home = Path.cwd()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    monkeypatch.syspath_prepend(home)
    code, out, _ = run(capsys, "validate", "--run", home / "logs/run/version_0", "--load", "last")
    assert (code, "val_loss" in out) == (0, True)
    assert not list(Path().iterdir())


def test_a_run_of_a_script(capsys, monkeypatch):
    """The command line says what the run does not record, and refuses to guess the class of the model."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    sys.modules.pop("lit", None)
    lit = importlib.import_module("lit")

    class Here(lit.Lit):
        pass

    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_model_summary": False}
    FabricLoop(**options).fit(lit.Lit(hidden=5), lit.Data().train_dataloader())
    FabricLoop(**options).fit(Here(hidden=5), lit.Data())
    capsys.readouterr()
    code, out, err = run(capsys, "validate", *FOLDER, "--data", "lit:Data", "--model.hidden", 5, "--load", "last")
    assert (code, "val_loss" in out) == (0, True)
    assert "version_0/config.yaml does not record model.hidden (not kept by save_hyperparameters)" in err
    assert "data (fit was given loaders): give these options if needed\n" in err
    Path("logs/run/version_1/config.yaml").write_text("model: {hidden: 5}\n")
    assert refused(capsys, "validate", "--run", "logs/run/version_1").startswith("--model: got no class")
