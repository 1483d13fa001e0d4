"""Test the files that a run leaves in its log folder, and the calls that other loggers get."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
import yaml
from lightning.fabric.loggers import Logger as FabricLogger
from lightning.fabric.loggers import TensorBoardLogger as FabricTensorBoard
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from modules import Classifier, make_loader, quiet
from runs import Plain, fit, logs_of, loud, tree, val_loader, without_time
from torch import nn

from fabric_template import FabricLoop, read_logs


class Known(pl.LightningModule):
    """Logs the index of each of 4 batches, so that means are known. The weight stays 1."""

    def __init__(self, lr=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        self.log("loss_of_batch", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)
        self.log("epoch_only", 2.0 * batch_idx, on_step=False, on_epoch=True, batch_size=1)
        return self.weight * 0.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 10.0 + self.current_epoch, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def four():
    return make_loader(16, shuffle=False)


def folder(root, version=0):
    return Path(root, "logs", "run", f"version_{version}")


def test_exact_files(tmp_path):
    _, _, history = fit(tmp_path, Known, four, four, max_epochs=2, log_every_n_steps=2)
    assert without_time(folder(tmp_path) / "metrics.csv") == (
        "epoch,step,train_loss,val_loss,loss_of_batch,epoch_only,lr\n0,4,0.0,10.0,1.5,3.0,0.5\n1,8,0.0,11.0,1.5,3.0,0.5"
    )
    assert (folder(tmp_path) / "steps.csv").read_bytes() == (
        b"step,epoch,loss_of_batch_step\n"  #
        b"2,0,1.0\n"
        b"4,0,3.0\n"
        b"6,1,1.0\n"
        b"8,1,3.0\n"
    )
    assert tree(tmp_path) == [
        "checkpoints/run/version_0/last.ckpt",
        "logs/run/version_0/config.yaml",
        "logs/run/version_0/hparams.yaml",
        "logs/run/version_0/metrics.csv",
        "logs/run/version_0/steps.csv",
    ]
    # The returned history, the file and read_logs have equal rows.
    read = read_logs(tmp_path / "logs").drop(columns=["name", "version"])
    from_file = pd.read_csv(folder(tmp_path) / "metrics.csv")
    pd.testing.assert_frame_equal(history, from_file)
    pd.testing.assert_frame_equal(history, read)
    assert (history["time"] > 0).all()


def test_hparams(tmp_path):
    fit(tmp_path, lambda: Known(lr=0.25), four, max_epochs=1, limit_train_batches=2, monitor="epoch_only")
    found = yaml.safe_load((folder(tmp_path) / "hparams.yaml").read_text())
    assert found["hparams"] == {"lr": 0.25}
    config = found["config"]
    assert (config["max_epochs"], config["limit_train_batches"], config["monitor"]) == (1, 2, "epoch_only")
    assert config["log_every_n_steps"] == 50


# One row per epoch, whatever is logged


class Pair(Plain):
    def training_step(self, batch):
        return super().training_step(batch), torch.tensor(0.5)


class Dictionary(Plain):
    def training_step(self, batch):
        return {"loss": super().training_step(batch), "acc": torch.tensor(0.25), "note": "no number"}

    def validation_step(self, batch, batch_idx):
        return {"loss": torch.tensor(1.0), "f1": 0.75}


class Silent(Plain):
    validation_step = None


class OnStep(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("steps_only", float(batch_idx))
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Forked(Classifier):
    def __init__(self):
        super().__init__(on_step=True)


START, END = ["epoch", "step"], ["lr", "time"]


@pytest.mark.parametrize(
    ("make", "val", "columns"),
    [
        (Plain, val_loader, ["train_loss", "val_loss", "val_acc"]),
        (Plain, None, ["train_loss"]),
        (Silent, None, ["train_loss"]),
        (Pair, val_loader, ["train_loss", "train_acc", "val_loss", "val_acc"]),
        (Dictionary, val_loader, ["train_loss", "train_acc", "val_loss", "val_f1"]),
        (Classifier, val_loader, ["train_loss", "train_acc", "val_loss", "val_acc"]),
        (Forked, val_loader, ["train_loss", "train_acc", "val_loss", "val_acc"]),
        (OnStep, val_loader, ["train_loss", "steps_only", "val_loss", "val_acc"]),
    ],
    ids=["returns", "returns_no_val", "silent", "pair", "dict", "logs", "forked", "on_step"],
)
def test_columns(tmp_path, make, val, columns):
    _, _, history = fit(tmp_path, make, four, val, max_epochs=3)
    assert list(history.columns) == START + columns + END
    assert history["epoch"].tolist() == [0, 1, 2]
    assert history["step"].tolist() == [4, 8, 12]
    assert not history.isna().any().any()
    text = (folder(tmp_path) / "metrics.csv").read_text()
    assert text.startswith(",".join(START + columns + END) + "\n")
    assert len(text.splitlines()) == 4


def test_validation_every_second_epoch(tmp_path):
    _, _, history = fit(tmp_path, Known, four, four, max_epochs=4, check_val_every_n_epoch=2)
    rows = (folder(tmp_path) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 5
    assert history["val_loss"].isna().tolist() == [True, False, True, False]
    assert history["val_loss"].dropna().tolist() == [11.0, 13.0]


def test_validation_inside_an_epoch(tmp_path):
    """The first of two validations is a row of steps.csv, the last one belongs to the epoch's row."""

    class Counts(Known):
        validations = 0

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                self.validations += 1

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.validations), batch_size=1)

    _, _, history = fit(tmp_path, Counts, four, four, max_epochs=2, val_check_interval=0.5, log_every_n_steps=0)
    assert history["val_loss"].tolist() == [1.0, 3.0]
    steps = read_logs(tmp_path / "logs", steps=True).drop(columns=["name", "version"])
    assert steps[["step", "epoch", "val_loss"]].values.tolist() == [[2, 0, 0.0], [6, 1, 2.0]]


@pytest.mark.parametrize(
    ("every", "steps"), [(1, range(1, 13)), (3, [3, 6, 9, 12]), (5, [5, 10]), (50, None), (0, None)]
)
def test_log_every_n_steps(tmp_path, every, steps):
    fit(tmp_path, Known, four, max_epochs=3, log_every_n_steps=every)
    found = logs_of(tmp_path)[1]
    if steps is None:
        assert found is None
    else:
        assert found.splitlines()[1:] == [f"{n},{(n - 1) // 4},{(n - 1) % 4:.1f}" for n in steps]


def test_log_every_n_steps_with_accumulation(tmp_path):
    """A step is one of the optimizer, here of two batches."""
    fit(tmp_path, Known, four, max_epochs=2, log_every_n_steps=1, accumulate_grad_batches=2)
    assert logs_of(tmp_path)[1].splitlines() == [
        "step,epoch,loss_of_batch_step",
        "1,0,1.0",
        "2,0,3.0",
        "3,1,1.0",
        "4,1,3.0",
    ]


def test_on_disk_as_soon_as_the_epoch_ends(tmp_path):
    """The next epoch finds complete rows and their checkpoint."""
    seen = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch:
                frame = pd.read_csv(folder(tmp_path) / "metrics.csv")
                saved = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
                seen.append((frame["epoch"].tolist(), frame["val_loss"].tolist(), saved["global_step"]))

    fit(tmp_path, Known, four, four, max_epochs=3, callbacks=[Look()])
    assert seen == [([0], [10.0], 4), ([0, 1], [10.0, 11.0], 8)]


def test_no_logger_writes_nothing(tmp_path):
    _, _, history = fit(tmp_path, Plain, four, val_loader, max_epochs=2, logger=False, enable_checkpointing=False)
    assert tree(tmp_path) == []
    assert list(history.columns) == [*START, "train_loss", "val_loss", "val_acc", *END]


# Other loggers


class Recorder(Logger):
    """Records its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    name, version = "recorder", 0

    @property
    @rank_zero_experiment
    def experiment(self):
        return self

    def log_hyperparams(self, params, *args, **kwargs):
        self.calls.append(("hparams", dict(params)))

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, {name: float(value) for name, value in metrics.items()}))

    def finalize(self, status):
        self.calls.append(("finalize", status))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"log_every_n_steps": 1},
        {"accumulate_grad_batches": 3, "log_every_n_steps": 1},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 2},
        {"max_steps": 7, "max_epochs": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [Known, lambda: Classifier(on_step=True)], ids=["known", "classifier"])
def test_same_calls_as_trainer(make, options):
    options = {"max_epochs": 3, "log_every_n_steps": 2, **options}
    calls = []
    for kind in (pl.Trainer, FabricLoop):
        pl.seed_everything(3, verbose=False)
        recorder = Recorder()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = kind(**quiet(**{**options, "logger": recorder}))
            loop.fit(make(), make_loader(24, shuffle=False), val_loader())
        calls.append(recorder.calls)
    assert calls[1] == calls[0]


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("kind", ["trainers", "fabrics"])
def test_tensorboard_beside_the_csv(tmp_path, kind):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fabric_template.loggers.csv_logger import CSVLogger

    board = TensorBoardLogger(tmp_path / "tb") if kind == "trainers" else FabricTensorBoard(tmp_path / "tb")
    loggers = [CSVLogger(tmp_path / "logs"), board]
    loop = FabricLoop(**loud(tmp_path, max_epochs=2, logger=loggers, log_every_n_steps=2))
    history = loop.fit(Known(), four(), four())
    events = EventAccumulator(str(next((tmp_path / "tb").rglob("events.out*")).parent)).Reload()
    assert set(events.Tags()["scalars"]) >= {
        "loss_of_batch_step",
        "loss_of_batch_epoch",
        "epoch_only",
        "val_loss",
        "epoch",
    }
    found = [(event.step, event.value) for event in events.Scalars("loss_of_batch_step")]
    assert found == [(1, 1.0), (3, 3.0), (5, 1.0), (7, 3.0)]
    assert [event.value for event in events.Scalars("val_loss")] == history["val_loss"].tolist() == [10.0, 11.0]
    assert logs_of(tmp_path)[0].splitlines()[1:] == ["0,4,0.0,10.0,1.5,3.0,0.5", "1,8,0.0,11.0,1.5,3.0,0.5"]
    assert loop.logger is loggers[0]


def test_a_logger_of_fabric(tmp_path):
    class Small(FabricLogger):
        name, version = "small", 0

        def __init__(self):
            self.rows = []

        def log_metrics(self, metrics, step=None):
            self.rows.append((step, sorted(metrics)))

        def log_hyperparams(self, params, *args, **kwargs):
            pass

    small = Small()
    loop = FabricLoop(**loud(tmp_path, max_epochs=1, loggers=small, log_every_n_steps=2, enable_checkpointing=False))
    loop.fit(Known(), four(), four())
    assert small.rows == [
        (1, ["epoch", "loss_of_batch_step"]),
        (3, ["epoch", "loss_of_batch_step"]),
        (3, ["epoch", "val_loss"]),
        (3, ["epoch", "epoch_only", "loss_of_batch_epoch"]),
    ]
    assert tree(tmp_path) == []


def test_an_object_with_log_metrics_alone_is_a_logger():

    class Lines:
        def __init__(self):
            self.seen = []

        def log_metrics(self, metrics, step):
            self.seen.append((step, metrics))

    lines = Lines()
    options = quiet(max_epochs=1, logger=lines, log_every_n_steps=2, enable_checkpointing=True)
    FabricLoop(**options).fit(Known(), four(), four())
    assert lines.seen == [
        (1, {"epoch": 0, "loss_of_batch_step": 1.0}),
        (3, {"epoch": 0, "loss_of_batch_step": 3.0}),
        (3, {"epoch": 0, "val_loss": 10.0}),
        (3, {"epoch": 0, "loss_of_batch_epoch": 1.5, "epoch_only": 3.0}),
    ]


def test_true_in_a_list_of_loggers_is_the_csv_logger():
    """It continues in the version of a resumed run."""

    class Lines:
        def __init__(self):
            self.steps = []

        def log_metrics(self, metrics, step):
            self.steps.append(step)

    for loggers, epochs, resume in ((True, 3, None), ([Lines(), True], 2, None), ([Lines(), True], 3, "last")):
        name = "alone" if loggers is True else "among"
        options = quiet(max_epochs=epochs, logger=loggers, name=name, log_every_n_steps=0, enable_checkpointing=True)
        loop = FabricLoop(**options)
        loop.fit(Known(), four(), four(), resume=resume)
    assert loop.loggers[0].steps == [11, 11]
    assert [path.name for path in Path("logs/among").iterdir()] == ["version_0"]
    alone, among = (without_time(Path("logs", name, "version_0", "metrics.csv")) for name in ("alone", "among"))
    assert alone == among
