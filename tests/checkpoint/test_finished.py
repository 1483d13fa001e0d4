"""A run that had come to its end and is started again, as by a scheduler that requeues, stays as it ended."""

import shutil
import time

import fabric_template.process.signals
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from modules import Classifier, make_loader
from runs import assert_same_end, fit, logs_of, tree, val_loader
from torch import nn


class Flat(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)


class Watch(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, *_):
        self.seen.append(trainer.global_step)

    def on_validation_start(self, trainer, *_):
        self.seen.append("validation")


class WithBatchNorm(Classifier):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


def files(root):
    """Every file with its bytes; a checkpoint with the time at which it was written."""
    names = {name: root / name for name in tree(root)}
    return {n: (p.read_bytes(), p.stat().st_mtime_ns * (p.suffix == ".ckpt")) for n, p in names.items()}


def twice(root, make, capsys, said, changes=(), callbacks=list, seen=(), **words):
    """Fit with resume="auto", then the same again: nothing is trained, written or different, and a line says so."""
    train = lambda: make_loader(24)  # noqa: E731
    words = {"resume": "auto", "log_every_n_steps": 2, **words}
    first = fit(root, make, train, val_loader, callbacks=callbacks(), **words)
    for _ in range(2):
        before, watch = files(root), Watch()
        capsys.readouterr()
        again = fit(root, make, train, val_loader, seed=9, callbacks=[*callbacks(), watch], **words)
        assert_same_end(first, again)
        assert [name for name, found in files(root).items() if found != before.get(name)] == list(changes)
        lines = [line for line in capsys.readouterr().err.splitlines() if "finished" in line]
        assert lines == [f"resume: '{root}/checkpoints/run/version_0/last.ckpt' is of a finished run {said}"]
        assert watch.seen == list(seen)
    return first


STOPS = {"callbacks": lambda: [EarlyStopping("val_loss", patience=2)], "max_epochs": 9}
SAYS = "nothing is trained: should_stop was set (EarlyStopping on 'val_loss'); resume='last' goes on all the same"


def test_early_stopping(tmp_path, capsys):
    first = twice(tmp_path, Flat, capsys, f"(epoch 3, step 18), {SAYS}", **STOPS)
    assert first[0].current_epoch == 3
    more = dict(
        STOPS, callbacks=STOPS["callbacks"](), train=lambda: make_loader(24), val=val_loader, log_every_n_steps=2
    )
    assert_same_end(first, fit(tmp_path, Flat, resume="auto", **{**more, "max_epochs": 12}))
    loop, _, history = fit(tmp_path, Flat, resume="last", **more)  # that is a wish
    assert loop.current_epoch == len(history) == 4


def test_early_stopping_in_the_middle_of_an_epoch(tmp_path, capsys):
    """last.ckpt is of before the end of the epoch; its end comes once more, and is the same."""
    changed = ["logs/run/version_0/metrics.csv"]  # for the seconds of its last row
    first = twice(tmp_path, Flat, capsys, f"(epoch 2, step 16), {SAYS}", changed, val_check_interval=4, **STOPS)
    assert first[2]["step"].tolist() == [6, 12, 16]


def test_min_epochs(tmp_path):
    """To stop was decided before a kill, and is not forgotten: the run ends as soon as it may."""

    class Stops(Callback):
        def on_train_epoch_end(self, trainer, *_):
            trainer.should_stop |= trainer.current_epoch == 0

    class Copy(Callback):
        def on_train_epoch_start(self, trainer, *_):
            if trainer.current_epoch == 2:
                shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    words = {"train": lambda: make_loader(24), "min_epochs": 4, "max_epochs": 9}
    whole = fit(tmp_path / "whole", callbacks=[Stops(), Copy()], **words)
    assert whole[0].current_epoch == 4
    for resume in ("last", "auto"):
        root = shutil.copytree(tmp_path / "killed", tmp_path / resume)
        assert_same_end(whole, fit(root, callbacks=[Stops()], seed=9, resume=resume, **words))
        assert logs_of(root) == logs_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("make", "average"),
    [
        (Classifier, WeightAveraging),
        (Classifier, lambda: EMAWeightAveraging(decay=0.5)),
        (Classifier, lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1)),
        (WithBatchNorm, lambda: EMAWeightAveraging(decay=0.5)),
        (WithBatchNorm, lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1)),
    ],
    ids=["average", "EMA", "SWA", "EMA+BatchNorm", "SWA+BatchNorm"],
)
@pytest.mark.filterwarnings("ignore:SWA is initializing", "ignore:Detected call of `lr_scheduler")
def test_averaged_weights(tmp_path, capsys, make, average):
    epochs = 4 if make is WithBatchNorm and average().__class__ is StochasticWeightAveraging else 3  # one for BatchNorm
    said = f"(epoch {epochs}, step {15 + epochs}), nothing is trained: max_epochs={epochs} is reached; more max_epochs go on"
    twice(tmp_path, make, capsys, said, callbacks=lambda: [average()], max_epochs=3)


@pytest.mark.filterwarnings("ignore:SWA is initializing", "ignore:Detected call of `lr_scheduler")
def test_early_stopping_while_weights_are_averaged(tmp_path, capsys):
    """The scheduler that was put in the others' place is there again."""
    both = lambda: [EarlyStopping("val_loss", patience=2), StochasticWeightAveraging(0.1, swa_epoch_start=1)]  # noqa: E731
    first = twice(tmp_path, Flat, capsys, f"(epoch 3, step 18), {SAYS}", **dict(STOPS, callbacks=both))
    assert [type(config.scheduler).__name__ for config in first[0].lr_scheduler_configs] == ["SWALR"]


@pytest.mark.parametrize(("steps", "place"), [(12, "epoch 2, step 12"), (8, "epoch 1, step 8")])
def test_max_steps(tmp_path, capsys, steps, place):
    said = f"({place}), nothing is trained: max_steps={steps} is reached; more max_steps go on"
    changed = ["logs/run/version_0/metrics.csv"] if steps == 8 else []
    first = twice(tmp_path / "cut", Classifier, capsys, said, changed, max_steps=steps, max_epochs=4)
    assert first[0].global_step == steps
    more = {
        "train": lambda: make_loader(24),
        "val": val_loader,
        "max_steps": 15,
        "max_epochs": 4,
        "log_every_n_steps": 2,
    }
    whole = fit(tmp_path / "whole", **more)
    assert_same_end(whole, fit(tmp_path / "cut", seed=9, resume="auto", **more))


class Late(Callback):
    """An hour goes by at one step."""

    def __init__(self, patch, at, hook):
        self.patch, self.at = patch, at
        setattr(self, hook, self.pass_an_hour)

    def pass_an_hour(self, trainer, *_):
        if trainer.global_step == self.at:
            now = time.monotonic
            self.patch.setattr(fabric_template.process.signals.time, "monotonic", lambda: now() + 3600)


@pytest.mark.parametrize(
    ("at", "hook", "place"),
    [(8, "on_train_batch_end", "epoch 1, step 8"), (12, "on_train_epoch_end", "epoch 2, step 12")],
    ids=["in_an_epoch", "between_epochs"],
)
def test_max_time(tmp_path, monkeypatch, capsys, at, hook, place):
    """Time that was trained before counts, as for Trainer: a requeue does not begin another hour. More time goes on."""
    said = f"({place}), nothing is trained: max_time='00:01:00:00' is over; more max_time goes on"
    changed = ["logs/run/version_0/metrics.csv"] if at == 8 else []
    late = lambda: [Late(monkeypatch, at, hook)]  # noqa: E731
    words = {"max_epochs": 4, "log_every_n_steps": 2}
    seen = ["validation"] if at == 8 else []  # which comes after what is saved
    first = twice(tmp_path / "cut", Classifier, capsys, said, changed, late, seen, max_time="00:01:00:00", **words)
    monkeypatch.undo()
    assert first[0].global_step == at
    assert "val_loss" in first[2]
    words |= {"train": lambda: make_loader(24), "val": val_loader}
    whole = fit(tmp_path / "whole", **words)
    monkeypatch.chdir(tmp_path)
    assert_same_end(whole, fit(tmp_path / "cut", seed=9, resume="auto", max_time="00:03:00:00", **words))


def test_a_timer_that_is_over(tmp_path, capsys):
    timer = lambda: [Timer({"microseconds": 1})]  # noqa: E731
    said = "(epoch 0, step 1), nothing is trained: should_stop was set; resume='last' goes on all the same"
    twice(tmp_path, Classifier, capsys, said, ["logs/run/version_0/metrics.csv"], timer, max_epochs=3)


def test_what_an_end_of_ones_own_has_done(tmp_path, capsys):
    """It cannot be known; the line says whose."""

    class Halves(Callback):
        def on_train_end(self, trainer, module):
            with torch.no_grad():
                module.net[0].weight *= 0.5

    fit(tmp_path, max_epochs=1, callbacks=[Halves()])
    fit(tmp_path, max_epochs=1, callbacks=[Halves()], resume="auto")
    assert capsys.readouterr().err.endswith(
        "max_epochs=1 is reached; more max_epochs go on. What on_train_end of Halves does is not done again\n"
    )
