"""Helpers for tests of complete runs, such as functions that train, compare runs, or read log files."""

import csv
import io
import itertools
import logging
import shutil
import sys
from pathlib import Path

import torch
from interpreter import fork_command
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from torch import nn

from fabric_template import CSVLogger, FabricLoop

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

# Comparisons leave out these CSV columns, which differ even between two identical runs.
TIMES = ["time", "waiting", "gpu_memory", "samples_per_second"]


def with_files(root=".", **options):
    """Return options that make a loop write its files but print nothing."""
    return {
        "accelerator": "cpu",
        "default_root_dir": str(root),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }


def fit(root, make_module=Classifier, train=None, val=None, seed=1, resume=None, load=None, given=None, **options):
    """Train in a folder. Return (loop, module, history). `train` and `val` create the loaders."""
    seed_everything(seed, verbose=False)
    module = make_module()
    loaders = (train or make_loader)(), (val() if val else None)
    loop = FabricLoop(**with_files(root, **options))
    history = loop.fit(module, *loaders, resume=resume, load=load, **(given(module) if given else {}))
    return loop, module, history


def val_loader():
    return make_loader(18, shuffle=False, seed=5)


class Record(list):
    """A list that a resumed run does not restore, because its class is a subclass of list."""


class RecordByKey(dict):
    """A dict that a resumed run does not restore, because its class is a subclass of dict."""


class Plain:
    """A model without a base class, whose steps return the values to log."""

    def __init__(self, dropout=0.2):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def same(one, other):
    """Return whether two nested values are equal. Tensors must be equal bit for bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other or (one != one and other != other)


def weights_of(model):
    """Return the state dict of a module, or of a plain object's net."""
    return (model if isinstance(model, nn.Module) else model.net).state_dict()


def without_time(path):
    """Return a CSV file's content without the columns of time and speed, or None if the file is missing."""
    path = Path(path)
    if not path.exists():
        return None
    columns, *rows = csv.reader(io.StringIO(path.read_text(), newline=""))
    keep = [i for i, name in enumerate(columns) if name not in TIMES]
    return "\n".join(",".join(row[i] for i in keep) for row in (columns, *rows))


def logs_of(root, version=0, name="run"):
    """Return the content of metrics.csv and steps.csv of a run without their time columns."""
    folder = Path(root, "logs", name, f"version_{version}")
    return without_time(folder / "metrics.csv"), without_time(folder / "steps.csv")


def tree(root):
    """Return the paths of all files and empty folders under a folder, except .lock files."""
    paths = (path for path in Path(root).rglob("*") if path.is_file() or not any(path.iterdir()))
    paths = (path for path in paths if path.name != ".lock")
    return sorted(path.relative_to(root).as_posix() for path in paths)


def assert_same_end(one, other):
    """Check that two runs, each (loop, module, history), have equal weights, states, metrics, counters and rows."""
    (first, module, rows), (second, other_module, other_rows) = one, other
    assert same(weights_of(module), weights_of(other_module))
    states = [[optimizer.state_dict() for optimizer in loop.optimizers] for loop in (first, second)]
    assert same(*states), states
    states = [[config.scheduler.state_dict() for config in loop.lr_scheduler_configs] for loop in (first, second)]
    assert same(*states), states
    metrics = [{name: float(value) for name, value in loop.callback_metrics.items()} for loop in (first, second)]
    assert metrics[0] == metrics[1], metrics
    assert (first.current_epoch, first.global_step) == (second.current_epoch, second.global_step)
    if not any(isinstance(logger, CSVLogger) for logger in second.loggers):
        # Compare only the last rows, because a resumed run without a CSV file returns only its own rows.
        rows = rows.tail(len(other_rows)).reset_index(drop=True).dropna(axis="columns", how="all")
    texts = [table.drop(columns=TIMES, errors="ignore").to_csv() for table in (rows, other_rows)]
    assert texts[0] == texts[1]


class Snapshots(Callback):
    """A callback that copies the run's folder before a batch, in the state in which SIGKILL would leave it.

    Args:
        root: The folder of the run.
        to: The folder for the copies. Their names are the numbers of batches before the copy.
        chosen: The numbers of batches after which to copy. By default, copy before each batch except the first.
    """

    def __init__(self, root, to, chosen=None):
        self.root, self.to, self.chosen = Path(root), Path(to), chosen
        # Count with an iterator, because a resumed run would restore an int attribute.
        self.batches = itertools.count()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batches = next(self.batches)
        is_chosen = batches > 0 if self.chosen is None else batches in self.chosen
        if is_chosen and trainer.is_global_zero:
            shutil.copytree(self.root, self.to / str(batches))


def python_command(code, file=__file__):
    """Return a command that runs code in a new Python, with tests/support and the folder of `file` on sys.path."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2]), str(Path(file).parent)]
    return fork_command([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"])


def copy_on_rank_0(rank, source, target):
    """Copy a folder on rank 0 while the other ranks wait."""
    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(source, target)
    torch.distributed.barrier()
    return target
