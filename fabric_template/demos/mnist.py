"""Classify MNIST's 70,000 handwritten digits with a small fully connected network.

The model has no base class, only step methods and configure_optimizers. The first run downloads
MNIST's files. On a machine without internet access, copy these files to ``data/mnist``.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.tensor_loader import TensorLoader
from .data import SplitData, download, hold_out

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
Batch = tuple[Tensor, Tensor]


class MNISTData(SplitData):
    """Load MNIST's IDX files.

    A batch is ``(images, labels)``: images are ``float32 (batch, 28, 28)`` from 0 to 1, and
    labels are ``int64 (batch,)``.

    Args:
        path: Folder with the four IDX files. Missing files are downloaded (12 MB).
    """

    def __init__(self, path: str = "data/mnist", batch_size: int = 64) -> None:
        super().__init__(batch_size)
        self.path = Path(path)

    def prepare_data(self) -> None:
        for name in TRAIN + TEST:
            download(f"{MIRROR}{name}", self.path / name)

    def setup(self, stage: str | None = None) -> None:
        """Read the files. Use the last tenth of the training images for validation."""
        self.splits = hold_out(self.read_part(TRAIN), self.read_part(TEST))

    def read_part(self, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
        images, labels = (read_idx(self.path / name) for name in names)
        return images.float() / 255, labels.long()

    def make_loader(self, split: str, shuffle: bool = False) -> TensorLoader:
        """Return a TensorLoader, which reads data in memory faster than a DataLoader."""
        tensors = self.splits[split].tensors
        return TensorLoader(*tensors, batch_size=self.batch_size, shuffle=shuffle)


def read_idx(path: Path) -> Tensor:
    """Read a gzip-compressed IDX file of unsigned bytes."""
    content = gzip.decompress(path.read_bytes())
    # The fourth byte is the number of dimensions. The sizes of the dimensions follow as big-endian
    # 32-bit integers. The values come last.
    header = 4 + 4 * content[3]
    sizes = struct.unpack(f">{content[3]}I", content[4:header])
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).reshape(sizes)


class MNISTNet:
    """Classify 28x28 images with a network that has one hidden layer."""

    def __init__(self, hidden: int = 100, lr: float = 1e-3) -> None:
        self.lr = lr
        hidden_layer = nn.Sequential(nn.Linear(784, hidden), nn.ReLU())
        self.net = nn.Sequential(nn.Flatten(), hidden_layer, nn.Linear(hidden, 10))

    def training_step(self, batch: Batch) -> Tensor:
        """Return the cross-entropy, which the loop logs as ``train_loss``."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss and accuracy, which the loop logs as ``val_loss`` and ``val_acc``."""
        images, labels = batch
        logits = self.net(images)
        acc = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "acc": acc}

    test_step = validation_step

    def predict_step(self, batch: Batch) -> Tensor:
        images, _ = batch
        return self.net(images).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=self.lr)
