"""Train a generator and a critic with one optimizer each.

The GAN is a LightningModule with manual optimization. The training data consists of points around
eight centers. A good generator creates points near all eight centers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import softplus

from .data import SplitData

ANGLES = torch.arange(8) * math.pi / 4
CENTERS = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)
SPREAD = 0.05


def make_points(count: int, seed: int = 0) -> Tensor:
    """Return random training points, as a tensor of shape ``(count, 2)``."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randint(len(CENTERS), (count,), generator=generator)
    return CENTERS[center] + SPREAD * torch.randn(count, 2, generator=generator)


class RingData(SplitData):
    """Generate random points around eight centers. A batch is a float32 tensor ``(batch, 2)``."""

    def __init__(self, count: int = 25_600, batch_size: int = 256, seed: int = 0) -> None:
        super().__init__(batch_size)
        val = make_points(2000, seed + 1)
        self.splits = {"train": make_points(count, seed), "val": val, "test": val}


def judge(points: Tensor) -> dict[str, float]:
    """Return the fraction of covered Gaussian centers, and the fraction of points near a center.

    A point is near a center if it is less than four standard deviations away. A center is covered
    if at least 2.5% of the generated points are near the center.
    """
    distance, nearest = torch.cdist(points, CENTERS.to(points)).min(dim=1)
    is_good = distance < 4 * SPREAD
    counts = torch.bincount(nearest[is_good], minlength=len(CENTERS))
    has_enough = counts >= 0.2 * len(points) / len(CENTERS)
    return {"places": has_enough.double().mean().item(), "good": is_good.double().mean().item()}


class GAN(LightningModule):
    """Train a generator of points, and a critic that distinguishes real from generated points.

    Args:
        noise: Length of the generator's random input vector.
    """

    def __init__(self, noise: int = 8, hidden: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = make_mlp(noise, hidden, 2)
        self.critic = make_mlp(2, hidden, 1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, points: Tensor, batch_idx: int) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()  # type: ignore[attr-defined]
        fake = self(torch.randn(len(points), self.hparams["noise"], device=points.device))

        loss_of_true = softplus(-self.critic(points)).mean()
        critic_loss = loss_of_true + softplus(self.critic(fake.detach())).mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()

        generator_loss = softplus(-self.critic(fake)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()

        losses = {"train_loss_critic": critic_loss, "train_loss_generator": generator_loss}
        self.log_dict(losses, on_step=False, on_epoch=True)

    def validation_step(self, points: Tensor, batch_idx: int) -> None:
        """Generate as many points as the batch contains, and log the results of ``judge()``."""
        judged = judge(self.predict_step(points, batch_idx))
        self.log_dict({f"val_{name}": value for name, value in judged.items()})

    def predict_step(self, points: Tensor, batch_idx: int) -> Tensor:
        """Generate as many points as the batch contains, with ``batch_idx`` as the random seed."""
        generator = torch.Generator().manual_seed(batch_idx)
        return self(torch.randn(len(points), self.hparams["noise"], generator=generator).to(points))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return two Adam optimizers with low momentum, which stabilizes the training of a GAN."""
        options: dict[str, Any] = {"lr": self.hparams["lr"], "betas": (0.5, 0.99)}
        return [
            torch.optim.Adam(self.generator.parameters(), **options),
            torch.optim.Adam(self.critic.parameters(), **options),
        ]


def make_mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )
