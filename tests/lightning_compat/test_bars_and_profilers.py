"""Test that Lightning's summaries, progress bars and profilers show the same values as with Trainer."""

import io
import logging

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS, run_both
from lightning.pytorch import callbacks as cb
from lightning.pytorch import profilers
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from modules import Classifier, make_loader, quiet
from runs import val_loader

from fabric_template import FabricLoop

BAR = {"enable_progress_bar": True}


# The printed model summary


# The model summary of Lightning 2.5 does not count FLOPs.
HAS_FLOPS = hasattr(pl.utilities.model_summary.ModelSummary, "total_flops")


class Shown(Classifier):
    example_input_array = torch.ones(2, 8)


@pytest.mark.parametrize("depth", [1, -1])
def test_model_summary_prints_the_same_table_as_with_trainer(tmp_path, caplog, depth):
    logger = "lightning.pytorch.callbacks.model_summary"
    with caplog.at_level(logging.INFO, logger=logger):
        logging.getLogger(logger).addHandler(caplog.handler)
        run_both(tmp_path, lambda root: cb.ModelSummary(max_depth=depth), Shown, max_epochs=1)
        logging.getLogger(logger).removeHandler(caplog.handler)
    tables = list(dict.fromkeys(record.getMessage() for record in caplog.records if "net" in record.getMessage()))
    assert len(tables) == 1, tables
    assert "Trainable params" in tables[0]


def test_the_default_model_summary_is_short_and_printed_to_stdout(capsys):
    for module in (Classifier(), Shown(), Classifier()):
        module.net[0].requires_grad_(type(module) is Shown)
        FabricLoop(max_epochs=1, accelerator="cpu", enable_progress_bar=False).fit(module, make_loader(8))
        out, err = capsys.readouterr()
        assert ("In sizes" in out) == (type(module) is Shown)
        assert ("FLOPs" in out) == (type(module) is Shown and HAS_FLOPS)
        assert out.splitlines()[1].split()[:5] == ["0", "net", "Sequential", "195", "train"]
        assert len(out.splitlines()) == 3
        assert "Sequential" not in err
    assert out.splitlines()[-1] == "195 parameters, 144 of them frozen, 0.0 MB"


# Lightning's progress bars


class RecordedTqdm(cb.TQDMProgressBar):
    """A progress bar that records its state after each hook that would draw it, and draws nothing."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def _quiet(self):
        return Tqdm(file=io.StringIO(), leave=True, disable=self.is_disabled)

    init_sanity_tqdm = init_train_tqdm = init_validation_tqdm = init_test_tqdm = init_predict_tqdm = _quiet

    def record(self, hook, bar, trainer, module):
        metrics = {name: float(value) for name, value in self.get_metrics(trainer, module).items()}
        self.seen.append((hook, bar.desc, bar.total, bar.n, metrics))


def record_after(hook, bar):
    """Make RecordedTqdm record the state of a bar after a hook."""
    drawn = getattr(RecordedTqdm, hook)

    def recorded(self, trainer, module, *args):
        drawn(self, trainer, module, *args)
        self.record(hook, getattr(self, bar), trainer, module)

    setattr(RecordedTqdm, hook, recorded)


for _hook, _bar in {
    "on_train_epoch_start": "train_progress_bar",
    "on_train_batch_end": "train_progress_bar",
    "on_train_epoch_end": "train_progress_bar",
    "on_validation_batch_start": "val_progress_bar",
    "on_validation_batch_end": "val_progress_bar",
    "on_test_batch_end": "test_progress_bar",
    "on_predict_batch_end": "predict_progress_bar",
}.items():
    record_after(_hook, _bar)


class Barred(Classifier):
    """A module that shows a value per step and per epoch, and defines test_step and predict_step."""

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
def test_progress_bars_show_the_same_values_as_with_trainer(tmp_path, options):
    """After each batch, the bars have the same totals, positions, titles and values as Trainer's bars."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    sides = run_both(tmp_path, lambda root: RecordedTqdm(refresh_rate=3), Barred, **BAR, **options)
    for side in sides:
        side.trainer.test(side.module, val_loader(), verbose=False)
        side.trainer.predict(side.module, val_loader())
    expected, ours = (side.callbacks[0].seen for side in sides)
    assert expected == ours
    assert {row[0] for row in ours} >= {"on_train_batch_end", "on_validation_batch_end", "on_predict_batch_end"}
    assert sides[1].trainer.progress_bar_callback is sides[1].callbacks[0]


# Lightning's profilers


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_simple_profiler_measures_the_same_actions_as_with_trainer(tmp_path):
    """Every measured action has the same name and count as with Trainer. Each stage writes a report."""
    counts = []
    for name, kind in LOOPS.items():
        profiler = profilers.SimpleProfiler(dirpath=tmp_path / name, filename="report")
        pl.seed_everything(1, verbose=False)
        loop, module = kind(**quiet(max_epochs=2, profiler=profiler)), Barred()
        loop.fit(module, make_loader(), val_loader())
        loop.test(module, val_loader(), verbose=False)
        counts.append({action: len(durations) for action, durations in profiler.recorded_durations.items()})
    expected, ours = counts
    assert {action: expected.get(action) for action in ours} == ours
    assert {"run_training_epoch", "[_TrainingEpochLoop].train_dataloader_next"} <= set(ours)
    assert "[LightningModule]Barred.configure_optimizers" in ours
    for stage in ("fit", "test"):
        assert (tmp_path / "loop" / f"{stage}-report.txt").read_text().startswith(f"{stage.upper()} Profiler Report\n")
