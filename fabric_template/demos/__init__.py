"""Small complete models with their data, one file for each kind of task.

DEMOS has the classes of each, and the options that its run has by default: `fit --model demos.gan`.
"""

from typing import Any


def _demo(model: str, data: str, epochs: int, monitor: str, mode: str = "max") -> dict[str, Any]:
    options = {"max_epochs": epochs, "monitor": monitor, "mode": mode, "seed": 0}
    return {"model": f"{__name__}.{model}", "data": f"{__name__}.{data}", **options}


DEMOS = {
    "digits": _demo("digits.DigitsClassifier", "digits.DigitsData", 10, "val_acc"),
    "tabular": _demo("tabular.TabularNet", "tabular.TabularData", 20, "val_r2"),
    "mnist": _demo("mnist.MNISTNet", "mnist.MNISTData", 5, "val_acc"),
    "cifar10": _demo("cifar10.CIFAR10Net", "cifar10.CIFAR10Data", 10, "val_acc"),
    "language_model": _demo("language_model.GPT", "language_model.TextData", 5, "val_loss", "min"),
    "autoencoder": _demo("autoencoder.Autoencoder", "digits.DigitsData", 40, "val_loss", "min"),
    "gan": _demo("gan.GAN", "gan.RingData", 20, "val_good"),
    "detection": _demo("detection.Detector", "detection.RectanglesData", 12, "val_iou"),
}
