"""Metrics: the arithmetic behind ``self.log``, on the device; nothing is read back inside a step.

The rules are those of `Lightning's logging <https://lightning.ai/docs/pytorch/stable/extensions/logging.html>`_, to the
bit: a mean is the sum of value x batch size over the sum of batch sizes, in float32 or wider, added in order.
"""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ..core.errors import Misuse
from .asked import REDUCTIONS, Meta, check_attribute, check_loggable, levels
from .entries import Collection, Entry, float_type
from .metric_states import MetricStates, is_metric

_EXACT = frozenset({torch.float32, torch.float64})


class Metrics:
    """All that a run has logged, and the three views of it that Trainer offers.

    Attributes:
        fx: the hook that runs now; it decides whether a value belongs to the step or to the epoch.
    """

    def __init__(
        self, all_reduce: Callable[..., Any] | None = None, distributed: bool = False, predicts: bool = False,
        enabled: bool = True, has_logger: bool = True,
    ) -> None:  # fmt: skip
        self._all_reduce, self._distributed = all_reduce or _alone, distributed
        self.predicts, self.enabled, self.has_logger = predicts, enabled, has_logger  # enabled=False: barebones
        self.train, self.val = Collection(training=True), Collection(training=False)
        self._closed = Collection(training=False)  # into which nothing can be logged
        self.active = self._closed
        self.fx: str | None = None
        self._last_fx: str | None = None
        self._paused: tuple | None = None  # where training stood, while it is validated
        self._in_batches: bool | None = None  # None: outside of the batches; True: in the first one; False: after it
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress: dict[str, float] = {}
        self.row: dict[str, Tensor] = {}  # what goes into the epoch's row of the history
        self._objects: MetricStates | None = None  # the module's torchmetrics

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
            self._refuse(name)
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
            if value.numel() != 1:
                raise Misuse(
                    f"`self.log({name}, {value})` was called, but the tensor must have a single element."
                    f" You can try doing `self.log({name}, {value}.mean())`"
                )
            value = value.squeeze()
        if value.dtype not in _EXACT:
            value = self._as_float(entry, value)
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

    def merge(self) -> dict[str, Tensor]:
        """Bring the three views up to date; returns what goes to the loggers."""
        if not self.active:
            return {}
        callback, logged, bar = self.views()
        self.callback.update(callback)
        self.logged.update(logged)
        self.progress.update({name: value.item() for name, value in bar.items()})  # CPU-GPU sync point
        on_step = self._in_batches is not None
        for entry in self.active.live():
            meta = entry.meta
            if not meta.logger or (on_step and meta.on_epoch):
                continue
            if (value := entry.value(not meta.on_epoch)) is not None:
                self.row[meta.name + meta.idx_suffix] = value
        return logged

    def take_row(self) -> dict[str, Tensor]:
        """What the epoch's row says, once: names without forks, with the epoch's value where there is one."""
        row, self.row = self.row, {}
        return row

    def views(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """The values of this step, or of the epoch when its batches are over: (callback, logger, progress bar)."""
        on_step = self._in_batches is not None
        callback: dict[str, Tensor] = {}
        logged: dict[str, Tensor] = {}
        bar: dict[str, Tensor] = {}
        for entry in self.active.live():
            value = entry.value(on_step)
            if value is None:
                continue
            meta = entry.meta
            key = meta.key(on_step)
            if meta.logger:
                logged[key] = value
            if self.active.training or not on_step:
                callback[meta.name + meta.idx_suffix] = value
                callback[key] = value
            if meta.prog_bar:
                bar[key] = value
        return callback, logged, bar

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

    def show(self, callback: dict, logged: dict, progress: dict) -> None:
        """Show what was logged in another process."""
        self.callback, self.logged, self.progress = callback, logged, progress

    def to_cpu(self) -> None:
        """Move what stays readable after the run off the device."""
        self.callback, self.logged = move_data_to_device((self.callback, self.logged), "cpu")

    def name_metrics(self, module: Any) -> None:
        """Know the torchmetrics attributes of a module, to refuse those that belong to nobody."""
        self._objects = MetricStates(module)

    def state_dict(self) -> dict[str, Any]:
        """The epoch's sums so far and the three views, for a checkpoint in the middle of an epoch."""
        names = self._objects.names() if self._objects is not None else {}
        entries = [
            {
                "meta": dataclasses.asdict(dataclasses.replace(entry.meta, sync_dist_group=None)),
                "total": entry.total, "weight": entry.weight, "step_value": entry.step_value,
                "object": names.get(id(entry.metric)),
            }
            for entry in self.train.values()
            if entry.live and entry.meta.sync_dist_group is None
        ]  # fmt: skip
        objects = self._objects.state_dict() if self._objects is not None else {}
        _, in_batches, last_fx = self._paused or (None, self._in_batches, self._last_fx)
        place = {"objects": objects, "in_batches": in_batches, "last_fx": last_fx}
        if self._paused is not None and self.fx == "on_validation_end":  # behind this hook they are reset
            place["resets"] = [
                names[id(one.metric)] for one in self.val.values() if one.live and id(one.metric) in names
            ]
        return {"train": entries, "callback": dict(self.callback), "row": dict(self.row), **place}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums; each name is checked again when it is logged."""
        objects = self._objects or MetricStates(None)
        objects.load_state_dict(state["objects"], device)
        state = move_data_to_device({**state, "objects": None}, device)
        parts = objects.parts()
        for name in state.get("resets", ()):
            if name in parts:
                parts[name].reset()
        for part in state["train"]:
            meta = Meta(**part["meta"])
            entry = Entry(meta, (), self._all_reduce)
            entry.total, entry.weight, entry.step_value = part["total"], part["weight"], part["step_value"]
            entry.metric, entry.live = parts.get(part["object"]), True
            self.train[(meta.fx, meta.name, meta.dataloader_idx if meta.suffix else None)] = entry
            self.train.any_on_step |= meta.on_step
        self.callback, self.row = dict(state["callback"]), dict(state["row"])
        self._in_batches, self._last_fx = state["in_batches"], state["last_fx"]

    # ---- checks, made once per name

    def _refuse(self, name: str) -> None:
        if not self.enabled:
            warnings.warn(
                f"self.log({name!r}) does nothing: `FabricLoop(barebones=True)` is configured; leave barebones out to log",
                stacklevel=3,
            )
            return
        where = f"inside `{self.fx}`" if self.fx else "outside of the loop's hooks"
        if self.predicts:
            where = "in prediction (a result collection is not registered yet, and none will be)"
        raise Misuse(
            f"You can't `self.log({name!r})` {where}; log in training_step, validation_step, test_step or the hooks"
            " around them, or write to `self.logger` directly"
        )

    def _register(
        self, collection: Collection, entry: Entry | None, name: str, value: Any, args: tuple, index: int | None
    ) -> Entry:
        (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, group, suffix, attribute,
         rank_zero_only) = args  # fmt: skip
        fx = self.fx or ""
        on_step, on_epoch = levels(fx, name, on_step, on_epoch)
        reduce = REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        if reduce is None:
            raise Misuse(
                f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom reduction,"
                f" please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
            )
        if suffix and "/dataloader_idx_" in name:
            raise Misuse(
                f"You called `self.log` with the key `{name}` but it should not contain information about"
                " `dataloader_idx` when `add_dataloader_idx=True`"
            )
        check_loggable(name, value)
        if is_metric(value) and attribute is None and self._objects is not None:
            check_attribute(self._objects.names(), name, value)
        if logger and not self.has_logger:
            warnings.warn(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured. You can enable one"
                " by doing `FabricLoop(logger=ALogger(...))`", stacklevel=4,
            )  # fmt: skip
        meta = Meta(fx, name, prog_bar, logger is not False, on_step, on_epoch, reduce, enable_graph,
                    sync_dist and self._distributed, group, collection.dataloader_idx, suffix, rank_zero_only)  # fmt: skip
        if entry is None:
            entry = collection[(fx, name, index)] = Entry(meta, args, self._all_reduce)
            collection.any_on_step |= on_step
        elif entry.meta != meta:
            raise Misuse(
                f"You called `self.log({name}, ...)` twice in `{fx}` with different arguments. This is not allowed"
            )
        entry.args = args
        return entry

    def _as_float(self, entry: Entry, value: Tensor) -> Tensor:
        if not value.is_floating_point() and not entry.live:
            warnings.warn(
                f"You called `self.log({entry.meta.name!r}, ...)` in your `{entry.meta.fx}` but the value needs to be"
                f" floating to be reduced. Converting it to {float_type()}. You can silence this warning by converting"
                " the value to floating point yourself.", stacklevel=4,
            )  # fmt: skip
        return value.to(float_type())


def _alone(value: Tensor, **words: Any) -> Tensor:
    """The reduction over one process."""
    return value
