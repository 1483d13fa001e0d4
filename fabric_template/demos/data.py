"""Download, split and load the data for the demos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

Tensors = tuple[Tensor, ...]


class SplitData:
    """A datamodule that returns loaders for the datasets in its ``splits`` attribute.

    In ``setup()``, a subclass fills ``splits`` with the "train", "val" and "test" datasets.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.splits: dict[str, Any] = {}

    def train_dataloader(self) -> Any:
        return self.make_loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        return self.make_loader("val")

    def test_dataloader(self) -> Any:
        return self.make_loader("test")

    predict_dataloader = test_dataloader

    def make_loader(self, split: str, shuffle: bool = False) -> Any:
        """Return a DataLoader for the "train", "val" or "test" split."""
        return DataLoader(self.splits[split], batch_size=self.batch_size, shuffle=shuffle)


def hold_out(train: Tensors, test: Tensors) -> dict[str, TensorDataset]:
    """Return the "train", "val" and "test" datasets, with the last tenth of ``train`` as "val"."""
    first_of_val = len(train[0]) - len(train[0]) // 10
    return {
        "train": TensorDataset(*(tensor[:first_of_val] for tensor in train)),
        "val": TensorDataset(*(tensor[first_of_val:] for tensor in train)),
        "test": TensorDataset(*test),
    }


def split_indices(count: int, seed: int = 0, labels: Any = None) -> dict[str, np.ndarray]:
    """Split ``range(count)`` at random: 70% "train", 20% "val" and 10% "test".

    If the NumPy array ``labels`` is given, every split has the same class proportions.
    """
    from sklearn.model_selection import train_test_split

    rows = np.arange(count)
    rest, test = train_test_split(rows, test_size=0.1, stratify=labels, random_state=seed)
    labels = None if labels is None else labels[rest]
    train, val = train_test_split(rest, test_size=2 / 9, stratify=labels, random_state=seed)
    return {"train": train, "val": val, "test": test}


def download(url: str, path: Path) -> None:
    """Download a file to ``path``, unless the file already exists."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {url}")
    try:
        torch.hub.download_url_to_file(url, str(path), progress=False)
    except OSError as error:
        raise ValueError(
            f"The download of {url} failed: {error}. Download the file by hand, and copy it to"
            f" {path}."
        ) from error
