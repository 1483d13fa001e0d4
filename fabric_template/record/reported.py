"""Reported: what was logged, as others see it: callbacks, loggers, the bar, the epoch's row of the history, a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ..core.errors import Misuse
from .entries import Collection, Entry
from .loggable import metrics_in

if TYPE_CHECKING:
    from .metric_states import MetricStates


class Reported:
    """All that a run has logged, and the three views of it that Trainer offers.

    Attributes:
        fx: the hook that runs now; it decides whether a value belongs to the step or to the epoch.
    """

    def __init__(self, all_reduce: Callable[..., Any] | None, distributed: bool, has_logger: bool) -> None:
        self._all_reduce = all_reduce or _alone
        self._distributed, self.has_logger = distributed, has_logger
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
        self._module: Any = None  # that may have torchmetrics,
        self._states: MetricStates | None = None  # and what these hold

    @property
    def in_step(self) -> bool:
        """Whether a training batch is at hand that is not done: in each of its hooks but the last."""
        return self.train.batch is not None and self.fx != "on_train_batch_end"

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
            if not meta.logger or on_step == meta.on_epoch:  # of a step alone: it is there since its batch
                continue
            if (value := entry.value(on_step)) is not None:
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

    def show(self, callback: dict, logged: dict, progress: dict) -> None:
        """Show what was logged in another process."""
        self.callback, self.logged, self.progress = callback, logged, progress

    def to_cpu(self) -> None:
        """Move what stays readable after the run off the device."""
        self.callback, self.logged = move_data_to_device((self.callback, self.logged), "cpu")

    def name_metrics(self, module: Any) -> None:
        """Know the torchmetrics attributes of a module, to refuse those that belong to nobody."""
        self._module = module
        if (objects := self._objects()) is not None:
            objects.note()

    def _objects(self) -> MetricStates | None:
        """What the module's torchmetrics hold; None as long as it has none."""
        if self._states is None and metrics_in(self._module):
            from .metric_states import MetricStates

            self._states = MetricStates(self._module)
        return self._states

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

    def state_dict(self) -> dict[str, Any]:
        """The epoch's sums so far and the three views, for a checkpoint in the middle of an epoch."""
        states = self._objects()
        names = {} if states is None else states.names()
        self.train.together.add_up()
        entries = [
            {
                "meta": dataclasses.asdict(dataclasses.replace(entry.meta, sync_dist_group=None)),
                "total": None if entry.total is None else entry.total.clone(), "weight": entry.weight,
                "step_value": entry.step_value,
                "object": names.get(id(entry.metric)),
            }
            for entry in self.train.values()
            if entry.live and entry.meta.sync_dist_group is None
        ]  # fmt: skip
        objects = {} if states is None else states.state_dict()
        _, in_batches, last_fx = self._paused or (None, self._in_batches, self._last_fx)
        place = {"objects": objects, "in_batches": in_batches, "last_fx": last_fx}
        if self._paused is not None and self.fx == "on_validation_end":  # behind this hook they are reset
            place["resets"] = [
                names[id(one.metric)] for one in self.val.values() if one.live and id(one.metric) in names
            ]
        return {"train": entries, "callback": dict(self.callback), "row": dict(self.row), **place}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums; each name is checked again when it is logged."""
        from .sums import load_sums

        load_sums(self, state, device)


def _alone(value: Tensor, **words: Any) -> Tensor:
    """The reduction over one process."""
    return value
