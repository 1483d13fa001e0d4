"""MNIST: 70,000 images of handwritten digits, 28x28 pixels, and the net of every tutorial: 784-100-10.

The images are fetched once, from openml.org, into a file; where there is no network, give the file. Rung 3 of the ladder: an
object with step methods.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

KEYS = ("x_train", "y_train", "x_test", "y_test")  # as in the mnist.npz that comes with Keras, which will do
TEST = 10_000  # the last images of openml's, as their makers have split them


class MNISTData:
    """MNIST as three parts; a batch is ``(images, labels)``: ``float32 (batch, 784)`` from 0 to 1, ``int64 (batch,)``.

    Args:
        path: The file with the images, an ``.npz`` with x_train, y_train, x_test and y_test (images ``uint8 (n, 28, 28)``). If
            there is none, it is made: 15 MB, fetched from openml.org.
        batch_size: Images per batch.
        val_size: How many of the training images, the last ones, are kept for validation.

    Example:
        >>> import numpy
        >>> x, y = numpy.zeros((20, 28, 28), "uint8"), numpy.arange(20) % 10
        >>> numpy.savez("small.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        >>> data = MNISTData("small.npz", batch_size=8, val_size=5)
        >>> data.setup()
        >>> [len(labels) for images, labels in data.train_dataloader()], len(data.val_dataloader())
        ([8, 7], 1)
    """

    def __init__(self, path: str = "data/mnist.npz", batch_size: int = 64, val_size: int = 5000) -> None:
        self.path, self.batch_size, self.val_size = path, batch_size, val_size
        self.parts: dict[str, TensorDataset] = {}

    def prepare_data(self) -> None:
        """Fetch the images unless the file is there; of several processes one does it."""
        if not Path(self.path).exists():
            fetch(self.path)

    def setup(self, stage: str | None = None) -> None:
        """Read the file and split the training images."""
        if self.parts:
            return
        import numpy as np

        self.prepare_data()
        try:
            with open(self.path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                x, y, x_test, y_test = (torch.from_numpy(file[key]) for key in KEYS)
        except Exception as error:  # a damaged file makes zipfile and numpy raise anything
            raise ValueError(
                f"MNISTData: '{self.path}' is no .npz file with {', '.join(KEYS)} ({type(error).__name__}: {error});"
                " give another one as path= (--data.path), or remove it to fetch it again"
            ) from error
        if not 1 <= self.val_size < len(x):
            raise ValueError(
                f"MNISTData: val_size={self.val_size} must be at least 1, and less than the {len(x)} images"
            )
        pixels, labels = x.flatten(1).float() / 255, y.long()
        self.parts = {
            "train": TensorDataset(pixels[: -self.val_size], labels[: -self.val_size]),
            "val": TensorDataset(pixels[-self.val_size :], labels[-self.val_size :]),
            "test": TensorDataset(x_test.flatten(1).float() / 255, y_test.long()),
        }

    def train_dataloader(self) -> DataLoader:
        """The training part, reshuffled every epoch."""
        return DataLoader(self.parts["train"], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The validation part."""
        return DataLoader(self.parts["val"], self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The test part."""
        return DataLoader(self.parts["test"], self.batch_size)

    predict_dataloader = test_dataloader


def fetch(path: str | Path) -> None:
    """Fetch MNIST from openml.org into a file, which is whole or not there."""
    import numpy as np
    from sklearn.datasets import fetch_openml

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is tried again: the end is told below
            found = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff", cache=False, n_retries=1)
    except Exception as error:  # no network, a proxy, a server that is down: each says it in another way
        raise ValueError(
            f"MNISTData: there is no file '{path}', and openml.org cannot be reached ({type(error).__name__}: {error}): give"
            " the path of an .npz file with x_train, y_train, x_test and y_test, such as Keras' mnist.npz, as path="
            " (--data.path ~/.keras/datasets/mnist.npz)"
        ) from error
    images, labels = found.data.astype("uint8").reshape(-1, 28, 28), found.target.astype("int64")
    parts = dict(zip(KEYS, (images[:-TEST], labels[:-TEST], images[-TEST:], labels[-TEST:]), strict=True))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    beside = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            np.savez_compressed(file, **parts)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class MNISTNet(nn.Module):
    """784-100-10: one hidden layer, ReLU, cross-entropy, Adam.

    Args:
        hidden: Width of the layer between.
        lr: Learning rate.

    Example:
        >>> MNISTNet()(torch.zeros(5, 784)).shape
        torch.Size([5, 10])
    """

    def __init__(self, hidden: int = 100, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(batch, 784)`` to one score per digit ``(batch, 10)``."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy, in nats per image."""
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss, and the share of images that are read rightly: ``val_loss``, ``val_acc``."""
        images, labels = batch
        logits = self(images)
        return functional.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The most likely digit of each image."""
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
