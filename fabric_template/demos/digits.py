"""Digits: the embedded default. 1,797 real images of handwritten digits, 8x8 pixels, and a small convolutional net.

Neither class has a base class from Lightning: this is rung 3 of the ladder, an object with step methods. The data come
with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class DigitsData:
    """Scikit-learn's digits as three stratified parts, with the methods of a LightningDataModule (and no base class).

    A batch is ``(images, labels)``: images ``float32 (batch, 1, 8, 8)`` with grey values from 0 (paper) to 1 (ink),
    labels ``int64 (batch,)`` from 0 to 9.

    Args:
        batch_size: Images per batch. The last batch of an epoch is smaller; none is dropped.
        val_fraction: Share of the 1,797 images kept for validation.
        test_fraction: Share kept for the test, which nothing in a run looks at.
        seed: Decides who goes to which part. The order of the training batches is drawn from torch's global generator.
        num_workers: Processes that collate batches. At this size, 0 is fastest.

    Example:
        >>> data = DigitsData(batch_size=32)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, images.dtype, labels.dtype
        (torch.Size([32, 1, 8, 8]), torch.float32, torch.int64)
    """

    def __init__(
        self,
        batch_size: int = 64,
        val_fraction: float = 0.2,
        test_fraction: float = 0.1,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        complaints = []
        if batch_size < 1:
            complaints.append(f"batch_size={batch_size} must be at least 1")
        for name, fraction in {"val_fraction": val_fraction, "test_fraction": test_fraction}.items():
            # each part needs an image of each of the ten digits, or a stratified split is refused further down
            if not 0.01 <= fraction <= 0.9:
                complaints.append(f"{name}={fraction} must lie between 0.01 and 0.9")
        if val_fraction + test_fraction > 0.95:
            complaints.append(
                f"val_fraction + test_fraction = {val_fraction + test_fraction:g} leaves too little to train on"
                " (at most 0.95)"
            )
        if num_workers < 0:
            complaints.append(f"num_workers={num_workers} must be 0 (load in this process) or more")
        if complaints:
            raise ValueError("DigitsData: " + "; ".join(complaints))
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
        self.num_workers = num_workers
        self._parts: dict[str, TensorDataset] = {}

    def prepare_data(self) -> None:
        """Does nothing: the images are installed with scikit-learn. Where data is downloaded, this is the place."""

    def setup(self, stage: str | None = None) -> None:
        """Reads the images and splits them; a second call changes nothing.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"`` or None. All parts are made at once: it takes
                milliseconds, and the parts cannot overlap.
        """
        if self._parts:
            return
        from numpy import ndarray
        from sklearn.datasets import load_digits  # not above: a second of import that other models need not pay
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images, labels = digits.images, digits.target
        images, test_images, labels, test_labels = train_test_split(
            images, labels, test_size=self.test_fraction, stratify=labels, random_state=self.seed
        )
        train_images, val_images, train_labels, val_labels = train_test_split(
            images,
            labels,
            test_size=self.val_fraction / (1 - self.test_fraction),  # a share of the whole, taken from what is left
            stratify=labels,
            random_state=self.seed,
        )

        def part(images: ndarray, labels: ndarray) -> TensorDataset:
            pixels = torch.as_tensor(images, dtype=torch.float32).unsqueeze(1) / 16  # stored as 0..16
            return TensorDataset(pixels, torch.as_tensor(labels, dtype=torch.int64))

        self._parts = {
            "train": part(train_images, train_labels),
            "val": part(val_images, val_labels),
            "test": part(test_images, test_labels),
        }

    def train_dataloader(self) -> DataLoader:
        """The training part, reshuffled every epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The validation part, in a fixed order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """The test part, in a fixed order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The test part again: ``predict_step`` does not look at the labels."""
        return self._loader("test")

    def _loader(self, part: str, shuffle: bool = False) -> DataLoader:
        if not self._parts:
            raise RuntimeError(f"DigitsData: there is no {part} part before setup(); call data.setup('fit') first")
        return DataLoader(
            self._parts[part],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,  # starting processes anew each epoch takes longer than the epoch
        )


class DigitsClassifier(nn.Module):
    """A small convolutional net for 8x8 images, with its own steps.

    What a step returns is what the loop writes down: a dict from ``training_step`` becomes ``train_loss, train_acc``, a
    tuple from ``validation_step`` becomes ``val_loss, val_acc``. Losses are cross-entropies in nats per image,
    accuracies are shares from 0 to 1.

    Args:
        hidden: Width of the layer before the last.
        dropout: Share of activations dropped in training, before each of the two linear layers.
        lr: Learning rate of Adam in the first epoch.
        lr_decay: What the learning rate is multiplied with after every epoch. 1 keeps it constant.

    Example:
        >>> model = DigitsClassifier(hidden=32)
        >>> model(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, hidden: int = 128, dropout: float = 0.25, lr: float = 3e-3, lr_decay: float = 0.85) -> None:
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
            nn.MaxPool2d(2),  # 8x8 becomes 4x4
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 4 * 4, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(batch, 1, 8, 8)`` to one score per digit ``(batch, 10)``, not yet probabilities."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The loss to go down, and the accuracy on the batch."""
        loss, acc = self._loss_and_acc(batch)
        return {"loss": loss, "acc": acc}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Loss and accuracy on a batch that is not trained on."""
        return self._loss_and_acc(batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Loss and accuracy on a batch that nothing was chosen by."""
        return self._loss_and_acc(batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The most likely digit of each image, ``int64 (batch,)``."""
        images, _ = batch
        return self(images).argmax(dim=1)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        """Adam, with a learning rate that decays every epoch, whatever number of epochs is asked for."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.lr_decay)]

    def _loss_and_acc(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images)
        acc = (logits.argmax(dim=1) == labels).float().mean()
        return functional.cross_entropy(logits, labels), acc
