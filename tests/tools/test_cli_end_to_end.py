"""What a training prints at its end, the commands that it names, and what Ctrl-C leaves behind."""

import re
import shlex
import signal
from pathlib import Path

import pytest
from clock import DURATION
from test_cli import FIT, LIT, QUIET, run, typed  # noqa: F401

SMALL = ["--accelerator", "cpu", "--devices", 1, *QUIET]


def lines(out):
    """Return the lines at the end of a training by their first word."""
    return dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", out, re.MULTILINE))


def test_the_default_trains_the_digits_and_names_the_next_commands(capsys):
    code, out, _ = run(capsys, "fit", "--max_epochs", 1, *SMALL)
    told = lines(out)
    folder = "logs/digits/version_0"
    assert code == 0
    assert re.fullmatch(rf"DigitsClassifier on DigitsData: 1 epoch, 20 steps, {DURATION}", told["trained"])
    assert re.fullmatch(r"val_acc 0\.\d+ in epoch 0", told["best"])
    assert (told["log"], told["picture"]) == (f"{folder}/metrics.csv", f"{folder}/history.png")
    assert all(Path(told[word]).stat().st_size for word in ("log", "picture", "checkpoint"))
    assert told["resume"] == f"fabric-template fit --run {folder} --resume last --max_epochs 2"
    assert told["validate"] == f"fabric-template validate --run {folder} --load best"
    assert told["plot"] == f"fabric-template plot {folder}"
    code, out, _ = run(capsys, *shlex.split(told["resume"])[1:])
    assert (code, "2 epochs, 40 steps" in out) == (0, True)
    assert len(Path(folder, "metrics.csv").read_text().splitlines()) == 3
    code, out, _ = run(capsys, *shlex.split(told["validate"])[1:])
    assert (code, "val_acc" in out) == (0, True)


def test_without_logs_no_command_is_named_that_needs_them(capsys):
    code, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--logger", "false")
    assert code == 0
    assert {"trained", "checkpoint"} <= {*lines(out)}
    assert not {"resume", "validate", "plot", "picture"} & {*lines(out)}


def test_print_config_has_the_options_of_the_demo(capsys):
    out = run(capsys, "fit", "--print_config")[1]
    for line in ("max_epochs: 10", "name: digits", "monitor: val_acc", "mode: max", "seed: 0"):
        assert f"{line}\n" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_names_the_command_to_continue(capsys, number):
    step = f"        signal.raise_signal({number:d})\n        return super().training_step(batch)\n"
    stops = f"class Stops(Lit):\n    def training_step(self, batch):\n{step}"
    Path("lit.py").write_text(f"import signal\n{LIT}\n\n{stops}")
    argv = [*QUIET, "--max_epochs", 3, "--save_every_n_steps", 1]
    code, _, err = run(capsys, "fit", "--model", "lit:Stops", *FIT[3:], *argv)
    assert code == 128 + number
    assert "'checkpoints/run/version_0/last.ckpt' is saved" in err
    command = "fabric-template fit --run logs/run/version_0 --resume last"
    assert err.endswith(f"\ninterrupted; continue with\n{command}\n")
