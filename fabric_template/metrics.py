"""Metrics: the arithmetic behind ``self.log``, on the device; nothing is read back inside a step.

The rules are those of `Lightning's logging <https://lightning.ai/docs/pytorch/stable/extensions/logging.html>`_, to the
bit: a mean is the sum of value x batch size over the sum of batch sizes, in float32 or wider, added in order.
"""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Where self.log may be called: the hooks where a value can only belong to the epoch, and those where it may be either,
# with the default (on_step, on_epoch).
_EPOCH_HOOKS = {
    "on_train_start", "on_validation_start", "on_test_start", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_test_epoch_start", "on_test_epoch_end",
}  # fmt: skip
_TRAIN_STEP_HOOKS = {
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step",
    "configure_gradient_clipping", "clip_gradients", "on_before_zero_grad", "optimizer_zero_grad",
    "on_train_batch_start", "on_train_batch_end", "training_step",
}  # fmt: skip
_EVAL_STEP_HOOKS = {
    "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end",
    "validation_step", "test_step",
}  # fmt: skip
_REDUCTIONS: dict[Any, str] = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min", "avg": "mean",
                               sum: "sum", max: "max", min: "min", "mean": "mean", "sum": "sum", "max": "max",
                               "min": "min"}  # fmt: skip


@dataclasses.dataclass
class Meta:
    """How one name is logged: ``self.log``'s arguments with the defaults of the hook filled in."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce: str
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    dataloader_idx: int | None
    suffix: bool
    rank_zero_only: bool

    def key(self, on_step: bool) -> str:
        """The name under which the step's or the epoch's value is reported."""
        fork = ("_step" if on_step else "_epoch") if self.on_step and self.on_epoch else ""
        return f"{self.name}{fork}{self.idx_suffix}"

    @property
    def idx_suffix(self) -> str:
        """What tells one of several evaluation loaders from the other in a name."""
        return f"/dataloader_idx_{self.dataloader_idx}" if self.suffix and self.dataloader_idx is not None else ""


class Entry:
    """One logged name: its last value and its running sum, both on the device of what was logged."""

    def __init__(self, meta: Meta, args: tuple, all_reduce: Callable[..., Tensor]) -> None:
        self.meta, self.args, self._all_reduce = meta, args, all_reduce
        self._on_step, self._on_epoch, self._mean = meta.on_step, meta.on_epoch, meta.reduce == "mean"
        self._synced = meta.sync_dist and not meta.rank_zero_only
        self._factor_of: int | None = None
        self.metric: Any = None  # a torchmetrics.Metric, if that is what was logged
        self.step_value: Tensor | None = None
        self.live = False  # logged since the last reset
        self.reset()

    def reset(self) -> None:
        """Start the next epoch's sum."""
        if self.metric is not None:
            self.metric.reset()
        self.total: Tensor | None = None
        self.weight: int | Tensor = 0
        self._epoch_value: Tensor | None = None
        self.live = False

    def update(self, value: Tensor, batch_size: int) -> None:
        """Add one value (0-dim) that stands for batch_size samples."""
        self._epoch_value, self.live = None, True
        if self._on_step:
            self.step_value = self._sync(value.clone()) if self._synced else value.clone()
            if not self._on_epoch:
                return
        if self._mean:
            if batch_size != self._factor_of:  # a factor on the device costs half of a number from Python
                self._factor_of, self._factor = batch_size, torch.tensor(batch_size, dtype=value.dtype, device=value.device)
            value = value * self._factor
            self.weight += batch_size
        if self.total is None:  # under 64-true a float32 value is summed in float64
            self.total = value.to(torch.promote_types(value.dtype, _float_type()), copy=True)
        elif self._mean:
            self.total = self.total + value
        else:
            combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[self.meta.reduce]
            self.total = combine(self.total, value)

    def update_metric(self, metric: Any) -> None:
        """Note that a torchmetrics object was logged; it keeps its own sums."""
        self.metric, self.live, self._epoch_value = metric, True, None
        if self.meta.on_step:
            # torchmetrics keeps what forward() returned for this very purpose, and has no public name for it
            self.step_value = getattr(metric, "_forward_cache", None)

    def epoch_value(self) -> Tensor | None:
        """The reduction over the epoch so far; over all ranks when sync_dist."""
        if self._epoch_value is None:
            if self.metric is not None:
                self._epoch_value = self.metric.compute()
            elif self.total is not None:
                total = self._sync(self.total.clone())
                if self.meta.reduce == "mean":
                    weight = torch.tensor(self.weight, device=total.device)
                    total = total / self._sync(weight)
                self._epoch_value = total
        return self._epoch_value

    def value(self, on_step: bool) -> Tensor | None:
        """What is reported in a step, or at the end of the epoch; None where nothing is."""
        if on_step:
            found = self.step_value if self.meta.on_step else None
        else:
            found = self.epoch_value() if self.meta.on_epoch else None
        if found is not None and self.metric is not None and not isinstance(found, Tensor):
            raise ValueError(
                f"self.log({self.meta.name!r}, metric): metric.compute() returned {type(found).__name__}, expected a "
                "tensor; log a MetricCollection or the dict it returned with self.log_dict"
            )
        return found if found is None or self.meta.enable_graph else found.detach()

    def _sync(self, value: Tensor) -> Tensor:
        if self._synced:
            return self._all_reduce(value, group=self.meta.sync_dist_group, reduce_op=self.meta.reduce)
        return value


class Collection(dict):
    """What one loop (training, or an evaluation) has logged: entries by (hook, name, loader)."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.any_on_step = False  # whether any name has a value per step

    def live(self) -> Iterator[Entry]:
        """The entries logged since the last reset, for the loader at hand."""
        return (e for e in self.values() if e.live and e.meta.dataloader_idx == self.dataloader_idx)

    def size_of_batch(self) -> int:
        """The batch size found in the batch at hand, looked for once."""
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else batch_size_of(self.batch)
        return self.batch_size

    def reset(self, fx: str | None = None, tensors_only: bool = False) -> None:
        """Forget the epoch's sums: of all entries or of one hook's."""
        for entry in self.values():
            if (fx is None or entry.meta.fx == fx) and not (tensors_only and entry.metric is not None):
                entry.reset()


class Metrics:
    """All that a run has logged, and the three views of it that Trainer offers.

    Attributes:
        fx: the hook that runs now; it decides whether a value belongs to the step or to the epoch.
    """

    def __init__(self, all_reduce: Callable[..., Tensor] | None = None, distributed: bool = False) -> None:
        self._all_reduce = all_reduce or _alone
        self._distributed = distributed
        self.train, self.val = Collection(training=True), Collection(training=False)
        self.active: Collection | None = None
        self.fx: str | None = None
        self.enabled = True  # False: barebones
        self.has_logger = True
        self._last_fx: str | None = None
        self._in_batches: bool | None = None  # None: outside of the batches; True: in the first one; False: after it
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress: dict[str, float] = {}
        self.row: dict[str, Tensor] = {}  # what goes into the epoch's row of the history
        self._metric_names: dict[int, str] | None = None
        self._objects: dict[str, Any] = {}  # the module's torchmetrics by name

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
        collection = self.active
        if collection is None or not self.enabled:
            self._refuse(name)
            return
        args = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
                add_dataloader_idx, metric_attribute, rank_zero_only)  # fmt: skip
        index = collection.dataloader_idx if add_dataloader_idx else None
        entry = collection.get((self.fx, name, index))
        if entry is None or entry.args != args:
            entry = self._register(collection, entry, name, value, args, index)

        if self._last_fx != self.fx:
            if self._in_batches is not False:  # a new epoch begins for this hook
                collection.reset(fx=self.fx, tensors_only=True)
            self._last_fx = self.fx
        if isinstance(value, Tensor):
            if not enable_graph:
                value = value.detach()
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=_float_type())
        else:
            _check_loggable(name, value)
            entry.update_metric(value)
            return
        if value.dim():
            if value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, {value})` was called, but the tensor must have a single element."
                    f" You can try doing `self.log({name}, {value}.mean())`"
                )
            value = value.squeeze()
        if value.dtype is not torch.float32 and value.dtype is not torch.float64:
            value = self._as_float(entry, value)
        if batch_size is None:
            needed = entry.meta.on_epoch and entry.meta.reduce == "mean"
            batch_size = (collection.batch_size or collection.size_of_batch()) if needed else 1
        entry.update(value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        names: dict[str, Any] = {}
        if hasattr(dictionary, "add_metrics"):  # a MetricCollection: names with its prefix, states as they are
            names = {"keep_base": False, "copy_state": False}
        for name, value in dictionary.items(**names):
            self.log(name, value, **arguments)

    # ---- what the loop calls

    def start(self, collection: Collection | None) -> None:
        """Log into this collection from now on; None: logging is refused."""
        self.active = collection

    def batch_starts(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """A batch is at hand: its size is looked for when a mean needs it."""
        self._in_batches = self._in_batches is None
        collection = self.active
        collection.batch, collection.batch_size, collection.dataloader_idx = batch, None, dataloader_idx

    def batch_ends(self) -> None:
        """Let go of the batch."""
        self.active.batch = self.active.batch_size = None

    def batches_end(self) -> None:
        """The batches (of one loader) are over: from now on the epoch's values count."""
        if self._in_batches is not None:
            self.merge()  # the last step's values stay visible under their own names
        self._in_batches = None

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
            if meta.logger and not (on_step and meta.on_epoch) and (value := entry.value(not meta.on_epoch)) is not None:
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

    def step_log(self) -> dict[str, Tensor]:
        """What this step gives to the loggers."""
        return self.views()[1] if self.active.any_on_step else {}

    def epoch_ends(self) -> None:
        """All hooks of the epoch have run: forget its sums."""
        if self.active is not None:
            self.active.reset()
        self._in_batches = self._last_fx = None

    def forget(self) -> None:
        """Start as if nothing had been logged."""
        self.epoch_ends()
        self.callback, self.logged, self.progress, self.row = {}, {}, {}, {}

    def pause(self) -> tuple:
        """Validation runs inside the training epoch: keep where its batches stood."""
        self.merge()
        return self.active, self._in_batches, self._last_fx

    def resume(self, kept: tuple) -> None:
        """Go on after `pause`."""
        self.active, self._in_batches, self._last_fx = kept

    def to_cpu(self) -> None:
        """Move what stays readable after the run off the device."""
        self.callback = {name: value.cpu() for name, value in self.callback.items()}
        self.logged = {name: value.cpu() for name, value in self.logged.items()}

    def name_metrics(self, module: Any) -> None:
        """Know the torchmetrics attributes of a module, to refuse those that belong to nobody."""
        named = module.named_modules() if hasattr(module, "named_modules") else ()
        self._objects = {name: part for name, part in named if _is_metric(part)}
        self._metric_names = {id(part): name for name, part in self._objects.items()}

    def state_dict(self) -> dict[str, Any]:
        """The epoch's sums so far and the three views, for a checkpoint in the middle of an epoch."""
        entries = [
            {
                "meta": dataclasses.asdict(dataclasses.replace(entry.meta, sync_dist_group=None)),
                "total": entry.total, "weight": entry.weight, "step_value": entry.step_value,
            }
            for entry in self.train.values()
            if entry.metric is None and entry.live and entry.meta.sync_dist_group is None
        ]  # fmt: skip
        # torchmetrics leaves its sums out of state_dict, and has no public name for the count
        objects = {name: [dict(part.metric_state), part._update_count] for name, part in self._objects.items()}
        place = {"objects": objects, "in_batches": self._in_batches, "last_fx": self._last_fx}
        return {"train": entries, "callback": dict(self.callback), "row": dict(self.row), **place}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums; each name is checked again when it is logged."""

        def move(value: Any) -> Any:
            if isinstance(value, list):
                return [move(part) for part in value]
            return value.to(device) if isinstance(value, Tensor) else value

        for name, (sums, count) in state["objects"].items():
            if (metric := self._objects.get(name)) is not None:
                metric._update_count, metric._computed = count, None
                for key, value in sums.items():
                    setattr(metric, key, move(value))
        for part in state["train"]:
            meta = Meta(**part["meta"])
            entry = Entry(meta, (), self._all_reduce)
            entry.total, entry.weight, entry.step_value = move(part["total"]), part["weight"], move(part["step_value"])
            entry.live = True
            self.train[(meta.fx, meta.name, meta.dataloader_idx if meta.suffix else None)] = entry
            self.train.any_on_step |= meta.on_step
        self.callback = {name: move(value) for name, value in state["callback"].items()}
        self.row = {name: move(value) for name, value in state["row"].items()}
        self._in_batches, self._last_fx = state["in_batches"], state["last_fx"]

    # ---- checks, made once per name

    def _refuse(self, name: str) -> None:
        if not self.enabled:
            warnings.warn(
                f"self.log({name!r}) does nothing under barebones=True; leave barebones out to log", stacklevel=3
            )
            return
        where = f"inside `{self.fx}`" if self.fx else "outside of the loop's hooks"
        raise RuntimeError(
            f"You can't `self.log({name!r})` {where}; log in training_step, validation_step, test_step or the hooks"
            " around them, or write to `self.logger` directly"
        )

    def _register(
        self, collection: Collection, entry: Entry | None, name: str, value: Any, args: tuple, index: int | None
    ) -> Entry:
        (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, group, suffix, attribute,
         rank_zero_only) = args  # fmt: skip
        fx = self.fx
        on_step, on_epoch = _levels(fx, name, on_step, on_epoch)
        reduce = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        if reduce is None:
            raise ValueError(
                f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom reduction,"
                f" please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
            )
        if suffix and "/dataloader_idx_" in name:
            raise ValueError(
                f"You called `self.log` with the key `{name}` but it should not contain information about"
                " `dataloader_idx` when `add_dataloader_idx=True`"
            )
        _check_loggable(name, value)
        if _is_metric(value) and attribute is None and self._metric_names is not None:
            self._check_attribute(name, value)
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
            raise ValueError(
                f"You called `self.log({name}, ...)` twice in `{fx}` with different arguments. This is not allowed"
            )
        entry.args = args
        return entry

    def _check_attribute(self, name: str, value: Any) -> None:
        if id(value) not in self._metric_names:
            if not self._metric_names:
                raise ValueError(
                    "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
                    " You can fix this by setting an attribute for the metric in your `LightningModule`."
                )
            raise ValueError(
                "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
                f" You can fix this by calling `self.log({name}, ..., metric_attribute=name)` where `name` is one"
                f" of {list(self._metric_names.values())}"
            )

    def _as_float(self, entry: Entry, value: Tensor) -> Tensor:
        if not value.is_floating_point() and not entry.live:
            warnings.warn(
                f"You called `self.log({entry.meta.name!r}, ...)` in your `{entry.meta.fx}` but the value needs to be"
                f" floating to be reduced. Converting it to {_float_type()}. You can silence this warning by converting"
                " the value to floating point yourself.", stacklevel=4,
            )  # fmt: skip
        return value.to(_float_type())


def _alone(value: Tensor, **words: Any) -> Tensor:
    """The reduction over one process."""
    return value


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of the first tensor in it, however deep.

    Example:
        >>> batch_size_of({"x": torch.zeros(4, 3), "y": torch.zeros(4)})
        4
    """
    if type(batch) in (list, tuple) and len(batch) == 2:  # (inputs, targets), nearly always
        first, second = batch
        if type(first) is type(second) is Tensor and (size := first.shape[:1]) and size == second.shape[:1]:
            return size[0]
    sizes = _sizes(batch)
    size = next(sizes, None)
    if size is None:
        raise ValueError(
            "We could not infer the batch_size from the batch. Either simplify its structure"
            " or provide the batch_size as `self.log(..., batch_size=batch_size)`."
        )
    if any(other != size for other in sizes):
        warnings.warn(
            "Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is"
            f" {size}. To avoid any miscalculations, use `self.log(..., batch_size=batch_size)`.", stacklevel=4,
        )  # fmt: skip
    return size


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.dim() else 1
    elif isinstance(batch, str):
        return
    elif isinstance(batch, Iterable | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _sizes(part)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from _sizes(getattr(batch, field.name))


def _levels(fx: str | None, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """The hook's defaults filled in; refused where the hook has no step or no epoch to log for."""
    if fx in _EPOCH_HOOKS:
        if on_step:
            raise ValueError(f"You can't `self.log(on_step={on_step})` inside `{fx}`, must be one of (False,).")
        if on_epoch is False:
            raise ValueError(f"You can't `self.log(on_epoch={on_epoch})` inside `{fx}`, must be one of (True,).")
        return False, True
    if fx in _TRAIN_STEP_HOOKS or fx in _EVAL_STEP_HOOKS:
        on_step = fx in _TRAIN_STEP_HOOKS if on_step is None else on_step
        on_epoch = fx in _EVAL_STEP_HOOKS if on_epoch is None else on_epoch
        if not on_step and not on_epoch:
            raise ValueError("`self.log(on_step=False, on_epoch=False)` is not useful.")
        return on_step, on_epoch
    where = f"inside `{fx}`" if fx else "outside of the loop's hooks"
    raise RuntimeError(
        f"You can't `self.log()` {where}. HINT: You can still log directly to the logger by using"
        " `self.logger.experiment`."
    )


def _check_loggable(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        raise ValueError(f"`self.log({name}, {value})` was called, but nested dictionaries cannot be logged")
    if not (isinstance(value, Tensor | numbers.Number) or _is_metric(value)):
        raise ValueError(f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged")


def _is_metric(value: Any) -> bool:
    """Whether this is a torchmetrics object, or one of that shape."""
    return all(hasattr(value, name) for name in ("update", "compute", "reset")) and not isinstance(value, Mapping)


def _float_type() -> torch.dtype:
    """The default dtype, but no narrower than float32, so that long sums stay exact enough."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32
