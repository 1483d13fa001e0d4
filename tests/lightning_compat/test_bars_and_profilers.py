"""Test that model summaries, progress bars and profilers of Lightning show what they show under Trainer."""

import io
import logging
import re

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS, run_both
from lightning.pytorch import callbacks as cb
from lightning.pytorch import profilers
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from modules import Classifier, make_loader, quiet
from runs import val_loader

BAR = {"enable_progress_bar": True}


# Model summaries


class Shown(Classifier):
    example_input_array = torch.ones(2, 8)


@pytest.mark.parametrize("depth", [1, -1])
def test_model_summary(tmp_path, caplog, depth):
    logger = "lightning.pytorch.callbacks.model_summary"
    with caplog.at_level(logging.INFO, logger=logger):
        logging.getLogger(logger).addHandler(caplog.handler)
        run_both(tmp_path, lambda root: cb.ModelSummary(max_depth=depth), Shown, max_epochs=1)
        logging.getLogger(logger).removeHandler(caplog.handler)
    tables = list(dict.fromkeys(record.getMessage() for record in caplog.records if "net" in record.getMessage()))
    assert len(tables) == 1, tables
    assert "Trainable params" in tables[0]


# Progress bars


class NotedTqdm(cb.TQDMProgressBar):
    """Records its bars after each hook that draws them, and draws nothing."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def _quiet(self):
        return Tqdm(file=io.StringIO(), leave=True, disable=self.is_disabled)

    init_sanity_tqdm = init_train_tqdm = init_validation_tqdm = init_test_tqdm = init_predict_tqdm = _quiet

    def note(self, hook, bar, trainer, module):
        metrics = {name: float(value) for name, value in self.get_metrics(trainer, module).items()}
        self.seen.append((hook, bar.desc, bar.total, bar.n, metrics))


def noting(hook, bar):
    """Let the class record its bar after a hook."""
    drawn = getattr(NotedTqdm, hook)

    def noted(self, trainer, module, *args):
        drawn(self, trainer, module, *args)
        self.note(hook, getattr(self, bar), trainer, module)

    setattr(NotedTqdm, hook, noted)


for _hook, _bar in {
    "on_train_epoch_start": "train_progress_bar",
    "on_train_batch_end": "train_progress_bar",
    "on_train_epoch_end": "train_progress_bar",
    "on_validation_batch_start": "val_progress_bar",
    "on_validation_batch_end": "val_progress_bar",
    "on_test_batch_end": "test_progress_bar",
    "on_predict_batch_end": "predict_progress_bar",
}.items():
    noting(_hook, _bar)


class Barred(Classifier):
    """Shows a value per step and per epoch; tests and predicts."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self(batch[0]).mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 0.5}, {"max_epochs": -1, "max_steps": 13}, {"check_val_every_n_epoch": 2}],
    ids=str,
)
def test_progress_bar(tmp_path, options):
    """Totals, positions, titles and values are equal after each batch of fit, test and predict."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    sides = run_both(tmp_path, lambda root: NotedTqdm(refresh_rate=3), Barred, **BAR, **options)
    for side in sides:
        side.trainer.test(side.module, val_loader(), verbose=False)
        side.trainer.predict(side.module, val_loader())
    expected, ours = (side.callbacks[0].seen for side in sides)
    assert expected == ours
    assert {row[0] for row in ours} >= {"on_train_batch_end", "on_validation_batch_end", "on_predict_batch_end"}
    assert sides[1].trainer.progress_bar_callback is sides[1].callbacks[0]


# Profilers


class Data(pl.LightningDataModule):
    def prepare_data(self):
        pass

    def setup(self, stage):
        pass

    def train_dataloader(self):
        return make_loader()

    def val_dataloader(self):
        return val_loader()

    test_dataloader = predict_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def teardown(self, stage):
        pass


class Hooked(Barred):
    def setup(self, stage):
        pass

    def on_train_epoch_start(self):
        pass

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_callbacks(self):
        return []

    def on_save_checkpoint(self, checkpoint):
        pass


class Mine(pl.Callback):
    def on_train_batch_end(self, *args):
        pass


def profile_both(tmp_path, make):
    """Fit, test and predict with a profiler. Returns both profilers."""
    found = []
    for name, kind in LOOPS.items():
        root = tmp_path / name
        profiler = make(root)
        saving = cb.ModelCheckpoint(root, save_last=True)
        options = {"profiler": profiler, "callbacks": [Mine(), saving], "enable_checkpointing": True, "max_epochs": 2}
        pl.seed_everything(1, verbose=False)
        loop = kind(**quiet(default_root_dir=str(root), **options))
        module, data = Hooked(), Data()
        loop.fit(module, datamodule=data)
        loop.test(module, datamodule=data, verbose=False)
        loop.predict(module, datamodule=data)
        found.append(profiler)
    return found


# Trainer measures these also where they are empty.
EMPTY = re.compile(
    r"\.(on_\w+|setup|teardown|configure_gradient_clipping|optimizer_zero_grad|state_dict|transfer_batch_to_device)$"
)


@pytest.mark.filterwarnings("ignore:.*(does not have many workers|has no logger|`logger=True` but)")
def test_simple_profiler(tmp_path):
    """Every action has Trainer's name and count."""
    theirs, ours = profile_both(tmp_path, lambda root: profilers.SimpleProfiler(dirpath=root, filename="report"))
    expected, found = ({name: len(took) for name, took in p.recorded_durations.items()} for p in (theirs, ours))
    assert {name: expected.get(name) for name in found} == found
    missing = {name for name in expected if name not in found}
    assert {name for name in missing if not EMPTY.search(name)} == set()
    wrote = [name for name in missing if name.endswith(("Hooked.setup", "Hooked.on_train_epoch_start", "Data.setup"))]
    assert wrote == []
    assert "[_TrainingEpochLoop].train_dataloader_next" in found
    for stage in ("fit", "test", "predict"):
        assert (tmp_path / "loop" / f"{stage}-report.txt").read_text().startswith(f"{stage.upper()} Profiler Report\n")
    assert re.search(r"\|  run_training_epoch\s+\|", (tmp_path / "loop" / "fit-report.txt").read_text())
