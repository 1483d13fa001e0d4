"""What a run of the command line says at its end, what it lets one type next, and what it does not do in silence."""

import re
import signal
from pathlib import Path

import pytest
import yaml
from test_cli import FIT, LIT, QUIET, refused, run, typed  # noqa: F401

from fabric_template.files.reading import read_checkpoint

SMALL = ["--limit_train_batches", 2, "--limit_val_batches", 1, "--accelerator", "cpu", "--devices", 1]


def line(out, word):
    """What stands behind a word of the summary."""
    return re.search(rf"^{word} +(.*)$", out, re.MULTILINE)[1]


def words(command):
    return command.removeprefix("fabric-template ").split()


@pytest.mark.filterwarnings("ignore:The training loss is not finite")
def test_the_end_shows_each_metric_with_the_epoch_that_it_is_of(capsys):
    """Not measured in the last epoch: named with its own; measured, and no number: that."""
    _, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 3, "--check_val_every_n_epoch", 2, "--monitor", "val_loss")
    assert re.fullmatch(r"train_loss 0\.\d{4}, val_loss \d\.\d{4} \(epoch 1\)", line(out, "at the end"))
    assert re.fullmatch(r"val_loss \d\.\d{4} in epoch 1", line(out, "best"))
    _, out, _ = run(
        capsys, *FIT, *QUIET, "--max_epochs", 3, "--model.lr", "1e20", "--name", "lost", "--monitor", "val_loss"
    )
    assert line(out, "at the end") == "train_loss nan, val_loss nan"
    assert "\nbest " not in out


def test_numbers_have_their_plural(capsys):
    _, out, _ = run(capsys, *FIT, *QUIET, "--max_steps", 1)
    assert line(out, "trained").startswith("Lit on Data: 1 epoch, 1 step, ")
    assert line(out, "ended") == "in epoch 0, after step 1: max_steps=1 is reached"  # below the lines of epochs; and
    assert "\nended       max_steps=1 is reached\n" in out
    assert line(out, "device") == "cpu, 32-true"


def test_a_run_with_options_of_the_model_is_validated_as_printed(capsys):
    code, out, _ = run(capsys, "fit", *SMALL, *QUIET, "--max_epochs", 1, "--model.hidden", 32)
    command = line(out, "validate")
    assert command == "fabric-template validate --load best --accelerator cpu --devices 1 --model.hidden 32"
    code, out, _ = run(capsys, *words(command), "--limit_val_batches", 1)
    assert (code, "val_loss" in out) == (0, True)
    for verb, word in (("validate", "load"), ("fit", "resume")):
        error = refused(capsys, verb, f"--{word}", "last")
        assert "is of another model: 3 differences: 'net.9.weight' has shape (32, 1024) in the file" in error
        assert error.endswith(": repeat the --model.* options that its fit was given, or give its folder as --run")


def test_several_files_of_options_go_together(capsys):
    """A later one wins, word by word, what is typed beats all, and all are named in what goes on."""
    Path("base.yaml").write_text(
        "model: {class: lit:Lit, hidden: 5, lr: 0.2}\ndata: lit:Data\nmax_epochs: 7\nname: base\n"
    )
    Path("more.yaml").write_text("model: {hidden: 6}\nmax_epochs: 1\naccelerator: cpu\n")
    files = ["--config", "base.yaml", "--config", "more.yaml"]
    _, printed, _ = run(capsys, "fit", *files, "--name", "typed", "--print_config")
    found = yaml.safe_load(printed)
    assert (found["model"]["hidden"], found["model"]["lr"], found["max_epochs"], found["name"]) == (6, 0.2, 1, "typed")
    _, out, _ = run(capsys, "fit", *files, *QUIET)
    assert read_checkpoint("checkpoints/base/version_0/last.ckpt")["state_dict"]["net.0.weight"].shape == (6, 4)
    go_on = "--resume last --config base.yaml --config more.yaml --enable_model_summary false --max_epochs 2"
    assert line(out, "go on") == f"fabric-template fit {go_on}"
    assert line(out, "validate") == "fabric-template validate --load last --config base.yaml --config more.yaml"
    Path("other.yaml").write_text("model: {class_path: lit.Broken}\n")
    _, printed, _ = run(capsys, "fit", *files, "--config", "other.yaml", "--print_config")
    assert yaml.safe_load(printed)["model"]["hidden"] == 3  # another model's arguments are not this one's


def test_data_of_ones_own_do_not_train_the_digits_net(capsys):
    line = "--data lit:Data without --model: expected --model package.module:Class, too"
    assert refused(capsys, "fit", "--data", "lit:Data") == line
    Path("run.yaml").write_text("data: lit:Data\n")
    assert refused(capsys, "fit", "--config", "run.yaml") == line
    assert "--model PACKAGE.MODULE:CLASS" in run(capsys, "fit", "--data", "lit:Data", "--help")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_says_what_is_saved_and_what_to_type(capsys, number):
    step = f"        signal.raise_signal({number:d})\n        return super().training_step(batch)\n"
    Path("lit.py").write_text(f"import signal\n{LIT}class Stops(Lit):\n    def training_step(self, batch):\n{step}")
    code, _, err = run(
        capsys, "fit", "--model", "lit:Stops", *FIT[3:], *QUIET, "--max_epochs", 3, "--save_every_n_steps", 1
    )
    name = signal.Signals(number).name
    assert code == 128 + number
    assert err == (
        f"{name}: stopping after this step; again to stop at once\n"
        f"{name}: training stops in epoch 0, after step 1; 'checkpoints/run/version_0/last.ckpt' is saved: resume='last'"
        " goes on after step 1\n\ninterrupted; go on with\nfabric-template fit --resume last --model lit:Stops --data lit:Data"
        " --accelerator cpu --devices 1 --enable_model_summary false --max_epochs 3 --save_every_n_steps 1\n"
    )


def test_data_without_a_loader_for_the_verb_is_told_which(capsys):
    Path("lit.py").write_text(LIT.replace("val_dataloader = test_dataloader = predict_dataloader", "val_dataloader"))
    error = run(capsys, "predict", *FIT[1:])[2].strip()
    assert error.endswith(
        "predict has no predict loader; give --data package.module:Class, or write a method predict_dataloader in Data"
    )
