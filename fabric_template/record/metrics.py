"""Metrics: the arithmetic behind ``self.log``, on the device; nothing is read back inside a step.

The rules are those of `Lightning's logging <https://lightning.ai/docs/pytorch/stable/extensions/logging.html>`_, to the
bit: a mean is the sum of value x batch size over the sum of batch sizes, in float32 or wider, added in order.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .entries import Collection
from .loggable import as_float, check_loggable, float_type, of_one_element
from .reported import Reported

_EXACT = frozenset({torch.float32, torch.float64})


class Metrics(Reported):
    """``self.log`` of a run; what it has logged is `Reported`."""

    def __init__(
        self, all_reduce: Callable[..., Any] | None = None, distributed: bool = False, predicts: bool = False,
        enabled: bool = True, has_logger: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(all_reduce, distributed, has_logger)
        self.predicts, self.enabled = predicts, enabled  # enabled=False: barebones

    def __deepcopy__(self, memo: dict) -> Metrics:
        """Copies of a module made while it runs (EMA, pruning) log into the same run."""
        return self

    def __reduce__(self) -> tuple:
        """A module pickled while it runs does not take the run along."""
        return (Metrics, ())

    # ---- what users call

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: Any = "mean", enable_graph: bool = False, sync_dist: bool = False,
        sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: int | None = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Log a number, a tensor of one element or a torchmetrics object under a name; see LightningModule.log."""
        collection, fx = self.active, self.fx
        if collection is self._closed or not self.enabled:
            from .refused import refuse

            refuse(name, self.fx, self.enabled, self.predicts)
            return
        args = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
                add_dataloader_idx, metric_attribute, rank_zero_only)  # fmt: skip
        index = collection.dataloader_idx if add_dataloader_idx else None
        entry = collection.get((fx, name, index))
        if entry is None or entry.args != args:
            entry = self._register(collection, entry, name, value, args, index)

        if self._last_fx != fx:
            if self._in_batches is not False:  # a new epoch begins for this hook
                collection.reset(fx=fx, tensors_only=True)
            self._last_fx = fx
        source = None
        if isinstance(value, Tensor):
            if value.requires_grad and not enable_graph:
                source = value
                value = value.detach()
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=float_type())
        else:
            check_loggable(name, value)
            entry.update_metric(value)
            return
        if value.dim():
            value, source = of_one_element(name, value), None
        if value.dtype not in _EXACT:
            value, source = as_float(entry, value), None
        if batch_size is None:
            batch_size = (collection.batch_size or collection.size_of_batch()) if entry.needs_size else 1
        else:
            collection.said_size = batch_size
        entry.update(value, batch_size)
        if source is not None and entry.copies:
            collection.copied = source, source._version, entry.step_value

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        names: dict[str, Any] = {}
        if hasattr(dictionary, "add_metrics"):  # a MetricCollection: names with its prefix, states as they are
            names = {"keep_base": False, "copy_state": False}
        for name, value in dictionary.items(**names):
            self.log(name, value, **arguments)

    # ---- what the loop calls

    def copy_of(self, loss: Tensor) -> Tensor | None:
        """The copy that was made when the step logged this very tensor; asked once, since it lets go of the graph behind it."""
        copied, self.active.copied = self.active.copied, None
        if copied is None or copied[0] is not loss:
            return None
        _, version, copy = copied
        return copy if version == loss._version and copy._version == 0 else None  # neither was changed in place since

    def recording(self, logged: list) -> AbstractContextManager[None]:
        """What is logged inside is noted, and counts nowhere: (name, value, the further words of log)."""
        from .recording import recording

        return recording(self, logged)

    def start(self, collection: Collection | None) -> None:
        """Log into this collection from now on; None: logging is refused."""
        self.active = self._closed if collection is None else collection

    def batch_starts(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """A batch is at hand: its size is looked for when a mean needs it."""
        self._in_batches = self._in_batches is None
        collection = self.active
        collection.batch, collection.dataloader_idx = batch, dataloader_idx
        collection.batch_size = collection.said_size = collection.copied = None

    def batch_taken(self, batch: Any) -> None:
        """A step has taken a batch itself: that is the one at hand."""
        self.active.batch, self.active.batch_size, self.active.said_size = batch, None, None

    def batch_ends(self) -> None:
        """Let go of the batch."""
        self.active.batch = self.active.batch_size = self.active.said_size = self.active.copied = None

    def batches_end(self, seen: bool = False) -> None:
        """The batches (of one loader) are over: from now on the epoch's values count.

        The last step's stay visible under their own names; where a validation has ``seen`` them, its own are newer.
        """
        if self._in_batches is not None and not seen:
            self.merge()
        self._in_batches = self.active.batch = None
        for entry in self.active.values() if self.active.dataloader_idx is not None else ():
            entry.args = ()  # in the next loader the name is checked once more: it may be this one's

    def batches_go_on(self) -> None:
        """The epoch was not over after all: its sums so far count on."""
        self._in_batches = False

    def epoch_ends(self) -> None:
        """All hooks of the epoch have run: forget its sums."""
        self.active.reset()
        self._in_batches = self._last_fx = None

    def forget(self) -> None:
        """Start as if nothing had been logged."""
        self.epoch_ends()
        self.callback, self.logged, self.progress, self.row = {}, {}, {}, {}

    def pause(self) -> tuple:
        """Validation runs inside the training epoch: keep where its batches stood."""
        self.merge()
        self._paused = self.active, self._in_batches, self._last_fx
        return self._paused

    def resume(self, kept: tuple) -> None:
        """Go on after `pause`."""
        self.active, self._in_batches, self._last_fx = kept
        self._paused = None
