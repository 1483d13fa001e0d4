"""Loaders in every shape that Trainer takes, with limits, positions and transfer to the device."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..checkpoint.dataloader_state import ResumableLoader
from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..errors import CheckpointError, ConfigurationError
from ..lightning_compat.private import combined_mode
from ..training.hooks import is_instance_of, overridden
from .distributed_samplers import check_lengths

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


class StageLoaders:
    """The loaders of a stage, prepared for this run.

    Args:
        prepared: The loaders with the samplers that this run needs, in the shape in which they were given.

    Attributes:
        loaders: These loaders in a list.
        limits: How many batches of each count.
        as_given: The loaders in the shape in which they were given.
        resumable: The loaders again, with their positions.
        combined: Gives batches of the resumable loaders as (batch, batch_idx, dataloader_idx).
        mode: How it combines them, by CombinedLoader's names.
    """

    def __init__(self, run: RunState, prepared: CombinedLoader, stage: str) -> None:
        self.run, self.prepared, self.stage = run, prepared, stage
        self.mode = combined_mode(prepared)
        self.loaders = prepared.flattened
        self.as_given: Any = prepared.iterables
        limit = getattr(run.config, f"limit_{stage}_batches")
        self.limits = [count_batches(loader, limit, stage) for loader in self.loaders]
        check_lengths(run, self.limits, stage)
        self.resumable = [ResumableLoader(loader, stage == "train") for loader in self.loaders]
        self.combined = with_loaders(prepared, self.resumable)

    def count(self, limits: list[int | float]) -> int | float:
        """Return the number of batches of all loaders together under limits."""
        if self.mode == "sequential":
            return sum(limits)
        return min(limits) if self.mode == "min_size" else max(limits)

    def close(self) -> None:
        """End the workers of every loader."""
        for loader in self.resumable:
            loader.close()
        self.combined.reset()
        self.prepared.reset()


class TrainLoaders(StageLoaders):
    """The training loader, or several that give one batch together.

    Attributes:
        num_batches: Batches of an epoch; infinite where nobody knows.
        extra_batches: Batches that steps with ``dataloader_iter`` took beyond one for each step.
        is_used: Whether a batch was asked for since the iterator was started.
    """

    def __init__(self, run: RunState, prepared: CombinedLoader) -> None:
        super().__init__(run, prepared, "train")
        if self.mode == "sequential":
            raise ConfigurationError(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. The available'
                " modes are: ['min_size', 'max_size_cycle', 'max_size']"
            )
        self.is_single = self.as_given is self.loaders[0]
        self.num_batches = self.count(self.limits)
        self.is_started = self.is_used = False
        self.extra_batches = 0
        self._num_given = 0
        self._fetch: Callable = next
        self._iterator: Iterator[Any] = iter(())
        # Samples that workers read depend on the random numbers of the workers.
        self._reads_in_process = not all(getattr(part, "num_workers", 0) for part in self.loaders)
        # A loader of unknown length is read one batch ahead.
        self._following: Any = _END
        self._states_before_ahead: list[Any] = []
        self._rng_before_ahead: dict[str, Any] | None = None
        self._restored_rng: dict[str, Any] | None = None

    def start(self) -> None:
        """Start the iterator of an epoch, or of the rest of one whose position was restored."""
        self.is_started, self.is_used = True, False
        for loader in self.resumable:
            loader.start_epoch()
        # CombinedLoader would cost each batch some microseconds.
        self._iterator = iter(self.resumable[0] if self.is_single else self.combined)

    def set_batches_done(self, batches_done: int) -> None:
        """Count the batches of this epoch, also those of an earlier process. There may be none left."""
        self.is_used, self._num_given = True, batches_done + self.extra_batches

    def batches(self, batches_done: int) -> Iterator[tuple[Any, bool]]:
        """Yield (batch on the device, whether it is the last one)."""
        transfer = make_transfer(self.run)
        for batch, is_last in self.raw_batches(batches_done):
            yield (batch if transfer is None else transfer(batch, 0)), is_last

    def raw_batches(self, batches_done: int) -> Iterator[tuple[Any, bool]]:
        """Yield (batch, whether it is the last one). A loader of unknown length is read one batch ahead."""
        self.set_batches_done(batches_done)
        action = "[_TrainingEpochLoop].train_dataloader_next"
        self._fetch = self.run.hooks.with_profiler(action, next)
        if self.num_batches != math.inf:
            for index in range(self._num_given, int(self.num_batches)):
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
        restored, self._restored_rng = self._restored_rng, None
        if restored is None:
            self._rng_before_ahead = capture_rng_state() if self._reads_in_process else None
            return next(self._iterator, _END)
        current, self._rng_before_ahead = capture_rng_state(), restored
        restore_rng_state(restored)
        batch = next(self._iterator, _END)
        restore_rng_state(current)
        return batch

    def state_dict(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Return the positions of the loaders, and the random state before the batch ahead was read.

        Args:
            progress: The saved progress. Batches whose step was not finished count as not given.
        """
        is_in_pass = progress["is_in_epoch"] and self.is_used
        is_ahead = is_in_pass and self._following is not _END
        dropped, rng_before_ahead = 0, self._restored_rng
        if is_in_pass:
            dropped = self._num_given - progress["batches_done"] - self.extra_batches
        if is_ahead:
            rng_before_ahead = capture_rng_state() if dropped else self._rng_before_ahead
            dropped += 1
        positions = [loader.state_dict(dropped) for loader in self.resumable]
        if is_ahead:
            for position, part_state in zip(positions, self._states_before_ahead, strict=True):
                if part_state is not None:
                    position["state"] = part_state
        return {
            "is_used": self.is_used,
            "extra_batches": self.extra_batches,
            "rng_before_ahead": rng_before_ahead,
            "loaders": positions,
        }

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
        self.extra_batches = state["extra_batches"]
        self._restored_rng = state["rng_before_ahead"]

    def check_short_pass(self, batches_done: int) -> None:
        """Warn of a pass without batches, and of one that was shorter than its length says.

        Raises:
            ConfigurationError: There was no batch, and there will be none.
        """
        names = ", ".join(type(loader).__name__ for loader in self.loaders)
        if not batches_done:
            is_used_up = any(isinstance(loader, Iterator) for loader in self.loaders)
            if is_used_up or self.run.stop.max_epochs == -1:
                # All further epochs would be empty, too.
                when = f"in epoch {self.run.progress.epochs_done}"
                raise ConfigurationError(no_batch_message(f"train loader ({names})", when))
            self.run.warn_once(no_batch_message(f"train loader ({names})"))
            return
        if self.num_batches != math.inf:
            self.run.warn_once(
                f"The train loader ({names}) gave {batches_done} batches, expected {self.num_batches} by its"
                " len() or limit_train_batches. The epoch ends here. Give the loader its true length, or"
                " write a smaller limit."
            )

    def end_epoch(self) -> None:
        self.extra_batches = 0
        for loader in self.resumable:
            loader.end_pass()

    def _unpack(self, item: Any) -> Any:
        return item if self.is_single else item[0]


class EvalLoaders(StageLoaders):
    """The loaders of an evaluation, one after the other."""

    def __init__(self, run: RunState, prepared: CombinedLoader, stage: str) -> None:
        super().__init__(run, prepared, stage)
        if stage == "predict" and self.mode != "sequential":
            raise ConfigurationError(
                '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.'
            )
        is_flat = isinstance(self.as_given, Mapping) and len(self.as_given) == len(self.loaders)
        self.names = [str(name) for name in self.as_given] if is_flat else []
        self._iterator: Iterator[tuple[Any, int, int]] = iter(())

    def state_dict(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self.resumable]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for loader, position in zip(self.resumable, state, strict=False):
            loader.load_state_dict(position, is_in_pass=False)

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
        self._iterator = iter(self.combined)

    def batches(self, max_batches: int | float | None = None) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch on the device, batch_idx, dataloader_idx)."""
        transfer = make_transfer(self.run)
        for batch, batch_idx, dataloader_idx in self.raw_batches(max_batches):
            moved = batch if transfer is None else transfer(batch, dataloader_idx)
            yield moved, batch_idx, dataloader_idx

    def raw_batches(self, max_batches: int | float | None) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx)."""
        loop = "_PredictionLoop" if self.stage == "predict" else "_EvaluationLoop"
        fetch = self.run.hooks.with_profiler(f"[{loop}].{self.stage}_next", next)
        counts = [0] * len(self.loaders)
        num_batches = self.count_batches(max_batches)
        # CombinedLoader keeps the limits only where loaders come one after the other.
        while sum(counts) < num_batches:
            try:
                item = fetch(self._iterator)
            except StopIteration:
                break
            counts[item[2]] += 1
            yield item
        for index, loader in enumerate(self.resumable):
            loader.end_pass()
            if self.limits[index] and not counts[index] and self.mode == "sequential":
                name = type(self.loaders[index]).__name__
                self.run.warn_once(no_batch_message(f"{self.stage} loader ({name})"))

    def batch_indices(self, dataloader_idx: int, batch_idx: int) -> list[int]:
        """Return the samples of a batch that is predicted; empty for loaders that have no indices."""
        sampler = getattr(self.loaders[dataloader_idx], "batch_sampler", None)
        seen = sampler.seen if isinstance(sampler, TrackingBatchSampler) else []
        return seen[batch_idx] if batch_idx < len(seen) else []


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


def no_batch_message(loader: str, when: str = "in this pass") -> str:
    """Return what to do about a loader that gave no batch."""
    return (
        f"The {loader} gave no batch {when}. An iterator is used up after one pass: give an object that"
        " starts from its beginning with each iter(), such as a DataLoader or a list."
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
