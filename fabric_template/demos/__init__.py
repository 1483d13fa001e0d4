"""Provide small, complete example models and their data. Each file shows one kind of task.

DEMOS maps a demo's name to the options that `fabric-template fit --model demos.NAME` uses.
"""

from typing import Any


def _demo(path: str, data: str, monitor: str, **options: Any) -> dict[str, Any]:
    options |= {"name": path.partition(".")[0], "monitor": monitor, "seed": 0}
    return {"model": f"{__name__}.{path}", "data": f"{__name__}.{data}", **options}


_BY_STEPS = {"max_steps": 1000, "validate_every_n_steps": 200, "gradient_clip_val": 1.0}
_DEMOS = [
    _demo("digits.DigitsClassifier", "digits.DigitsData", "val_acc", max_epochs=10),
    _demo("tabular.TabularNet", "tabular.TabularData", "val_r2", max_epochs=20),
    _demo("mnist.MNISTNet", "mnist.MNISTData", "val_acc", max_epochs=5),
    _demo("cifar10.CIFAR10Net", "cifar10.CIFAR10Data", "val_acc", max_epochs=10),
    _demo("language_model.GPT", "language_model.TextData", "val_loss", **_BY_STEPS),
    _demo("autoencoder.Autoencoder", "digits.DigitsData", "val_loss", max_epochs=40),
    _demo("gan.GAN", "gan.RingData", "val_good", mode="max", max_epochs=20),
]
DEMOS = {demo["name"]: demo for demo in _DEMOS}
