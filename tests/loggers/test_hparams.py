"""Test the hparams option in both loops."""

import enum
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from modules import Classifier, make_loader
from torch import nn

from fabric_template import FabricLoop, MiniLoop, list_runs
from fabric_template.tools.cli import main

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}
FILE = Path("logs/run/version_0/hparams.yaml")


class Width(enum.Enum):
    SMALL = 4


class Augment(str, enum.Enum):
    FLIP = "flip"


class Unprintable:
    def __repr__(self):
        raise RuntimeError


class WithHyperparameters(Classifier):
    def __init__(self, hidden=16, rate=0.1):
        super().__init__(hidden=hidden)
        self.save_hyperparameters()


def train(kind, model=None, **options):
    if kind == "FabricLoop":
        options = {"enable_progress_bar": False, "enable_model_summary": False, **options}
    loop = LOOPS[kind](**{"max_epochs": 1, "accelerator": "cpu", **options})
    loop.fit(model or Classifier(), make_loader(8))
    return loop


@pytest.mark.parametrize("kind", LOOPS)
def test_hparams_yaml_contains_the_hparams_option_and_the_modules_hyperparameters(kind):
    train(kind, WithHyperparameters(hidden=8), hparams={"rate": 0.1, "augment": "flip"})
    found = yaml.safe_load(FILE.read_text())["hparams"]
    assert found == {"hidden": 8, "rate": 0.1, "augment": "flip"}


@pytest.mark.parametrize("kind", LOOPS)
def test_list_runs_and_the_diff_command_compare_the_hparams_of_runs(kind, capsys):
    for version, width in enumerate((8, 16)):
        train(kind, hparams={"width": width, "depth": 2}, version=version)
    assert list_runs()["changed"].tolist() == [{"width": 8}, {"width": 16}]
    capsys.readouterr()
    main(["runs", "diff", "run/version_0", "run/version_1"])
    assert ["width", "8", "16"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("kind", LOOPS)
def test_unusual_hparams_such_as_functions_and_recursive_dicts_raise_no_error(kind):
    cycle = {}
    cycle["cycle"] = cycle
    settings = {
        "number": np.float32(0.5),
        "count": np.int64(3),
        "path": Path("data"),
        "dtype": torch.bfloat16,
        "width": Width.SMALL,
        "list": [1, (2, None)],
        "dict": {"a": {"b": True}},
        "tensor": torch.tensor(2),
        "array": np.ones(2),
        "function": len,
        "object": Unprintable(),
        "cycle": cycle,
        7: "seven",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "You defined a `validation_step`")
        train(kind, hparams=settings)
    found = yaml.safe_load(FILE.read_text())["hparams"]
    assert [found[name] for name in ("number", "count", "path", "dtype", "tensor", "7")] == [
        0.5, 3, "data", "torch.bfloat16", 2, "seven",
    ]  # fmt: skip
    assert (found["list"], found["dict"], found["width"]) == ([1, [2, None]], {"a": {"b": True}}, "Width.SMALL")
    assert {*found} == {str(name) for name in settings}


def make_settings():
    class Augment:
        pass

    def schedule(step):
        return 1.0

    names = ["flip", "crop", "jitter"]
    settings = {"fn": schedule, "kind": nn.GELU, "object": Augment(), "act": torch.relu, "lam": [lambda x: x]}
    return settings | {"names": set(names), "frozen": frozenset(names), "nan": math.nan, "nested": {"a": [math.nan]}}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_records_file_names_that_are_not_in_utf_8(kind, monkeypatch):
    # Python reads the Latin-1 file name "café" as this string.
    name = "caf\udce9"
    monkeypatch.setattr("sys.argv", ["train.py", name])
    train(kind, hparams={"file": name, "path": Path(name), "files": {"all": [name]}, "augment": Augment.FLIP})
    found = yaml.safe_load(FILE.read_text())["hparams"]
    assert found == {"file": "caf?", "path": "caf?", "files": {"all": ["caf?"]}, "augment": "flip"}
    about = yaml.safe_load(FILE.with_name("config.yaml").read_text())["about"]
    assert "caf?" in about["command"]
    assert list_runs()["epochs"].tolist() == [1]


@pytest.mark.parametrize("kind", LOOPS)
def test_equal_hparams_are_not_listed_as_changed(kind):
    """Equal objects may have different addresses, and equal sets may have different orders."""
    settings = []
    for version, rate in enumerate((0.1, 0.2)):
        settings.append(make_settings())
        train(kind, hparams={"rate": rate, **settings[-1]}, version=version)
    assert list_runs()["changed"].tolist() == [{"rate": 0.1}, {"rate": 0.2}]
    found = yaml.safe_load(FILE.read_text())["hparams"]
    assert " at 0x" not in str(found)
    assert (found["kind"], found["names"]) == ("GELU", ["crop", "flip", "jitter"])


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("settings", [3, "lr=0.1", [("lr", 0.1)], {"lr"}, dict])
def test_hparams_that_are_not_a_dict_are_refused(kind, settings):
    with pytest.raises((ValueError, TypeError), match="hparams: got .*, expected a dict of your settings"):
        LOOPS[kind](hparams=settings)


@pytest.mark.parametrize("kind", LOOPS)
def test_hparams_that_contradict_hyperparameters_of_the_module_are_refused(kind):
    with pytest.raises(ValueError, match="hparams: got .*rate.*rename"):
        train(kind, WithHyperparameters(rate=0.1), hparams={"rate": 0.2})
    assert not Path("logs").exists()
    train(kind, WithHyperparameters(hidden=8), hparams={"hidden": np.int64(8)})


@pytest.mark.parametrize("kind", LOOPS)
def test_load_from_checkpoint_ignores_hparams_of_the_loop(kind):
    train(kind, WithHyperparameters(hidden=8), hparams={"augment": "flip"})
    path = Path("checkpoints/run/version_0/last.ckpt")
    assert WithHyperparameters.load_from_checkpoint(path).hparams["hidden"] == 8


def test_a_user_defined_logger_gets_the_hparams():
    class Logger:
        def log_metrics(self, metrics, step=None):
            pass

        def log_hyperparams(self, params):
            self.params = dict(params)

    logger = Logger()
    train("FabricLoop", WithHyperparameters(hidden=8), hparams={"path": Path("data")}, logger=[logger, True])
    assert logger.params == {"hidden": 8, "rate": 0.1, "path": "data"}


@pytest.mark.parametrize("kind", LOOPS)
def test_list_runs_shows_an_hparam_with_the_same_name_as_a_loop_option(kind):
    for version, seed in enumerate((1, 2)):
        train(kind, hparams={"seed": seed}, version=version)
    assert list_runs()["changed"].tolist() == [{"seed": 1}, {"seed": 2}]
