"""Demos: the short names of the models that come with the package, such as ``demos.tabular``, and what goes with each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import PACKAGE


@dataclass(frozen=True)
class Demo:
    """A model with its data, and the words that its run has if nobody says otherwise."""

    model: str  # file:Class in the room demos/
    data: str
    words: dict[str, Any] = field(default_factory=dict)

    def path(self, part: str) -> str:
        """The whole path of the model's class, or of that of the data."""
        return f"{PACKAGE}.demos.{getattr(self, part)}"


def _words(max_epochs: int, monitor: str, mode: str = "max") -> dict[str, Any]:
    return {"max_epochs": max_epochs, "monitor": monitor, "mode": mode, "seed": 0}


DEMOS = {
    "digits": Demo("digits:DigitsClassifier", "digits:DigitsData", _words(10, "val_acc")),
    "tabular": Demo("tabular:TabularNet", "tabular:TabularData", _words(20, "val_r2")),
    "mnist": Demo("mnist:MNISTNet", "mnist:MNISTData", _words(5, "val_acc")),
    "images": Demo("images:ImageClassifier", "images:ImagesData", _words(10, "val_acc")),
    "cifar10": Demo("cifar10:CIFAR10Net", "cifar10:CIFAR10Data", _words(10, "val_acc")),
    "language_model": Demo("language_model:GPT", "language_model:TextData", _words(5, "val_loss", "min")),
    "autoencoder": Demo("autoencoder:Autoencoder", "digits:DigitsData", _words(40, "val_loss", "min")),
    "gan": Demo("gan:GAN", "gan:RingData", _words(20, "val_good")),
    "detection": Demo("detection:Detector", "detection:RectanglesData", _words(12, "val_iou")),
}
DEFAULT = "digits"  # what is trained where no model is named


def demo_of(name: Any) -> str | None:
    """The demo that a short name means; None for every other name.

    Example:
        >>> demo_of("demos.gan"), demo_of("my.demos.gan:Net")
        ('gan', None)
    """
    name = name.removeprefix("demos.") if isinstance(name, str) and name.startswith("demos.") else None
    return name if name in DEMOS else None


def full_path(part: str, name: Any) -> Any:
    """What is typed for the model or the data, with the whole path of a demo's class; None stays None."""
    demo = demo_of(name)
    return DEMOS[demo].path(part) if demo else name


def words_of(name: str) -> dict[str, Any]:
    """The words of a demo's run, its name among them."""
    return {"name": name, **DEMOS[name].words}
