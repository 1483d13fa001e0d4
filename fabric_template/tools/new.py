"""New: a small project that trains at once, to be changed: model, data, MiniLoop's file, a test and a notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .copying import copy_mini

MODEL = '''"""The model: a net, what it is to learn, and by which optimizer. Change all; MiniLoop asks for these methods."""

from torch import nn, optim
from torch.nn.functional import cross_entropy


class Model(nn.Module):
    """Images (batch, 64) to one score for each digit (batch, 10)."""

    def __init__(self, hidden=64, lr=3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):
        loss, acc = self.loss_and_acc(batch)
        return {"loss": loss, "acc": acc}  # columns train_loss, train_acc

    def validation_step(self, batch):
        return self.loss_and_acc(batch)  # columns val_loss, val_acc

    def loss_and_acc(self, batch):
        images, labels = batch
        scores = self(images)
        return cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=self.lr)
'''

DATA = '''"""The data: scikit-learn's 1,797 digits in batches of images (batch, 64), pixels from 0 to 1, and labels (batch,)."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


def make_loaders(batch_size=64):
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))  # the same parts in every run
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)
'''

TRAIN = '''"""python train.py, and then, to go on: python train.py --max_epochs 20 --resume last"""

import argparse

from data import make_loaders
from model import Model
from train_loop import MiniLoop


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_epochs", type=int, default=10)
    parser.add_argument("--resume", help='"last", "best", "auto" or the path of a checkpoint')
    given = parser.parse_args(argv)
    loop = MiniLoop(max_epochs=given.max_epochs, name="NAME", monitor="val_loss", seed=0)
    history = loop.fit(Model(), *make_loaders(), resume=given.resume)
    print(f"log         {loop.log_dir}/metrics.csv\\ncheckpoint  {loop.checkpoint_dir}/best.ckpt")
    return history


if __name__ == "__main__":
    main()
'''

TEST = '''"""pytest: that it learns, and that a run which is resumed ends as one that was never stopped."""

from train import main


def test_one_epoch_and_another_are_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where logs/ and checkpoints/ go
    whole = main(["--max_epochs", "2"])
    main(["--max_epochs", "1"])
    resumed = main(["--max_epochs", "2", "--resume", "last"])
    assert resumed.drop(columns="time").equals(whole.drop(columns="time"))
    assert whole["val_loss"][1] < whole["val_loss"][0]
'''

CELLS = [
    "# NAME",
    "from data import make_loaders\nfrom model import Model\nfrom train_loop import MiniLoop",
    'loop = MiniLoop(max_epochs=10, name="NAME", monitor="val_loss", seed=0)\nhistory = loop.fit(Model(), *make_loaders())',
    'history.plot(x="epoch", y=["train_loss", "val_loss"])',
]


def make_project(destination: str | Path) -> list[str]:
    """Make the project's folder, whose name becomes that of its runs.

    Returns:
        The names of its files.

    Raises:
        ValueError: If there is something in the folder already, or its name is none for a run.
    """
    folder = Path(destination).resolve()
    if not re.fullmatch(r"\w[\w.-]*", folder.name):
        raise ValueError(
            f"new {destination}: {folder.name!r} names no run: expected letters, digits, '_' and '-', such as my_digits"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"new {destination}: there is something already, nothing was written: give another name")
    texts = {"model.py": MODEL, "data.py": DATA, "train.py": TRAIN, "test_train.py": TEST, "train.ipynb": _notebook()}
    copy_mini(folder / "train_loop.py")
    for name, text in texts.items():
        (folder / name).write_text(text.replace("NAME", folder.name), encoding="utf-8")
    return ["train_loop.py", *texts]


def _notebook() -> str:
    """The cells as Jupyter keeps them, the first one a title."""
    title, *sources = CELLS
    cells: list[dict] = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": title}]
    for number, source in enumerate(sources):
        cell = {"cell_type": "code", "id": f"code-{number}", "metadata": {}, "source": source}
        cells.append({**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"
