"""Entries: the sums behind each logged name, on the device; Trainer's arithmetic, to the bit.

A mean is the sum of value x batch size over the sum of batch sizes, in float32 or wider, added in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, add

from ..core.errors import Misuse
from .loggable import float_type

if TYPE_CHECKING:
    from .asked import Meta

POWERS_OF_TWO = frozenset(2**power for power in range(24))  # the batch sizes by which a float is multiplied exactly
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": add, "max": torch.maximum, "min": torch.minimum}


class Entry:
    """One logged name: its last value and its running sum, both on the device of what was logged."""

    def __init__(self, meta: Meta, args: tuple, all_reduce: Callable[..., Tensor], together: Together) -> None:
        self.args, self._all_reduce, self._together = args, all_reduce, together
        self._ask(meta)
        self._factor_of: int | None = None
        self.metric: Any = None  # a torchmetrics.Metric, if that is what was logged
        self.step_value: Tensor | None = None
        self.live = False  # logged since the last reset
        self.reset()

    def _ask(self, meta: Meta) -> None:
        self.meta = meta
        self._on_step, self._on_epoch, self._mean = meta.on_step, meta.on_epoch, meta.reduce == "mean"
        self._synced = meta.sync_dist and not meta.rank_zero_only
        self.needs_size = meta.on_epoch and self._mean
        self.copies = meta.on_step and not self._synced  # what was logged, into `step_value`
        self._may_wait = meta.on_epoch and self._mean and self.copies and not (meta.enable_graph or meta.sync_dist)

    def is_asked_again(self, meta: Meta) -> bool:
        """Whether it comes from a run of one process, which did not note whether several would share it; now they do."""
        if is_first := not self.args and dataclasses.replace(self.meta, sync_dist=meta.sync_dist) == meta:
            self._ask(meta)
        return is_first

    def reset(self) -> None:
        """Start the next epoch's sum."""
        if self.metric is not None:
            self.metric.reset()
        self._together.add_up()
        self._waits_in: torch.dtype | None = None  # the dtype of values that may wait
        self.total: Tensor | None = None
        self.weight: int | Tensor = 0
        self._epoch_value: Tensor | None = None
        self.live = False

    def update(self, value: Tensor, batch_size: int) -> None:
        """Add one value (0-dim) that stands for batch_size samples."""
        self._epoch_value = None
        self.live = True
        if self._on_step:
            copy = value.clone()  # nobody changes that one
            if copy.dtype is self._waits_in:
                self.step_value, self.weight = copy, self.weight + batch_size
                self._together.add(self, copy, batch_size)
                return
            self._end_wait()
            self.step_value = self._sync(copy)
            if not self._on_epoch:
                return
        if self._mean:
            self.weight += batch_size
            if batch_size in POWERS_OF_TWO and (total := self.total) is not None:
                # scaled exactly, so that one operation rounds as the two below do
                self.total = add(total, value, alpha=batch_size)
                return
            if batch_size != self._factor_of:  # a factor on the device costs half of a number from Python
                self._factor_of = batch_size
                # filled there: made of a number it would be copied there, and waited for
                self._factor = torch.full((), batch_size, dtype=torch.float32, device=value.device)
            value = value * self._factor
        if self.total is None:  # under 64-true a float32 value is summed in float64
            self.total = value.to(torch.promote_types(value.dtype, float_type()), copy=True)
            if self._may_wait and self._together.takes(self.total):
                self._waits_in = self.total.dtype
        elif self._mean:
            self.total = self.total + value
        else:
            self.total = _COMBINE[self.meta.reduce](self.total, value)

    def update_metric(self, metric: Any) -> None:
        """Note that a torchmetrics object was logged; it keeps its own sums."""
        self._end_wait()
        default = torch.get_default_dtype()
        if metric is self.metric and getattr(metric, "dtype", default) is not default:
            # as Trainer, which moves it once more with every log: it computes in what is now the default dtype
            metric.to(metric.device)
        self.metric, self.live, self._epoch_value = metric, True, None
        if self.meta.on_step:
            # torchmetrics keeps what forward() returned for this very purpose, and has no public name for it
            self.step_value = getattr(metric, "_forward_cache", None)

    def _end_wait(self) -> None:
        if self._waits_in is not None:  # else none of its values waits, and the others may
            self._together.add_up()

    def epoch_value(self) -> Tensor | None:
        """The reduction over the epoch so far; over all ranks when sync_dist."""
        if self._epoch_value is None:
            if self.metric is not None:
                self._epoch_value = self.metric.compute()
            elif self.total is not None:
                total = self._sync(self.total.clone())
                if self.meta.reduce == "mean":
                    # no integer: the mean of two ranks' 4 and 3 is 3.5
                    weight = torch.tensor(self.weight, dtype=total.dtype, device=total.device)
                    total = total / self._sync(weight)
                self._epoch_value = total
        return self._epoch_value

    def value(self, on_step: bool) -> Tensor | None:
        """What is reported in a step, or at the end of the epoch; None where nothing is."""
        self._together.add_up()  # before anybody has the step's value in hand
        if on_step:
            found = self.step_value if self.meta.on_step else None
        else:
            found = self.epoch_value() if self.meta.on_epoch else None
        if found is not None and self.metric is not None and not isinstance(found, Tensor):
            raise Misuse(
                f"The `.compute()` return of the metric logged as {self.meta.name!r} must be a tensor. Found {found}: log a"
                " MetricCollection or the dict it returned with self.log_dict"
            )
        return found if found is None or self.meta.enable_graph else found.detach()

    def _sync(self, value: Tensor) -> Tensor:
        if self._synced:
            return self._all_reduce(value, group=self.meta.sync_dist_group, reduce_op=self.meta.reduce)
        return value


class Together:
    """Values that wait to be added: a batch's in one operation, and many batches in a row, while its code is at hand."""

    MOST = 32  # values that wait

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor]] = []
        self._batch_size = 0  # of all that wait,
        self._factor: Tensor | None = None  # as a tensor on their device, where it does not scale exactly
        self._device: torch.device | None = None

    def takes(self, total: Tensor) -> bool:
        """Whether copies of its dtype can wait here for this total; not what others may change meanwhile."""
        self._device = self._device or total.device
        return type(total) is Tensor and total.device == self._device and not total.is_inference()

    def add(self, entry: Any, value: Tensor, batch_size: int) -> None:
        """Add a value of so many samples to that entry's ``total``, before anybody looks at it, or has the value in hand."""
        if batch_size != self._batch_size or len(self._waiting) == self.MOST:
            self.add_up()
            if batch_size != self._batch_size:
                self._batch_size = batch_size
                is_exact = batch_size in POWERS_OF_TWO
                self._factor = (
                    None if is_exact else torch.full((), batch_size, dtype=torch.float32, device=self._device)
                )
        self._waiting.append((entry, value))

    def add_up(self) -> None:
        """Add what waits, each name's values in their order."""
        waiting, self._waiting = self._waiting, []
        batches: list[dict[Any, Tensor]] = []
        for entry, value in waiting:
            if not batches or entry in batches[-1]:
                batches.append({})
            batches[-1][entry] = value
        for batch in batches:
            totals, values = [entry.total for entry in batch], list(batch.values())
            if self._factor is None:
                torch._foreach_add_(totals, values, alpha=self._batch_size)
            else:
                torch._foreach_add_(totals, torch._foreach_mul(values, self._factor))


class Collection(dict):
    """What one loop (training, or an evaluation) has logged: entries by (hook, name, loader)."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training
        self.together = Together()
        self.batch: Any = None
        self.batch_size: int | None = None
        self.said_size: int | None = None  # what self.log(..., batch_size=) has said of the batch at hand
        self.dataloader_idx: int | None = None
        self.copied: tuple[Tensor, int, Any] | None = None  # what was logged with a graph, its version, and the copy
        self.any_on_step = False  # whether any name has a value per step

    def live(self) -> Iterator[Entry]:
        """The entries logged since the last reset, for the loader at hand."""
        return (e for e in self.values() if e.live and e.meta.dataloader_idx == self.dataloader_idx)

    def size_of_batch(self) -> int:
        """The batch size found in the batch at hand, looked for once."""
        if self.batch_size is None:
            batch = self.batch
            if type(batch) in (list, tuple) and 0 < len(batch) < 3:  # (inputs, targets), nearly always
                one, two = batch[0], batch[-1]
                if type(one) is type(two) is Tensor and (x := one.shape) and (y := two.shape) and x[0] == y[0]:
                    self.batch_size = x[0]
                    return x[0]
            from .sizes import batch_size_of

            self.batch_size = 1 if batch is None else batch_size_of(batch)
        return self.batch_size

    def reset(self, fx: str | None = None, tensors_only: bool = False) -> None:
        """Forget the epoch's sums: of all entries or of one hook's."""
        for entry in self.values():
            if (fx is None or entry.meta.fx == fx) and not (tensors_only and entry.metric is not None):
                entry.reset()
