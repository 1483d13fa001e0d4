"""Test how training scripts use a Trainer before and after fit."""

from collections import UserList
from pathlib import Path

import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from fabric_template import FabricLoop, read_logs

SHORT = {
    "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1, "log_every_n_steps": 1,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def test_the_callbacks_option_accepts_any_sequence():
    """Hydra, for example, passes a ListConfig, which is not a list."""
    one, two = Callback(), ModelCheckpoint()
    assert FabricLoop(callbacks=UserList([two, one]), **SHORT).callbacks == [one, two]


def test_fit_keeps_the_log_directory_that_the_script_has_already_used():
    loop = FabricLoop(**SHORT)
    logger, folder = loop.logger, Path(loop.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.txt").write_text("copied by the script")
    logger.log_hyperparams({"rate": 0.1})
    logger.log_metrics({"before": 1.0}, step=0)
    loop.validate(BoringModel(), verbose=False)
    loop.fit(BoringModel(), resume="auto")
    assert (loop.logger, loop.log_dir) == (logger, str(folder))
    logger.log_metrics({"after": 2.0}, step=9)
    assert [path.as_posix() for path in Path().glob("*/run/*")] == ["checkpoints/run/version_0", "logs/run/version_0"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == [
        "config.yaml", "hparams.yaml", "metrics.csv", "script.txt", "steps.csv",
    ]  # fmt: skip
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["rate"] == 0.1
    steps = read_logs(folder, steps=True)
    assert (steps["before"].dropna().tolist(), steps["after"].dropna().tolist()) == ([1.0], [2.0])

    loop.fit(BoringModel())
    assert loop.log_dir == str(folder.with_name("version_1"))
