"""From what was given to a call to batches on their device: loaders, limits, shares of processes."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities import move_data_to_device, suggested_max_num_workers
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
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

from ..checkpoint.dataloader_state import ResumableLoader, has_state, samplers_of
from ..checkpoint.rng import capture_rng_state, restore_rng_state, unchanged_rng_state
from ..distributed.launch import gather_objects
from ..errors import CheckpointError, ConfigurationError
from ..lightning_compat.private import combined_mode
from ..training.checks import check_loader, loader_argument
from ..training.hooks import is_instance_of, overridden
from .tensor_loader import TensorLoader

if TYPE_CHECKING:
    from ..training.run_state import RunState

# CombinedLoader uses what torch has deprecated, and a user can do nothing about it.
warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)

# What a loader gives after its last batch.
_END = object()
_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class DataConnector:
    """Makes the loaders of a run, at first and whenever they are to be reloaded.

    Args:
        loaders: What was given to the call, by stage: "train", "val", "test", "predict".
        source: The datamodule or module that has ``train_dataloader()`` and the like.

    Attributes:
        sampler_seed: The seed by which processes draw one order of the samples. A resumed run has that of
            its checkpoint.
        keeps_first_iterator: Whether the run continues a checkpoint of Trainer, whose iterator starts with
            its loader.
    """

    def __init__(self, loaders: Mapping[str, Any], source: Any) -> None:
        self.given = {stage: given for stage, given in loaders.items() if given is not None}
        self.source = source
        self.run: RunState = None  # type: ignore[assignment]
        self.train: TrainLoaders = None  # type: ignore[assignment]
        self.eval_loaders: EvalLoaders = None  # type: ignore[assignment]
        self.sampler_seed: int | None = None
        self.keeps_first_iterator = False

    def has_loader(self, stage: str) -> bool:
        """Return whether there is a loader for this stage, given or made by a method."""
        return stage in self.given or overridden(self.source, f"{stage}_dataloader") is not None

    def request(self, stage: str) -> Any:
        """Return the given loaders, or call the method that makes them."""
        if stage in self.given:
            call, source = self.run.stage, self.given[stage]
            where = f"passed to `Trainer.{call}({loader_argument(call, stage)}=...)`"
        else:
            name, provider = f"{stage}_dataloader", self.source
            kind = "LightningDataModule" if provider is self.run.datamodule else "LightningModule"
            with self.run.hooks.profiled(f"[{kind}]{type(provider).__name__}.{name}"):
                source = self.run.hooks.inside(name, getattr(provider, name))()
            where = f"returned from `{type(provider).__name__}.{name}()`"
        for loader in combine_loaders(source, "sequential").flattened:
            check_loader(loader, where)
        return source

    def _prepare(self, stage: str, mode: Literal["max_size_cycle", "sequential"]) -> CombinedLoader:
        """Return the loaders of a stage, with the samplers that this run needs."""
        combined = combine_loaders(self.request(stage), mode)
        for loader in combined.flattened:
            # Trainer calls iter() to check a loader, which counts where it draws random numbers.
            if not isinstance(loader, DataLoader | TensorLoader):
                iter(loader)
        loaders = [prepare_loader(self.run, loader, stage) for loader in combined.flattened]
        return with_loaders(combined, loaders)

    def _is_current(self, loaders: StageLoaders | None) -> bool:
        """Return whether loaders exist and need no reload."""
        if loaders is None:
            return False
        every = self.run.config.reload_dataloaders_every_n_epochs
        return not every or self.run.progress.epochs_done - loaders.loaded_in_epoch < every

    def setup_train_loader(self) -> None:
        """Make the training loader, at first and whenever it is to be reloaded."""
        run = self.run
        if run.config.limit_train_batches == 0 or self._is_current(self.train):
            return
        self.train = TrainLoaders(run, self._prepare("train", "max_size_cycle"))
        run.progress.num_train_batches = self.train.num_batches
        every = run.config.log_every_n_steps or 0
        # Our own logger has the rows of the epochs in any case.
        has_other_logger = len(run.loggers.csv_loggers) < len(run.loop.loggers)
        if self.train.num_batches < every and has_other_logger and not run.config.fast_dev_run:
            run.warn_once(
                f"The number of training batches ({self.train.num_batches}) is smaller than the logging"
                f" interval Trainer(log_every_n_steps={every}). Set a lower value for log_every_n_steps if"
                " you want to see logs for the training epoch.",
                PossibleUserWarning,
            )
        # The first epoch's iterator starts with its loader, as in Trainer.
        if run.checkpoint is None or (self.keeps_first_iterator and not run.progress.is_in_epoch):
            self.train.start()

    def start_train_batches(self) -> None:
        """Start the iterator of an epoch, unless it has started with its loader."""
        is_later = self.run.progress.epochs_done > 0 and not self.keeps_first_iterator
        self.keeps_first_iterator = False
        if is_later or not self.train.is_started:
            self.train.start()

    def resume_train_batches(self) -> None:
        """Continue the epoch that a checkpoint was saved in."""
        self.keeps_first_iterator = False
        self.set_epoch("train", self.run.progress.epochs_done)
        self.train.start()
        self.train.set_batches_done(self.run.progress.batches_done)

    def train_batches(self) -> Iterator[tuple[Any, bool]]:
        """Return an iterator of (batch on the device, whether it is the last one)."""
        return self.train.batches(self.run.progress.batches_done)

    def setup_eval_loaders(self, stage: str) -> None:
        """Make the loaders of an evaluation, at first and whenever they are to be reloaded."""
        run = self.run
        if self._is_current(self.eval_loaders):
            return
        if self.eval_loaders is not None:
            run.loggers.restart_evaluation_count()
        self.eval_loaders = EvalLoaders(run, self._prepare(stage, "sequential"), stage)
        if run.loop.sanity_checking and run.config.check_val_every_n_epoch not in (None, 1):
            # A sanity check before an epoch that does not validate does not count as a load.
            self.eval_loaders.loaded_in_epoch = -math.inf

    def setup_val_loaders(self) -> None:
        """Make the loaders of the validation before it starts, for progress bars and for a resume."""
        self.run.progress.stage = "validate"
        self.setup_eval_loaders("val")
        self.run.progress.stage = "train"

    def set_epoch(self, stage: str, epoch: int) -> None:
        """Tell every sampler the epoch, so that shuffled epochs differ."""
        loaders = self.train.loaders if stage == "train" else self.eval_loaders.loaders
        for loader in loaders:
            for part in (loader, *samplers_of(loader)):
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(epoch)

    def teardown(self) -> None:
        """End the workers of every loader."""
        for part in (self.train, self.eval_loaders):
            if part is not None:
                part.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders, those of the validation between two passes."""
        val = self.eval_loaders
        return {
            "train": None if self.train is None else self.train.state_dict(),
            "val": val.state_dict() if val is not None and val.is_used else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.train is not None and state["train"] is not None:
            self.train.load_state_dict(state["train"])
        if state["val"] is not None and self.run.should_validate:
            if self.eval_loaders is None:
                self.setup_val_loaders()
            self.eval_loaders.load_state_dict(state["val"])

    def loader_states(self) -> list[Any]:
        """Return the states of the training loaders with ``state_dict``, which Trainer saves, too."""
        if self.train is None or not any(map(has_state, self.train.loaders)):
            return []
        positions = self.train.state_dict()["loaders"]
        pairs = zip(self.train.loaders, positions, strict=True)
        return [position["state"] for loader, position in pairs if has_state(loader)]

    def load_loader_states(self, states: list[Any]) -> None:
        """Restore the states that Trainer saved."""
        loaders = [] if self.train is None else filter(has_state, self.train.loaders)
        for loader, state in zip(loaders, states, strict=False):
            loader.load_state_dict(state)
            if not self.run.progress.is_in_epoch:
                # It continues the pass that has ended. The next iterator starts a new one.
                iter(loader)


class StageLoaders:
    """The loaders of a stage, prepared for this run.

    Attributes:
        loaders: The loaders with the samplers that this run needs; in the shape as given: ``as_given``.
        resumable: The loaders with their positions; ``combined`` iterates over them.
        limits: How many batches of each loader count.
    """

    def __init__(self, run: RunState, combined: CombinedLoader, stage: str) -> None:
        self.run, self.stage = run, stage
        self.mode = combined_mode(combined)
        if stage == "train" and self.mode == "sequential":
            raise ConfigurationError(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. The available'
                " modes are: ['min_size', 'max_size_cycle', 'max_size']"
            )
        if stage == "predict" and self.mode != "sequential":
            raise ConfigurationError(
                '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.'
            )
        self.loaders = combined.flattened
        self.as_given: Any = combined.iterables
        limit = getattr(run.config, f"limit_{stage}_batches")
        self.limits = [count_batches(loader, limit, stage) for loader in self.loaders]
        check_lengths(run, self.limits, stage)
        self.resumable = [ResumableLoader(loader) for loader in self.loaders]
        self.combined = with_loaders(combined, self.resumable)
        self.loaded_in_epoch: int | float = run.progress.epochs_done
        self.is_started = False
        self._iterator: Iterator[Any] = iter(())

    @property
    def is_used(self) -> bool:
        """Return whether a batch was asked for since an iterator was started, also before a resume."""
        return any(loader.is_used for loader in self.resumable)

    def count(self, limits: list[int | float]) -> int | float:
        """Return the number of batches of all loaders together under limits."""
        if self.mode == "sequential":
            return sum(limits)
        return min(limits) if self.mode == "min_size" else max(limits)

    def start_iterator(self, source: Any) -> None:
        """Start a pass, or the rest of one whose position was restored."""
        self.is_started = True
        for loader in self.resumable:
            loader.start_epoch()
        self._iterator = iter(source)

    def end_pass(self) -> None:
        for loader in self.resumable:
            loader.end_pass()

    def close(self) -> None:
        """End the workers of every loader."""
        for loader in self.resumable:
            loader.close()
        self.combined.flattened = self.loaders
        self.combined.reset()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["loaders"]) != len(self.resumable):
            raise CheckpointError(
                f"resume: got the positions of {len(state['loaders'])} {self.stage} loaders, expected"
                f" {len(self.resumable)}. Give the loaders that the run was started with, or use load=."
            )
        self.loaded_in_epoch = state["loaded_in_epoch"]
        for loader, position in zip(self.resumable, state["loaders"], strict=True):
            loader.load_state_dict(position)


class TrainLoaders(StageLoaders):
    """The training loader, or several that give one batch together.

    Attributes:
        num_batches: Batches of an epoch; infinite where nobody knows.
        extra_batches: Batches that steps with ``dataloader_iter`` took beyond one for each step.
        reads_in_process: Whether samples depend on the random numbers of this process.
    """

    def __init__(self, run: RunState, combined: CombinedLoader) -> None:
        super().__init__(run, combined, "train")
        self.is_single = self.as_given is self.loaders[0]
        self.num_batches = self.count(self.limits)
        self.extra_batches = 0
        self._num_given = 0
        self.reads_in_process = not all(getattr(part, "num_workers", 0) for part in self.loaders)
        # A loader of unknown length is read one batch ahead.
        self._following: Any = _END
        self._states_before_ahead: list[Any] = []
        self._rng_before_ahead: dict[str, Any] | None = None
        self._restored_rng: dict[str, Any] | None = None

    def start(self) -> None:
        """Start the iterator of an epoch, or of the rest of one."""
        # CombinedLoader would cost each batch some microseconds.
        self.start_iterator(self.resumable[0] if self.is_single else self.combined)

    def batches(self, batches_done: int) -> Iterator[tuple[Any, bool]]:
        """Return an iterator of (batch on the device, whether it is the last one)."""
        transfer, batches = make_transfer(self.run), self.raw_batches(batches_done)
        if transfer is None:
            return batches
        return ((transfer(batch, 0), is_last) for batch, is_last in batches)

    def raw_batches(self, batches_done: int) -> Iterator[tuple[Any, bool]]:
        """Yield (batch, whether it is the last one). A loader of unknown length is read one batch ahead."""
        self.set_batches_done(batches_done)
        if self.num_batches == math.inf:
            yield from self._batches_of_unknown_length()
            return
        action = "[_TrainingEpochLoop].train_dataloader_next"
        fetch = self.run.hooks.with_profiler(action, next)
        for index in range(self._num_given, int(self.num_batches)):
            try:
                item = fetch(self._iterator)
            except StopIteration:
                return
            self._num_given = index + 1
            yield (item if self.is_single else item[0]), index + 1 == self.num_batches

    def set_batches_done(self, batches_done: int) -> None:
        """Count the batches of this epoch, also those of an earlier process. There may be none left."""
        self._num_given = batches_done + self.extra_batches

    def _batches_of_unknown_length(self) -> Iterator[tuple[Any, bool]]:
        self._following = self._read_ahead()
        while self._following is not _END:
            item: Any = self._following
            self._following = self._read_ahead()
            self._num_given += 1
            yield (item if self.is_single else item[0]), self._following is _END

    def _read_ahead(self) -> Any:
        """Read the next batch. The first one after a resume was read before the checkpoint was saved."""
        self._states_before_ahead = [loader.part_state() for loader in self.resumable]
        restored, self._restored_rng = self._restored_rng, None
        if restored is None:
            self._rng_before_ahead = capture_rng_state() if self.reads_in_process else None
            return next(self._iterator, _END)
        self._rng_before_ahead = restored
        with unchanged_rng_state():
            restore_rng_state(restored)
            return next(self._iterator, _END)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders, and the random state before the batch ahead was read."""
        # Batches whose step was not finished count as not given.
        progress = self.run.progress.state_dict()
        is_in_pass = progress["is_in_epoch"] and self.is_used
        is_ahead = is_in_pass and self._following is not _END
        dropped, rng_before_ahead = 0, self._restored_rng
        if is_in_pass:
            dropped = self._num_given - progress["batches_done"] - self.extra_batches
        if is_ahead:
            rng_before_ahead = None if dropped else self._rng_before_ahead
            dropped += 1
        # The iterator of the first epoch starts before that epoch.
        is_continued = is_in_pass or not self.is_used
        positions = [loader.state_dict(is_continued, dropped) for loader in self.resumable]
        if is_ahead:
            for position, part_state in zip(positions, self._states_before_ahead, strict=True):
                if part_state is not None:
                    position["state"] = part_state
        return {
            "loaded_in_epoch": self.loaded_in_epoch,
            "extra_batches": self.extra_batches,
            "rng_before_ahead": rng_before_ahead,
            "loaders": positions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.extra_batches = state["extra_batches"]
        self._restored_rng = state["rng_before_ahead"]

    def check_empty_pass(self) -> None:
        """Refuse a pass without batches where all further ones would be empty, too."""
        is_used_up = any(isinstance(loader, Iterator) for loader in self.loaders)
        if not self._num_given and (is_used_up or self.run.stop.max_epochs == -1):
            raise ConfigurationError(no_batch_message("train", self.loaders))

    def end_epoch(self) -> None:
        self.extra_batches = 0
        self.end_pass()


class EvalLoaders(StageLoaders):
    """The loaders of an evaluation, one after the other."""

    def __init__(self, run: RunState, combined: CombinedLoader, stage: str) -> None:
        super().__init__(run, combined, stage)
        is_flat = isinstance(self.as_given, Mapping) and len(self.as_given) == len(self.loaders)
        self.names = [str(name) for name in self.as_given] if is_flat else []

    @property
    def has_several(self) -> bool:
        """Return whether steps and hooks get a ``dataloader_idx``."""
        return len(self.loaders) > 1 and self.mode == "sequential"

    def count_batches(self, max_batches: int | float | None = None) -> int | float:
        """Return the number of batches of all loaders."""
        return self.count(self._limited(max_batches))

    def _limited(self, max_batches: int | float | None) -> list[int | float]:
        most = math.inf if max_batches is None else max_batches
        return [min(limit, most) for limit in self.limits]

    def start(self, max_batches: int | float | None = None) -> None:
        """Start the iterator, which may draw random numbers, before the hooks, as Trainer."""
        self.combined.limits = self._limited(max_batches)
        self.start_iterator(self.combined)

    def batches(self, max_batches: int | float | None = None) -> Iterator[tuple[Any, int, int]]:
        """Iterate over (batch on the device, batch_idx, dataloader_idx)."""
        transfer = make_transfer(self.run)
        raw = self.raw_batches(max_batches)
        if transfer is None:
            return raw
        return ((transfer(batch, place[1]), *place) for batch, *place in raw)

    def raw_batches(self, max_batches: int | float | None) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx)."""
        loop = "_PredictionLoop" if self.stage == "predict" else "_EvaluationLoop"
        fetch = self.run.hooks.with_profiler(f"[{loop}].{self.stage}_next", next)
        num_left = self.count_batches(max_batches)
        # CombinedLoader keeps the limits only where loaders come one after the other.
        while num_left > 0:
            try:
                item = fetch(self._iterator)
            except StopIteration:
                break
            num_left -= 1
            yield item
        self.end_pass()
        for limit, loader in zip(self.limits, self.resumable, strict=True):
            if limit and not loader.batches:
                self.run.warn_once(no_batch_message(self.stage, [loader.loader]))

    def batch_indices(self, dataloader_idx: int, batch_idx: int) -> list[int]:
        """Return the samples of a batch that is predicted; empty for loaders that have no indices."""
        sampler = getattr(self.loaders[dataloader_idx], "batch_sampler", None)
        seen = sampler.seen if isinstance(sampler, TrackingBatchSampler) else []
        return seen[batch_idx] if batch_idx < len(seen) else []

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two passes."""
        positions = [loader.state_dict() for loader in self.resumable]
        return {"loaded_in_epoch": self.loaded_in_epoch, "loaders": positions}


class TrackingBatchSampler(BatchSampler):
    """A batch sampler that remembers the indices of each batch that it gave, for predictions."""

    def __init__(self, batch_sampler: Any) -> None:
        vars(self).update(vars(batch_sampler))
        self._batch_sampler = batch_sampler
        self.seen: list[list[int]] = []

    def __iter__(self) -> Iterator[Any]:
        self.seen = []
        for indices in self._batch_sampler:
            self.seen.append(list(indices))
            yield indices

    def __len__(self) -> int:
        return len(self._batch_sampler)


# The shapes and lengths of loaders


def combine_loaders(source: Any, mode: Literal["max_size_cycle", "sequential"]) -> CombinedLoader:
    """Return the CombinedLoader that was given, or one around the loaders that were given.

    A list of loaders gives several loaders, a list of batches is one loader.

    Example:
        >>> combine_loaders({"a": range(3), "b": [range(2), range(1)]}, "sequential").flattened
        [range(0, 3), range(0, 2), range(0, 1)]
        >>> len(combine_loaders([Tensor([1.0]), Tensor([2.0])], "sequential").flattened)
        1
    """
    if is_instance_of(source, "CombinedLoader"):
        return source
    combined = CombinedLoader(source, mode)
    if any(isinstance(part, Tensor) for part in combined.flattened):
        return with_loaders(CombinedLoader(None, mode), [source])
    return combined


def with_loaders(combined: CombinedLoader, loaders: list[Any]) -> CombinedLoader:
    """Return a copy of a CombinedLoader with other loaders in the same shape."""
    other = copy.copy(combined)
    other.flattened = loaders
    return other


def no_batch_message(stage: str, loaders: list[Any]) -> str:
    names = ", ".join(type(loader).__name__ for loader in loaders)
    return (
        f"The {stage} loader ({names}) gave no batch in this pass. An iterator is used up after one pass: give"
        " an object that starts from its beginning with each iter(), such as a DataLoader or a list."
    )


def count_batches(loader: Any, limit: int | float, stage: str) -> int | float:
    """Return how many batches of a loader count under a limit; infinite where nobody knows.

    Example:
        >>> count_batches(range(10), 0.25, "val"), count_batches(iter([1]), 4, "val")
        (2, 4)
    """
    try:
        length: int | float = len(loader)
    except (TypeError, NotImplementedError):
        length = math.inf
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


def check_lengths(run: RunState, lengths: list[int | float], stage: str) -> None:
    """Refuse loaders whose numbers of batches differ between processes that wait for each other."""
    for found in zip(*gather_objects(run, lengths), strict=False):
        is_strict = run.stage == "fit" or 0 in found
        if is_strict and len(set(found)) > 1:
            raise ConfigurationError(
                f"{stage}_dataloader: got {list(found)} batches by process, expected one number. Write"
                f" limit_{stage}_batches={min(found)}, or leave the sampler out."
            )


# Samplers


def prepare_loader(run: RunState, loader: Any, stage: str) -> Any:
    """Return a loader with the sampler that this run needs."""
    if callable(getattr(loader, "for_rank", None)):
        options = sampler_options(run, loader.shuffle)
        return loader.for_rank(options.pop("rank"), options.pop("num_replicas"), **options)
    if not isinstance(loader, DataLoader):
        return loader
    if os.environ.get("PL_SEED_WORKERS") == "1" and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=run.fabric.global_rank)
    warn_of_workers(run, loader, stage)
    if isinstance(loader.dataset, IterableDataset):
        return loader
    sampler, batch_sampler = choose_sampler(run, loader, stage), loader.batch_sampler
    if sampler is not loader.sampler:
        batch_sampler = remake_batch_sampler(batch_sampler, sampler)
    if stage == "predict" and batch_sampler is not None:
        if type(batch_sampler) is BatchSampler:
            # As Trainer: no sample is dropped.
            batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, False)
        batch_sampler = TrackingBatchSampler(batch_sampler)
    if batch_sampler is loader.batch_sampler and sampler is loader.sampler:
        return loader
    clone = copy.copy(loader)
    # A DataLoader refuses to change its samplers through its own __setattr__.
    vars(clone).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return clone


def shares_of(run: RunState) -> tuple[int, int]:
    """Return the number of shares and the one of this process. A tensor-parallel group has one share."""
    fabric = run.fabric
    if fabric.world_size == 1:
        return 1, 0
    default = {"num_replicas": fabric.world_size, "rank": fabric.global_rank}
    kwargs = getattr(fabric.strategy, "distributed_sampler_kwargs", default)
    return kwargs["num_replicas"], kwargs["rank"]


def sampler_options(run: RunState, shuffle: bool) -> dict[str, Any]:
    """Return the arguments of a DistributedSampler."""
    shares, share = shares_of(run)
    if run.data.sampler_seed is None:
        run.data.sampler_seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    seed = run.data.sampler_seed
    return {"num_replicas": shares, "rank": share, "shuffle": shuffle, "seed": seed}


def choose_sampler(run: RunState, loader: DataLoader, stage: str) -> Any:
    """Return the sampler that Trainer uses: in order to overfit, and of this process's share."""
    given: Any = loader.sampler
    dataset: Any = loader.dataset
    is_overfitting = bool(run.config.overfit_batches) and run.stage == "fit"
    if is_overfitting and not isinstance(given, SequentialSampler):
        run.warn_once(
            f"You requested to overfit but enabled {stage} dataloader shuffling. We are turning off the"
            f" {stage} dataloader shuffling for you."
        )
        given = SequentialSampler(dataset)
    if shares_of(run)[0] == 1 or isinstance(given, DistributedSampler):
        return given
    is_shuffled = stage == "train" or isinstance(given, RandomSampler)
    options = sampler_options(run, is_shuffled and not is_overfitting)
    if stage == "predict":
        return UnrepeatedDistributedSamplerWrapper(given, **options)
    if isinstance(given, RandomSampler | SequentialSampler):
        return DistributedSampler(dataset, **options)
    return DistributedSamplerWrapper(given, **options)


def remake_batch_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """Return a batch sampler of the same class around another sampler; None for batch_size=None."""
    if batch_sampler is None:
        return None
    kind = type(batch_sampler)
    try:
        return kind(sampler, batch_size=batch_sampler.batch_size, drop_last=batch_sampler.drop_last)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"batch_sampler: got {kind.__name__}, expected the arguments of torch's BatchSampler, so that"
            f" each process can have its share: {error}. Or give the loader a DistributedSampler."
        ) from error


def warn_of_workers(run: RunState, loader: DataLoader, stage: str) -> None:
    """Warn of streams whose length may be wrong with workers, and of few workers."""
    if isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
        run.warn_once(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading"
            " (when num_workers > 1), `__len__` could be inaccurate if each worker is not configured"
            " independently to avoid having duplicate data."
        )
    most = suggested_max_num_workers(run.loop.num_devices)
    if loader.num_workers < 2 and most > 1:
        run.warn_once(
            f"The '{stage}_dataloader' does not have many workers which may be a bottleneck. Consider"
            f" increasing the value of the `num_workers` argument` to `num_workers={most}` in the"
            " `DataLoader` to improve performance.",
            PossibleUserWarning,
        )


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
