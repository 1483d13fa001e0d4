"""Test the files in the log folder of new and resumed runs, and test other loggers."""

import shutil
import signal
import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from modules import Classifier, make_loader, quiet
from parameters import halve
from runs import Plain, assert_same_end, fit, logs_of, same, tree, val_loader, weights_of, with_files, without_time
from torch import nn

from fabric_template import list_runs
from fabric_template.loggers.read_logs import read_logs
from fabric_template.loop import FabricLoop

LAST = "checkpoints/run/version_0/last.ckpt"
FOLDER = "logs/run/version_0"


class Known(pl.LightningModule):
    """A model that logs predictable numbers. Batch i of an epoch logs i, and the weight stays 1."""

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


def two():
    return make_loader(8)


def test_metrics_csv_and_steps_csv_contain_the_logged_values(tmp_path):
    _, _, history = fit(tmp_path, Known, four, four, max_epochs=2, log_every_n_steps=2)
    assert without_time(tmp_path / FOLDER / "metrics.csv") == (
        "epoch,step,train_loss,val_loss,loss_of_batch,epoch_only,lr\n0,4,0.0,10.0,1.5,3.0,0.5\n1,8,0.0,11.0,1.5,3.0,0.5"
    )
    steps = (tmp_path / FOLDER / "steps.csv").read_text()
    assert steps == "step,epoch,train_loss,lr,loss_of_batch\n" + "".join(
        f"{step},{epoch},0.0,0.5,{value}\n"
        for step, epoch, value in ((2, 0, 1.0), (4, 0, 3.0), (6, 1, 1.0), (8, 1, 3.0))
    )
    names = ("config.yaml", "hparams.yaml", "metrics.csv", "steps.csv")
    assert tree(tmp_path) == [LAST, *(f"{FOLDER}/{name}" for name in names)]
    pd.testing.assert_frame_equal(history, pd.read_csv(tmp_path / FOLDER / "metrics.csv"))
    pd.testing.assert_frame_equal(history, read_logs(tmp_path / "logs").drop(columns=["name", "version"]))
    hparams = yaml.safe_load((tmp_path / FOLDER / "hparams.yaml").read_text())
    assert (hparams["hparams"], hparams["config"]["max_epochs"]) == ({"lr": 0.5}, 2)


def test_the_csv_row_of_an_epoch_without_validation_has_no_validation_loss(tmp_path):
    _, _, history = fit(tmp_path, Known, four, four, max_epochs=4, check_val_every_n_epoch=2)
    assert history["val_loss"].isna().tolist() == [True, False, True, False]
    fit(tmp_path / "inside", Known, four, four, max_epochs=2, val_check_interval=0.5, log_every_n_steps=0)
    steps = read_logs(tmp_path / "inside/logs", steps=True)
    assert steps[["step", "epoch", "val_loss"]].values.tolist() == [[2, 0, 10.0], [6, 1, 11.0]]


@pytest.mark.parametrize(("every", "steps"), [(1, range(1, 13)), (5, [5, 10]), (50, None), (0, None)])
def test_log_every_n_steps_selects_the_rows_of_steps_csv(tmp_path, every, steps):
    fit(tmp_path, Known, four, max_epochs=3, log_every_n_steps=every)
    found = logs_of(tmp_path)[1]
    if steps is None:
        assert found is None
    else:
        rows = [f"{step},{(step - 1) // 4},0.0,0.5,{(step - 1) % 4:.1f}" for step in steps]
        assert found.splitlines() == ["step,epoch,train_loss,lr,loss_of_batch", *rows]


def test_each_call_to_fit_gets_a_new_version_unless_a_version_is_given(tmp_path):
    loop = FabricLoop(**with_files(tmp_path, max_epochs=1))
    for version in (0, 1):
        loop.fit(Known(), four())
        assert loop.log_dir.endswith(f"version_{version}")
    for _ in range(2):
        # With version=0, each call to fit uses the folder of version 0 again.
        fit(tmp_path, Known, four, version=0, max_epochs=2)
        assert len(read_logs(tmp_path / "logs/run/version_0")) == 2


# The files of a resumed run


class Odd(Classifier):
    """A model that logs unusual values, some only in one epoch, under names that need quotes."""

    def training_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("third", torch.tensor(1 / 3, dtype=torch.float64) * 10.0**-epoch, on_step=False, on_epoch=True)
        self.log("sum", float("nan") if epoch else float("-inf"), on_step=False, on_epoch=True)
        if epoch == 1:
            self.log("late, one", torch.tensor(7.0), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Foreign:
    """A minimal logger, as another package might define it."""

    def __init__(self):
        self.steps = []

    def log_metrics(self, metrics, step):
        self.steps.append((step, dict(metrics)))


LOGGERS = {
    "ours": lambda: {},
    "none": lambda: {"logger": False},
    "foreign": lambda: {"loggers": Foreign()},
    "both": lambda: {"logger": [Foreign(), True]},
}


@pytest.mark.parametrize("loggers", LOGGERS)
def test_a_resumed_run_writes_the_same_csv_rows_as_an_uninterrupted_run(tmp_path, loggers):
    whole = fit(tmp_path / "whole", Odd, two, max_epochs=4, **LOGGERS[loggers]())
    for epochs in (1, 2, 4):
        resume = None if epochs == 1 else "last"
        resumed = fit(tmp_path / "cut", Odd, two, max_epochs=epochs, resume=resume, **LOGGERS[loggers]())
    has_file = loggers not in ("none", "foreign")
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")
    assert (logs_of(tmp_path / "cut")[0] is not None) == has_file
    expected = whole[2] if has_file else whole[2].iloc[2:].reset_index(drop=True)
    found = resumed[2].reindex(columns=expected.columns)
    tables = [table.drop(columns=["time", "waiting"]) for table in (expected, found)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.mark.parametrize("place", ["new version", "version of another run", "moved run"])
def test_resuming_in_another_folder_copies_the_csv_rows_of_the_run(tmp_path, place):
    fit(tmp_path / "whole", Odd, two, max_epochs=3)
    root, version = tmp_path / "a", {"new version": 7, "version of another run": 1}.get(place)
    fit(root, Odd, two, max_epochs=2)
    resume = root / LAST
    if place == "version of another run":
        fit(root, Odd, lambda: make_loader(12), max_epochs=3)
    elif place == "moved run":
        resume = shutil.move(root, tmp_path / "moved") / LAST
        root = tmp_path / "b"
    _, _, history = fit(root, Odd, two, max_epochs=3, resume=resume, version=version)
    assert history["epoch"].tolist() == [0, 1, 2]
    assert logs_of(root, version or 0)[0] == logs_of(tmp_path / "whole")[0]


@pytest.mark.parametrize("loss", ["removed", "shortened", "of another run", "never written"])
def test_resume_warns_if_csv_rows_from_before_the_checkpoint_are_missing(tmp_path, loss):
    whole = fit(tmp_path / "whole", Odd, two, max_epochs=3)
    fit(tmp_path, Odd, two, max_epochs=2, logger=loss != "never written")
    path = tmp_path / "logs/run/version_0/metrics.csv"
    if loss == "removed":
        path.unlink()
    elif loss == "shortened":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    elif loss == "of another run":
        fit(tmp_path / "other", Odd, lambda: make_loader(12), max_epochs=3)
        shutil.copy(tmp_path / "other/logs/run/version_0/metrics.csv", path)
    with pytest.warns(UserWarning, match=r"metrics\.csv: the rows from before the checkpoint are missing"):
        _, module, history = fit(tmp_path, Odd, two, max_epochs=3, resume="last")
    assert same(weights_of(module), weights_of(whole[1]))
    assert history["epoch"].tolist() == [2]
    assert list(read_logs(tmp_path / "logs")["epoch"]) == [2]


class Flat(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)


class Watch(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, *_):
        self.seen.append(trainer.global_step)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_epochs": 2}, "max_epochs=2 is reached"),
        ({"max_epochs": 4, "max_steps": 12}, "max_steps=12 is reached"),
        ({"max_epochs": 9, "stops": True}, "should_stop was set by EarlyStopping on 'val_loss'"),
    ],
    ids=["max_epochs", "max_steps", "early stopping"],
)
def test_starting_a_finished_run_again_with_resume_auto_changes_no_file(tmp_path, capsys, options, reason):
    stops = options.pop("stops", False)

    def start(*callbacks, **more):
        callbacks = [*callbacks, *([EarlyStopping("val_loss", patience=2)] if stops else [])]
        return fit(
            tmp_path, Flat, lambda: make_loader(24), val_loader,
            resume="auto", log_every_n_steps=2, callbacks=callbacks, **{**options, **more},
        )  # fmt: skip

    def contents():
        return {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)}

    first, before, watch = start(), contents(), Watch()
    assert_same_end(first, start(watch, seed=9))
    assert (watch.seen, contents()) == ([], before)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"resume: {tmp_path / LAST} is from a finished run. Nothing is left to train: {reason}."
        " For a new run, leave out resume=."
    )
    if not stops:
        longer = start(**{name: 15 for name in ("max_steps",) if name in options} or {"max_epochs": 3})
        assert longer[0].global_step > first[0].global_step


# The recorded status of a run: finished, failed or interrupted


class Raises(Plain):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch):
        raise self.error


@pytest.mark.parametrize(
    ("error", "state"), [(None, "finished"), (RuntimeError("mine"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_list_runs_shows_whether_a_run_finished_failed_or_was_interrupted(tmp_path, error, state):
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer, module):
            seen.extend(list_runs(tmp_path / "logs")["state"])

    def start(**options):
        make = Plain if error is None else lambda: Raises(error)
        with pytest.raises(type(error)) if error is not None else nullcontext():
            fit(tmp_path, make, two, **{"max_epochs": 1, **options})

    start(callbacks=[Look()])
    assert seen == ["running"]
    assert list_runs(tmp_path / "logs")["state"].tolist() == [state]
    lines = (tmp_path / FOLDER / ".lock").read_text().splitlines()
    assert (lines[0].isdigit(), lines[-1]) == (True, state)
    if error is None:
        start(max_epochs=2, resume="last", callbacks=[Look()])
        assert seen == ["running", "running"]
        assert list_runs(tmp_path / "logs")["state"].tolist() == ["finished"]


def test_the_message_after_ctrl_c_mentions_the_saved_checkpoint(capsys):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(".", Plain, four, max_epochs=2, callbacks=[Interrupt()])
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"SIGINT: training stops in epoch 0, after step 2. To resume from '{LAST}', write resume='last'."
    )
    assert list_runs("logs")["state"].tolist() == ["interrupted"]


# The calls that a custom logger receives


class Recorder(Logger):
    """A logger that records the calls to its methods."""

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


class LogsEachStep(Classifier):
    def __init__(self):
        super().__init__(on_step=True)


@pytest.mark.parametrize(
    ("options", "make"),
    halve(
        [{}, {"accumulate_grad_batches": 3, "log_every_n_steps": 1}, {"val_check_interval": 0.5}, {"max_steps": 7}],
        [Known, LogsEachStep],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_logger_gets_the_same_calls_as_with_trainer(make, options):
    calls = []
    for kind in (pl.Trainer, FabricLoop):
        pl.seed_everything(3, verbose=False)
        recorder = Recorder()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = kind(**quiet(**{"max_epochs": 3, "log_every_n_steps": 2, "logger": recorder, **options}))
            loop.fit(make(), make_loader(24, shuffle=False), val_loader())
        calls.append(recorder.calls)
    assert calls[1] == calls[0]
