"""GAN: two nets against each other, each with its optimizer, stepped by hand; the data are points around eight places.

Whether it learns can be counted: how many of the places it finds, and how many of its points lie at one. A LightningModule
with manual optimization, as people have it: rung 4 of the ladder.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = torch.tensor([[math.cos(i * math.pi / 4), math.sin(i * math.pi / 4)] for i in range(8)])
SPREAD = 0.05


def make_points(count: int, seed: int = 0) -> Tensor:
    """Points around eight places on a circle, each as likely as the others.

    Example:
        >>> make_points(3).shape
        torch.Size([3, 2])
    """
    random = torch.Generator().manual_seed(seed)
    which = torch.randint(len(PLACES), (count,), generator=random)
    return PLACES[which] + SPREAD * torch.randn(count, 2, generator=random)


class RingData:
    """Points ``float32 (batch, 2)`` around the eight places.

    Args:
        count: Points in the training part.
        batch_size: Points per batch.
        seed: Decides where the points lie.
    """

    def __init__(self, count: int = 25_600, batch_size: int = 256, seed: int = 0) -> None:
        self.batch_size = batch_size
        self.train, self.val = make_points(count, seed), make_points(2000, seed + 1)

    def train_dataloader(self) -> DataLoader:
        """The training part, reshuffled every epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        """Two thousand other points, in one batch: a judgement of all of them is no mean over batches."""
        return DataLoader(self.val, len(self.val))  # type: ignore[arg-type]

    predict_dataloader = val_dataloader


def judge(points: Tensor) -> dict[str, float]:
    """What made points are worth: the share of the eight places they find, and of points that lie at one.

    A point lies at a place within four spreads, as do all but 3 in 10,000 true ones. A place is found if a fortieth of
    all points lie there, a fifth of what it should have.

    Example:
        >>> judge(make_points(2000)), judge(PLACES[:1].repeat(100, 1)), judge(torch.zeros(100, 2))
        ({'places': 1.0, 'good': 1.0}, {'places': 0.125, 'good': 1.0}, {'places': 0.0, 'good': 0.0})
    """
    distances, nearest = torch.cdist(points, PLACES.to(points)).min(dim=1)
    is_good = distances < 4 * SPREAD
    counts = torch.bincount(nearest[is_good], minlength=len(PLACES))
    found = (counts >= len(points) / 40).double().mean().item()
    return {"places": found, "good": round(is_good.double().mean().item(), 3)}


class GAN(LightningModule):
    """A generator that makes points of noise, and a critic that tells them from true ones.

    Args:
        noise: Numbers of noise per point.
        hidden: Width of the layers of both nets.
        lr: Learning rate of both optimizers.

    Example:
        >>> GAN()(torch.zeros(5, 8)).shape
        torch.Size([5, 2])
    """

    def __init__(self, noise: int = 8, hidden: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.critic = _net(noise, hidden, 2), _net(2, hidden, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Noise ``(batch, noise)`` to points ``(batch, 2)``."""
        return self.generator(noise)

    def training_step(self, points: Tensor, batch_idx: int) -> None:
        """One step of the critic, then one of the generator."""
        for_generator, for_critic = self.optimizers()  # type: ignore[attr-defined]
        made = self(torch.randn(len(points), self.hparams["noise"], device=points.device))

        self.toggle_optimizer(for_critic)
        critic_loss = (
            functional.softplus(-self.critic(points)).mean() + functional.softplus(self.critic(made.detach())).mean()
        )
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        generator_loss = functional.softplus(-self.critic(made)).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        losses = {"train_loss_critic": critic_loss, "train_loss_generator": generator_loss}
        self.log_dict(losses, on_step=False, on_epoch=True)

    def validation_step(self, points: Tensor, batch_idx: int) -> None:
        """Judge as many made points; of the same noise each time, so that epochs can be compared."""
        judged = judge(self.predict_step(points, batch_idx))
        self.log_dict({f"val_{name}": value for name, value in judged.items()})

    def predict_step(self, points: Tensor, batch_idx: int) -> Tensor:
        """Make as many points as there are true ones."""
        random = torch.Generator().manual_seed(batch_idx)
        return self(torch.randn(len(points), self.hparams["noise"], generator=random).to(points))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """An Adam for each net, with less momentum than usual: each net's task changes with the other."""
        words: dict[str, Any] = {"lr": self.hparams["lr"], "betas": (0.5, 0.99)}
        return [torch.optim.Adam(net.parameters(), **words) for net in (self.generator, self.critic)]


def _net(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )


def draw(points: Tensor) -> Figure:
    """True points, and made ones over them.

    Example:
        >>> len(draw(torch.zeros(5, 2)).axes[0].collections)
        2
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    for name, these, color in (("true", make_points(len(points)), "#999999"), ("made", points, "#0072B2")):
        axes.scatter(these[:, 0], these[:, 1], s=3, color=color, label=name)
    axes.set_aspect("equal")
    axes.legend(loc="center", frameon=False, markerscale=3)
    return figure
