"""Where a run's batches come from, and the samplers that its loaders need."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities import suggested_max_num_workers
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..checkpoint.dataloader_state import has_state, samplers_of
from ..training.checks import check_loader, loader_argument
from ..training.hooks import overridden
from .distributed_samplers import remake_batch_sampler, share_samples, share_tensors, shares_of
from .loaders import EvalLoaders, TrackingBatchSampler, TrainLoaders, combine_loaders, with_loaders
from .tensor_loader import TensorLoader

if TYPE_CHECKING:
    from ..training.run_state import RunState


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
        self.train: TrainLoaders = None  # type: ignore[assignment]
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
            name, owner = f"{stage}_dataloader", self.source
            kind = "LightningDataModule" if owner is self.run.datamodule else "LightningModule"
            with self.run.hooks.profiled(f"[{kind}]{type(owner).__name__}.{name}"):
                source = self.run.hooks.inside(name, getattr(owner, name))()
            where = f"returned from `{type(owner).__name__}.{name}()`"
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
        self.train.set_batches_done(self.run.progress.batches_done)

    def train_batches(self) -> Iterator[tuple[Any, bool]]:
        """Return an iterator of (batch on the device, whether it is the last one)."""
        return self.train.batches(self.run.progress.batches_done)

    def setup_eval_loaders(self, stage: str) -> None:
        """Make the loaders of an evaluation, at first and whenever they are to be reloaded."""
        run, is_due, restored = self.run, self._should_reload(stage), self._restored_eval
        if self._eval_stage == stage and not is_due:
            return
        self._restored_eval = None
        if is_due:
            # A sanity check before an epoch that does not validate does not count as a load.
            every = run.config.check_val_every_n_epoch
            is_counted = not run.loop.sanity_checking or every in (None, 1)
            self._loaded_in_epoch[stage] = run.progress.epochs_done if is_counted else -math.inf
            if self.eval_loaders is not None or restored is not None:
                run.loggers.restart_evaluation_count()
        self._eval_stage = stage
        self.eval_loaders = EvalLoaders(run, self._prepare(stage, "sequential"), stage)
        if restored is not None and not is_due:
            self.eval_loaders.load_state_dict(restored)

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
        progress = self.run.progress.state_dict()
        val = self.eval_loaders.state_dict() if self._has_val_loaders() else self._restored_eval
        return {
            "loaded_in_epoch": dict(sorted(self._loaded_in_epoch.items())),
            "train": None if self.train is None else self.train.state_dict(progress),
            "val": val,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The loader that exists was made for this run. It is due again as it was before the resume.
        self._loaded_in_epoch.update(state["loaded_in_epoch"])
        if state["val"] is not None and self._has_val_loaders():
            self.eval_loaders.load_state_dict(state["val"])
        else:
            self._restored_eval = state["val"]
        if self.train is not None and state["train"] is not None:
            self.train.load_state_dict(state["train"], self.run.progress.is_in_epoch)

    def _has_val_loaders(self) -> bool:
        return self.eval_loaders is not None and self._eval_stage == "val"

    def loader_states(self) -> list[Any]:
        """Return the states of the training loaders with ``state_dict``, which Trainer saves, too."""
        if not self._stateful_loaders():
            return []
        positions = self.train.state_dict(self.run.progress.state_dict())["loaders"]
        pairs = zip(self.train.loaders, positions, strict=True)
        return [position["state"] for loader, position in pairs if has_state(loader)]

    def load_loader_states(self, states: list[Any]) -> None:
        """Restore the states that Trainer saved."""
        loaders = self._stateful_loaders()
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

    def _stateful_loaders(self) -> list[Any]:
        return [] if self.train is None else list(filter(has_state, self.train.loaders))


def prepare_loader(run: RunState, loader: Any, stage: str) -> Any:
    """Return a loader with the sampler that this run needs."""
    has_shares = shares_of(run)[0] > 1
    if callable(getattr(loader, "for_rank", None)):
        return share_tensors(run, loader, stage) if has_shares else loader
    if not isinstance(loader, DataLoader):
        return loader
    if run.config.overfit_batches and run.stage == "fit":
        loader = _without_shuffling(run, loader, stage)
    warn_of_loader(run, loader, stage)
    if os.environ.get("PL_SEED_WORKERS") == "1" and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=run.fabric.global_rank)
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    is_distributed = isinstance(loader.sampler, DistributedSampler)
    if has_shares and is_map_style and not is_distributed:
        loader = with_samplers(loader, *share_samples(run, loader, stage))
    if stage == "predict" and is_map_style and loader.batch_sampler is not None:
        batch_sampler = loader.batch_sampler
        if type(batch_sampler) is BatchSampler:
            # As Trainer: no sample is dropped, and a BatchSampler of the user's own loses its order.
            batch_sampler = BatchSampler(loader.sampler, batch_sampler.batch_size, False)
        loader = with_samplers(loader, loader.sampler, TrackingBatchSampler(batch_sampler))
    return loader


def warn_of_loader(run: RunState, loader: DataLoader, stage: str) -> None:
    """Warn of evaluations in random order, streams whose length may be wrong, and few workers."""
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
    most = suggested_max_num_workers(run.loop.num_devices)
    if loader.num_workers < 2 and most > 1:
        run.warn_once(
            f"The '{stage}_dataloader' does not have many workers which may be a bottleneck. Consider"
            f" increasing the value of the `num_workers` argument` to `num_workers={most}` in the"
            " `DataLoader` to improve performance.",
            PossibleUserWarning,
        )


def _without_shuffling(run: RunState, loader: DataLoader, stage: str) -> DataLoader:
    if isinstance(loader.sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset):
        return loader
    run.warn_once(
        f"You requested to overfit but enabled {stage} dataloader shuffling. We are turning off the"
        f" {stage} dataloader shuffling for you."
    )
    dataset: Any = loader.dataset
    sampler = SequentialSampler(dataset)
    return with_samplers(loader, sampler, remake_batch_sampler(loader.batch_sampler, sampler))


def with_samplers(loader: DataLoader, sampler: Any, batch_sampler: Any) -> DataLoader:
    """Return a copy of a loader that takes its samples in another order.

    A copy keeps the class of the loader and its attributes, also those of subclasses that cannot be
    constructed again. A DataLoader refuses to change its samplers through its own ``__setattr__``.
    """
    clone = copy.copy(loader)
    vars(clone).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return clone
