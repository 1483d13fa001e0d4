"""Provide the splits, loaders and downloads of the demos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    import numpy as np

Tensors = tuple[Tensor, ...]


class SplitData:
    """Return loaders for the datasets in ``splits``, like a LightningDataModule.

    A subclass fills ``splits`` with "train", "val" and "test" in ``setup()``.
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
        """Return a loader for one split. Override this method to return another kind of loader."""
        return DataLoader(self.splits[split], batch_size=self.batch_size, shuffle=shuffle)


def hold_out(train: Tensors, test: Tensors) -> dict[str, TensorDataset]:
    """Return a dict of three datasets. The last tenth of the training samples becomes "val"."""
    val_size = len(train[0]) // 10
    return {
        "train": TensorDataset(*(tensor[:-val_size] for tensor in train)),
        "val": TensorDataset(*(tensor[-val_size:] for tensor in train)),
        "test": TensorDataset(*test),
    }


def split_indices(count: int, seed: int = 0, labels: Any = None) -> dict[str, np.ndarray]:
    """Split ``range(count)`` at random: 70 % "train", 20 % "val" and 10 % "test".

    With ``labels``, a NumPy array, each split has the same share of each class.
    """
    import numpy as np
    from sklearn.model_selection import train_test_split

    rows = np.arange(count)
    rest, test = train_test_split(rows, test_size=0.1, stratify=labels, random_state=seed)
    labels = None if labels is None else labels[rest]
    train, val = train_test_split(rest, test_size=2 / 9, stratify=labels, random_state=seed)
    return {"train": train, "val": val, "test": test}


def download(url: str, path: Path) -> None:
    """Download a file unless it exists."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {url}")
    try:
        torch.hub.download_url_to_file(url, str(path), progress=False)
    except OSError as error:
        raise ValueError(f"download of {url}: got {error}. Copy the file to {path}.") from error
