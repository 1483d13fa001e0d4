"""The verb tune as it is typed: its table, the file that fit takes, what it leaves out, what it refuses."""

import pickle
import sys

import pytest
import yaml
from clock import Clock

from fabric_template.tools import cli, throughput
from fabric_template.tools import typed as typed_commands
from fabric_template.tools.trying import TypedJob, Written

MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric_template.tools import throughput


class Samples(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Lit(nn.Module):
    def __init__(self, lr: float = 0.001):
        super().__init__()
        self.lr, self.net = lr, nn.Linear(2, 1)

    def training_step(self, batch):
        throughput.time.sleep(0.01)  # for a batch, however large it is
        return (self.net(batch / 256) - 1).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}

    def validation_step(self, batch):
        return self.training_step(batch)


class Data:
    def __init__(self, batch_size: int = 16):
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=self.batch_size)

    val_dataloader = train_dataloader


class Deaf(Data):
    def __init__(self, batch_size: int = 16):
        super().__init__()


class NoRate(Lit):
    def __init__(self):
        super().__init__()


def nothing():
    raise ValueError("inside the constructor")
"""
WHAT = ["--model", "mine_to_tune:Lit", "--accelerator", "cpu"]
QUICK = ["--seconds", "0.1", "--only", "batch_size", "--max_batch_size", "32"]


@pytest.fixture(autouse=True)
def typed(monkeypatch, tmp_path):
    """As if typed in a shell, in a folder with a module of the user's own, whose steps are all that takes time."""
    monkeypatch.setattr(throughput, "time", Clock())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fabric-template"])
    monkeypatch.setattr(typed_commands.shutil, "which", lambda name: None)
    (tmp_path / "mine_to_tune.py").write_text(MODULE)
    yield
    sys.modules.pop("mine_to_tune", None)


def test_the_file_is_what_fit_takes(tmp_path, capsys):
    words = [*WHAT, "--data", "mine_to_tune:Data", "--data.batch_size", "16"]
    assert cli.main(["tune", *words, *QUICK, "--csv", "trials.csv"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "tuned.yaml").read_text()) == {
        "data": {"class": "mine_to_tune:Data", "batch_size": 32}
    }
    lines = out.splitlines()
    names = [
        "",
        "as it is",
        "batch size 32",
        "as it is, again",
        "kept",
        "as it is, again",
        "all that pays, again",
        "as written",
    ]
    assert [line[:34].strip().partition("   ")[0] for line in lines[: len(names)]] == names
    told = " ".join(WHAT) + " --data mine_to_tune:Data"
    assert lines[len(names) + 1 :] == [
        "other       the numbers change: batch size 32",
        "table       trials.csv",
        "config      tuned.yaml: data.batch_size",
        f"train       fabric-template fit {told} --config tuned.yaml",
        "then        the steps are fewer and larger: the learning rate is to be found again (--lr)",
    ]
    assert len((tmp_path / "trials.csv").read_text().splitlines()) == 1 + 6
    command = [*told.split(), "--config", "tuned.yaml", "--max_epochs", "1", "--enable_progress_bar", "false"]
    assert cli.main(["fit", *command]) == 0
    assert "1 epochs, 8 steps" in capsys.readouterr().out.replace("1 epoch,", "1 epochs,")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".yaml", ".csv")) == [
        "trials.csv",
        "tuned.yaml",
    ]


def test_an_argument_that_is_not_heeded_is_a_line_instead(tmp_path, capsys):
    assert cli.main(["tune", *WHAT, "--data", "mine_to_tune:Deaf", *QUICK, "--out", "other.yaml"]) == 0
    out = capsys.readouterr().out
    assert "note        the file leaves out data.batch_size=32: the parts took it, and were as before" in out
    assert "write       DataLoader(..., batch_size=32); the steps are fewer and larger" in out
    assert "config" not in out
    assert not (tmp_path / "other.yaml").exists()


def test_the_words_of_a_file_and_what_was_typed_in_their_place(tmp_path):
    job = TypedJob([*WHAT, "--data", "mine_to_tune:Data", "--precision", "32-true", "--max_epochs", "3"], "")
    written = Written(
        job, {"threads": 1, "tensors": True, "precision": "bf16-mixed", "compile": True, "batch_size": 64}
    )
    assert written.names == {"precision", "compile", "batch_size"}
    assert written.text().splitlines() == [
        "# written by fabric-template tune, for fit --config",
        "precision: bf16-mixed  # other numbers: layers compute in bfloat16, of which three digits are right",
        "compile: true  # other numbers: operations are put together: other last digits",
        "data:",
        "  class: mine_to_tune:Data",
        "  batch_size: 64  # other numbers: the steps are fewer and larger: the learning rate is to be found again (--lr)",
    ]
    typed = f"{' '.join(WHAT)} --data mine_to_tune:Data --max_epochs 3 --config tuned.yaml"
    assert written.command("tuned.yaml") == f"fabric-template fit {typed}"
    (tmp_path / "tuned.yaml").write_text(written.text())
    read = TypedJob(typed.split(), "")
    words = read.words(str(tmp_path))
    assert (words["precision"], words["compile"]) == ("bf16-mixed", True)
    assert read.parts()[1]["train_dataloaders"].batch_size == 64


def test_a_learning_rate(tmp_path, capsys):
    words = [*WHAT, "--data", "mine_to_tune:Data", "--lr", "--lr_steps", "40", "--lr_min", "1e-4"]
    assert cli.main(["tune", *words]) == 0
    out = capsys.readouterr().out
    rate = float(out.partition("suggested   ")[2].partition(":")[0])
    assert 1e-3 < rate < 5
    assert f"fit {' '.join(WHAT)} --data mine_to_tune:Data --model.lr {rate:.3g}\n" in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "mine_to_tune.py",
        "__pycache__",
        "tuned_lr.png",
        "tuned_lr.csv",
    } - (set() if (tmp_path / "__pycache__").exists() else {"__pycache__"})


def test_a_job_that_travels_is_read_again(tmp_path):
    job = pickle.loads(pickle.dumps(TypedJob([*WHAT, "--data", "mine_to_tune:Data", "--seed", "7"], "")))
    words = job.words(str(tmp_path), precision="bf16-mixed")
    chosen = {"precision": "bf16-mixed", "seed": 7, "accelerator": "cpu", "logger": False, "max_epochs": -1}
    assert {word: words[word] for word in chosen} == chosen
    model, given = job.parts()
    assert type(model).__name__ == "Lit"
    assert type(given["train_dataloaders"]).__name__ == "Data"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "warp"], "tune: there is no 'warp' to try: expected some of threads, workers, pin_memory"),
        (["--only", "precision", "--same_numbers"], "tune: precision changes the numbers: leave it out, or"),
        (["--seconds", "0"], "--seconds 0: expected a number above 0"),
        (["--max_batch_size", "many"], "tune: argument --max_batch_size: invalid int value: 'many'"),
        (["--lr", "--only", "workers"], "--lr with --only: a learning rate is found by itself; type one of them"),
        (["--lr", "--lr_min", "1", "--lr_max", "0.1"], "lr from 1 to 0.1: expected two rates above 0"),
        (["--out", "lost/tuned.yaml"], "--out lost/tuned.yaml: there is no folder 'lost'; make it first"),
        (["--max_epoch", "3"], "tune has no option --max_epoch: did you mean --max_epochs?"),
        (["--model", "mine_to_tune:nothing"], "tune: the training fails as it is (ValueError: inside the constructor)"),
    ],
)
def test_what_is_refused(words, says, tmp_path, capsys):
    assert cli.main(["tune", *WHAT, "--data", "mine_to_tune:Data", *words]) == 2
    assert f"fabric-template: {says}" in capsys.readouterr().err
    assert {path.suffix for path in tmp_path.iterdir()} <= {".py", ""}


def test_help(capsys):
    assert cli.main(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Find what makes a training faster on this machine, or with --lr a learning rate for it.\n" in out
    assert "fabric-template tune --lr" in out
