"""A short run for the fault tests, with all kinds of state, and functions to compare two runs."""

import csv
import io
import logging
import os
import random
import re
import sys
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Import the tests' helpers and the package from this clone.
sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import numpy as np
import torch
from lightning.fabric.utilities.seed import seed_everything
from modules import make_data, shard_module
from torch import nn
from torch.utils.data import DataLoader

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.checkpoint.distributed import SHARDS_KEY

# A run has 3 epochs of 8 batches and 4 optimizer steps each. It saves some checkpoints mid-epoch.
RUN_OPTIONS = {
    "accelerator": "cpu",
    "max_epochs": 3,
    "accumulate_grad_batches": 2,
    "log_every_n_steps": 1,
    "save_every_n_steps": 3,
    "monitor": "val_loss",
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# Comparisons ignore these values, which depend on a clock or on the version folder.
# A run that is killed before its first save starts again in the next version folder.
TIMES = (
    "time",
    "waiting",
    "seconds",
    "seconds_waited",
    "excluded_seconds",
    "samples_per_second",
    "elapsed",
    "saved_at",
    "folder",
)
# If best.ckpt or config.yaml cannot be written, a run continues without the file, so these values differ.
BEST = ("checkpoints/best.ckpt", "best", "score", "kept", "callbacks", "logs/config.yaml")


class Victim(nn.Module):
    """A model that draws random numbers from Python, NumPy and torch, and logs per step and per epoch."""

    # The total number of steps of the learning-rate scheduler.
    steps = 12

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("noise", noise, on_step=True, on_epoch=True)
        return loss * noise

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def sharded_strategy(ranks=2, **options):
    """Return the strategy that shards the victim's weights over `ranks` ranks (FSDP2)."""
    from lightning.fabric.strategies import ModelParallelStrategy

    return ModelParallelStrategy(shard_module, ranks, 1, **options)


def train(root, make=Victim, batch_size=4, **options):
    """Start or resume the run. The tests call this function again after they have killed the run."""
    seed_everything(1, verbose=False)
    train_loader = DataLoader(make_data(32), batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(make_data(8, seed=5), batch_size=4)
    loop = FabricLoop(default_root_dir=str(root), **{**RUN_OPTIONS, **options})
    loop.fit(make(), train_loader, val_loader, resume="auto")


def end_of(root, without=()):
    """Return {path: content} of the files in the newest version folder of a finished run, without clock values.

    The content of a checkpoint is a dict, and the content of a CSV file is a list of lines.
    """
    found = {}
    for kind in ("checkpoints", "logs"):
        versions = sorted(Path(root, kind, "run").glob("version_*"), key=lambda path: int(path.name[8:]))
        for path in sorted(versions[-1].rglob("*")) if versions else []:
            if path.name not in (".lock", ".metadata"):
                # Remove the number that a save adds to its folder's name
                # if a killed save has left a folder with the same name.
                name = re.sub(r"(step=\d+)-\d+", r"\1", f"{kind}/{path.relative_to(versions[-1])}")
                found[name] = _content(path, str(root))
    return without_names(found, (*TIMES, *without))


def _content(path, root):
    if path.suffix == ".ckpt":
        checkpoint = read_checkpoint(path)
        checkpoint.pop(SHARDS_KEY, None)
        return checkpoint
    if path.suffix == ".distcp":
        return path.read_bytes()
    if path.suffix == ".csv":
        columns, *rows = csv.reader(io.StringIO(path.read_text(), newline=""))
        times = [i for i, name in enumerate(columns) if name in TIMES]
        return [",".join(cell for i, cell in enumerate(row) if i not in times) for row in (columns, *rows)]
    text = path.read_text().replace(root, "ROOT") if path.is_file() else None
    # Leave out the last part of config.yaml, which lists package versions.
    return text.partition("\nabout:")[0] if path.name == "config.yaml" else text


def without_names(value, names):
    """Return a copy of a nested value without the entries that have the given names."""
    if isinstance(value, dict):
        return {key: without_names(part, names) for key, part in value.items() if key not in names}
    if isinstance(value, list | tuple):
        return [without_names(part, names) for part in value]
    return value


def difference(expected, found, where=""):
    """Describe the first difference between two runs. Return None if they are equal bit for bit."""
    if isinstance(expected, torch.Tensor) or isinstance(found, torch.Tensor):
        equal = type(expected) is type(found) and expected.dtype == found.dtype and torch.equal(expected, found)
        return None if equal else f"{where}: another tensor"
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f"{where}: {sorted(map(str, found))} instead of {sorted(map(str, expected))}"
        parts = ((expected[key], found[key], f"{where}/{key}") for key in expected)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{where}: {len(found)} items instead of {len(expected)}"
        parts = ((a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(expected, found, strict=True)))
    else:
        equal = expected == found or (expected != expected and found != found)
        return None if equal else f"{where}: {found!r} instead of {expected!r}"
    return next((text for part in parts if (text := difference(*part))), None)


def quiet():
    """Turn off warnings and Lightning's log lines in a process whose output is not read."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    torch.set_num_threads(1)
