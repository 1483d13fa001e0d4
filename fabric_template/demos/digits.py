"""Classify 1,797 images of handwritten digits with a small convolutional network.

This is the default demo. The model is an nn.Module with step methods. The images are part of
scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from .data import SplitData, split_indices

Batch = tuple[Tensor, Tensor]


class DigitsData(SplitData):
    """Load scikit-learn's digits, and divide them into three stratified splits.

    A batch is ``(images, labels)``: images are ``float32 (batch, 1, 8, 8)`` from 0 (paper) to 1
    (ink), and labels are ``int64 (batch,)``.
    """

    def __init__(self, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__(batch_size)
        self.seed = seed

    def setup(self, stage: str | None = None) -> None:
        """On the first call, read the images and divide them into splits."""
        if self.splits:
            return
        from sklearn.datasets import load_digits

        digits = load_digits()
        # The pixel values of scikit-learn's images range from 0 to 16.
        images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.as_tensor(digits.target, dtype=torch.int64)
        indices = split_indices(len(images), seed=self.seed, labels=digits.target)
        for split, rows in indices.items():
            self.splits[split] = TensorDataset(images[rows], labels[rows])


class DigitsClassifier(nn.Module):
    """Classify 8x8 images with two convolutions and two linear layers.

    The loss is the cross-entropy in nats per image. The accuracy is between 0 and 1.

    Args:
        hidden: Width of the first linear layer.
        dropout: Fraction of activations that are dropped before each linear layer.
        lr: Learning rate of Adam in the first epoch.
        lr_decay: Factor by which the learning rate is multiplied after every epoch.
    """

    def __init__(
        self, hidden: int = 128, dropout: float = 0.25, lr: float = 3e-3, lr_decay: float = 0.85
    ) -> None:
        super().__init__()
        self.lr = lr
        self.lr_decay = lr_decay
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 4 * 4, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per digit for each image, ``(batch, 10)``."""
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss and accuracy, which the loop logs as ``train_loss`` and ``train_acc``."""
        loss, acc = self.compute_loss_and_acc(batch)
        return {"loss": loss, "acc": acc}

    def validation_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return the loss and accuracy, which the loop logs as ``val_loss`` and ``val_acc``."""
        return self.compute_loss_and_acc(batch)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, _ = batch
        return self(images).argmax(dim=1)

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.lr_decay)]

    def compute_loss_and_acc(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images)
        acc = (logits.argmax(dim=1) == labels).float().mean()
        return functional.cross_entropy(logits, labels), acc
