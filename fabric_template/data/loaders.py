"""Loaders in every shape that Trainer takes, with limits, samplers and transfer to the device."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device, suggested_max_num_workers
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..checkpoint.dataloader_state import ResumableLoader, has_state
from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..errors import CheckpointError, ConfigurationError
from ..lightning_compat.private import combined_mode
from ..training.checks import check_loader, loader_argument
from ..training.hooks import is_instance_of, overridden
from .distributed_samplers import (
    check_lengths,
    needs_shares,
    remake_batch_sampler,
    share_samples,
    share_tensors,
)

if TYPE_CHECKING:
    from ..training.run_state import RunState

# What a loader gives after its last batch.
_END = object()
_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class DataConnector:
    """Gives a run its batches.

    Args:
        loaders: What was given to the call, by stage: "train", "val", "test", "predict".
        source: The datamodule or module that has ``train_dataloader()`` and the like.
    """

    def __init__(self, loaders: Mapping[str, Any], source: Any) -> None:
        self.given = {stage: given for stage, given in loaders.items() if given is not None}
        self.source = source
        self.run: RunState = None  # type: ignore[assignment]
        self.train: TrainLoaders | None = None
        self.eval_loaders: EvalLoaders = None  # type: ignore[assignment]
        self._eval_stage: str | None = None
        self._loaded_in_epoch: dict[str, int | float] = {}
        self._restored_eval: list[dict[str, Any]] | None = None
        self.keeps_first_iterator = False
        # The seed by which processes draw one order of the samples; None if they do not.
        self.saved_sampler_seed: int | None = None

    def has_loader(self, stage: str) -> bool:
        """Return whether there is a loader for this stage, given or made by a method."""
        return stage in self.given or overridden(self.source, f"{stage}_dataloader") is not None

    def request(self, stage: str) -> Any:
        """Return the given loaders, or call the method that makes them."""
        if stage in self.given:
            call, source = self.run.stage, self.given[stage]
            where = f"passed to `Trainer.{call}({loader_argument(call, stage)}=...)`"
        else:
            name = f"{stage}_dataloader"
            owner = self.source
            is_datamodule = owner is self.run.datamodule
            kind = "LightningDataModule" if is_datamodule else "LightningModule"
            with self.run.hooks.profiled(f"[{kind}]{type(owner).__name__}.{name}"):
                source = self.run.hooks.inside(name, getattr(owner, name))()
            where = f"returned from `{type(self.source).__name__}.{name}()`"
        for loader in flatten_loaders(source):
            check_loader(loader, where)
        return source

    @property
    def sampler_seed(self) -> int:
        """The global seed of the start of a run. A resumed run continues the same order."""
        own = self.run.own_state if self.run.resumes else None
        if self.saved_sampler_seed is None and own is not None:
            self.saved_sampler_seed = own["sampler_seed"]
        if self.saved_sampler_seed is None:
            self.saved_sampler_seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return self.saved_sampler_seed

    def _should_reload(self, stage: str) -> bool:
        if stage not in self._loaded_in_epoch:
            return True
        every = self.run.config.reload_dataloaders_every_n_epochs
        return bool(every) and self.run.progress.epochs_done - self._loaded_in_epoch[stage] >= every

    def setup_train_loader(self) -> None:
        """Make the training loader, at first and whenever it is to be reloaded."""
        run = self.run
        if run.config.limit_train_batches == 0 or not self._should_reload("train"):
            return
        self._loaded_in_epoch["train"] = run.progress.epochs_done
        self.train = TrainLoaders(run, self.request("train"))
        run.progress.num_train_batches = self.train.num_batches
        every = run.config.log_every_n_steps
        # Our own logger has the rows of the epochs in any case.
        has_other_logger = len(run.loggers.csv_loggers) < len(run.loop.loggers)
        if self.train.num_batches < every and has_other_logger and not run.config.fast_dev_run:
            run.warn_once(
                f"The number of training batches ({self.train.num_batches}) is smaller than the logging"
                f" interval Trainer(log_every_n_steps={every}). Set a lower value for log_every_n_steps if"
                " you want to see logs for the training epoch.",
                PossibleUserWarning,
            )
        # A run that continues a checkpoint of Trainer starts its iterator here, too.
        if run.checkpoint is None or (self.keeps_first_iterator and not run.progress.is_in_epoch):
            self.train.start()

    def start_train_batches(self) -> None:
        """Start the iterator of an epoch.

        That of the first epoch started with its loader, as in Trainer, and so did that of the first
        epoch after a checkpoint of Trainer.
        """
        is_later = self.run.progress.epochs_done > 0 and not self.keeps_first_iterator
        self.keeps_first_iterator = False
        if is_later or self.train.is_used or not self.train.is_started:
            self.train.start()

    def resume_train_batches(self) -> None:
        """Continue the epoch that a checkpoint was saved in."""
        self.set_epoch("train", self.run.progress.epochs_done)
        self.train.start()
        self.train.note_batches_done(self.run.progress.batches_done)

    def train_batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield (batch on the device, whether it is the last one)."""
        transfer = make_transfer(self.run)
        for batch, is_last in self.train.batches(self.run.progress.batches_done):
            yield (batch if transfer is None else transfer(batch, 0)), is_last

    def setup_eval_loaders(self, stage: str) -> None:
        """Make the loaders of an evaluation, at first and whenever they are to be reloaded."""
        if self._eval_stage == stage and not self._should_reload(stage):
            return
        run = self.run
        # A sanity check before an epoch that does not validate does not count as a load.
        is_counted = not run.loop.sanity_checking or run.config.check_val_every_n_epoch in (None, 1)
        self._loaded_in_epoch[stage] = run.progress.epochs_done if is_counted else -math.inf
        if self.eval_loaders is not None:
            run.loggers.restart_evaluation_count()
        self._eval_stage = stage
        self.eval_loaders = EvalLoaders(self.run, stage, self.request(stage))
        if self._restored_eval is not None:
            self.eval_loaders.load_state_dict(self._restored_eval)
            self._restored_eval = None

    def end_train_epoch(self) -> None:
        for loader in self.train.resumable:
            loader.end_pass()

    def set_epoch(self, stage: str, epoch: int) -> None:
        """Tell every sampler the epoch, so that shuffled epochs differ."""
        loaders = self.train.loaders if stage == "train" else self.eval_loaders.loaders
        for loader in loaders:
            batch_sampler = getattr(loader, "batch_sampler", None)
            samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
            for part in {id(s): s for s in (loader, *samplers, batch_sampler)}.values():
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(epoch)

    def teardown(self) -> None:
        """End the workers of every loader."""
        for part in (self.train, self.eval_loaders):
            if part is None:
                continue
            for resumable in part.resumable:
                resumable.close()
            if part.combined is not None:
                part.combined.reset()
            for loader in part.loaders:
                iterator = getattr(loader, "_iterator", None)
                if isinstance(iterator, _MultiProcessingDataLoaderIter):
                    iterator._shutdown_workers()
                    loader._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders, those of the validation between two passes."""
        progress, restored = self.run.progress.state_dict(), self._restored_eval
        has_eval = self.eval_loaders is not None and self._eval_stage == "val"
        return {
            "loaded_in_epoch": dict(self._loaded_in_epoch),
            "train": None if self.train is None else self.train.state_dict(progress),
            "val": self.eval_loaders.state_dict() if has_eval else restored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The loader that exists was made for this run. It is due again as it was before the resume.
        self._loaded_in_epoch.update(state["loaded_in_epoch"])
        if state["val"] is not None and self.eval_loaders is not None and self._eval_stage == "val":
            self.eval_loaders.load_state_dict(state["val"])
        elif state["val"] is not None:
            self._restored_eval = state["val"]
            self._loaded_in_epoch.pop("val", None)
        if self.train is not None and state["train"] is not None:
            self.train.load_state_dict(state["train"], self.run.progress.is_in_epoch)

    def loader_states(self) -> list[Any]:
        """Return the states of the training loaders with ``state_dict``, which Trainer saves, too."""
        if self.train is None or not any(map(has_state, self.train.loaders)):
            return []
        positions = self.train.state_dict(self.run.progress.state_dict())["loaders"]
        pairs = zip(self.train.loaders, positions, strict=True)
        return [position["state"] for loader, position in pairs if has_state(loader)]

    def load_loader_states(self, states: list[Any]) -> None:
        """Restore the states that Trainer saved."""
        loaders = (
            [] if self.train is None else [part for part in self.train.loaders if has_state(part)]
        )
        if states and len(states) != len(loaders):
            raise RuntimeError(
                f"The CombinedLoader has {len(loaders)} stateful loaders, but found {len(states)} states in"
                " the checkpoint. Please make sure you define the same dataloaders that were used when"
                " saving the checkpoint."
            )
        for loader, state in zip(loaders, states, strict=False):
            loader.load_state_dict(state)
            if not self.run.progress.is_in_epoch:
                # It continues the pass that has ended. The next iterator starts a new one.
                iter(loader)


class TrainLoaders:
    """The training loader, or several that give one batch together."""

    def __init__(self, run: RunState, source: Any) -> None:
        self.run, self.source = run, source
        self.loaders = [prepare_loader(run, loader, "train") for loader in flatten_loaders(source)]
        limit = run.config.limit_train_batches
        self.limits = [count_batches(loader, limit, "train") for loader in self.loaders]
        check_lengths(run, self.limits, "train")
        self.combined = self._combine()
        self.num_batches = self._count()
        self.resumable = [ResumableLoader(loader) for loader in self.loaders]
        self.is_started = self.is_used = False
        self._num_given = 0
        self._fetch: Callable = next
        self._iterator: Iterator[Any] | None = None
        # A loader of unknown length is read one batch ahead.
        self._following: Any = _END
        self._states_before_ahead: list[Any] = []
        self._restored_ahead: Any = None
        self._is_ahead_restored = False

    def _combine(self) -> CombinedLoader | None:
        is_combined = is_instance_of(self.source, "CombinedLoader")
        if (
            not is_combined
            and len(self.loaders) == 1
            and self.source is flatten_loaders(self.source)[0]
        ):
            return None
        combined = self.source if is_combined else CombinedLoader(self.source, "max_size_cycle")
        if combined_mode(combined) == "sequential":
            raise ConfigurationError(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. The available'
                " modes are: ['min_size', 'max_size_cycle', 'max_size']"
            )
        combined.flattened = self.loaders
        combined.limits = self.limits
        return combined

    def _count(self) -> int | float:
        if self.combined is None:
            return self.limits[0]
        return combined_length(self.combined, self.limits)

    def start(self) -> None:
        """Start the iterator of an epoch, or of the rest of one whose position was restored."""
        self.is_started, self.is_used = True, False
        for loader in self.resumable:
            loader.start_epoch()
        if self.combined is None:
            self._iterator = iter(self.resumable[0])
            return
        self.combined.flattened = self.resumable
        self._iterator = iter(self.combined)
        self.combined.flattened = self.loaders

    def note_batches_done(self, batches_done: int) -> None:
        """Note that batches were given, also by an earlier process. A resume may find none left to give."""
        self.is_used, self._num_given = True, batches_done

    def batches(self, batches_done: int) -> Iterator[tuple[Any, bool]]:
        """Yield (batch, whether it is the last one). A loader of unknown length is read one batch ahead."""
        self.note_batches_done(batches_done)
        # Trainer's name of the action.
        self._fetch = self.run.hooks.with_profiler(
            "[_TrainingEpochLoop].train_dataloader_next", next
        )
        if self.num_batches != math.inf:
            for index in range(batches_done, int(self.num_batches)):
                try:
                    batch = self._fetch(self._iterator)
                except StopIteration:
                    return
                self._num_given = index + 1
                yield self._unpack(batch), index + 1 == self.num_batches
            return
        self._following = self._read_ahead()
        while self._following is not _END:
            batch = self._following
            self._following = self._read_ahead()
            self._num_given += 1
            yield self._unpack(batch), self._following is _END

    def _read_ahead(self) -> Any:
        """Read the next batch. The first one after a resume was read before the checkpoint was saved."""
        self._states_before_ahead = [loader.part_state() for loader in self.resumable]
        if not self._is_ahead_restored:
            return next(self._iterator, _END)
        saved, self._restored_ahead, self._is_ahead_restored = self._restored_ahead, None, False
        rng_state = capture_rng_state()
        batch = next(self._iterator, _END)
        restore_rng_state(rng_state)
        return batch if saved is None else saved

    def state_dict(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Return the positions of the loaders, and the batch that was read ahead.

        Args:
            progress: The saved progress. Batches whose step was not finished count as not given.
        """
        is_in_pass = progress["is_in_epoch"] and self.is_used
        dropped = self._num_given - progress["batches_done"] if is_in_pass else 0
        state = {
            "is_used": self.is_used,
            "is_ahead": self._is_ahead_restored,
            "ahead": self._restored_ahead,
        }
        if self._following is _END or not is_in_pass:
            return {**state, "loaders": [loader.state_dict(dropped) for loader in self.resumable]}
        positions = [loader.state_dict(dropped + 1) for loader in self.resumable]
        for position, part_state in zip(positions, self._states_before_ahead, strict=True):
            if part_state is not None:
                position["state"] = part_state
        # The batch depends on random numbers that nobody noted, where it was made in this process.
        ahead = self._following if dropped == 0 and is_plain(self._following) else None
        return {**state, "is_ahead": True, "ahead": ahead, "loaders": positions}

    def load_state_dict(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        if len(state["loaders"]) != len(self.resumable):
            raise CheckpointError(
                f"resume: got the positions of {len(state['loaders'])} training loaders, expected"
                f" {len(self.resumable)}. Give the loaders that the run was started with, or use load=."
            )
        # The iterator of the first epoch starts before that epoch.
        is_in_pass = is_in_epoch or not state["is_used"]
        for loader, position in zip(self.resumable, state["loaders"], strict=True):
            loader.load_state_dict(position, is_in_pass)
        self._is_ahead_restored, self._restored_ahead = state["is_ahead"], state["ahead"]

    def _unpack(self, item: Any) -> Any:
        return item[0] if self.combined is not None else item

    @property
    def as_given(self) -> Any:
        """The loaders in the shape in which they were given."""
        return self.loaders[0] if self.combined is None else self.combined.iterables


class EvalLoaders:
    """The loaders of an evaluation, one after the other."""

    def __init__(self, run: RunState, stage: str, source: Any) -> None:
        self.run, self.stage, self.source = run, stage, source
        self.loaders = [prepare_loader(run, loader, stage) for loader in flatten_loaders(source)]
        limit = getattr(run.config, f"limit_{stage}_batches")
        self.limits = [count_batches(loader, limit, stage) for loader in self.loaders]
        check_lengths(run, self.limits, stage)
        self.names = [str(name) for name in source] if _is_flat_dict(source) else []
        is_combined = is_instance_of(source, "CombinedLoader")
        self.combined = source if is_combined and combined_mode(source) != "sequential" else None
        if self.combined is not None:
            if stage == "predict":
                raise ConfigurationError(
                    '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.'
                )
            self.combined.flattened = self.loaders
        self._iterator: Iterator[Any] | None = None
        self.resumable = [ResumableLoader(loader, is_training=False) for loader in self.loaders]

    def state_dict(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self.resumable]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for loader, position in zip(self.resumable, state, strict=False):
            loader.load_state_dict(position, is_in_pass=False)

    @property
    def has_several(self) -> bool:
        """Return whether steps and hooks get a ``dataloader_idx``."""
        return len(self.loaders) > 1 and self.combined is None

    def count_batches(self, max_batches: int | float | None = None) -> int | float:
        """Return the number of batches of all loaders."""
        limits = self._limited(max_batches)
        return sum(limits) if self.combined is None else combined_length(self.combined, limits)

    def _limited(self, max_batches: int | float | None) -> list[int | float]:
        return [
            min(limit, math.inf if max_batches is None else max_batches) for limit in self.limits
        ]

    def batches(self, max_batches: int | float | None = None) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch on the device, batch_idx, dataloader_idx)."""
        transfer = make_transfer(self.run)
        for batch, batch_idx, dataloader_idx in self.raw_batches(max_batches):
            yield (
                (batch if transfer is None else transfer(batch, dataloader_idx)),
                batch_idx,
                dataloader_idx,
            )

    def raw_batches(self, max_batches: int | float | None) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx)."""
        if self.combined is not None:
            self.combined.limits = self._limited(max_batches)
            num_batches = self.count_batches(max_batches)
            yield from islice(self.combined, None if num_batches == math.inf else num_batches)
            return
        loop = "_PredictionLoop" if self.stage == "predict" else "_EvaluationLoop"
        fetch = self.run.hooks.with_profiler(f"[{loop}].{self.stage}_next", next)
        for dataloader_idx, limit in enumerate(self._limited(max_batches)):
            if dataloader_idx:
                self._iterator = iter(self.resumable[dataloader_idx])
            batch_idx = 0
            while batch_idx < limit:
                try:
                    batch = fetch(self._iterator)
                except StopIteration:
                    break
                yield batch, batch_idx, dataloader_idx
                batch_idx += 1
            self.resumable[dataloader_idx].end_pass()
            if limit and not batch_idx:
                self.run.warn_once(
                    f"The {self.stage} loader ({type(self.loaders[dataloader_idx]).__name__}) gave no"
                    " batch. Give an object that starts from its beginning with each iter()."
                )

    def batch_indices(self, dataloader_idx: int, batch_idx: int) -> list[int]:
        """Return the samples of a batch that is predicted; empty for loaders that have no indices."""
        sampler = getattr(self.loaders[dataloader_idx], "batch_sampler", None)
        seen = sampler.seen if isinstance(sampler, TrackingBatchSampler) else []
        return seen[batch_idx] if batch_idx < len(seen) else []

    @property
    def as_given(self) -> Any:
        """The loaders in the shape in which they were given."""
        if is_instance_of(self.source, "CombinedLoader"):
            return self.source.iterables
        return replace_loaders(self.source, iter(self.loaders))

    def start(self) -> None:
        """Start the first loader's iterator, which may draw random numbers, before the hooks, as Trainer."""
        if self.combined is None and self.loaders and self.limits[0]:
            self._iterator = iter(self.resumable[0])


class TrackingBatchSampler(BatchSampler):
    """A batch sampler that remembers the indices of each batch that it gave, for predictions."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.seen: list[list[int]] = []

    def __iter__(self) -> Iterator[Any]:
        self.seen = []
        for indices in self.batch_sampler:
            self.seen.append(list(indices))
            yield indices

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def combined_length(combined: CombinedLoader, limits: list[int | float]) -> int | float:
    """Return the number of batches of a CombinedLoader, which limits its length and not its iteration."""
    return (min if combined_mode(combined) == "min_size" else max)(limits)


def flatten_loaders(source: Any) -> list[Any]:
    """Return the loaders of a source in order. A list of loaders is opened, a list of batches is a loader.

    Example:
        >>> flatten_loaders({"a": range(3), "b": [range(2), range(1)]})
        [range(0, 3), range(0, 2), range(0, 1)]
    """
    if is_instance_of(source, "CombinedLoader"):
        return list(source.flattened)
    parts = _parts(source)
    return [loader for part in parts for loader in flatten_loaders(part)] if parts else [source]


def replace_loaders(source: Any, loaders: Iterator[Any]) -> Any:
    """Return a source with other loaders in its places."""
    if not _parts(source):
        return next(loaders)
    if isinstance(source, Mapping):
        return {name: replace_loaders(part, loaders) for name, part in source.items()}
    return [replace_loaders(part, loaders) for part in source]


def _parts(source: Any) -> list[Any]:
    """Return what a collection of loaders holds; nothing for a single loader."""
    if isinstance(source, Mapping):
        parts = list(source.values())
    else:
        parts = list(source) if isinstance(source, list | tuple) else []
    return parts if all(map(_is_loader, parts)) else []


def _is_loader(item: Any) -> bool:
    """Return whether an item of a list is a loader, and not a batch."""
    if isinstance(item, Mapping):
        return bool(item) and all(map(_is_loader, item.values()))
    if isinstance(item, list | tuple):
        is_data = bool(item) and all(isinstance(part, int | float | str) for part in item)
        return is_data or (bool(item) and all(map(_is_loader, item)))
    return hasattr(item, "__iter__") and not isinstance(item, Tensor | str | bytes)


def _is_flat_dict(source: Any) -> bool:
    return isinstance(source, Mapping) and all(
        flatten_loaders(value)[0] is value for value in source.values()
    )


def loader_length(loader: Any) -> int | float:
    """Return the number of batches of a loader; infinite where the length is unknown.

    Example:
        >>> loader_length(range(3)), loader_length(iter([1]))
        (3, inf)
    """
    is_iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if is_iterable and not hasattr(loader.dataset, "__len__"):
        return math.inf
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def count_batches(loader: Any, limit: int | float, stage: str) -> int | float:
    """Return how many batches of a loader count under a limit.

    Raises:
        ConfigurationError: A fraction of a loader without length, or of less than one batch.

    Example:
        >>> count_batches(range(10), 0.25, "val"), count_batches(range(10), 4, "val")
        (2, 4)
    """
    length = loader_length(loader)
    if length == 0:
        warnings.warn(
            f"Total length of `{type(loader).__name__}` across ranks is zero. Please make sure this was"
            " your intention.",
            stacklevel=2,
        )
        return 0
    if isinstance(limit, int):
        return min(length, limit)
    if length == math.inf:
        if limit in (0.0, 1.0):
            return length if limit else 0
        raise ConfigurationError(
            f"When using an `IterableDataset`, `Trainer(limit_{stage}_batches)` must be `1.0` or an int."
            f" An int specifies `num_{stage}_batches` to use."
        )
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise ConfigurationError(
            f"You requested to check {limit} of the `{stage}_dataloader` but {limit} * {length} < 1."
            f" Please increase the `limit_{stage}_batches` argument. Try at least"
            f" `limit_{stage}_batches={1.0 / length}`"
        )
    return batches


def prepare_loader(run: RunState, loader: Any, stage: str) -> Any:
    """Return a loader with the sampler that this run needs."""
    has_shares = needs_shares(run, stage)
    if callable(getattr(loader, "for_rank", None)):
        return share_tensors(run, loader, stage) if has_shares else loader
    if not isinstance(loader, DataLoader):
        return loader
    warn_of_loader(run, loader, stage)
    if run.config.overfit_batches and run.stage == "fit":
        loader = _without_shuffling(run, loader, stage)
    prepare_workers(run, loader, stage)
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    is_distributed = isinstance(loader.sampler, DistributedSampler)
    if has_shares and is_map_style and not is_distributed:
        loader = with_sampler(loader, *share_samples(run, loader, stage))
    if stage == "predict" and is_map_style and loader.batch_sampler is not None:
        batch_sampler = loader.batch_sampler
        if type(batch_sampler) is BatchSampler and batch_sampler.drop_last:
            batch_sampler = BatchSampler(batch_sampler.sampler, batch_sampler.batch_size, False)
        loader = with_batch_sampler(loader, TrackingBatchSampler(batch_sampler))
    return loader


def prepare_workers(run: RunState, loader: DataLoader, stage: str) -> None:
    """Seed the workers of a loader as Trainer does, and warn where there are few."""
    most = suggested_max_num_workers(run.loop.num_devices)
    if loader.num_workers < 2 and most > 1:
        run.warn_once(
            f"The '{stage}_dataloader' does not have many workers which may be a bottleneck. Consider"
            f" increasing the value of the `num_workers` argument` to `num_workers={most}` in the"
            " `DataLoader` to improve performance.",
            PossibleUserWarning,
        )
    if os.environ.get("PL_SEED_WORKERS") == "1" and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=run.fabric.global_rank)


def warn_of_loader(run: RunState, loader: DataLoader, stage: str) -> None:
    """Warn of evaluations in random order, and of streams whose length may be wrong."""
    if run.stage != "fit" and isinstance(loader.sampler, RandomSampler):
        run.warn_once(
            f"Your `{stage}_dataloader`'s sampler has shuffling enabled, it is strongly recommended that you"
            " turn shuffling off for val/test dataloaders.",
            PossibleUserWarning,
        )
    if isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
        run.warn_once(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading"
            " (when num_workers > 1), `__len__` could be inaccurate if each worker is not configured"
            " independently to avoid having duplicate data."
        )


def _without_shuffling(run: RunState, loader: DataLoader, stage: str) -> DataLoader:
    if isinstance(loader.sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset):
        return loader
    run.warn_once(
        f"You requested to overfit but enabled {stage} dataloader shuffling. We are turning off the"
        f" {stage} dataloader shuffling for you."
    )
    sampler = SequentialSampler(loader.dataset)
    return with_sampler(loader, sampler, remake_batch_sampler(loader.batch_sampler, sampler))


def with_sampler(loader: DataLoader, sampler: Any, batch_sampler: Any) -> DataLoader:
    """Return a copy of a loader that takes its samples in another order."""
    clone = with_batch_sampler(loader, batch_sampler)
    object.__setattr__(clone, "sampler", sampler)
    return clone


def with_batch_sampler(loader: DataLoader, batch_sampler: Any) -> DataLoader:
    """Return a copy of a loader with other batches of indices.

    A copy keeps the class of the loader and its attributes, also those of subclasses that cannot be
    constructed again. A DataLoader refuses to change its samplers through its own ``__setattr__``.
    """
    clone = copy.copy(loader)
    object.__setattr__(clone, "batch_sampler", batch_sampler)
    object.__setattr__(clone, "_iterator", None)
    return clone


def is_plain(batch: Any) -> bool:
    """Return whether a batch consists of tensors, numbers and texts in plain containers.

    Example:
        >>> is_plain({"x": [1.0, "cat"]}), is_plain(object())
        (True, False)
    """
    if isinstance(batch, dict):
        return type(batch) is dict and all(map(is_plain, batch.values()))
    if isinstance(batch, list | tuple):
        return type(batch) in (list, tuple) and all(map(is_plain, batch))
    return batch is None or type(batch) in (Tensor, bool, int, float, str)


def make_transfer(run: RunState) -> Callable[[Any, int], Any] | None:
    """Return what brings a batch to the device, or None where there is nothing to do."""
    owners = [part for part in (run.datamodule, run.hooks.source) if part is not None]
    hooks: dict[str, Any] = {}
    for name in _TRANSFER_HOOKS:
        methods = [method for part in owners if (method := overridden(part, name)) is not None]
        hooks[name] = methods[0] if methods else None
    device, precision = run.fabric.device, run.steps
    is_needed = device.type != "cpu" or precision.converts_dtype
    if not is_needed and not any(hooks.values()):
        return None
    before, move, after = (hooks[name] for name in _TRANSFER_HOOKS)

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if precision.converts_dtype:
            batch = run.fabric.strategy.precision.convert_input(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, device, dataloader_idx)
        elif device.type != "cpu":
            batch = move_data_to_device(batch, device)
        return batch if after is None else after(batch, dataloader_idx)

    action = f"[Strategy]{type(run.fabric.strategy).__name__}.batch_to_device"
    return run.hooks.with_profiler(action, transfer)
