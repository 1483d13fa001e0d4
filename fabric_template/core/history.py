"""History: one row per epoch, for modules that log much and for modules that log nothing."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .returned import LOOK_EVERY, Returned


class History:
    """The rows of a run, one per epoch, as they stand in ``metrics.csv`` and as ``fit`` returns them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._names: dict[str, None] = {}  # of the rows so far that a checkpoint was told of,
        self._lines: list[str] = []  # and their text, where that is asked for
        self._told = 0
        self.train, self.val = Returned(), Returned()
        self._means: dict[str, None] = {}  # their names
        self.returned: dict[str, float] = {}  # the last epoch's means of what the steps returned
        self.warns = True  # of a loss that is no number; once

    def end_train(self, step: int, all_reduce: Callable[..., Tensor] | None = None) -> None:
        """The training epoch is over, after so many batches of the fit: read its means."""
        self._note(self.train.means(all_reduce))
        self.warn_of_nan(step)
        self.train.reset()

    def end_validation(self, all_reduce: Callable[..., Tensor] | None = None) -> dict[str, float]:
        """A validation is over: its means."""
        means = self.val.means(all_reduce)
        self._note(means)
        self.val.reset()
        return means

    def _note(self, means: dict[str, float]) -> None:
        self.returned |= means
        self._means |= dict.fromkeys(means)

    def latest(self) -> dict[str, float]:
        """What the steps return: this epoch's means so far, on this rank, and the newest of validation. CPU-GPU sync point."""
        last = {**(self.rows[-1] if self.rows else {}), **self.returned}
        return {name: value for name, value in last.items() if name in self._means} | self.train.means()

    def warn_of_nan(self, step: int) -> None:
        """Say once that the training loss is no number any more, and since when."""
        if self.warns and (found := self.train.bad_step(step)) is not None:
            self.warns = False
            first = found - found % LOOK_EVERY
            since = f"{first} to {found}" if first != found else str(found)
            warnings.warn(
                f"The training loss is not finite (NaN or inf) since batch {since} of this fit; training goes on. To find"
                " the operation: FabricLoop(detect_anomaly=True); often a smaller learning rate or gradient_clip_val=1.0"
                " helps", stacklevel=2,
            )  # fmt: skip

    def add(
        self, epoch: int, step: int, values: Mapping[str, Any], learning_rates: list[float], seconds: float
    ) -> dict:
        """Make the epoch's row: what was logged, what was returned, learning rate, time."""
        found = {**self.returned, **values}
        row: dict[str, Any] = {"epoch": epoch, "step": step}
        for name in sorted(found, key=lambda name: not name.startswith("train")):  # train_loss, then val_loss
            value = found[name]
            row[name] = value.item() if isinstance(value, Tensor) else value
        for index, rate in enumerate(learning_rates):
            row.setdefault("lr" if index == 0 else f"lr_{index}", rate)
        row["time"] = seconds
        self.returned = {}
        self.rows.append(row)
        return row

    def state_dict(self, whole: bool) -> dict[str, Any]:
        """How many rows there are, their names, and the last one, for a checkpoint; ``whole``: all, a line of JSON each."""
        for row in self.rows[self._told :]:
            self._names |= dict.fromkeys(row)
        self._told = len(self.rows)
        last = self.rows[-1] if self.rows else {}
        last = {name: last[name] for name in self._names if name in last}
        state = {"rows": len(self.rows), "names": list(self._names), "last": last}
        if whole:
            for row in self.rows[len(self._lines) :]:  # up to its last value: names may come later
                most = max((index for index, name in enumerate(self._names) if name in row), default=-1)
                values = [row.get(name) for name in list(self._names)[: most + 1]]
                self._lines.append(json.dumps(values, default=str))
            state["lines"] = "\n".join(self._lines)
        return state

    def frame(self) -> Any:
        """The rows as a pandas DataFrame; where pandas is not installed as they are, a list of dicts."""
        try:
            import pandas
        except ModuleNotFoundError:  # a copy needs torch and lightning
            return list(self.rows)
        return pandas.DataFrame(self.rows)


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Whether a monitored value beats the best so far; NaN never does.

    Example:
        >>> is_better(0.5, None, "min"), is_better(0.5, 0.4, "min"), is_better(math.nan, 1.0, "max")
        (True, False, False)
    """
    if math.isnan(value):
        return False
    return best is None or math.isnan(best) or (value < best if mode == "min" else value > best)
