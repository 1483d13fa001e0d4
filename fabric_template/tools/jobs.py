"""Jobs: a training that is to be tried, its loop's words and its parts, made anew in each process that tries it."""

from __future__ import annotations

from typing import Any, Protocol

from lightning.fabric import Fabric

from ..loop import FabricLoop

# a trial writes nothing, validates nothing, and ends when it knows enough
TRIED: dict[str, Any] = {
    "logger": False, "loggers": None, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "barebones": False, "profiler": None, "limit_val_batches": 0, "num_sanity_val_steps": 0,
    "max_epochs": -1, "max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None, "fast_dev_run": False,
    "overfit_batches": 0.0, "monitor": None, "save_top_k": 1, "save_every_n_steps": None, "validate_every_n_steps": None,
    "val_check_interval": None, "check_val_every_n_epoch": 1, "version": None, "on_nan": "off", "num_nodes": 1,
    "strategy": "auto",
}  # fmt: skip


class Job(Protocol):
    """What is tried. One that was typed is made of its words; one of a script has its objects, and travels by fork."""

    def words(self, folder: str, **words: Any) -> dict[str, Any]:
        """What FabricLoop is given for a trial."""

    def parts(self) -> tuple[Any, dict[str, Any]]:
        """The model, and what fit is given beside it; to be made behind the loop, which seeds."""


def for_a_trial(given: dict[str, Any], folder: str, words: dict[str, Any]) -> dict[str, Any]:
    """A loop's words as a trial has them: on one device, with no callbacks but its own.

    Example:
        >>> words = for_a_trial({"max_epochs": 3, "devices": [2, 3], "seed": 1}, "there", {"compile": True})
        >>> [words[word] for word in ("max_epochs", "devices", "seed", "compile", "default_root_dir")]
        [-1, [2], 1, True, 'there']
    """
    devices = given.get("devices")
    one = devices[:1] if isinstance(devices, list | tuple) else 1
    return {**given, **TRIED, "devices": one, "default_root_dir": folder, **words}


class ObjectJob:
    """A loop, a model and its data as they stand in a script."""

    def __init__(self, loop: FabricLoop, model: Any, given: dict[str, Any]) -> None:
        known = {word: value for word, value in loop.recipe.items() if word not in ("callbacks", "logger", "about")}
        if isinstance(known.get("accelerator"), Fabric):
            fabric = known["accelerator"]
            known |= {"accelerator": fabric.device.type, "precision": fabric.strategy.precision.precision}
        self.known, self.model, self.given = known, model, given

    def words(self, folder: str, **words: Any) -> dict[str, Any]:
        """What FabricLoop is given for a trial."""
        return for_a_trial(self.known, folder, words)

    def parts(self) -> tuple[Any, dict[str, Any]]:
        """The model, and what fit is given beside it."""
        return self.model, dict(self.given)
