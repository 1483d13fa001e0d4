"""Sums that are taken further together, as the next batch begins: Trainer's bits, whatever comes between."""

import random
from functools import partial

import pytest
import torch
from modules import Classifier, make_loader, run_loop, run_trainer
from runs import Plain, fit, same
from torchmetrics import MeanMetric

from fabric_template.record.entries import Together
from fabric_template.record.metrics import Metrics

NAMES = ("one", "two", "three")


class Odd(Classifier):
    """Logs names that come and go, twice in a batch, of other dtypes and sizes, and changes what it has logged."""

    def on_train_start(self):
        self.random, self.running = random.Random(7), torch.zeros(())
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        draw = self.random.random
        for name in NAMES:
            for _ in range(int(draw() * 3)):
                value = loss.detach() * draw()
                value = value.double() if draw() < 0.2 else value
                size = None if draw() < 0.6 else int(1 + draw() * 9)
                self.log(name, value, on_step=True, on_epoch=True, batch_size=size)
        self.running += loss.detach()
        self.log("running", self.running, on_step=True, on_epoch=True)
        self.running *= 0.5
        with torch.inference_mode():
            self.log("inferred", loss.detach() * 2, on_step=True, on_epoch=True)
        if batch_idx % 3 == 1:
            self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})
        return loss


@pytest.mark.parametrize(
    ("batch_size", "precision"), [(4, "32-true"), (3, "32-true"), (3, "64-true"), (4, "bf16-mixed")]
)
def test_as_trainer(batch_size, precision):
    words = {"max_epochs": 3, "precision": precision, "num_sanity_val_steps": 0}
    loaders = lambda: make_loader(38, batch_size=batch_size)  # noqa: E731
    (trainer, theirs), (loop, ours) = (run(Odd, loaders, **words) for run in (run_trainer, run_loop))
    assert len(ours.seen) == len(theirs.seen) > 5
    for mine, wanted in zip([*ours.seen, loop.callback_metrics], [*theirs.seen, trainer.callback_metrics], strict=True):
        other = {name: (mine[name], value) for name, value in wanted.items() if not same(mine[name], value)}
        assert not other
        assert set(mine) == set(wanted)


class Looking(Classifier):
    """Has a look at what is logged, changes it, and saves, in the middle of the batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx == 4:
            self.trainer.callback_metrics["loss_step"].mul_(100)
        return loss


def test_what_is_read_is_added_before(tmp_path):
    """A checkpoint in mid-epoch has all sums, and what is changed by its readers counts nowhere."""
    make_train = lambda: make_loader(40, batch_size=4)  # noqa: E731
    _, _, whole = fit(tmp_path / "whole", Looking, make_train, max_epochs=2)
    fit(tmp_path / "cut", Looking, make_train, max_steps=7, max_epochs=2, save_every_n_steps=3)
    _, _, resumed = fit(tmp_path / "cut", Looking, make_train, resume="auto", max_epochs=2)
    assert whole["loss"].tolist() == whole["train_loss"].tolist()
    assert resumed["loss"].tolist() == whole["loss"].tolist()


def log_three(metrics):
    metrics.start(metrics.train)
    metrics.fx = "training_step"
    for value in (1.0, 2.0, 4.0):
        metrics.batch_starts((torch.zeros(2, 1), torch.zeros(2)))
        metrics.log("loss", torch.tensor(value), on_step=True, on_epoch=True, sync_dist=True)
        metrics.batch_ends()


def test_what_several_processes_share_does_not_wait():
    """An epoch that one process began goes on with two: each value is asked of both, in the next epoch, too."""
    asked = []
    alone, both = (
        Metrics(),
        Metrics(all_reduce=lambda value, **_: asked.append(float(value)) or value, distributed=True),
    )
    log_three(alone)
    both.load_state_dict(alone.state_dict(), torch.device("cpu"))
    for _ in range(2):
        log_three(both)
        both.epoch_ends()
    assert asked == 2 * [1.0, 2.0, 4.0]


class Returning(Plain):
    """Returns a loss; what of it is logged, and what is done to it then, is up to others."""

    def __init__(self, log=lambda module, loss: None, behind=lambda outputs: None):
        super().__init__()
        self.log_loss, self.behind = log, behind

    def training_step(self, batch):
        loss = super().training_step(batch) * 1.0
        self.log_loss(self, loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.behind(outputs)


def logs_it(module, loss, **words):
    module.log("again", loss, on_step=True, **words)


def logs_it_twice(module, loss):
    module.log("again", loss, on_step=True, on_epoch=True)
    module.log("again", loss * 2, on_step=True, on_epoch=True)


def changes_it(module, loss):
    module.log("again", loss, on_step=True, on_epoch=True)
    loss *= 2  # noqa: PLW2901


def changes_what_was_logged(module, loss):
    module.log("again", loss, on_step=True, on_epoch=True)
    module.log.__self__.merge()
    module.log.__self__.callback["again_step"].mul_(100)


def logs_now_and_then(module, loss):
    if loss < 1.1:
        module.log("again", loss, on_step=True, on_epoch=True)


WAYS = [
    (logs_it, {}),
    (partial(logs_it, on_epoch=True), {}),
    (partial(logs_it, on_epoch=True, enable_graph=True), {}),
    (logs_it_twice, {}),
    (changes_what_was_logged, {}),
    (logs_now_and_then, {}),
    (partial(logs_it, on_epoch=True), {"accumulate_grad_batches": 2}),
    (partial(logs_it, on_epoch=True), {"precision": "bf16-true"}),
]


@pytest.mark.parametrize("batch_size", [4, 3])
@pytest.mark.parametrize(("log", "words"), WAYS)
def test_the_returned_loss_counts_as_if_it_were_not_logged(tmp_path, monkeypatch, batch_size, log, words):
    """Its copy is the one that was logged, if there is one; who changes what the hook behind a batch gets changes no sum."""
    monkeypatch.setattr(Together, "MOST", 5)
    make_train = lambda: make_loader(40, batch_size=batch_size)  # noqa: E731
    words = {"max_epochs": 2, "log_every_n_steps": 4, **words}
    silent = fit(tmp_path / "silent", Returning, make_train, **words)[2]
    behind = lambda outputs: outputs["loss"].mul_(7)  # noqa: E731
    logged = fit(tmp_path / "logged", partial(Returning, log, behind), make_train, **words)[2]
    assert logged["train_loss"].tolist() == pytest.approx(
        silent["train_loss"].tolist(), rel=0 if batch_size == 4 else 3e-7
    )
    cut = {**words, "save_every_n_steps": 2, "max_steps": 4 // words.get("accumulate_grad_batches", 1)}
    fit(tmp_path / "cut", partial(Returning, log, behind), make_train, **cut)
    resumed = fit(tmp_path / "cut", partial(Returning, log, behind), make_train, resume="auto", **words)[2]
    assert resumed["train_loss"].tolist() == logged["train_loss"].tolist()


def test_a_loss_that_is_changed_behind_its_log(tmp_path):
    """The history has what was returned."""
    doubled = lambda module, loss: loss.mul_(2)  # noqa: E731
    (_, _, one), (_, _, other) = (
        fit(tmp_path / name, partial(Returning, log), max_epochs=2)
        for name, log in {"one": changes_it, "other": doubled}.items()
    )
    assert one["train_loss"].tolist() == other["train_loss"].tolist()


def test_other_names_do_not_end_the_wait(monkeypatch):
    """A value per step only, one per epoch only and a metric's object are logged beside; nobody looks before the end."""
    metrics, mean, batches = Metrics(), MeanMetric(), []
    added = Together.add_up
    monkeypatch.setattr(Together, "add_up", lambda self: batches.append(len(self._waiting)) or added(self))
    metrics.start(metrics.train)
    metrics.fx = "training_step"
    for value in map(float, range(10)):
        metrics.batch_starts((torch.zeros(2, 1), torch.zeros(2)))
        metrics.log("step", torch.tensor(value), on_step=True)
        metrics.log("both", torch.tensor(value), on_step=True, on_epoch=True)
        mean.update(value)
        metrics.log("object", mean, on_step=False, on_epoch=True)
        metrics.log("epoch", torch.tensor(value), on_step=False, on_epoch=True)
        metrics.batch_ends()
    metrics.batches_end()
    assert metrics.merge()["both_epoch"] == metrics.callback["epoch"] == metrics.callback["object"] == 4.5
    assert [count for count in batches if count] == [9]
