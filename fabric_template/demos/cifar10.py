"""CIFAR-10: 60,000 images of ten kinds of things, 32x32 pixels, and a ResNet-18 for images of that size.

The images are read from the python batches (cs.toronto.edu/~kriz/cifar.html), unpacked; where there are none, some are made
that can be told apart. Rung 3 of the ladder: objects with step methods.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from .images import ImageClassifier, Parts

MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, by colour
TRAIN, TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]


class CIFAR10Data(Parts):
    """CIFAR-10 as three parts; a batch is ``(images, labels)``: ``uint8 (batch, 3, 32, 32)``, ``int64 (batch,)``.

    Args:
        path: The folder of the python batches: data_batch_1 to data_batch_5 and test_batch. Without it, images are made.
        batch_size: Images per batch.
        val_size: How many of the training images, the last ones, are kept for validation; of made ones a fifth.
        workers: Processes that read images while a step computes; these lie in memory, so there is no need.

    Example:
        >>> data = CIFAR10Data(batch_size=50)
        >>> with warnings.catch_warnings(action="ignore"):
        ...     data.setup()
        >>> [len(data.parts[part]) for part in ("train", "val", "test")], next(iter(data.train_dataloader()))[0].shape
        ([800, 200, 200], torch.Size([50, 3, 32, 32]))
    """

    def __init__(
        self, path: str = "data/cifar-10-batches-py", batch_size: int = 128, val_size: int = 5000, workers: int = 0
    ) -> None:
        super().__init__(batch_size, workers)
        self.path, self.val_size = path, val_size

    def setup(self, stage: str | None = None) -> None:
        """Read the files, or make images, and split those for training."""
        if self.parts:
            return
        if Path(self.path).is_dir():
            train, test, last = self._read(TRAIN), self._read(TEST), self.val_size
        else:
            warnings.warn(
                f"CIFAR10Data: there is no folder '{self.path}': 1,200 made images in its place; unpack cifar-10-python.tar.gz"
                " of cs.toronto.edu/~kriz/cifar.html, and give the folder as path= (--data.path)",
                stacklevel=2,
            )
            train, test, last = make_images(1000), make_images(200, seed=1), 200
        if not 1 <= last < len(train[1]):
            raise ValueError(
                f"CIFAR10Data: val_size={last} must be at least 1, and less than the {len(train[1])} images"
            )
        self.parts = {
            "train": TensorDataset(*(part[:-last] for part in train)),
            "val": TensorDataset(*(part[-last:] for part in train)),
            "test": TensorDataset(*test),
        }

    def _read(self, names: list[str]) -> tuple[Tensor, Tensor]:
        read = [read_batch(Path(self.path, name)) for name in names]
        return torch.cat([images for images, _ in read]), torch.cat([labels for _, labels in read])


class Arrays(pickle.Unpickler):
    """Reads pickles of plain values and arrays, and of nothing else: a pickle can name any function, to be called."""

    def find_class(self, module: str, name: str) -> Any:
        """What an array is made with; anything else is refused."""
        import numpy as np

        known = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.zeros(0).__reduce__()[0]}
        if module.startswith("numpy") and name in known:
            return known[name]
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them for Python 2
            return lambda text, encoding: text.encode(encoding) if encoding == "latin1" else b""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """The images and labels of one file."""
    try:
        read = Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        images = torch.as_tensor(read[b"data"]).reshape(-1, 3, 32, 32)
        labels = torch.as_tensor(read[b"labels"], dtype=torch.int64)
        if images.dtype != torch.uint8 or labels.shape != (len(images),):
            raise TypeError(f"{images.dtype} images {tuple(images.shape)} and {tuple(labels.shape)} labels")
    except Exception as error:  # a damaged pickle makes Python raise anything
        raise ValueError(
            f"CIFAR10Data: '{path}' is no python batch of CIFAR-10, a pickled dict with data uint8 (n, 3072) and labels"
            f" ({type(error).__name__}: {error}); unpack cifar-10-python.tar.gz again, or give another folder as path="
            " (--data.path)"
        ) from error
    return images, labels


def make_images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ten classes that can be told apart: columns, rows, checks, rings or diamonds, wide or narrow, in any two colours."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    x, y = (torch.arange(32.0) - 24 * torch.rand(2, count, 1, generator=random) - 4).unbind()
    x, y = torch.broadcast_tensors(x[:, None], y[..., None])
    wave = torch.where(labels < 5, 1.3, 0.65)[:, None, None]  # full circles in 5 pixels, or 10
    drawn = [(wave * x).sin(), (wave * y).sin(), (wave * x).sin() * (wave * y).sin()]
    drawn += [(wave * x.hypot(y)).sin(), (wave * (x.abs() + y.abs())).sin()]
    is_first = torch.stack(drawn)[labels % 5, torch.arange(count), None] > 0
    colors = torch.rand(2, count, 3, 1, 1, generator=random)
    images = torch.where(is_first, colors[0], colors[1]) + 0.05 * torch.randn(count, 3, 32, 32, generator=random)
    return (images.clamp(0, 1) * 255).to(torch.uint8), labels


class CIFAR10Net(ImageClassifier):
    """ResNet-18 for 32x32 pixels: its first layer leaves the size as it is. In training, images are mirrored and shifted.

    Args:
        width: Channels of the first layer; 64 is the real one, of 11.2 million weights.
        lr: Learning rate of AdamW.
        augment: Whether images are mirrored and shifted in training.

    Example:
        >>> net = CIFAR10Net()
        >>> net(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape, sum(part.numel() for part in net.parameters())
        (torch.Size([2, 10]), 11173962)
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, width: int = 64, lr: float = 1e-3, augment: bool = True) -> None:
        super().__init__(classes=10, lr=lr)
        self.augment = augment
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None] * 255)
        self.register_buffer("spread", torch.tensor(SPREAD)[:, None, None] * 255)
        self.net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        for inputs, outputs, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)):
            self.net += nn.Sequential(
                Residual(inputs * width, outputs * width, stride), Residual(outputs * width, outputs * width)
            )
        self.net += nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Images ``uint8 (batch, 3, 32, 32)`` to one score per class ``(batch, 10)``."""
        return self.net((images - self.mean) / self.spread)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The loss and the accuracy of images that are mirrored, each or not, and shifted together by up to four pixels."""
        images, labels = batch
        if self.augment:
            mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
            down, right = (int(part) for part in torch.randint(0, 9, (2,)))
            images = functional.pad(images, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]
        return super().training_step((images, labels))


class Residual(nn.Module):
    """Two convolutions, and the way around them.

    Example:
        >>> Residual(4, 8, stride=2)(torch.zeros(1, 4, 6, 6)).shape
        torch.Size([1, 8, 3, 3])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.around += nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Half as large where the stride is two."""
        return functional.relu(self.body(images) + self.around(images))
