"""Test that config.yaml records the command, the code, versions, device, model and optimizer."""

import os
import subprocess
import sys
import time
from pathlib import Path

import lightning
import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from modules import make_loader
from parameters import halve, once
from torch import nn

import fabric_template
from fabric_template import FabricLoop, MiniLoop, list_runs, mini
from fabric_template.loggers import run_config
from fabric_template.tools.cli import main

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}


@pytest.fixture(autouse=True)
def clear_git_cache():
    run_config.read_git.cache_clear()
    mini.read_git.cache_clear()


def training_step(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def make_loop(kind, **options):
    if kind == "FabricLoop":
        options = {"enable_progress_bar": False, "enable_model_summary": False, **options}
    return LOOPS[kind](**{"max_epochs": 1, "accelerator": "cpu", **options})


def train(kind, optimizer=torch.optim.SGD, scheduler=None, batch_size=4, lr=0.1, val=None, **options):
    """Train with step functions. Return the section "about" of config.yaml."""
    loop, net = make_loop(kind, **options), nn.Linear(8, 3)
    optimizer = optimizer(net.parameters(), lr=lr)
    scheduler = scheduler(optimizer) if scheduler else None
    steps = {"training_step": training_step, "validation_step": training_step if val else None}
    loop.fit(net, make_loader(8, batch_size), val, optimizer=optimizer, scheduler=scheduler, **steps)
    return yaml.safe_load(Path(loop.log_dir, "config.yaml").read_text())["about"]


@pytest.fixture(autouse=True)
def in_a_script(monkeypatch):
    """Make each test run as in a script, even after a test that has imported ipykernel."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


@pytest.mark.parametrize("kind", LOOPS)
def test_config_yaml_describes_how_and_where_a_run_was_trained(kind, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "my digits"])
    about = train(kind, torch.optim.Adam, batch_size=2)
    assert about["command"] == "train.py --data 'my digits'"
    assert about["versions"] == {
        "fabric_template": fabric_template.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    assert (about["device"], about["processes"], about["batch_size"]) == ("cpu", 1, 2)
    assert about["model"] == {"class": "Linear", "parameters": 27}
    optimizer = about["optimizer"]
    assert [optimizer[name] for name in ("class", "lr", "betas")] == ["Adam", 0.1, [0.9, 0.999]]


@pytest.mark.parametrize("kind", LOOPS)
def test_config_yaml_records_the_learning_rate_that_the_optimizer_was_given(kind):
    def warm_up(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01)

    assert train(kind, scheduler=warm_up)["optimizer"]["lr"] == 0.1


@pytest.mark.parametrize("kind", LOOPS)
def test_config_yaml_lists_the_learning_rates_of_all_parameter_groups(kind):
    def by_group(parameters, lr):
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": lr / 10}], lr=lr)

    optimizer = train(kind, by_group)["optimizer"]
    assert (optimizer["lr"], optimizer["momentum"]) == ([0.1, 0.01], 0)


@pytest.mark.parametrize("kind", LOOPS)
def test_config_yaml_records_the_commit_and_the_number_of_changed_files(kind):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    Path("train.py").write_text("lr = 0.1\n")
    subprocess.run([*git, "add", "train.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "Add training"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    commit = commit.stdout.strip()
    assert train(kind)["git"] == {"commit": commit, "changed_files": 0}
    Path("train.py").write_text("lr = 0.2\n")
    run_config.read_git.cache_clear()
    mini.read_git.cache_clear()
    assert train(kind)["git"] == {"commit": commit, "changed_files": 1}


@pytest.mark.parametrize(
    ("kind", "content"), once(LOOPS, [None, "#!/bin/sh\nexec sleep 30\n", "#!/bin/sh\nexit 128\n"])
)
def test_problems_with_the_git_command_do_not_stop_a_run(kind, content, monkeypatch):
    Path("bin").mkdir()
    path = os.path.abspath("bin")
    if content is not None:
        Path("bin/git").write_text(content)
        Path("bin/git").chmod(0o755)
        path += f"{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    started = time.monotonic()
    about = train(kind)
    assert not about["git"]
    assert time.monotonic() - started < 10
    assert about["optimizer"]["lr"] == 0.1


@pytest.mark.parametrize("kind", LOOPS)
def test_unusual_optimizer_arguments_do_not_stop_a_run(kind):
    class Unusual(torch.optim.SGD):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr=lr)
            self.defaults |= {"not in a group": object(), 7: object()}

    assert train(kind, Unusual)["optimizer"]["lr"] == 0.1


def test_mini_py_has_the_same_version_as_the_package():
    assert fabric_template.__version__ == mini.VERSION


# Settings that list_runs shows because they differ between runs


class Module(LightningModule):
    def __init__(self, rate):
        super().__init__()
        self.net, self.rate = nn.Linear(8, 3), rate

    def training_step(self, batch, batch_idx):
        return training_step(self.net, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", training_step(self.net, batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.rate)


def train_with_functions(kind, lr):
    train(kind, lr=lr, val=make_loader(8))


def train_a_module(kind, lr):
    make_loop(kind).fit(Module(lr), make_loader(8), make_loader(8))


def train_a_trial(kind, lr):
    # This function imitates the objective of an Optuna study, which passes trial.params as hparams.
    train(kind, hparams={"rate": lr}, version=round(10 * lr), val=make_loader(8))


WAYS = [train_with_functions, train_a_module, train_a_trial]


@pytest.mark.parametrize(("kind", "way"), halve(LOOPS, WAYS))
def test_list_runs_shows_learning_rates_that_differ_between_runs(kind, way, capsys):
    for rate in (0.1, 0.4):
        way(kind, rate)
    runs = list_runs().sort_values("best")
    name = "rate" if way is train_a_trial else "lr"
    assert sorted(changed[name] for changed in runs["changed"]) == [0.1, 0.4]
    assert runs["best"].notna().all()
    assert not {*runs["changed"][0]} - {"rate", "lr"}
    capsys.readouterr()
    main(["runs"])
    assert f"{name}=0.4" in capsys.readouterr().out


def test_list_runs_does_not_compare_optimizer_arguments_that_only_one_run_has():
    train("FabricLoop", torch.optim.SGD)
    train("FabricLoop", torch.optim.Adam)
    assert list_runs()["changed"].tolist() == [{"optimizer": "SGD"}, {"optimizer": "Adam"}]


def test_a_hand_written_loop_writes_hparams_yaml():
    loop = make_loop("FabricLoop", hparams={"width": 8})
    loop.setup(nn.Linear(8, 3))
    assert not Path("logs").exists()
    loop.log_dict({"epoch": 0, "val_loss": 0.5})
    hparams = yaml.safe_load(Path(loop.own_logger.log_dir, "hparams.yaml").read_text())["hparams"]
    assert hparams == {"width": 8}


def test_the_runs_diff_command_shows_the_commands_and_batch_sizes_of_two_runs(capsys, monkeypatch):
    for batch_size, name in ((2, "a.py"), (4, "b.py")):
        monkeypatch.setattr(sys, "argv", [name])
        train("MiniLoop", batch_size=batch_size)
    capsys.readouterr()
    main(["runs", "diff", "run/version_0", "run/version_1"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["batch_size", "2", "4"] in lines
    assert ["command", "a.py", "b.py"] in lines
