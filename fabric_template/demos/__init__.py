"""Small complete models with their data, one file for each kind of task.

DEMOS has the options of each: `fabric-template fit --model demos.gan` uses them.
"""

from typing import Any


def _demo(name: str, model: str, data: str, epochs: int, monitor: str) -> dict[str, Any]:
    mode = "min" if "loss" in monitor else "max"
    options = {"name": name, "max_epochs": epochs, "monitor": monitor, "mode": mode, "seed": 0}
    return {"model": f"{__name__}.{model}", "data": f"{__name__}.{data}", **options}


DEMOS = {
    "digits": _demo("digits", "digits.DigitsClassifier", "digits.DigitsData", 10, "val_acc"),
    "tabular": _demo("tabular", "tabular.TabularNet", "tabular.TabularData", 20, "val_r2"),
    "mnist": _demo("mnist", "mnist.MNISTNet", "mnist.MNISTData", 5, "val_acc"),
    "cifar10": _demo("cifar10", "cifar10.CIFAR10Net", "cifar10.CIFAR10Data", 10, "val_acc"),
    "language_model": _demo(
        "language_model", "language_model.GPT", "language_model.TextData", 5, "val_loss"
    ),
    "autoencoder": _demo(
        "autoencoder", "autoencoder.Autoencoder", "digits.DigitsData", 40, "val_loss"
    ),
    "gan": _demo("gan", "gan.GAN", "gan.RingData", 20, "val_good"),
}
