"""Read a limited number of batches from loaders, and move each batch to the device."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from ..checkpoint.dataloader_state import ResumableLoader, has_state, samplers_of
from ..distributed.launch import gather_objects
from ..errors import CheckpointError, ConfigurationError
from ..lightning_compat.private import combined_mode
from ..training.check_arguments import check_loader, loader_argument
from ..training.hooks import is_instance_of, overridden
from .samplers import TrackingBatchSampler, prepare_loader
from .tensor_loader import TensorLoader

if TYPE_CHECKING:
    from ..training.run_state import RunState

# Hide a warning of CombinedLoader about a deprecated class of torch.
warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)

# This value marks the end of a loader's batches.
_END = object()
_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class DataConnector:
    """Creates the loaders of a run, and creates them again when a reload is due.

    Args:
        loaders: The given loaders, keyed by stage: "train", "val", "test", "predict".
        source: The datamodule or module with methods such as ``train_dataloader()``.

    Attributes:
        sampler_seed: The seed with which all processes draw the same order of samples. A resumed
            run uses the seed in its checkpoint.
        keeps_first_iterator: Whether the run resumes a checkpoint of Trainer. Trainer starts the
            first iterator when the loader is created.
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
        """Return whether the user gave a loader for this stage or a method that creates one."""
        return stage in self.given or overridden(self.source, f"{stage}_dataloader") is not None

    def request(self, stage: str) -> Any:
        """Return the given loaders, or call the method that creates them."""
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
            # Call iter() like Trainer, because iter() may draw random numbers.
            if not isinstance(loader, DataLoader | TensorLoader):
                iter(loader)
        loaders = [prepare_loader(self.run, loader, stage) for loader in combined.flattened]
        return with_loaders(combined, loaders)

    def _needs_no_reload(self, loaders: StageLoaders | None) -> bool:
        """Return whether the loaders exist and no reload is due."""
        if loaders is None:
            return False
        every = self.run.config.reload_dataloaders_every_n_epochs
        return not every or self.run.progress.epochs_done - loaders.loaded_in_epoch < every

    def setup_train_loader(self) -> None:
        """Create the training loader if there is none or a reload is due."""
        run = self.run
        if run.config.limit_train_batches == 0 or self._needs_no_reload(self.train):
            return
        self.train = TrainLoaders(run, self._prepare("train", "max_size_cycle"))
        run.progress.num_train_batches = self.train.num_batches
        every = run.config.log_every_n_steps or 0
        # Do not warn for CSV loggers. They write a row per epoch even if log_every_n_steps is large.
        has_other_logger = len(run.history.csv_loggers) < len(run.loop.loggers)
        if self.train.num_batches < every and has_other_logger and not run.config.fast_dev_run:
            run.warn_once(
                f"The number of training batches ({self.train.num_batches}) is smaller than the logging"
                f" interval Trainer(log_every_n_steps={every}). Set a lower value for log_every_n_steps if"
                " you want to see logs for the training epoch.",
                PossibleUserWarning,
            )
        # As in Trainer, the first epoch's iterator starts as soon as the loader is created.
        if run.checkpoint is None or (self.keeps_first_iterator and not run.progress.is_in_epoch):
            self.train.start()

    def start_train_batches(self) -> None:
        """Start the iterator of an epoch, unless setup_train_loader has started this iterator."""
        is_later = self.run.progress.epochs_done > 0 and not self.keeps_first_iterator
        self.keeps_first_iterator = False
        if is_later or not self.train.is_started:
            self.train.start()

    def resume_train_batches(self) -> None:
        """Continue the epoch in which the checkpoint was saved."""
        self.keeps_first_iterator = False
        self.set_epoch("train", self.run.progress.epochs_done)
        self.train.start()

    def setup_eval_loaders(self, stage: str) -> None:
        """Create the loaders of an evaluation if there are none or a reload is due."""
        run = self.run
        if self._needs_no_reload(self.eval_loaders):
            return
        if self.eval_loaders is not None:
            # Count the batches of the new loaders from 0. Loggers use this count as the step.
            run.progress.eval_batches_by_loader = {}
        self.eval_loaders = EvalLoaders(run, self._prepare(stage, "sequential"), stage)
        if run.loop.sanity_checking and run.config.check_val_every_n_epoch not in (None, 1):
            # With check_val_every_n_epoch > 1, Trainer reloads loaders after the sanity check.
            self.eval_loaders.loaded_in_epoch = -math.inf

    def setup_val_loaders(self) -> None:
        """Create the validation loaders early, because progress bars and a resume need them."""
        self.run.progress.stage = "validate"
        self.setup_eval_loaders("val")
        self.run.progress.stage = "train"

    def set_epoch(self, stage: str, epoch: int) -> None:
        """Set the epoch of every sampler, so that shuffled epochs differ."""
        loaders = self.train.loaders if stage == "train" else self.eval_loaders.loaders
        for loader in loaders:
            for part in (loader, *samplers_of(loader)):
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(epoch)

    def teardown(self) -> None:
        """Shut down the workers of every loader."""
        for part in (self.train, self.eval_loaders):
            if part is not None:
                part.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the training loaders, and the state of the validation loaders."""
        val = self.eval_loaders
        return {
            "train": None if self.train is None else self.train.state_dict(),
            "val": val.state_dict() if val is not None and val.is_used else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.train is not None and state["train"] is not None:
            self.train.load_state_dict(state["train"])
        if state["val"] is not None and self.has_loader("val"):
            if self.eval_loaders is None:
                self.setup_val_loaders()
            self.eval_loaders.load_state_dict(state["val"])

    def loader_states(self) -> list[Any]:
        """List the states of the training loaders that define ``state_dict``, as Trainer does."""
        if self.train is None or not any(map(has_state, self.train.loaders)):
            return []
        positions = self.train.state_dict()["loaders"]
        pairs = zip(self.train.loaders, positions, strict=True)
        return [state["state"] for loader, state in pairs if has_state(loader) and "state" in state]

    def load_loader_states(self, states: list[Any]) -> None:
        """Restore the loader states in a checkpoint of Trainer."""
        loaders = [] if self.train is None else filter(has_state, self.train.loaders)
        for loader, state in zip(loaders, states, strict=False):
            loader.load_state_dict(state)
            if not self.run.progress.is_in_epoch:
                # End the iterator of the previous epoch, so that the next epoch starts a new one.
                iter(loader)


class StageLoaders:
    """The loaders of a stage, prepared for this run.

    Attributes:
        loaders: The loaders with the samplers of this run. ``as_given`` keeps their shape.
        resumable: A ResumableLoader around each loader. ``combined`` iterates over these.
        limits: The number of batches to read from each loader.
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
        previous: Any = run.data.train if stage == "train" else run.data.eval_loaders
        workers = {id(part.loader): part.workers for part in previous.resumable} if previous else {}
        self.resumable = [ResumableLoader(part, workers.get(id(part))) for part in self.loaders]
        self.combined = with_loaders(combined, self.resumable)
        self.loaded_in_epoch: int | float = run.progress.epochs_done
        self.is_started = False
        self._iterator: Iterator[Any] = iter(())

    @property
    def is_used(self) -> bool:
        """Return whether a batch of this epoch was read, before or after a resume."""
        return any(loader.is_used for loader in self.resumable)

    def count_batches(self, max_batches: int | float = math.inf) -> int | float:
        """Return the number of batches of all loaders, with at most ``max_batches`` of each."""
        limits = [min(limit, max_batches) for limit in self.limits]
        if self.mode == "sequential":
            return sum(limits)
        return min(limits) if self.mode == "min_size" else max(limits)

    def start(self, max_batches: int | float = math.inf) -> None:
        """Create the loaders' iterators, which start at the restored positions after a resume."""
        self.is_started = True
        for loader in self.resumable:
            loader.start_epoch()
        self.combined.limits = [min(limit, max_batches) for limit in self.limits]
        self._iterator = self.make_iterator()

    def make_iterator(self) -> Iterator[Any]:
        return iter(self.combined)

    def end_pass(self) -> None:
        for loader in self.resumable:
            loader.end_pass()

    def close(self) -> None:
        """Shut down the workers of every loader."""
        for loader in self.resumable:
            loader.close()
        self.combined.flattened = self.loaders
        self.combined.reset()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded_in_epoch = state["loaded_in_epoch"]
        for loader, position in zip(self.resumable, state["loaders"], strict=False):
            loader.load_state_dict(position)


class TrainLoaders(StageLoaders):
    """The training loader, or several loaders whose batches are combined into one.

    Attributes:
        num_batches: Batches of an epoch; infinite if the length is unknown.
        extra_batches: Batches that steps with ``dataloader_iter`` fetched beyond one per step.
    """

    def __init__(self, run: RunState, combined: CombinedLoader) -> None:
        super().__init__(run, combined, "train")
        self.num_batches = self.count_batches()
        self.extra_batches = 0
        self._num_given = 0
        # One batch is read early from a loader without a length, to know which batch is the last.
        self._following: Any = _END
        for loader in self.resumable:
            loader.is_read_ahead = self.num_batches == math.inf

    def start(self, max_batches: int | float = math.inf) -> None:
        """Start the iterator of an epoch, or continue an epoch with its next batch."""
        self._num_given, self._following = self.run.progress.batches_done + self.extra_batches, _END
        super().start(max_batches)

    def make_iterator(self) -> Iterator[Any]:
        if self.as_given is self.loaders[0]:
            # Bypass CombinedLoader, which adds some microseconds to each batch.
            return iter(self.resumable[0])
        return (batch for batch, _, _ in self.combined)

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Return an iterator of (batch on the device, whether this is the last batch)."""
        transfer, batches = make_transfer(self.run), self.raw_batches()
        if transfer is None:
            return batches
        return ((transfer(batch, 0), is_last) for batch, is_last in batches)

    def raw_batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield each batch, and whether the batch is the last one of the epoch."""
        if self.num_batches == math.inf:
            yield from self._batches_of_unknown_length()
            return
        action = "[_TrainingEpochLoop].train_dataloader_next"
        fetch = self.run.hooks.with_profiler(action, next)
        for index in range(self._num_given, int(self.num_batches)):
            try:
                batch = fetch(self._iterator)
            except StopIteration:
                return
            self._num_given = index + 1
            yield batch, index + 1 == self.num_batches

    def _batches_of_unknown_length(self) -> Iterator[tuple[Any, bool]]:
        self._following = next(self._iterator, _END)
        while self._following is not _END:
            batch: Any = self._following
            self._following = next(self._iterator, _END)
            self._num_given += 1
            yield batch, self._following is _END

    def state_dict(self) -> dict[str, Any]:
        progress, dropped = self.run.progress.state_dict(), 0
        if progress["is_in_epoch"]:
            # A resumed run reads the batches of an unfinished accumulation window again.
            dropped = self._num_given - progress["batches_done"] - self.extra_batches
            if self._following is not _END:
                dropped += 1
        # Also save the position of an iterator that was created but has not read a batch yet.
        is_in_pass = progress["is_in_epoch"] or not self.is_used
        positions = [loader.state_dict(is_in_pass, dropped) for loader in self.resumable]
        return {
            "loaded_in_epoch": self.loaded_in_epoch,
            "extra_batches": self.extra_batches,
            "loaders": positions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["loaders"]) != len(self.resumable):
            raise CheckpointError(
                f"resume: got the positions of {len(state['loaders'])} training loaders, expected"
                f" {len(self.resumable)}. Give the loaders that the run was started with, or use load=."
            )
        super().load_state_dict(state)
        self.extra_batches = state["extra_batches"]

    def check_empty_pass(self) -> None:
        """Raise an error if the loader yielded no batch, and cannot yield one in a later epoch."""
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

    def batches(self, max_batches: int | float = math.inf) -> Iterator[tuple[Any, int, int]]:
        """Return an iterator of (batch on the device, batch_idx, dataloader_idx)."""
        transfer, batches = make_transfer(self.run), self.raw_batches(max_batches)
        if transfer is None:
            return batches
        return ((transfer(item[0], item[2]), item[1], item[2]) for item in batches)

    def raw_batches(self, max_batches: int | float = math.inf) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx)."""
        loop = "_PredictionLoop" if self.stage == "predict" else "_EvaluationLoop"
        fetch = self.run.hooks.with_profiler(f"[{loop}].{self.stage}_next", next)
        num_left = self.count_batches(max_batches)
        # Stop at the limit, because CombinedLoader applies limits only in sequential mode.
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
        """Return the sample indices of a predicted batch; empty for loaders without indices."""
        sampler = getattr(self.loaders[dataloader_idx], "batch_sampler", None)
        seen = sampler.seen if isinstance(sampler, TrackingBatchSampler) else []
        return seen[batch_idx] if batch_idx < len(seen) else []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loaders between two epochs."""
        positions = [loader.state_dict() for loader in self.resumable]
        return {"loaded_in_epoch": self.loaded_in_epoch, "loaders": positions}


# Shapes and lengths


def combine_loaders(source: Any, mode: Literal["max_size_cycle", "sequential"]) -> CombinedLoader:
    """Return a CombinedLoader around the given loaders, or the CombinedLoader that was given.

    A list of loaders counts as several loaders. A list of batches counts as one loader.
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
    """Return the number of batches to read from a loader; infinite if the length is unknown."""
    known_length = sized_len(loader)
    length = math.inf if known_length is None else known_length
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
    """Raise an error if processes have different numbers of batches and would wait forever."""
    for found in zip(*gather_objects(run, lengths), strict=False):
        is_strict = run.stage == "fit" or 0 in found
        if is_strict and len(set(found)) > 1:
            raise ConfigurationError(
                f"{stage}_dataloader: got {list(found)} batches by process, expected one number. Write"
                f" limit_{stage}_batches={min(found)}, or leave the sampler out."
            )


def make_transfer(run: RunState) -> Callable[[Any, int], Any] | None:
    """Return a function that moves a batch to the device, or None if batches stay as they are."""
    owners = [part for part in (run.datamodule, run.module) if part is not None]
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
