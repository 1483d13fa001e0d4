"""Run the same code with Trainer and with FabricLoop, each in its own folder, and compare the results."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from modules import Classifier, assert_same_weights, make_loader, quiet
from runs import same, val_loader

from fabric_template import FabricLoop

LOOPS = {"trainer": pl.Trainer, "loop": FabricLoop}


class Notes(Logger):
    """A logger that stores (step, metrics) for each call in ``rows``."""

    name, version, save_dir = "notes", 0, None

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def experiment(self):
        return self

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


@dataclass
class Side:
    """The results of the run with Trainer or of the run with FabricLoop."""

    trainer: Any
    module: Any
    callbacks: list
    root: Path
    error: BaseException | None = None

    @property
    def rows(self):
        return self.trainer.loggers[0].rows

    def files(self):
        """Return the content of all checkpoints in the run's folder, keyed by relative path."""
        paths = sorted(self.root.rglob("*.ckpt"))
        return {path.relative_to(self.root).as_posix(): torch.load(path, weights_only=False) for path in paths}

    def place(self, path):
        """Return a path relative to the run's folder."""
        return Path(path).relative_to(self.root).as_posix() if path else path


def run_both(tmp_path, make_callbacks, make_module=Classifier, train=make_loader, val=val_loader, fit=None, **options):
    """Train with Trainer and with FabricLoop, and check that both give the same weights and errors.

    Args:
        make_callbacks: A function that takes the run's folder, and returns the callbacks.
        fit: A function that takes the run's folder and "trainer" or "loop", and returns additional arguments for fit.
    """
    sides = []
    for name, kind in LOOPS.items():
        pl.seed_everything(1, verbose=False)
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        module, callbacks = make_module(), make_callbacks(root)
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {"default_root_dir": str(root), "callbacks": callbacks, "max_epochs": 3, **options}
            if given.get("logger") is Notes:
                given["logger"] = Notes()
            trainer = kind(**quiet(**given))
            side = Side(trainer, module, callbacks, root)
            try:
                trainer.fit(module, train(), val() if val else None, **(fit(root, name) if fit else {}))
            except Exception as error:
                side.error = error
        sides.append(side)
    expected, ours = sides
    assert repr(expected.error) == repr(ours.error), (expected.error, ours.error)
    assert_same_weights(expected.module, ours.module)
    assert (expected.trainer.current_epoch, expected.trainer.global_step) == (
        ours.trainer.current_epoch,
        ours.trainer.global_step,
    )
    return expected, ours


def assert_same_files(expected, ours):
    """Check that both runs saved equal checkpoints: weights, optimizers, schedulers, counters and callbacks."""
    first, second = expected.files(), ours.files()
    assert sorted(first) == sorted(second)
    for name, theirs in first.items():
        mine = second[name]
        for key in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers"):
            assert (key in theirs) == (key in mine), (name, key)
            assert same(plain(theirs.get(key), expected), plain(mine.get(key), ours)), (name, key)
        states = [plain(file.get("callbacks"), side) for file, side in ((theirs, expected), (mine, ours))]
        assert same(*states), (name, states)


def plain(value, side):
    """Convert nested values to dicts and lists, and replace the run's folder with ROOT."""
    if isinstance(value, dict):
        return {plain(key, side): plain(part, side) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, side) for part in value]
    if isinstance(value, str):
        return value.replace(str(side.root), "ROOT")
    return value
