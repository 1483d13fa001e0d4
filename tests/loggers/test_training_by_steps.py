"""Test the rows that step-based runs and their resumed runs write."""

import itertools
import math
import shutil

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from parameters import once
from runs import TIMES, Plain, Snapshots, fit, logs_of, same, val_loader, weights_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Endless(IterableDataset):
    """An endless stream of samples that is the same in each run."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(8, generator=generator), torch.randint(3, (), generator=generator)


def endless():
    return DataLoader(Endless(), batch_size=4)


def seven_batches():
    return make_loader(28)


class Silent(Classifier):
    """A LightningModule that logs nothing in training."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Means(Classifier):
    """A module that logs the loss of each batch as "mine" and the step number as "of_step"."""

    def __init__(self):
        super().__init__()
        self.losses, self.step = [], itertools.count(1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        self.log("mine", loss.detach(), on_step=True, on_epoch=True)
        self.log("of_step", float(next(self.step)))
        return loss


def read(root, name):
    return pd.read_csv(root / "logs/run/version_0" / name)


@pytest.mark.parametrize(("train", "make"), once([make_loader, endless], [Plain, Silent, Means]))
def test_metrics_csv_has_a_row_per_validation_and_one_for_the_last_step(tmp_path, make, train):
    options = {"max_steps": 25, "validate_every_n_steps": 10, "log_every_n_steps": 5, "log_grad_norm": True}
    _, module, history = fit(tmp_path, make, train, val_loader, gradient_clip_val=0.1, **options)
    rows, steps = read(tmp_path, "metrics.csv"), read(tmp_path, "steps.csv")
    assert rows["step"].tolist() == [10, 20, 25]
    assert rows["epoch"].tolist() == ([0, 0, 0] if train is endless else [0, 1, 2])
    assert rows["val_loss"].isna().tolist() == [False, False, True]
    assert list(history.columns)[-4:] == ["lr", "samples_per_second", "time", "waiting"]
    assert not rows[["train_loss", "lr", "samples_per_second", "time", "waiting"]].isna().any(axis=None)
    assert steps["step"].tolist() == [5, 10, 15, 20, 25]
    assert (steps["grad_norm"] > 0.1).all()
    assert "val_loss" not in steps
    if make is Means:
        parts = [module.losses[start:stop] for start, stop in ((0, 10), (10, 20), (20, 25))]
        means = [pytest.approx(math.fsum(part) / len(part), rel=1e-5) for part in parts]
        assert rows["train_loss"].tolist() == rows["mine"].tolist() == means
        assert steps["train_loss"].tolist() == steps["mine"].tolist() == module.losses[4::5]
        assert "of_step" not in rows
        assert steps["of_step"].tolist() == [5, 10, 15, 20, 25]


def test_a_run_limited_only_by_max_steps_writes_a_csv_row_per_epoch(tmp_path):
    """The run writes the row of an epoch even if no validation follows the epoch."""
    for name, val in (("validated", val_loader), ("not", None)):
        _, _, history = fit(tmp_path / name, Plain, val=val, max_steps=25)
        assert history["step"].tolist() == [10, 20, 25]
        assert history["epoch"].tolist() == [0, 1, 2]


KINDS = {
    "max_steps": {"max_steps": 18},
    "max_steps, plain object": {"max_steps": 18, "make_module": Plain},
    "validate_every_n_steps": {"validate_every_n_steps": 5, "max_epochs": 3},
    "val_check_interval": {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 18},
    "endless": {"train": endless, "max_steps": 18, "val_check_interval": 4, "make_module": Plain},
    "accumulation": {
        "accumulate_grad_batches": 3,
        "validate_every_n_steps": 2,
        "max_steps": 7,
        "save_every_n_steps": 1,
    },
}


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_and_resumed_run_writes_the_same_csv_rows_as_an_uninterrupted_run(tmp_path, kind):
    """The first run is killed or is stopped by max_steps."""
    options = {"make_module": lambda: Classifier(on_step=True), "train": seven_batches, "val": val_loader}
    options |= {"log_every_n_steps": 2, "save_every_n_steps": 2, **KINDS[kind]}
    kills = (4, 16)
    snapshots = Snapshots(tmp_path / "whole", tmp_path, kills)
    _, module, history = fit(tmp_path / "whole", callbacks=[snapshots], **options)
    roots = [tmp_path / str(batches) for batches in kills]
    if "max_steps" in options:
        fit(tmp_path / "cut", **{**options, "max_steps": 5})
        roots.append(tmp_path / "cut")
    for root in roots:
        _, resumed, rows = fit(root, seed=9, resume="last", **options)
        assert same(weights_of(module), weights_of(resumed)), root
        assert logs_of(root) == logs_of(tmp_path / "whole"), root
        pd.testing.assert_frame_equal(*(table.drop(columns=TIMES, errors="ignore") for table in (rows, history)))


def test_resuming_a_finished_run_keeps_its_last_csv_row(tmp_path):
    options = {"val": val_loader, "max_steps": 13, "validate_every_n_steps": 5}
    for resume in (None, "last"):
        fit(tmp_path, Plain, resume=resume, **options)
        assert read(tmp_path, "metrics.csv")["step"].tolist() == [5, 10, 13]


def test_resuming_after_a_validation_does_not_duplicate_the_validation_row(tmp_path):
    """A run that resumes after a validation does not write the row of this validation again."""

    class SavingCallback(Callback):
        def on_validation_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    options = {"val": val_loader, "max_steps": 25, "validate_every_n_steps": 7}
    _, module, _ = fit(tmp_path / "whole", Plain, callbacks=[SavingCallback()], **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    _, resumed, history = fit(tmp_path / "again", Plain, seed=9, version=0, resume=tmp_path / "14.ckpt", **options)
    assert same(weights_of(module), weights_of(resumed))
    assert history["step"].tolist() == [7, 14, 21, 25]
    assert logs_of(tmp_path / "again")[0] == logs_of(tmp_path / "whole")[0]
