"""History: one row per epoch, for modules that log much and for modules that log nothing."""

from __future__ import annotations

import json
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LOOK_EVERY = 32  # steps between two looks, on the device, for a loss that is no number


class Returned:
    """The means of what a step returned, weighted by batch size: the history of a module that logs nothing.

    Sums are kept on their device; nothing is read back before the epoch ends.

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
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, int] = {}
        self._bad_step: Tensor | None = None  # by which the loss was not finite, on the device; -1: it is

    def add(self, values: dict[str, Tensor], batch_size: int, step: int) -> None:
        """Add one step's values (0-dim tensors) for a batch of so many samples."""
        for name, value in values.items():
            total = self._sums.get(name)
            if total is None:
                dtype = torch.promote_types(value.dtype, torch.float32)
                total = torch.zeros((), dtype=dtype, device=value.device)
                self._weights[name] = 0
            self._sums[name] = torch.add(total, value, alpha=batch_size)  # cheaper than in place
            self._weights[name] += batch_size
        if step % LOOK_EVERY == LOOK_EVERY - 1:
            self._look(step)

    def means(self, all_reduce: Callable[..., Tensor] | None = None) -> dict[str, float]:
        """The mean of each name so far, over all ranks when told how to add them. CPU-GPU sync point."""
        found = {}
        for name, total in self._sums.items():
            weight = torch.tensor(self._weights[name], dtype=total.dtype, device=total.device)
            pair = torch.stack([total.reshape(()), weight])  # a loss may have shape (1,)
            total, weight = pair if all_reduce is None else all_reduce(pair, reduce_op="sum")
            found[name] = (total / weight).item()
        return found

    def bad_step(self, step: int) -> int | None:
        """The step by which the training loss was no number any more, None if it still is. CPU-GPU sync point."""
        self._look(step)
        found = -1 if self._bad_step is None else int(self._bad_step)
        return None if found < 0 else found

    def _look(self, step: int) -> None:
        total = self._sums.get("train_loss")
        if total is not None:
            now = torch.where(torch.isfinite(total), -1, step)
            before = self._bad_step
            self._bad_step = now if before is None else torch.where(before < 0, now, before)

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, for a checkpoint in the middle of an epoch."""
        return {
            "sums": {k: v.clone().cpu() for k, v in self._sums.items()},
            "weights": dict(self._weights),
            "bad_step": None if self._bad_step is None else int(self._bad_step),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums."""
        self._sums = {name: total.to(device, copy=True) for name, total in state["sums"].items()}
        self._weights = dict(state["weights"])
        self._bad_step = None if state["bad_step"] is None else torch.tensor(state["bad_step"], device=device)


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """The scalars that a step returned, under the names that they get in the history.

    A tensor is ``<prefix>_loss``, a dict gives ``<prefix>_<key>``, a pair is ``<prefix>_loss, <prefix>_acc``.

    Example:
        >>> name_outputs((torch.tensor(0.5), torch.tensor(1.0)), "val")
        {'val_loss': tensor(0.5000), 'val_acc': tensor(1.)}
    """
    if isinstance(output, Tensor | numbers.Number):
        named: Mapping[str, Any] = {"loss": output}
    elif isinstance(output, Mapping):
        named = output
    elif isinstance(output, tuple) and len(output) == 2:
        named = {"loss": output[0], "acc": output[1]}
    else:
        return {}
    found = {}
    for key, value in named.items():
        name = key if str(key).startswith(f"{prefix}_") else f"{prefix}_{key}"
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().reshape(())
        elif isinstance(value, numbers.Number) and not isinstance(value, bool):
            found[name] = torch.tensor(float(value))  # type: ignore[arg-type]
    return found


class History:
    """The rows of a run, one per epoch, as they stand in ``metrics.csv`` and as ``fit`` returns them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._names: dict[str, None] = {}  # of the rows so far that a checkpoint was told of,
        self._lines: list[str] = []  # and their text, where that is asked for
        self._told = 0
        self.train, self.val = Returned(), Returned()
        self.returned: dict[str, float] = {}  # the last epoch's means of what the steps returned
        self._warned = False

    def end_train(self, step: int, all_reduce: Callable[..., Tensor] | None = None) -> None:
        """The training epoch is over, after so many batches of the fit: read its means."""
        self.returned.update(self.train.means(all_reduce))
        self.warn_of_nan(step)
        self.train.reset()

    def end_validation(self, all_reduce: Callable[..., Tensor] | None = None) -> dict[str, float]:
        """A validation is over: its means."""
        means = self.val.means(all_reduce)
        self.returned.update(means)
        self.val.reset()
        return means

    def warn_of_nan(self, step: int) -> None:
        """Say once that the training loss is no number any more, and since when."""
        if not self._warned and (found := self.train.bad_step(step)) is not None:
            self._warned = True
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
