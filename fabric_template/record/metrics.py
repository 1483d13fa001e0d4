"""Metrics: the arithmetic behind ``self.log``, on the device; nothing is read back inside a step.

The rules are those of `Lightning's logging <https://lightning.ai/docs/pytorch/stable/extensions/logging.html>`_, to the
bit: a mean is the sum of value x batch size over the sum of batch sizes, in float32 or wider, added in order.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import Misuse
from .entries import Collection, Entry
from .loggable import as_float, check_loggable, float_type, of_one_element, refuse
from .reported import Reported

_EXACT = frozenset({torch.float32, torch.float64})


class Metrics(Reported):
    """``self.log`` of a run; what it has logged is `Reported`."""

    def __init__(
        self, all_reduce: Callable[..., Any] | None = None, distributed: bool = False, predicts: bool = False,
        enabled: bool = True, has_logger: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(all_reduce)
        self._distributed = distributed
        self.predicts, self.enabled, self.has_logger = predicts, enabled, has_logger  # enabled=False: barebones

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
        if isinstance(value, Tensor):
            if value.requires_grad and not enable_graph:
                value = value.detach()
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=float_type())
        else:
            check_loggable(name, value)
            entry.update_metric(value)
            return
        if value.dim():
            value = of_one_element(name, value)
        if value.dtype not in _EXACT:
            value = as_float(entry, value)
        if batch_size is None:
            batch_size = (collection.batch_size or collection.size_of_batch()) if entry.needs_size else 1
        else:
            collection.said_size = batch_size
        entry.update(value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        names: dict[str, Any] = {}
        if hasattr(dictionary, "add_metrics"):  # a MetricCollection: names with its prefix, states as they are
            names = {"keep_base": False, "copy_state": False}
        for name, value in dictionary.items(**names):
            self.log(name, value, **arguments)

    # ---- what the loop calls

    @contextmanager
    def recording(self, logged: list) -> Iterator[None]:
        """What is logged inside is noted, and counts nowhere: (name, value, the further words of log)."""
        from .recording import Recording

        kept = self.active, self._last_fx, self.fx
        self.active = Recording(self.active, logged)
        try:
            yield
        finally:
            self.active, self._last_fx, self.fx = kept

    def start(self, collection: Collection | None) -> None:
        """Log into this collection from now on; None: logging is refused."""
        self.active = self._closed if collection is None else collection

    def batch_starts(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """A batch is at hand: its size is looked for when a mean needs it."""
        self._in_batches = self._in_batches is None
        collection = self.active
        collection.batch, collection.dataloader_idx = batch, dataloader_idx
        collection.batch_size = collection.said_size = None

    def batch_taken(self, batch: Any) -> None:
        """A step has taken a batch itself: that is the one at hand."""
        self.active.batch, self.active.batch_size, self.active.said_size = batch, None, None

    def batch_ends(self) -> None:
        """Let go of the batch."""
        self.active.batch = self.active.batch_size = self.active.said_size = None

    def batches_end(self) -> None:
        """The batches (of one loader) are over: from now on the epoch's values count."""
        if self._in_batches is not None:
            self.merge()  # the last step's values stay visible under their own names
        self._in_batches = None

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

    def _register(
        self, collection: Collection, entry: Entry | None, name: str, value: Any, args: tuple, index: int | None
    ) -> Entry:
        """The entry of a name that is logged for the first time, or in other words than before."""
        from .asked import asked

        meta = asked(self.fx or "", name, value, args, collection.dataloader_idx, self._module, self.has_logger)
        meta.sync_dist = meta.sync_dist and self._distributed
        if entry is None:
            entry = collection[(meta.fx, name, index)] = Entry(meta, args, self._all_reduce, collection.together)
            collection.any_on_step |= meta.on_step
        elif entry.meta != meta and not entry.is_asked_again(meta):
            raise Misuse(
                f"You called `self.log({name}, ...)` twice in `{meta.fx}` with different arguments. This is not allowed"
            )
        entry.args = args
        return entry
