"""Read a limited number of batches from loaders and move each batch to the device."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, count, islice, repeat
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..distributed.launch import gather_objects
from ..errors import CheckpointError, ConfigurationError, ConfigurationTypeError, describe
from ..lightning_compat.overrides import has_state, is_instance_of, overridden
from ..lightning_compat.private import combined_mode
from ..rng_state import capture_rng_state, restore_rng_state, unchanged_rng_state
from .loader_parts import samplers_of
from .loader_state import (
    END,
    STICKY_POSITION,
    ResumableLoader,
    describe_iterators,
    make_restart_error,
)
from .samplers import Predictions, prepare_loader
from .tensor_loader import TensorLoader

if TYPE_CHECKING:
    from ..training.run import Run

# The names under which Lightning's profilers record the time spent reading a batch.
_ACTIONS = {
    "train": "[_TrainingEpochLoop].train_dataloader_next",
    "predict": "[_PredictionLoop].predict_next",
}
_IS_CPU = attrgetter("is_cpu")
_IMMUTABLE_TYPES = frozenset([type(None), bool, int, float, str, bytes, range])
# A list of objects that have one of these attributes is a list of loaders.
_NAMES_IN_LOADERS = ("batch_size", "dataset", "sampler", "batch_sampler", "__next__")
_USED_UP = (
    "An iterator yields its batches only once. Pass an object that can be iterated over several"
    " times, such as a DataLoader or a list."
)


class DataConnector:
    """Creates the loaders of a run.

    Attributes:
        given: The loaders that the user passed, keyed by stage: "train", "val", "test", "predict".
        source: The datamodule or module with methods such as ``train_dataloader()``.
        created: The current loaders, keyed by "train" and "evaluation".
    """

    is_per_process = True

    def __init__(self, run: Run) -> None:
        self.run, self.given, self.source = run, run.plan.loaders, run.plan.source
        self.created: dict[str, StageLoaders] = {}
        self.predictions = Predictions()
        # The number of seconds that the run has waited for batches, over all stages.
        self.seconds_waited = 0.0
        self._is_train_started = self._is_epoch_set = False
        # Maps each stage to the RNG states and the model attributes that were recorded just before
        # the stage's loaders were created.
        self._loads: dict[str, Any] = {}
        self._restored_loads: dict[str, Any] = {}

    @property
    def train(self) -> StageLoaders:
        return self.created["train"]

    @property
    def eval_loaders(self) -> StageLoaders:
        return self.created["evaluation"]

    def has_loader(self, stage: str) -> bool:
        return has_loader(self.given, self.source, stage)

    @cached_property
    def common_seed(self) -> int:
        """The seed for shuffling in all processes. A resumed run uses the saved seed."""
        saved = self.run.plan.start.sampler_seed
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if saved is None else saved

    def request(self, stage: str) -> Any:
        """Return the user's loaders, or those that a hook such as train_dataloader() returns."""
        if stage in self.given:
            # The loaders that the user passes are checked before the run starts.
            return self.given[stage]
        name, provider, hooks = f"{stage}_dataloader", self.source, self.run.hooks
        call = hooks.call_datamodule if provider is self.run.datamodule else hooks.call_module
        source = call(name)
        where = f"returned from `{type(provider).__name__}.{name}()`"
        found = f"{name}: got {{}}, expected a loader (an iterable of batches)."
        check_loaders(source, f"An invalid dataloader was {where}. {found}")
        return source

    def _is_load_due(self, kind: str) -> bool:
        if kind not in self.created:
            return True
        every = self.run.config.reload_dataloaders_every_n_epochs
        epochs = self.run.progress.epochs_done - self.created[kind].loaded_in_epoch
        return every > 0 and epochs >= every

    def _create(self, kind: str, stage: str) -> StageLoaders:
        with self._state_of_load(stage):
            combined = combine_loaders(self.request(stage), is_training=kind == "train")
            if stage == "predict" and combined_mode(combined) != "sequential":
                raise ConfigurationError(
                    '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")`'
                    ' mode. Write CombinedLoader(loaders, "sequential"), or call predict once per'
                    " loader."
                )
            if stage == "val" and self.run.stage == "fit":
                self._check_validation_loaders(combined.flattened)
                if not self.run.is_lightning_module:
                    check_loader_names(combined)
            for loader in combined.flattened if self.run.is_lightning_module else ():
                # Like Trainer, call iter(loader) here, because some loaders draw random numbers in
                # __iter__.
                if not isinstance(loader, DataLoader | TensorLoader):
                    iter(loader)
        loaders = StageLoaders(self.run, stage, combined, previous=self.created.get(kind))
        self.created[kind] = loaders
        return loaders

    def _check_validation_loaders(self, loaders: list[Any]) -> None:
        """Raise an error for iterators such as generators, which the sanity check would use up."""
        config = self.run.config
        is_limited = config.limit_val_batches != 1.0 or config.reload_dataloaders_every_n_epochs
        if is_limited or config.num_sanity_val_steps == 0:
            return
        for loader in loaders:
            # The classes of Python's own iterators, such as generators and map objects, are defined
            # in builtins or itertools.
            is_built_in = type(loader).__module__ in ("builtins", "itertools")
            if is_built_in and isinstance(loader, Iterator):
                raise ConfigurationTypeError(
                    f"val_dataloaders: got a {type(loader).__name__}, which can be read only once,"
                    " expected a loader that can be read in every validation. Pass a DataLoader or"
                    " a list."
                )

    @contextmanager
    def _state_of_load(self, stage: str) -> Iterator[None]:
        """Before a hook creates loaders, record the state on which the loaders may depend.

        The hook may split the data at random. A resumed run restores the recorded state.
        """
        if stage in self.given:
            yield
            return
        saved = None if stage in self._loads else self._saved_loads().get(stage)
        plain_state = self.run.plain_state
        if saved is None:
            model = plain_state.state_dict(is_small=True)
            self._loads[stage] = {"rng": capture_rng_state(), "model": model}
            yield
            return
        self._loads[stage] = saved
        with unchanged_rng_state():
            restore_rng_state(saved["rng"])
            plain_state.load_state_dict(saved["model"])
            yield

    def _saved_state(self) -> dict[str, Any]:
        """Return this process's saved state, or {} if it does not exist or was already restored."""
        start = self.run.plan.start
        state: dict[str, Any] = start.state_of_process(self.run.fabric.global_rank).get("data", {})
        return state

    def _saved_loads(self) -> dict[str, Any]:
        """Return the states that the saved run recorded just before it created its loaders."""
        return self._restored_loads or self._saved_state().get("loads", {})

    def setup_train_loader(self) -> bool:
        """Create the training loader if it does not exist yet, or if a reload is due.

        Returns:
            Whether a loader was created.
        """
        run = self.run
        if run.config.limit_train_batches == 0 or not self._is_load_due("train"):
            return False
        self._create("train", "train")
        run.progress.count_train_batches(self.train.num_batches)
        every = run.config.log_every_n_steps or 0
        has_other_logger = len(run.loggers.csv_loggers) < len(run.loop.loggers)
        if self.train.num_batches < every and has_other_logger and not run.config.fast_dev_run:
            run.warn_once(
                f"The number of training batches ({self.train.num_batches}) is smaller than the"
                f" logging interval {run.plan.loop_name}(log_every_n_steps={every}). Set a lower"
                " value for log_every_n_steps if you want to see logs for the training epoch.",
                category=PossibleUserWarning,
            )
        is_resumed, restarts_epoch = run.plan.start.is_pending, run.plan.start.restarts_epoch
        is_first = run.progress.epochs_done == 0
        if is_resumed and is_first and run.progress.is_in_epoch:
            self._create_iterators_early()
        if not is_resumed or (restarts_epoch is not None and not self.stateful_loaders()):
            if not is_resumed and is_first:
                self._set_epoch_early()
            # Like Trainer, start the first epoch's iterator as soon as the loader is created.
            self.train.start()
            # Trainer calls iter(loader) a second time if it reloads a loader after the first epoch,
            # or resumes within an epoch. In this case, start_train_batches() makes the second call.
            self._is_train_started = (is_first or is_resumed) and not restarts_epoch
        return True

    def _create_iterators_early(self) -> None:
        """Create the iterators of a resumed first epoch before on_train_start, as in a new run."""
        saved = self._saved_state().get("train")
        if saved is None:
            return
        self.train.load_state_dict(saved)
        with unchanged_rng_state():
            self._set_epoch_early()
            for loader in self.train.resumable:
                loader.create_iterator_early()

    def _set_epoch_early(self) -> None:
        # Unlike Trainer, a hand-written loop calls set_epoch() before iter(loader).
        if not self.run.is_lightning_module:
            self.set_train_epoch()
            self._is_epoch_set = True

    def mark_changes(self) -> None:
        for loaders in self.created.values():
            for loader in loaders.resumable:
                loader.mark_changes()

    def set_train_epoch(self) -> None:
        """Call set_epoch() on the training samplers, unless it was called for this epoch."""
        if not self._is_epoch_set:
            self.train.set_epoch()
        self._is_epoch_set = False

    def start_train_batches(self) -> None:
        """Create the iterator of a training epoch, unless it already exists."""
        if not self._is_train_started:
            self.train.start()
        self._is_train_started = False

    def setup_eval_loaders(self, stage: str) -> None:
        """Create the loaders for an evaluation if they do not exist yet, or if a reload is due."""
        run = self.run
        if not self._is_load_due("evaluation"):
            return
        if "evaluation" in self.created:
            # Like Trainer, count the steps of logged evaluation metrics from 0 again after a
            # reload.
            run.progress.restart_eval_steps()
        loaders = self._create("evaluation", stage)
        if run.loop.sanity_checking and run.config.check_val_every_n_epoch not in (None, 1):
            # With check_val_every_n_epoch > 1, Trainer reloads loaders after the sanity check.
            loaders.loaded_in_epoch = -math.inf

    def setup_val_loaders(self) -> None:
        """Create the validation loaders before the first epoch, because progress bars need them."""
        # In a resumed run, an additional call to val_dataloader() might draw random numbers, which
        # would change the results. Call it here only if the saved run had already called it.
        is_early = "val" in self.given or "val" in self._saved_loads()
        if is_early or self.run.plan.start.own.get("writer") != "FabricLoop":
            self._create_val_loaders()

    def _create_val_loaders(self) -> None:
        with self.run.progress.in_stage("validate"):
            self.setup_eval_loaders("val")

    def teardown(self) -> None:
        for loaders in self.created.values():
            loaders.close()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"loads": dict(self._loads)}
        if "train" in self.created:
            state["train"] = self.train.state_dict()
        val = self.created.get("evaluation")
        if val is not None and any(loader.is_used for loader in val.resumable):
            state["val"] = val.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored_loads = state["loads"]
        if "train" in self.created and "train" in state:
            self.train.load_state_dict(state["train"])
        if "val" in state and self.has_loader("val"):
            if "evaluation" not in self.created:
                self._create_val_loaders()
            self.eval_loaders.load_state_dict(state["val"])

    def check_iterators(self, names: list[str]) -> None:
        """Raise an error if a MiniLoop checkpoint lists iterators whose positions are not saved."""
        if names:
            raise make_restart_error(describe_iterators(self.train.loaders[0], names))

    def stateful_loaders(self) -> list[Any]:
        """Return the training loaders whose states are part of a Trainer checkpoint."""
        loaders = self.train.loaders if "train" in self.created else []
        return list(filter(has_state, loaders))

    def load_loader_states(self, states: list[Any]) -> None:
        """Restore the states of training loaders from a Trainer checkpoint."""
        for loader, state in zip(self.stateful_loaders(), states, strict=False):
            loader.load_state_dict(state)
            # After load_state_dict(), a loader's first iterator continues the saved epoch. Create
            # and discard this iterator, so that the next iterator starts a new epoch.
            iter(loader)


def has_loader(given: Mapping[str, Any], source: Any, stage: str) -> bool:
    """Return whether the user passed loaders for a stage, or defined a method that returns them."""
    return stage in given or overridden(source, f"{stage}_dataloader") is not None


def check_loaders(source: Any, found: str) -> None:
    """Raise an error if a loader is not an iterable of batches.

    Args:
        found: The start of the error message, such as "val_dataloaders: got {}, expected a loader".
            A description of the loader replaces {}.
    """
    loaders = combine_loaders(source).flattened
    if isinstance(source, list | tuple) and loaders and all(map(_could_be_batch, loaders)):
        name = type(loaders[0]).__name__
        raise ConfigurationTypeError(
            f"{found.format(f'a {type(source).__name__} of {name} objects')} A {name} could be a"
            " batch or a loader. If the objects are batches, pass DataLoader(batches,"
            " batch_size=None). If they are loaders, pass CombinedLoader(loaders, mode), with the"
            ' mode "max_size_cycle" for training and "sequential" for all other stages.'
        )
    for loader in loaders:
        problem = find_problem(loader)
        if problem:
            raise ConfigurationTypeError(f"{found.format(describe(loader))} {problem}")


def check_loader_names(loaders: Any) -> None:
    """Raise an error if a key of a validation loader would give two metrics the same name."""
    names = find_loader_names(combine_loaders(loaders))
    doubled = [name for name in names if names.count(name) > 1]
    if "train" in names or doubled:
        name, source = (doubled[0], "another loader's") if doubled else ("train", "the training")
        raise ConfigurationError(
            f"val_dataloaders: got the key {name!r}, expected a different key, because {source}"
            f" loss is also named {name}_loss. For example, write {name + '_2'!r}."
        )


def find_loader_names(combined: CombinedLoader) -> list[str]:
    """Return the keys of a dict of loaders, or [] if the loaders are not in a dict."""
    source = combined.iterables
    is_flat = isinstance(source, Mapping) and len(source) == len(combined.flattened)
    return [str(name) for name in source] if is_flat else []


def find_problem(loader: Any) -> str:
    """Return advice for the user if an object does not yield batches, or "" if it does."""
    parts = loader.values() if isinstance(loader, Mapping) else loader
    holds_arrays = isinstance(loader, Mapping | tuple) and loader and all(map(_is_array, parts))
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if isinstance(loader, type | str | bytes) or not is_iterable:
        return "Pass a DataLoader, such as DataLoader(dataset, batch_size=32)."
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        return "A dataset yields single samples. Pass DataLoader(dataset, batch_size=32) instead."
    if holds_arrays or _is_array(loader) or hasattr(loader, "iloc"):
        package = __name__.removesuffix(".data.loaders")
        return f"Import TensorLoader from {package} and pass TensorLoader(x, y, batch_size=32)."
    return ""


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__array_interface__")


class StageLoaders:
    """The loaders of a stage, adapted to the number of processes and to the run's options.

    Args:
        previous: The stage's loaders from before a reload, or None if there were none.

    Attributes:
        loaders: The loaders as a flat list.
        as_given: The loaders in the structure that the user passed, such as a dict.
        resumable: A ResumableLoader for each loader.
        limits: The number of batches to read from each loader.
        num_batches: The number of batches in an epoch, or infinity if it is unknown.
        names: The keys of a dict of loaders, or an empty list if the loaders are not in a dict.
        has_several: Whether evaluation steps and hooks get a ``dataloader_idx``.
    """

    def __init__(
        self, run: Run, stage: str, combined: CombinedLoader, previous: StageLoaders | None = None
    ) -> None:
        self.run, self.stage, self._mode = run, stage, combined_mode(combined)
        self.loaders = [prepare_loader(run, loader, stage) for loader in combined.flattened]
        self.as_given: Any = with_loaders(combined, self.loaders).iterables
        limit = getattr(run.config, f"limit_{stage}_batches")
        name = run.plan.loop_name
        self.limits = [count_batches(loader, limit, stage, name) for loader in self.loaders]
        self.num_batches = self.count_batches()
        check_lengths(run, self.limits, stage)
        # If a reload returns the same loader, keep its persistent workers.
        used = previous.resumable if previous is not None else []
        known: dict[int, Any] = {id(part.loader): part for part in used}
        # Look up run.plain_state in each call, because the attribute is replaced before training.
        find_state = (lambda: run.plain_state) if stage == "train" else None
        self.resumable: list[ResumableLoader] = [
            known.pop(id(x), None) or ResumableLoader(x, run.stage == "fit", find_state)
            for x in self.loaders
        ]
        for part in self.resumable:
            # A reloaded loader may have a new length.
            part.length = sized_len(part.loader)
        self._combined = with_loaders(combined, self.resumable)
        self.names = find_loader_names(combined)
        self.has_several = len(self.loaders) > 1 and self._mode == "sequential"
        # If loaders are never reloaded, always set loaded_in_epoch to 0, so that checkpoints of
        # resumed and uninterrupted runs contain the same value.
        has_reloads = run.config.reload_dataloaders_every_n_epochs > 0
        self.loaded_in_epoch: float = run.progress.epochs_done if has_reloads else 0
        self._num_given = 0
        self.iterator: Any = None
        # If a training loader has no length, prefetch the next batch to detect the last batch.
        is_training = stage == "train"
        self._is_prefetching = is_training and self.num_batches == math.inf
        # Without a check before each batch, a process that has batches left would wait forever for
        # a process that has none left.
        has_stream = any(sized_len(loader) is None for loader in self.loaders)
        self._has_uneven_end = is_training and run.fabric.world_size > 1 and has_stream
        self._prefetched: Any = END
        # Checkpoints contain the loader positions and the RNG state from before the last prefetch.
        self._before_prefetch: Any = None
        self._restored_rng: dict[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        """Return whether the current training batch is the last one of the epoch."""
        if self._is_prefetching:
            return self._prefetched is END
        return self._num_given == self.num_batches

    def count_batches(self, max_batches: int | float = math.inf) -> int | float:
        """Count CombinedLoader's batches, with at most ``max_batches`` from each loader."""
        limits = [min(limit, max_batches) for limit in self.limits]
        if self._mode == "sequential":
            return sum(limits)
        return min(limits) if self._mode == "min_size" else max(limits)

    def set_epoch(self) -> None:
        """Set the epoch of every sampler, so that the order differs from epoch to epoch."""
        for loader, resumable in zip(self.loaders, self.resumable, strict=True):
            if self.stage == "train":
                resumable.prepare_set_epoch()
            for part in (loader, *samplers_of(loader)):
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(self.run.progress.epochs_done)

    def start(self, max_batches: int | float = math.inf) -> None:
        """Create the loaders' iterators."""
        is_training = self.stage == "train"
        self._num_given = self.run.progress.batches_done if is_training else 0
        self._prefetched = END
        for loader in self.resumable:
            loader.passes = 0
        if self.as_given is self.loaders[0]:
            # Bypass CombinedLoader, which costs a few microseconds per batch.
            self.iterator = zip(self.resumable[0], count(), repeat(0), strict=False)
        else:
            self._combined.limits = [min(limit, max_batches) for limit in self.limits]
            self.iterator = (item for item in self._combined)

    def batches(self, max_batches: int | float = math.inf) -> Iterator[tuple[Any, int, int]]:
        """Yield each batch on the device, together with its batch_idx and dataloader_idx."""
        items, num_batches, data = self.iterator, self.count_batches(max_batches), self.run.data
        transfer = make_transfer(self.run, self.loaders)
        if self.run.hooks.profiler is not None:
            action = _ACTIONS.get(self.stage, f"[_EvaluationLoop].{self.stage}_next")
            items = iter(partial(self.run.hooks.with_profiler(action, next), items, END), END)
        if self._has_uneven_end:
            items = self._until_first_end(items)
        if self._is_prefetching:
            items = self._with_prefetch(items)
        # CombinedLoader applies options such as limit_train_batches only in sequential mode. Apply
        # them in all modes with islice.
        most = None if num_batches == math.inf else int(num_batches) - self._num_given
        now = perf_counter
        requested = now()
        for item in islice(items, most):
            data.seconds_waited += now() - requested
            self._num_given += 1
            if transfer is None:
                yield item
            else:
                batch, batch_idx, dataloader_idx = item
                yield transfer(batch, dataloader_idx), batch_idx, dataloader_idx
            # Delete the reference, so that zip() can reuse its tuple. A new tuple would keep a
            # second batch in memory.
            del item
            requested = now()
        self.read_to_end()
        self.end_pass()
        self._check_empty_loaders()

    def _until_first_end(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield batches until one of the processes has no batches left."""
        for item in chain(items, repeat(END)):
            is_end = item is END
            has_end, has_item = self.run.signals.find_largest([int(is_end), int(not is_end)])
            if not has_end:
                yield item
                continue
            if has_item:
                self.run.warn_once(
                    "train_dataloaders: the processes have different numbers of batches. Each epoch"
                    " ends as soon as one process has no batches left."
                )
            return

    def prefetch_saved(self) -> bool:
        """In a resumed epoch, prefetch the batch that the saved run had prefetched.

        Before the prefetch, restore the dataset again. The model or the datamodule may refer to the
        dataset, so restoring their attributes may have changed it.
        """
        if self._restored_rng is None or self._has_uneven_end:
            return False
        for loader in self.resumable:
            loader.restore_again()
        self._prefetch(self.iterator)
        return True

    def _with_prefetch(self, items: Iterator[Any]) -> Iterator[Any]:
        if self._prefetched is END:
            self._prefetch(items)
        while self._prefetched is not END:
            item = self._prefetched
            self._prefetch(items)
            yield item

    def _prefetch(self, items: Iterator[Any]) -> None:
        """Prefetch one batch. In a resumed run, the first prefetch uses the saved RNG state."""
        restored, self._restored_rng = self._restored_rng, None
        positions = [loader.state_dict(True, is_per_batch=True) for loader in self.resumable]
        self._before_prefetch = positions, restored or capture_rng_state()
        if restored is None:
            self._prefetched = next(items, END)
            return
        with unchanged_rng_state():
            restore_rng_state(restored)
            self._prefetched = next(items, END)

    def _check_empty_loaders(self) -> None:
        for limit, loader in zip(self.limits, self.resumable, strict=True):
            if loader.batches or not limit:
                continue
            name = type(loader.loader).__name__
            message = f"The {self.stage} loader ({name}) yielded no batches in this epoch. "
            message += STICKY_POSITION if loader.is_sticky else _USED_UP
            is_used_up = isinstance(loader.loader, Iterator) or loader.is_sticky
            if self.stage == "train" and (is_used_up or self.run.stop.max_epochs == -1):
                raise ConfigurationError(message)
            self.run.warn_once(message)

    def read_to_end(self) -> None:
        """After the last batch, request one more item, so that the loaders' remaining code runs.

        A hand-written loop also runs this code. Trainer does not if the loader has a length.
        """
        is_combined = len(self.loaders) > 1 and self._mode != "sequential"
        if not self.run.is_lightning_module and not is_combined:
            for loader in self.resumable:
                loader.read_to_end()

    def end_pass(self) -> None:
        for loader in self.resumable:
            loader.end_pass()

    def close(self) -> None:
        """Shut down the workers of all loaders and free the last batch."""
        self.iterator = None
        for loader in self.resumable:
            loader.close()
        self._combined.flattened = self.loaders
        self._combined.reset()

    def state_dict(self) -> dict[str, Any]:
        progress, dropped = self.run.progress.state_dict(), 0
        is_in_epoch = self.stage == "train" and progress["is_in_epoch"]
        if is_in_epoch:
            # If save_checkpoint() is called during a batch, a resumed run repeats all batches since
            # the last optimizer step.
            dropped = self._num_given - progress["batches_done"]
        if is_in_epoch and self._is_prefetching and (dropped or self._prefetched is not END):
            positions, rng_state = self._before_prefetch
            pairs = zip(self.resumable, positions, strict=True)
            positions = [loader.with_attributes(position) for loader, position in pairs]
        else:
            positions = [loader.state_dict(is_in_epoch) for loader in self.resumable]
            rng_state = self._restored_rng
        for loader in self.resumable if self.stage == "train" else ():
            if loader.restart_problem:
                advice = "Otherwise, this run cannot be resumed after its first epoch."
                self.run.warn_once(f"train_dataloaders: {loader.restart_problem}. {advice}")
        are_known = True
        if dropped:
            # Move the positions back by these batches. If one of several loaders has ended or
            # restarted in this epoch, its earlier position is unknown, and resuming raises an
            # error.
            are_known = len(positions) == 1 or all(map(self._is_in_first_pass, positions))
            self._warn_of_repeated_batches()
            positions = [step_back(position, dropped) for position in positions]
        return {
            "loaded_in_epoch": self.loaded_in_epoch,
            "loaders": positions,
            "are_positions_known": are_known,
            "rng_before_following": rng_state,
        }

    def _is_in_first_pass(self, position: dict[str, Any]) -> bool:
        is_usual = position["batches"] in (0, self._num_given) and position["passes"] <= 1
        return is_usual and not position["is_finished"]

    def _warn_of_repeated_batches(self) -> None:
        self.run.warn_once(
            "save_checkpoint: called during a batch. A resumed run repeats the batches since the"
            " last optimizer step, but draws different random numbers for dropout and for random"
            " samples. To resume exactly, call save_checkpoint() in on_train_batch_end."
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.stage == "train" and len(state["loaders"]) != len(self.resumable):
            raise CheckpointError(
                f"resume: the number of training loaders is {len(self.resumable)}, but was"
                f" {len(state['loaders'])} in the saved run. Pass the same loaders as in the saved"
                " run, or use load= to start a new run from the weights."
            )
        if not state["are_positions_known"]:
            raise CheckpointError(
                "resume: the checkpoint was saved during a batch, after one of several loaders had"
                " yielded its last batch. A run cannot resume from this position. Call"
                " save_checkpoint() in on_train_batch_end, or use load= to start a new run from the"
                " weights."
            )
        self.loaded_in_epoch = state["loaded_in_epoch"]
        self._restored_rng = state["rng_before_following"]
        for loader, position in zip(self.resumable, state["loaders"], strict=False):
            loader.load_state_dict(position)


def step_back(position: dict[str, Any], dropped: int) -> dict[str, Any]:
    """Move a loader's saved position back by a number of batches."""
    # For a finished loader, also count the last call to next(), which yielded no batch.
    done = max(0, position["batches"] + position["is_finished"] - dropped)
    # A resumed run restarts the samplers at the start of the epoch, so omit their later states.
    # If the loader cannot skip batches by index, omit the dataset's state for the same reason.
    repeated = ("order",) if position["is_indexed"] else ("order", "samples")
    kept = {name: value for name, value in position.items() if name not in repeated}
    return {**kept, "batches": done, "is_finished": False}


# Creating CombinedLoaders and counting batches


def combine_loaders(source: Any, is_training: bool = False) -> CombinedLoader:
    """Wrap one or more loaders in a CombinedLoader, unless ``source`` is a CombinedLoader."""
    if is_instance_of(source, "CombinedLoader"):
        return source
    mode: Any = "max_size_cycle" if is_training else "sequential"
    with warnings.catch_warnings():
        # Hide torch's warning about a deprecated class that CombinedLoader uses.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        combined = CombinedLoader(source, mode)
    parts = combined.flattened
    # Treat a list of loaders as several loaders, but a list of batches as one loader.
    is_list = isinstance(source, list | tuple) and all(map(_can_only_be_batch, parts))
    if is_list or any(isinstance(part, Tensor | np.ndarray) for part in parts):
        return with_loaders(CombinedLoader(None, mode), [source])
    return combined


def _can_only_be_batch(value: Any) -> bool:
    """Return whether a list item must be a batch, because it cannot be a loader."""
    is_plain = value is None or isinstance(value, bool | int | float | str | bytes | type)
    # Batches of TensorDict and PyTorch Geometric also have the attribute batch_size.
    is_loader = any(hasattr(value, name) for name in _NAMES_IN_LOADERS if name != "batch_size")
    if is_plain or is_loader or isinstance(value, DataLoader | Dataset | TensorLoader):
        return False
    if isinstance(value, Mapping) and any(map(_is_array, value.values())):
        return True
    is_iterable = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    # A to() method marks a batch, because only batches are moved to the device.
    return not is_iterable or callable(getattr(value, "to", None))


def _could_be_batch(value: Any) -> bool:
    """Return whether an iterable object contains tensors but lacks the attributes of a loader."""
    if isinstance(value, Dataset) or any(hasattr(value, name) for name in _NAMES_IN_LOADERS):
        return False
    parts = list(getattr(value, "__dict__", {}).values())
    items = [item for part in parts if type(part) is dict for item in part.values()]
    return any(map(_is_array, [*parts, *items]))


def with_loaders(combined: CombinedLoader, loaders: list[Any]) -> CombinedLoader:
    """Return a copy of a CombinedLoader with different loaders."""
    other = copy.copy(combined)
    other.flattened = loaders
    return other


def count_batches(loader: Any, limit: int | float, stage: str, loop_name: str) -> int | float:
    """Return the number of batches to read from a loader, or infinity if its length is unknown."""
    known_length = sized_len(loader)
    length = math.inf if known_length is None else known_length
    if length == 0:
        warnings.warn(
            f"Total length of `{type(loader).__name__}` across ranks is zero. Please make sure this"
            " was your intention.",
            stacklevel=2,
        )
        return 0
    if isinstance(limit, int):
        return min(length, limit)
    if length == math.inf:
        if limit in (0.0, 1.0):
            return length if limit else 0
        raise ConfigurationError(
            f"When using an `IterableDataset`, `{loop_name}(limit_{stage}_batches)` must be `1.0`"
            f" or an int. An int specifies `num_{stage}_batches` to use."
        )
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise ConfigurationError(
            f"You requested to check {limit} of the `{stage}_dataloader` but {limit} * {length} <"
            f" 1. Please increase the `limit_{stage}_batches` argument. Try at least"
            f" `limit_{stage}_batches={1.0 / length}`"
        )
    return batches


def check_lengths(run: Run, lengths: list[int | float], stage: str) -> None:
    """Raise an error if the number of batches differs between processes, to avoid deadlocks."""
    for found in zip(*gather_objects(run, lengths), strict=False):
        is_strict = run.stage == "fit" or 0 in found
        if is_strict and len(set(found)) > 1:
            raise ConfigurationError(
                f"{stage}_dataloader: got {list(found)} batches in the processes, expected the same"
                f" number in each. Write limit_{stage}_batches={min(found)}, or do not pass a"
                " sampler."
            )


def make_transfer(run: Run, loaders: list[Any]) -> Callable[[Any, int], Any] | None:
    """Return a function that moves a batch to the device, or None if nothing has to be done."""
    # Like Trainer, use a datamodule's transfer hooks only if the datamodule provides the loaders.
    datamodule = run.datamodule if run.data.source is run.datamodule else None

    def find_hook(name: str) -> Callable | None:
        of_datamodule, of_module = overridden(datamodule, name), overridden(run.module, name)
        if datamodule is not None and of_module is not None:
            both = "both `LightningModule` and `LightningDataModule`."
            text = "`LightningModule` but have passed in a `LightningDataModule`."
            used = "LightningModule" if of_datamodule is None else "LightningDataModule"
            run.warn_once(
                f"You have overridden `{name}` in {text if of_datamodule is None else both} It will"
                f" use the implementation from `{used}` instance."
            )
        return of_datamodule or of_module

    before = find_hook("on_before_batch_transfer")
    move = find_hook("transfer_batch_to_device")
    after = find_hook("on_after_batch_transfer")
    device, converts_dtype = run.fabric.device, run.steps.converts_dtype
    if move is None and device.type != "cpu":
        move = move_to_device
    elif move is None and not all(map(creates_batches_of_tensors, loaders)):
        move = partial(move_to_cpu, run)
    if not (converts_dtype or before or move or after):
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if converts_dtype:
            batch = run.fabric.strategy.precision.convert_input(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, device, dataloader_idx)
        return batch if after is None else after(batch, dataloader_idx)

    action = f"[Strategy]{type(run.fabric.strategy).__name__}.batch_to_device"
    return run.hooks.with_profiler(action, transfer)


def creates_batches_of_tensors(loader: Any) -> bool:
    """Return whether each batch is a new container of tensors, which need not be copied."""
    is_default = type(loader) is DataLoader and loader.collate_fn is default_collate
    return is_default or type(loader) is TensorLoader


def move_to_device(batch: Any, device: Any, dataloader_idx: int) -> Any:
    return move_data_to_device(batch, device)


def move_to_cpu(run: Run, batch: Any, device: Any, dataloader_idx: int) -> Any:
    """Copy a batch's containers as Trainer does, and call ``to(device)`` on the objects in them."""
    # A fast path for the usual batch, which is a tuple or a list of tensors on the CPU.
    kind = type(batch)
    if kind in (tuple, list) and {*map(type, batch)} == {Tensor} and all(map(_IS_CPU, batch)):
        return batch if kind is tuple else list(batch)
    try:
        return copy_to_cpu(batch, device)
    except Exception as error:
        # On the CPU, a step can train even on a batch that cannot be copied, such as a dataclass
        # with frozen=True.
        run.warn_once(
            f"{run.stage}: got a batch that cannot be moved to a device"
            f" ({type(error).__name__}: {error}). The step gets the batch as the loader yielded it."
            " Change the loader to yield tensors in dicts, lists, tuples or dataclasses."
        )
        return batch


def copy_to_cpu(batch: Any, device: Any) -> Any:
    """Move a batch like move_data_to_device, but faster for the usual containers and values."""
    kind = type(batch)
    if kind is Tensor:
        return batch if batch.is_cpu else batch.to(device)
    if kind in _IMMUTABLE_TYPES:
        return batch
    if kind is dict:
        return {name: copy_to_cpu(part, device) for name, part in batch.items()}
    if kind in (list, tuple):
        return kind([copy_to_cpu(part, device) for part in batch])
    return move_data_to_device(batch, device)
