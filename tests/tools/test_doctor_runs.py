"""The doctor reads what a run has left: what its figures show is said, and nothing else."""

import math
from pathlib import Path

import pytest

from fabric_template import CSVLogger
from fabric_template.tools.cli import main
from fabric_template.tools.doctor import read_run

NAN = math.nan


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def leave(end="finished", words=None, **columns):
    """What a run leaves, without training."""
    logger = CSVLogger("logs", name="digits")
    epochs = max((len(values) for values in columns.values()), default=0)
    logger.log_hyperparams({"config": {"max_epochs": max(epochs, 1), "max_steps": -1, **(words or {})}})
    for i in range(epochs):
        logger.log_epoch({"epoch": i, "step": 10 * (i + 1), **{name: values[i] for name, values in columns.items()}})
    Path(logger.log_dir, ".lock").write_text(f"17\n{end}\n")
    return logger.log_dir


FALLING = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3]
SOUND = {"train_loss": FALLING, "val_loss": [1.1, 0.9, 0.7, 0.6, 0.5, 0.51], "lr": [0.1] * 6}


@pytest.mark.parametrize(
    ("changed", "what", "write"),
    [
        ({"train_loss": [1.0, 2.0, NAN, NAN, NAN, NAN]}, "train_loss is not finite from epoch 2 on",
         "a lower learning rate, gradient_clip_val=1.0; detect_anomaly=True names the operation"),
        ({"val_loss": [1.0, math.inf, 0.5, 0.4, 0.3, 0.3]}, "val_loss is not finite in epoch 1",
         "a lower learning rate, gradient_clip_val=1.0; detect_anomaly=True names the operation"),
        ({"lr": [0.0] * 6}, "lr is 0 in all epochs: nothing is trained",
         "the scheduler's warm-up, or lr=, of the optimizer"),
        ({"train_loss": [0.7] * 6}, "train_loss is 0.7 in all 6 epochs: nothing is learned",
         "requires_grad of the parameters, what the optimizer was given, and lr="),
        ({"train_loss": [1.0, 1.2, 1.5, 1.4, 1.6, 2.0]},
         "train_loss rises: 1 in the first epoch, 2 in the last, never below the first", "a lower learning rate, or warm-up"),
        ({"val_loss": [0.5, 0.6, 0.7, 0.7, 0.8, 0.9]}, "val_loss was best in the first epoch (0.5) and is 0.9 in the last",
         "a lower learning rate; best.ckpt has the first epoch's weights"),
        ({"words": {"monitor": "val_acc"}},
         "monitor='val_acc' was never logged, so that no checkpoint is the best; logged were train_loss, val_loss, lr",
         "monitor='val_loss'"),
    ],
)  # fmt: skip
def test_what_is_wrong(changed, what, write, capsys):
    folder = leave(**{**SOUND, **changed})
    (fact,) = read_run(folder)
    assert (fact.what, fact.write, fact.is_advice) == (what, write, False)
    assert main(["doctor", folder]) == 1
    assert capsys.readouterr().out == (
        f"run         digits/version_0, finished, 6 epochs\nwrong       {what}\nwrite       {write}\n"
    )


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"train_loss": FALLING}, "nothing was ever validated: only the training's own figures are known"),
        ({**SOUND, "val_loss": [0.9, 0.6, 0.5, 0.6, 0.7, 0.8]},
         "it overfits: val_loss was 0.5 in epoch 2 and is 0.8 in the last, while the training's loss fell"),
    ],
)  # fmt: skip
def test_advice_leaves_the_exit_code(columns, what, capsys):
    folder = leave(**columns)
    (fact,) = read_run(folder)
    assert (fact.what, fact.is_advice) == (what, True)
    assert main(["doctor", folder]) == 0
    assert f"consider    {what}" in capsys.readouterr().out


def test_a_run_that_was_cut(monkeypatch):
    monkeypatch.setattr("fabric_template.tools.finished.program", lambda: "fabric-template")
    folder = leave("failed", {"max_epochs": 10}, **SOUND)
    (fact,) = read_run(folder)
    assert (fact.what, fact.write) == ("it failed after 6 of 10 epochs", "begin it again, it left no last.ckpt")
    last = Path("checkpoints/digits/version_0/last.ckpt")
    last.parent.mkdir(parents=True)
    last.write_bytes(b"PK\x03\x04 something PK\x05\x06" + 18 * b"\0")
    (fact,) = read_run(folder)
    assert fact.write == "fabric-template fit --run logs/digits/version_0 --resume last"
    Path(folder, ".lock").write_text("17\n")
    (fact,) = read_run(folder)
    assert fact.what == "it was interrupted, or killed, after 6 of 10 epochs"
    last.write_bytes(b"")
    assert [fact.what for fact in read_run(folder)] == ["last.ckpt is cut off or altered"]


@pytest.mark.parametrize(
    "columns",
    [
        SOUND,
        {"train_loss": [0.5], "val_loss": [0.6]},
        {"train_loss": [0.5, 0.52, 0.51], "val_loss": [0.5, 0.6, 0.7]},  # three epochs say little
        {"train_loss": [-1.0, -2.0, -3.0, -4.0, -5.0], "val_loss": [-1.0, -2.0, -3.0, -4.0, -5.0]},
        {"train_loss": FALLING, "val_acc": [0.1, 0.2, 0.3, 0.9, 0.8, 0.8]},
        {"train_loss": FALLING, "val_loss": [0.9, 0.8, 0.5, 0.52, 0.51, 0.53], "lr": [0.0, 0.1, 0.1, 0.1, 0.1, 0.0]},
    ],
)
def test_a_sound_run_has_no_remark(columns, capsys):
    folder = leave(**columns)
    assert read_run(folder) == []
    assert main(["doctor", "digits/version_0"]) == 2  # a folder is asked for
    capsys.readouterr()
    assert main(["doctor", folder]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["sound       its figures show nothing that is wrong"]


def test_no_run():
    assert main(["doctor", "."]) == 2
