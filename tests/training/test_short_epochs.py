"""Test epochs that a limit ends early, and loaders that yield fewer batches than their length."""

import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, by_epoch, make_data, make_loader
from parameters import once
from runs import Snapshots, assert_same_end, fit, logs_of, val_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:resume. .* are read again"),
]


def train():
    return make_loader(24)


# Epochs that end early because of max_steps or should_stop. test_signals.py tests max_time.


OPTIONS = [{}, {"accumulate_grad_batches": 2}, {"monitor": "val_loss"}]


@pytest.mark.parametrize(("options", "steps"), once(OPTIONS, [1, 7, 8]), ids=str)
def test_a_run_stopped_mid_epoch_by_max_steps_resumes_exactly(tmp_path, options, steps):
    """Resuming with the same max_steps changes nothing. Resuming without max_steps continues the run."""
    options = {"max_epochs": 3, "log_every_n_steps": 2, **options}
    make = lambda: Classifier(on_step=True)  # noqa: E731
    whole = fit(tmp_path / "whole", make, train, val_loader, **options)
    first = fit(tmp_path / "cut", make, train, val_loader, max_steps=steps, **options)
    assert first[0].global_step == first[2]["step"].tolist()[-1] == steps
    rows = logs_of(tmp_path / "cut")
    again = fit(tmp_path / "cut", make, train, val_loader, max_steps=steps, seed=9, resume="auto", **options)
    assert_same_end(first, again)
    assert logs_of(tmp_path / "cut") == rows
    resumed = fit(tmp_path / "cut", make, train, val_loader, seed=9, resume="auto", **options)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


def test_a_fractional_val_check_interval_is_accepted_even_without_training_batches(tmp_path):
    loop, _, rows = fit(tmp_path, Classifier, train, val_loader, limit_train_batches=0, val_check_interval=0.5)
    assert (loop.global_step, len(rows)) == (0, 0)


class Copy(Callback):
    """A callback that copies a run's folder at the end of an epoch, as if SIGKILL had ended the run there."""

    def __init__(self, root, to, step):
        self.root, self.to, self.step = root, to, step

    def on_train_epoch_end(self, trainer, module):
        if trainer.global_step == self.step:
            shutil.copytree(self.root, self.to)


def test_a_run_killed_after_reaching_max_steps_resumes_exactly(tmp_path):
    options = {"val": val_loader, "max_steps": 8, "train": train, "make_module": lambda: Classifier(by_epoch)}
    copy = Copy(tmp_path / "whole", tmp_path / "killed", step=8)
    whole = fit(tmp_path / "whole", callbacks=[copy], **options)
    resumed = fit(tmp_path / "killed", seed=9, resume="last", callbacks=[Copy(None, None, step=-1)], **options)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "killed") == logs_of(tmp_path / "whole")


class StopsAt(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop |= trainer.global_step == self.at


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_run_resumed_after_should_stop_mid_epoch_matches_an_uninterrupted_run(tmp_path, options):
    options = {"max_epochs": 3, "log_every_n_steps": 2, **options}
    make = lambda: Classifier(on_step=True)  # noqa: E731
    whole = fit(tmp_path / "whole", make, train, **options)
    _, _, history = fit(tmp_path / "cut", make, train, callbacks=[StopsAt(4)], **options)
    assert history["step"].tolist()[-1] == 4
    assert_same_end(whole, fit(tmp_path / "cut", make, train, seed=9, resume="last", **options))
    # Compare only metrics.csv, because steps.csv contains an additional row for the step at which the run stopped.
    assert logs_of(tmp_path / "cut")[0] == logs_of(tmp_path / "whole")[0]


# Loaders that yield no batches, or fewer batches than their length


class Short(IterableDataset):
    """A dataset that yields fewer samples than its length in each pass after the first ``since`` passes."""

    def __init__(self, gives=16, length=24, since=0):
        self.gives, self.length, self.since, self.passes = gives, length, since, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.passes += 1
        gives = self.gives if self.passes > self.since else self.length
        return iter([make_data(24)[i] for i in range(gives)])


def short(**options):
    return lambda: DataLoader(Short(**options), batch_size=4)


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"}


@pytest.mark.parametrize("optimizers", [by_epoch, plateau])
def test_an_epoch_ends_if_the_loader_yields_fewer_batches_than_its_length(tmp_path, optimizers):
    """Weights and CSV rows equal those with a loader of the right length, even in a resumed run."""
    make = lambda: Classifier(optimizers)  # noqa: E731
    options = {"val": val_loader, "max_epochs": 2, "save_every_n_steps": 1}
    expected = fit(tmp_path / "expected", make, short(length=16), **options)
    copies = [Snapshots(tmp_path / "short", tmp_path / "killed", [1, 7])]
    whole = fit(tmp_path / "short", make, short(), callbacks=copies, **options)
    assert_same_end(expected, whole)
    assert logs_of(tmp_path / "expected") == logs_of(tmp_path / "short")
    for batches in (1, 7):
        root = tmp_path / "killed" / str(batches)
        assert_same_end(whole, fit(root, make, short(), seed=9, resume="last", **options))
        assert logs_of(root) == logs_of(tmp_path / "short")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8]),
        ({"val_check_interval": 0.5}, [3, 4, 7, 8]),
        ({"val_check_interval": 2}, [2, 4, 6, 8]),
        ({"val_check_interval": 5}, []),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
        ({"check_val_every_n_epoch": 2}, [8]),
    ],
    ids=str,
)
def test_an_epoch_with_fewer_batches_than_expected_ends_with_validation(tmp_path, options, steps):
    """A mid-epoch validation runs only if the loader has yielded enough batches."""
    seen = []

    class ValidationRecorder(Callback):
        def on_validation_start(self, trainer, *_):
            seen.append(trainer.global_step)

    options = {"num_sanity_val_steps": 0, "callbacks": [ValidationRecorder()], **options}
    fit(tmp_path, train=short(), val=val_loader, max_epochs=2, **options)
    assert seen == steps


@pytest.mark.filterwarnings("ignore:train_dataloaders. .* cannot be resumed after its first epoch")
def test_fit_raises_an_error_if_the_loader_yields_no_batch_in_a_later_epoch(tmp_path):
    """After the error, last.ckpt is the checkpoint of the previous epoch."""
    message = r"The train loader \(generator\) yielded no batches in this epoch. An iterator yields"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, Classifier, lambda: (batch for batch in list(train())), max_epochs=3)
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 6
