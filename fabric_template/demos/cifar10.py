"""Classify CIFAR-10's 60,000 color images into ten classes with a ResNet-18 for 32x32 images.

The model is a LightningModule whose learning rate changes at every step. The model converts the
images from bytes to floats on the device. The first run downloads the images. If the machine has no
internet access, download cs.toronto.edu/~kriz/cifar-10-binary.tar.gz on another machine, and copy
the file to ``data``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from .data import SplitData, download, hold_out

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST = ["test_batch.bin"]
Batch = tuple[Tensor, Tensor]


class CIFAR10Data(SplitData):
    """Load CIFAR-10's binary files.

    A batch is ``(images, labels)``: ``uint8 (batch, 3, 32, 32)`` and ``int64 (batch,)``.

    Args:
        path: Folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin. If the folder
            does not exist, the files are downloaded (170 MB).
    """

    def __init__(self, path: str = "data/cifar-10-batches-bin", batch_size: int = 128) -> None:
        super().__init__(batch_size)
        self.path = Path(path)

    def prepare_data(self) -> None:
        if not self.path.exists():
            archive = self.path.with_name("cifar-10-binary.tar.gz")
            download(URL, archive)
            shutil.unpack_archive(archive, self.path.parent, filter="data")

    def setup(self, stage: str | None = None) -> None:
        """Read the images, and use the last tenth of the training images for validation."""
        self.splits = hold_out(self.read_files(TRAIN), self.read_files(TEST))

    def read_files(self, names: list[str]) -> Batch:
        # The files store each image as a label byte and 32 * 32 bytes per color channel.
        content = b"".join((self.path / name).read_bytes() for name in names)
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


class CIFAR10Net(LightningModule):
    """Classify 32x32 images with a ResNet-18 whose first layer keeps the image size.

    Args:
        width: Number of channels in the first layer. The original ResNet-18 has 64.
        lr: Highest learning rate of the one-cycle schedule.
    """

    def __init__(self, width: int = 64, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
        for stage in range(4):
            stride = 1 if stage == 0 else 2
            layers.append(ResidualBlock(channels, stride * channels, stride))
            channels *= stride
            layers.append(ResidualBlock(channels, channels))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        self.net = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images / 127.5 - 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return self.log_loss_and_acc("train", augment(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log_loss_and_acc("val", *batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def log_loss_and_acc(self, stage: str, images: Tensor, labels: Tensor) -> Tensor:
        """Log the epoch's mean loss and accuracy, and return the loss of the batch."""
        logits = self(images)
        loss = functional.cross_entropy(logits, labels)
        acc = (logits.argmax(dim=1) == labels).float().mean()
        self.log_dict({f"{stage}_loss": loss, f"{stage}_acc": acc}, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> tuple[list, list]:
        """Return SGD with a one-cycle schedule over all training steps."""
        lr = self.hparams["lr"]
        optimizer = torch.optim.SGD(self.parameters(), lr, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ResidualBlock(nn.Module):
    """Apply two convolutions with a shortcut from the input to the output."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out_channels))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


def augment(images: Tensor) -> Tensor:
    """Flip each image at random, and shift the whole batch by up to four pixels."""
    is_flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    images = torch.where(is_flipped, images.flip(3), images)
    top, left = torch.randint(0, 9, (2,)).tolist()
    return functional.pad(images, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
