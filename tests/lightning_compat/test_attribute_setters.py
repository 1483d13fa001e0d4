"""Options that are set on a loop between runs and in hooks take effect."""

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from modules import quiet

from fabric_template import FabricLoop
from fabric_template.errors import ConfigurationError

WORDS = {
    "max_epochs": 3,
    "limit_train_batches": 4,
    "limit_val_batches": 2,
    "limit_test_batches": 2,
    "accelerator": "cpu",
}


class Notes(BoringModel):
    """Notes when it validates and when its loader is made."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def train_dataloader(self):
        self.seen.append("loader")
        return super().train_dataloader()

    def on_validation_start(self):
        self.seen.append(self.trainer.global_step)


def made(kind, tmp_path, **words):
    pl.seed_everything(1, verbose=False)
    return kind(**quiet(**{**WORDS, "default_root_dir": str(tmp_path), **words}))


def assert_same(sides):
    (theirs, first), (ours, second) = sides
    assert first.seen == second.seen
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    for name in ("global_step", "current_epoch", "num_training_batches", "num_val_batches", "accumulate_grad_batches"):
        assert getattr(theirs, name) == getattr(ours, name), name


SET = {
    "limit_train_batches": 2, "limit_val_batches": 0, "check_val_every_n_epoch": 2, "val_check_interval": 2,
    "accumulate_grad_batches": 2, "gradient_clip_val": 0.001, "num_sanity_val_steps": 0,
    "reload_dataloaders_every_n_epochs": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", SET)
def test_before_a_fit(name, tmp_path):
    sides = []
    for kind in LOOPS.values():
        trainer, module = made(kind, tmp_path), Notes()
        setattr(trainer, name, SET[name])
        trainer.fit(module)
        assert getattr(trainer, name) == SET[name]
        sides.append((trainer, module))
    assert_same(sides)


@pytest.mark.parametrize(
    ("hook", "name", "value"),
    [
        ("on_fit_start", "limit_train_batches", 2),
        ("on_train_start", "check_val_every_n_epoch", 2),
        ("on_train_start", "reload_dataloaders_every_n_epochs", 1),
        ("on_train_batch_start", "gradient_clip_val", 0.001),
        ("on_train_epoch_start", "accumulate_grad_batches", 2),
    ],
)
def test_in_a_hook(hook, name, value, tmp_path):
    Sets = type("Sets", (Callback,), {hook: lambda self, trainer, *rest: setattr(trainer, name, value)})
    sides = []
    for kind in LOOPS.values():
        trainer, module = made(kind, tmp_path, callbacks=[Sets()]), Notes()
        trainer.fit(module)
        sides.append((trainer, module))
    assert_same(sides)


def test_between_evaluations(tmp_path):
    found = []
    for kind in LOOPS.values():
        trainer, module = made(kind, tmp_path), BoringModel()
        trainer.test(module, verbose=False)
        trainer.limit_test_batches, trainer.limit_predict_batches = 0.5, 3
        trainer.test(module, verbose=False)
        found.append([trainer.num_test_batches, len(trainer.predict(module, module.test_dataloader()))])
    assert found == [[[32], 3]] * 2


def test_the_limit_of_steps(tmp_path):
    for kind in LOOPS.values():
        trainer = made(kind, tmp_path)
        trainer.fit_loop.epoch_loop.max_steps = 5
        trainer.fit(BoringModel())
        assert (trainer.max_steps, trainer.global_step) == (5, 5)


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Be aware that when using `ckpt_path`")
def test_the_checkpoint_to_begin_with(tmp_path):
    found = []
    for name, kind in LOOPS.items():
        saver = ModelCheckpoint(dirpath=tmp_path / name, filename="x")
        made(kind, tmp_path, callbacks=[saver], enable_checkpointing=True).fit(BoringModel())
        trainer = made(
            kind,
            tmp_path,
            max_epochs=5,
            callbacks=[ModelCheckpoint(dirpath=tmp_path / f"{name}_on")],
            enable_checkpointing=True,
        )
        trainer.ckpt_path = saver.best_model_path
        trainer.fit(BoringModel())
        found.append([trainer.global_step, trainer.ckpt_path == saver.best_model_path])
        trainer = made(kind, tmp_path)
        trainer.ckpt_path, module = saver.best_model_path, BoringModel()
        trainer.test(module, verbose=False)
        found[-1].append(module.layer.weight.sum().item())
    assert found[0] == found[1]


def test_the_profiler(tmp_path):
    for kind in LOOPS.values():
        trainer = made(kind, tmp_path)
        trainer.profiler = SimpleProfiler()
        trainer.fit(BoringModel())
        assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 12


def test_a_wrong_value_is_refused_as_in_the_constructor():
    loop = FabricLoop(**quiet())
    with pytest.raises(ConfigurationError, match="limit_val_batches: got 1.5"):
        loop.limit_val_batches = 1.5
    assert loop.limit_val_batches == 1.0


@pytest.mark.parametrize("nothing", [None, False])
def test_no_logger(nothing, tmp_path):
    for kind in LOOPS.values():
        trainer = made(kind, tmp_path, max_epochs=1, logger=True)
        trainer.logger = nothing
        trainer.fit(Notes())
        assert (trainer.loggers, trainer.logger) == ([], None)
    assert not [*tmp_path.rglob("metrics.csv")]


class Rows(CSVLogger):
    """Notes at which steps it is given what."""

    def __init__(self, folder):
        super().__init__(folder)
        self.steps = []

    def log_metrics(self, metrics, step=None):
        self.steps.append((sorted(metrics), step))


class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("x", float(batch_idx))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_end"]
)
def test_how_often_is_logged(hook, tmp_path):
    steps = []
    for kind in LOOPS.values():

        def log_often(self, trainer, *rest, **words):
            if trainer.global_step > 1 or hook in ("setup", "on_fit_start", "on_train_start"):
                trainer.log_every_n_steps = 2

        logger = Rows(tmp_path / kind.__name__)
        often = type("Often", (Callback,), {hook: log_often})()
        made(kind, tmp_path, callbacks=[often], logger=logger, log_every_n_steps=3).fit(Logs())
        steps.append(logger.steps)
    assert steps[0] == steps[1]
    early = {"on_train_epoch_start": [2, 5, 7, 9, 11], "on_train_batch_end": [1, 3, 5, 7, 9, 11]}
    assert steps[1] == [(["epoch", "x"], step) for step in early.get(hook, [1, 3, 5, 7, 9, 11])]
