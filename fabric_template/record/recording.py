"""Recording: what a step logs while it is recorded as a CUDA graph: noted, to be logged again with each replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..core.errors import Misuse
from .entries import Collection

# of log, in the order in which an entry knows them
WORDS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
         "add_dataloader_idx", "metric_attribute", "rank_zero_only")  # fmt: skip


class Recording(Collection):
    """Stands in a collection's place while a step is recorded, and notes what it logs.

    Example:
        >>> logged = []; noted = Recording(Collection(training=True), logged).get(("training_step", "train_loss", None))
        >>> noted.args != (True,) + (None,) * 10; noted.update(0.5, batch_size=4)
        False
        >>> name, value, words = logged[0]; name, value, words["prog_bar"], words["batch_size"]
        ('train_loss', 0.5, True, 4)
    """

    def __init__(self, of: Collection, logged: list) -> None:
        super().__init__(of.training)
        self.batch, self.batch_size, self.dataloader_idx = of.batch, of.batch_size, of.dataloader_idx
        self._logged = logged

    def get(self, key: Any, default: Any = None) -> Any:
        """An entry that takes whatever is logged under this name."""
        return Noted(key[1], self._logged)


class Noted:
    """An entry that notes its name, its value and the words of log."""

    __hash__ = None  # type: ignore[assignment]
    copies = False

    def __init__(self, name: str, logged: list) -> None:
        self.name, self._logged = name, logged
        self._words: dict[str, Any] = {}
        self.needs_size = True

    @property
    def args(self) -> Any:
        """Compared with the words that log got: they are noted, and always its own."""
        return self

    def __eq__(self, words: object) -> bool:
        self._words = dict(zip(WORDS, words, strict=True))  # type: ignore[call-overload]
        return True

    def update(self, value: Tensor, batch_size: int) -> None:
        """Note a value."""
        self._logged.append((self.name, value, {**self._words, "batch_size": batch_size}))

    def update_metric(self, metric: Any) -> None:
        """Objects make new tensors at each step."""
        raise Misuse(f"self.log({self.name!r}, ...) got a {type(metric).__name__}: expected a plain tensor")


@contextmanager
def recording(metrics: Any, logged: list) -> Iterator[None]:
    """What is logged inside is noted, and counts nowhere: (name, value, the further words of log)."""
    kept = metrics.active, metrics._last_fx, metrics.fx
    metrics.active = Recording(metrics.active, logged)
    try:
        yield
    finally:
        metrics.active, metrics._last_fx, metrics.fx = kept
