"""Autoencoder: a digit in eight numbers and back; what the numbers are good for is measured with a linear probe.

Nobody tells the net which digit it sees. The data are `DigitsData` of digits.py. Rung 3 of the ladder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Autoencoder(nn.Module):
    """An image through a few numbers, its code, and back. The loss is the squared error per image.

    Args:
        code: How many numbers stand for an image.
        hidden: Width of the layers between.
        noise: How much noise is laid over the images in training; the clean image is to come out.
        lr: Learning rate of Adam.

    Example:
        >>> Autoencoder(code=2)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 1, 8, 8])
    """

    def __init__(self, code: int = 8, hidden: int = 128, noise: float = 0.1, lr: float = 2e-3) -> None:
        super().__init__()
        self.noise, self.lr = noise, lr
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Sigmoid(),
            nn.Unflatten(1, (1, 8, 8)),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Images to what their codes say of them."""
        return self.decoder(self.encoder(images))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The squared error between the clean images and what comes of the noisy ones."""
        images, _ = batch
        noisy = images + self.noise * torch.randn_like(images)
        return self._error(self(noisy), images).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The squared error, and the share of the images' variance that comes back: 0 for a grey mean, 1 for all."""
        images, _ = batch
        error = self._error(self(images), images)
        return {"loss": error.mean(), "explained": 1 - error.mean() / self._error(images.mean(0), images).mean()}

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Codes ``(batch, code)``, and beside them the labels, to judge them by."""
        images, labels = batch
        return {"code": self.encoder(images), "label": labels}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _error(self, images: Tensor, others: Tensor) -> Tensor:
        return functional.mse_loss(images.expand_as(others), others, reduction="none").flatten(1).sum(1)


def probe(predictions: list[dict[str, Tensor]]) -> float:
    """How well a linear classifier tells the digits by their codes: the share of rights, each time on a fifth kept aside.

    Args:
        predictions: what ``loop.predict(model, datamodule=DigitsData(), load="best")`` returned.

    Example:
        >>> labels = torch.arange(10).repeat(5)
        >>> probe([{"code": functional.one_hot(labels).float(), "label": labels}])  # codes that say all
        1.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    codes, labels = (torch.cat([batch[name] for batch in predictions]).numpy() for name in ("code", "label"))
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return float(cross_val_score(linear, codes, labels, cv=5).mean())


def draw(model: Any, images: Tensor) -> Figure:
    """Images in the upper row, and what the codes of each say of it in the lower one.

    Example:
        >>> len(draw(Autoencoder(), torch.zeros(12, 1, 8, 8)).axes)
        2
    """
    from matplotlib.figure import Figure

    with torch.no_grad():
        rows = torch.stack([images, model(images)])[:, :, 0]  # (2, count, 8, 8)
    figure = Figure(figsize=(0.6 * len(images), 1.5), layout="constrained")
    for axes, row, title in zip(figure.subplots(2), rows, ("images", "from their codes"), strict=True):
        axes.imshow(functional.pad(row, (1, 1)).permute(1, 0, 2).flatten(1).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, loc="left", fontsize="small")
        axes.axis("off")
    return figure
