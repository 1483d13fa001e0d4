"""Test that a resumed run restores the callbacks of the saved run, or warns about differences."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import callbacks as cb
from modules import Classifier, make_loader
from runs import assert_same_end, fit, val_loader
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from fabric_template import read_logs
from fabric_template.errors import CheckpointError
from fabric_template.plain_state import Part, PlainState


class Interrupted(Exception):
    """An error that stops a run as a crash would."""


class Stops(cb.Callback):
    """A callback that raises Interrupted in the second epoch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 2):
            raise Interrupted


OPTIONS = {"train": lambda: make_loader(12), "max_epochs": 3, "save_every_n_steps": 1, "log_every_n_steps": 1}


def interrupt(root, make, make_callbacks, **options):
    """Train until the second epoch, and stop there."""
    with pytest.raises(Interrupted):
        fit(root, make, callbacks=[*make_callbacks(), Stops()], **{**OPTIONS, **options})


def assert_resumes_exactly(tmp_path, make, make_callbacks, seed=9, **options):
    """Check that an interrupted and resumed run ends like an uninterrupted run. Return both runs."""
    whole = fit(tmp_path / "whole", make, callbacks=make_callbacks(), **OPTIONS, **options)
    interrupt(tmp_path / "cut", make, make_callbacks, **options)
    resumed = fit(tmp_path / "cut", make, callbacks=make_callbacks(), seed=seed, resume="auto", **OPTIONS, **options)
    assert_same_end(whole, resumed)
    return whole, resumed


def prune():
    return cb.ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])


def test_resuming_with_model_pruning_is_refused(tmp_path):
    interrupt(tmp_path, Classifier, lambda: [prune()])
    with pytest.raises(CheckpointError, match="resume: got the callback ModelPruning, but"):
        fit(tmp_path, callbacks=[prune()], resume="auto", **OPTIONS)


def test_a_parameter_is_not_replaced_by_a_saved_attribute_with_the_same_name():
    layer = nn.Linear(2, 2)
    state = PlainState({"layer": Part(layer)})
    saved = {("layer", "weight"): ("tensor", torch.zeros(2, 2), False, True)}
    with pytest.warns(UserWarning, match=r"layer\.weight is neither saved nor restored"):
        state.load_attributes(saved)
    assert isinstance(layer.weight, nn.Parameter)


class LogsMost(Classifier):
    """A model that logs the batch index with the reduction ``reduce_fx``."""

    def __init__(self, reduce_fx):
        super().__init__()
        self.reduce_fx = reduce_fx

    def training_step(self, batch, batch_idx):
        self.log("index", float(batch_idx), on_step=False, on_epoch=True, reduce_fx=self.reduce_fx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("saves", [None, 1])
def test_resuming_uses_the_new_reduce_fx_instead_of_the_saved_one(tmp_path, saves, recwarn):
    """If the mean of the epoch covers only the batches after the resume, a warning is shown."""
    options = {**OPTIONS, "save_every_n_steps": saves}
    interrupt(tmp_path, lambda: LogsMost("mean"), list, **options)
    resumed = fit(tmp_path, lambda: LogsMost("max"), resume="auto", **options)[2]
    assert list(resumed["index"])[-1] == 2.0
    is_warned = any("uses a different reduce_fx" in str(warning.message) for warning in recwarn)
    assert is_warned == (saves is not None)


class LogsSums(Classifier):
    """A model that logs a sum in each validation batch, with on_step=``on_step``."""

    def __init__(self, on_step):
        super().__init__()
        self.on_step = on_step

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("sum", batch[0].sum(), on_step=self.on_step, on_epoch=True)


def test_a_resumed_run_logs_validation_steps_if_the_saved_run_did_not(tmp_path):
    options = {**OPTIONS, "val": val_loader}
    interrupt(tmp_path, lambda: LogsSums(False), list, val=val_loader)
    loop, _, _ = fit(tmp_path, lambda: LogsSums(True), resume="auto", **options)
    steps = read_logs(Path(loop.log_dir) / "steps.csv")
    assert steps["sum"].notna().sum() >= 2


class Metrics(cb.Callback):
    """A callback that logs the mean of the losses with torchmetrics objects."""

    def __init__(self, make, get):
        self.metric, self.get = make(), get

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.get(self.metric).update(outputs["loss"])

    def on_train_epoch_end(self, trainer, module):
        module.log("of callback", self.get(self.metric).compute())


METRICS = {
    "attribute": (MeanMetric, lambda metric: metric),
    "list": (lambda: [MaxMetric()], lambda metrics: metrics[0]),
    "dict": (lambda: {"a": MeanMetric()}, lambda metrics: metrics["a"]),
    "object": (lambda: SimpleNamespace(metric=MeanMetric()), lambda owner: owner.metric),
    "collection": (lambda: MetricCollection([MeanMetric()]), lambda metrics: metrics["MeanMetric"]),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_resumed_run_restores_torchmetrics_objects_stored_in_a_callback(tmp_path, name):
    _, (_, _, history) = assert_resumes_exactly(tmp_path, Classifier, lambda: [Metrics(*METRICS[name])])
    assert "of callback" in history


class Counts(cb.Callback):
    """A callback that adds ``step`` to a count after each batch."""

    def __init__(self, step):
        self.step, self.count = step, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += self.step


def test_resume_warns_about_the_attributes_of_a_missing_callback(tmp_path):
    interrupt(tmp_path, Classifier, lambda: map(Counts, [1, 10]))
    with pytest.warns(UserWarning, match=r"the object callbacks\.Counts\.2 is neither saved nor restored"):
        fit(tmp_path, callbacks=[Counts(1)], resume="auto", **OPTIONS)


class Settings:
    """A user-defined class whose objects a resumed run cannot read."""


class SavesSettings(cb.Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["settings"] = Settings()


class ReadsSettings(SavesSettings):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.settings = checkpoint["settings"]


@pytest.mark.parametrize("kind", [SavesSettings, ReadsSettings])
def test_fit_warns_about_callback_state_that_on_load_checkpoint_cannot_read(tmp_path, kind, recwarn):
    fit(tmp_path, callbacks=[kind()], max_epochs=1, train=OPTIONS["train"])
    found = [warning for warning in recwarn if "Settings" in str(warning.message)]
    assert len(found) == (kind is ReadsSettings)
