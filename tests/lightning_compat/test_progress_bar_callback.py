"""Test that reading `trainer.progress_bar_callback` before a run adds Lightning's bar."""

import pytest
from both import LOOPS
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress import tqdm_progress
from lightning.pytorch.demos.boring_classes import BoringModel
from modules import quiet

from fabric_template import FabricLoop


class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("x", float(batch_idx), prog_bar=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("last", float(self.current_epoch), prog_bar=True)


@pytest.fixture(autouse=True)
def plain_bar(monkeypatch):
    """Trainer uses another bar where rich is installed."""
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.callback_connector._RICH_AVAILABLE", False)


def made(kind, folder, **options):
    limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, "logger": False}
    return kind(**{**quiet(**limits, default_root_dir=str(folder)), "enable_progress_bar": True, **options})


@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
def test_read_before_a_run(kind, tmp_path, capsys):
    trainer = made(kind, tmp_path)
    bar = trainer.progress_bar_callback
    assert type(bar) is TQDMProgressBar
    assert trainer.progress_bar_callback is bar
    assert bar in trainer.callbacks
    trainer.fit(model := Logs())
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (3, 3)
    assert bar.get_metrics(trainer, model) == {"x": 2.0, "last": 1.0}
    assert "Epoch 1: 100%" in "".join(capsys.readouterr())


@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
def test_read_after_a_run(kind, tmp_path):
    trainer = made(kind, tmp_path)
    trainer.fit(model := Logs())
    assert trainer.progress_bar_callback.get_metrics(trainer, model) == {"x": 2.0, "last": 1.0}


@pytest.mark.parametrize("options", [{"enable_progress_bar": False}, {"barebones": True}])
@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
def test_without_a_bar(kind, options, tmp_path):
    assert kind(default_root_dir=str(tmp_path), **options).progress_bar_callback is None


def test_the_console_stays_if_nobody_reads_it(tmp_path, monkeypatch):
    """Reading it inside of a run changes nothing."""
    monkeypatch.delattr(tqdm_progress, "Tqdm")
    seen = []

    class Asks(Callback):
        def on_train_start(self, trainer, module):
            seen.append(trainer.progress_bar_callback)
            module.print("shown")

    made(FabricLoop, tmp_path, callbacks=[Asks()]).fit(Logs())
    assert seen == [None]
