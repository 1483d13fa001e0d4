"""What training scripts do around a Trainer, before its fit and behind it, with FabricLoop in its place."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.plugins.precision import DoublePrecision
from modules import quiet

from fabric_template import FabricLoop, read_logs

SHORT = {
    "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1, "log_every_n_steps": 1,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- what configuration libraries make of a list


class Listed(Sequence):
    """As Hydra's ListConfig: no list, but all that a list can."""

    def __init__(self, items):
        self.items = items

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)


@pytest.mark.parametrize("kind", [Listed, lambda items: dict(enumerate(items)).values()], ids=["sequence", "values"])
def test_callbacks_in_a_list_of_any_kind(kind):
    class Counts(Callback):
        starts = 0

        def on_train_start(self, trainer, module):
            self.starts += 1

    class Configured(BoringModel):
        def configure_callbacks(self):
            return kind([another])

    class Another(Callback):
        starts = 0
        on_train_start = Counts.on_train_start

    one, two, another = Counts(), ModelCheckpoint(), Another()
    loop = FabricLoop(callbacks=kind([two, one]), **SHORT)
    assert loop.callbacks == [one, two]
    loop.fit(Configured())
    assert (one.starts, another.starts) == (1, 1)


def test_plugins_and_loggers_too():
    loop = FabricLoop(plugins=Listed([DoublePrecision()]), logger=Listed([CSVLogger("one"), CSVLogger("two")]), **SHORT)
    assert (loop.precision, [logger.save_dir for logger in loop.loggers]) == ("64-true", ["one", "two"])


# ---- the folder of the logs, before fit


def test_what_is_logged_ahead_lies_in_the_folder_of_the_fit():
    loop = FabricLoop(**SHORT)
    logger, folder = loop.logger, Path(loop.log_dir)
    folder.mkdir(parents=True)
    (folder / "script.txt").write_text("copied by the script")
    logger.log_hyperparams({"rate": 0.1})
    logger.log_metrics({"ahead": 1.0}, step=0)
    loop.validate(BoringModel(), verbose=False)
    loop.fit(BoringModel(), resume="auto")
    assert (loop.logger, loop.log_dir) == (logger, str(folder))
    logger.log_metrics({"behind": 2.0}, step=9)
    assert [path.as_posix() for path in Path().glob("*/run/*")] == ["checkpoints/run/version_0", "logs/run/version_0"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == [
        "config.yaml", "hparams.yaml", "metrics.csv", "script.txt", "steps.csv",
    ]  # fmt: skip
    assert list(yaml.safe_load((folder / "hparams.yaml").read_text())) == ["rate", "hparams", "config"]
    steps = read_logs(folder, steps=True)
    assert (steps["ahead"].dropna().tolist(), steps["behind"].dropna().tolist()) == ([1.0], [2.0])

    loop.fit(BoringModel())  # begins anew
    assert (loop.log_dir, loop.logger is logger) == ("logs/run/version_1", False)


def test_two_loops_that_are_asked_at_once_have_two_folders():
    one, two = FabricLoop(**SHORT), FabricLoop(**SHORT)
    assert one.log_dir == two.log_dir
    one.fit(BoringModel())
    two.fit(BoringModel())
    assert (one.log_dir, two.log_dir) == ("logs/run/version_0", "logs/run/version_1")
    assert len(read_logs("logs/run/version_0")) == 1


def test_a_resumed_run_keeps_its_folder_and_gets_what_is_logged_ahead():
    FabricLoop(**SHORT).fit(BoringModel())
    loop = FabricLoop(**{**SHORT, "max_epochs": 2})
    loop.logger.log_hyperparams({"rate": 0.1})
    loop.logger.log_metrics({"ahead": 1.0}, step=0)
    assert loop.log_dir == "logs/run/version_1"
    loop.fit(BoringModel(), ckpt_path="last")
    assert loop.log_dir == "logs/run/version_0"
    assert "rate" in yaml.safe_load(Path(loop.log_dir, "hparams.yaml").read_text())
    assert read_logs(loop.log_dir)["epoch"].tolist() == [0, 1]


# ---- the callback that saves


def best_path(loop):
    saver = loop.checkpoint_callback
    return saver and (saver.best_model_path, saver.best_model_score)


def test_the_saver_is_there_when_nothing_is_saved():
    """As Trainer's: ``trainer.checkpoint_callback.best_model_path or None`` stands behind a fit that may not have been."""
    for words in ({}, {"fast_dev_run": True}):
        loop = FabricLoop(**SHORT, **words)
        assert best_path(loop) == ("", None)
        loop.test(BoringModel(), verbose=False)
        assert best_path(loop) == ("", None)
    loop.fit(BoringModel())
    assert best_path(loop) == ("", None)
    for words in ({"enable_checkpointing": False}, {"enable_checkpointing": False, "fast_dev_run": True}):
        assert FabricLoop(**SHORT, **words).checkpoint_callback is None
    with pytest.raises(AttributeError, match="^checkpoint_callback.monitor cannot be set: what is kept is said by"):
        FabricLoop().checkpoint_callback.monitor = "val_loss"


# ---- the logger's kind


def test_the_own_logger_is_one_to_who_asks():
    assert isinstance(FabricLoop().logger, Logger)
    assert not isinstance(FabricLoop().logger, CSVLogger)  # not this one of Lightning's
    FabricLoop(callbacks=[LearningRateMonitor()], **SHORT).fit(BoringModel())


def test_what_it_has_not_is_said_with_what_to_write():
    with pytest.raises(
        AttributeError, match=r"no attribute 'add_image': it writes .* logger=TensorBoardLogger\('logs'\)"
    ):
        FabricLoop(**quiet(logger=True)).logger.experiment.add_image("a", None)
