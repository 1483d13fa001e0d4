"""Compress each image of a digit to eight numbers, without using labels.

The model is an nn.Module with step methods. The images come from the DigitsData class in digits.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Autoencoder(nn.Module):
    """Encode each 8x8 image as a few numbers, and decode the numbers back into an image.

    Args:
        code: The number of values that encode an image.
        noise: Standard deviation of the noise that is added to the training images.
    """

    def __init__(self, code: int = 8, noise: float = 0.1, lr: float = 2e-3) -> None:
        super().__init__()
        self.noise = noise
        self.lr = lr
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, 8, 8)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))

    def training_step(self, batch: Batch) -> Tensor:
        """Reconstruct the images from noisy copies, and return the squared error."""
        images, _ = batch
        noisy = images + self.noise * torch.randn_like(images)
        return squared_error(self(noisy), images)

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        """Return the squared error, and the fraction of the variance that the model explains."""
        images, _ = batch
        error = squared_error(self(images), images)
        variance = squared_error(images.mean(0, keepdim=True).expand_as(images), images)
        return {"loss": error, "explained": 1 - error / variance}

    test_step = validation_step

    def predict_step(self, batch: Batch) -> dict[str, Tensor]:
        """Return the latent code and the label of each image."""
        images, labels = batch
        return {"code": self.encoder(images), "label": labels}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def squared_error(decoded: Tensor, images: Tensor) -> Tensor:
    """Return the squared error, summed over the pixels and averaged over the images of a batch."""
    return functional.mse_loss(decoded, images, reduction="sum") / len(images)
