"""History: one row per epoch, for modules that log much and for modules that log nothing."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WINDOW = 64  # returned values are summed this many at a time: one operation for many steps


class Returned:
    """The means of what a step returned, weighted by batch size: the history of a module that logs nothing.

    Values are kept as they come and summed a window at a time, on their device; nothing is read back before the epoch
    ends. The first value that is not finite is remembered with its step.

    Example:
        >>> returned = Returned()
        >>> returned.add({"train_loss": torch.tensor(1.0)}, 2, step=0)
        >>> returned.add({"train_loss": torch.tensor(4.0)}, 1, step=1)
        >>> returned.means()
        {'train_loss': 2.0}
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self._recent: dict[str, list[tuple[Tensor, int, int]]] = {}
        self._sums: dict[str, tuple[Tensor, int]] = {}
        self._first_bad: Tensor | None = None  # the step, on the device

    def add(self, values: dict[str, Tensor], batch_size: int, step: int) -> None:
        """Keep one step's values (0-dim tensors)."""
        for name, value in values.items():
            recent = self._recent.setdefault(name, [])
            recent.append((value, batch_size, step))
            if len(recent) == WINDOW:
                self._fold(name)

    def means(self) -> dict[str, float]:
        """The mean of each name so far. CPU-GPU sync point."""
        for name in list(self._recent):
            self._fold(name)
        return {name: (total / weight).item() for name, (total, weight) in self._sums.items()}

    def first_bad_step(self) -> int | None:
        """The step of the first loss that is not finite, None if all are. CPU-GPU sync point."""
        for name in list(self._recent):
            self._fold(name)
        if self._first_bad is None:
            return None
        step = int(self._first_bad)
        return None if step < 0 else step

    def _fold(self, name: str) -> None:
        recent, self._recent[name] = self._recent[name], []
        if not recent:
            return
        values = torch.stack([value for value, _, _ in recent])
        values = values.float() if values.dtype not in (torch.float32, torch.float64) else values
        weights = torch.tensor([weight for _, weight, _ in recent], dtype=values.dtype)
        total = (values * weights.to(values.device, non_blocking=True)).sum()
        before, weight = self._sums.get(name, (None, 0))
        self._sums[name] = (total if before is None else before + total, weight + sum(w for _, w, _ in recent))
        if name.endswith("loss"):
            bad = ~torch.isfinite(values)
            step = torch.where(bad.any(), bad.int().argmax() + recent[0][2], -1)
            first = self._first_bad
            self._first_bad = step if first is None else torch.where(first < 0, step, first)

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint in the middle of an epoch."""
        recent = {
            name: [[value.detach().cpu(), weight, step] for value, weight, step in kept]
            for name, kept in self._recent.items()
        }
        sums = {name: [total.cpu(), weight] for name, (total, weight) in self._sums.items()}
        return {"recent": recent, "sums": sums, "first_bad": None if self._first_bad is None else int(self._first_bad)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums."""
        self._recent = {
            name: [(value.to(device), weight, step) for value, weight, step in kept]
            for name, kept in state["recent"].items()
        }
        self._sums = {name: (total.to(device), weight) for name, (total, weight) in state["sums"].items()}
        bad = state["first_bad"]
        self._first_bad = None if bad is None else torch.tensor(bad, device=device)


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """The scalars that a step returned, under the names that they get in the history.

    A tensor is ``<prefix>_loss``, a dict gives ``<prefix>_<key>``, a pair is ``<prefix>_loss, <prefix>_acc``.

    Example:
        >>> name_outputs((torch.tensor(0.5), torch.tensor(1.0)), "val")
        {'val_loss': tensor(0.5000), 'val_acc': tensor(1.)}
    """
    if isinstance(output, Tensor):
        named: Mapping[str, Any] = {"loss": output}
    elif isinstance(output, Mapping):
        named = output
    elif isinstance(output, tuple) and len(output) == 2:
        named = {"loss": output[0], "acc": output[1]}
    elif isinstance(output, numbers.Number):
        named = {"loss": output}
    else:
        return {}
    found = {}
    for key, value in named.items():
        name = key if str(key).startswith(f"{prefix}_") else f"{prefix}_{key}"
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().reshape(())
        elif isinstance(value, numbers.Number) and not isinstance(value, bool):
            found[name] = torch.tensor(float(value))
    return found


class History:
    """The rows of a run, one per epoch, as they stand in ``metrics.csv`` and as ``fit`` returns them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.train, self.val = Returned(), Returned()
        self.returned: dict[str, float] = {}  # the last epoch's means of what the steps returned
        self._warned = False

    def end_train(self) -> None:
        """The training epoch is over: read its means."""
        self.returned.update(self.train.means())
        self.warn_of_nan()
        self.train.reset()

    def end_validation(self) -> None:
        """A validation is over: read its means."""
        self.returned.update(self.val.means())
        self.val.reset()

    def warn_of_nan(self) -> None:
        """Say once that the loss is no number any more, and since when."""
        if self._warned:
            return
        step = self.train.first_bad_step()
        if step is not None:
            self._warned = True
            warnings.warn(
                f"The training loss is not finite (NaN or inf) since batch {step} of this fit; training goes on. To find"
                " the operation: FabricLoop(detect_anomaly=True); often a smaller learning rate or gradient_clip_val=1.0"
                " helps", stacklevel=2,
            )  # fmt: skip

    def add(self, epoch: int, step: int, values: Mapping[str, Any], learning_rates: list[float], seconds: float) -> dict:
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

    def frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        import pandas

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
