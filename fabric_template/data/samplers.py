"""Divide samples among processes and record the sample indices of predicted batches."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device, suggested_max_num_workers
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..errors import ConfigurationError
from .tensor_loader import TensorLoader

if TYPE_CHECKING:
    from ..training.run import Run
    from .loaders import StageLoaders


def prepare_loader(run: Run, loader: Any, stage: str) -> Any:
    """Return a loader with the samplers that Trainer would use in this process."""
    if isinstance(loader, TensorLoader):
        return prepare_tensor_loader(run, loader, stage)
    if callable(getattr(loader, "for_rank", None)):
        num_replicas, rank = replicas_and_rank(run)
        return loader.for_rank(rank, num_replicas, run.data.common_seed)
    if not isinstance(loader, DataLoader):
        return loader
    if os.environ.get("PL_SEED_WORKERS") == "1" and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=run.fabric.global_rank)
    warn_of_loader(run, loader, stage)
    if isinstance(loader.dataset, IterableDataset):
        return loader
    sampler, batch_sampler = choose_sampler(run, loader, stage), loader.batch_sampler
    if sampler is not loader.sampler:
        batch_sampler = remake_batch_sampler(batch_sampler, sampler)
    if stage == "predict" and batch_sampler is not None:
        if type(batch_sampler) is BatchSampler:
            # Like Trainer, keep an incomplete last batch in predict.
            batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, False)
        batch_sampler = TrackingBatchSampler(batch_sampler)
    if batch_sampler is loader.batch_sampler and sampler is loader.sampler:
        return loader
    clone = copy.copy(loader)
    # Set the samplers through vars(), because DataLoader.__setattr__ forbids new samplers.
    vars(clone).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return clone


def prepare_tensor_loader(run: Run, loader: TensorLoader, stage: str) -> TensorLoader:
    """Return a TensorLoader that yields the same samples in this process as a DataLoader would."""
    num_replicas, rank = replicas_and_rank(run)
    is_prediction = stage == "predict"
    shuffle = loader.shuffle and not turn_off_shuffling(run, stage)
    if num_replicas > 1:
        shuffle = (shuffle or stage == "train") and not run.config.overfit_batches
    # Like Trainer, keep an incomplete last batch in predict.
    drop_last = loader.drop_last and not is_prediction
    if (shuffle, drop_last) != (loader.shuffle, loader.drop_last):
        loader = loader.with_options(shuffle=shuffle, drop_last=drop_last)
    return loader.for_rank(rank, num_replicas, run.data.common_seed, is_padded=not is_prediction)


def turn_off_shuffling(run: Run, stage: str) -> bool:
    """Return whether overfit_batches turns off shuffling. If it does, warn the user."""
    is_overfitting = bool(run.config.overfit_batches) and run.stage == "fit"
    if is_overfitting:
        run.warn_once(
            f"You requested to overfit but enabled {stage} dataloader shuffling. We are turning off"
            f" the {stage} dataloader shuffling for you."
        )
    return is_overfitting


def replicas_and_rank(run: Run) -> tuple[int, int]:
    """Return the ``num_replicas`` and ``rank`` of a DistributedSampler for this process."""
    if run.fabric.world_size == 1:
        return 1, 0
    # The processes of a tensor-parallel group get the same rank, and therefore the same samples.
    kwargs = run.fabric.strategy.distributed_sampler_kwargs
    return kwargs["num_replicas"], kwargs["rank"]


def choose_sampler(run: Run, loader: DataLoader, stage: str) -> Any:
    """Return the sampler that Trainer would use for this loader."""
    given: Any = loader.sampler
    dataset: Any = loader.dataset
    if not isinstance(given, SequentialSampler) and turn_off_shuffling(run, stage):
        given = SequentialSampler(dataset)
    num_replicas, rank = replicas_and_rank(run)
    if num_replicas == 1 or isinstance(given, DistributedSampler):
        return given
    is_shuffled = stage == "train" or isinstance(given, RandomSampler)
    options: dict[str, Any] = {
        "num_replicas": num_replicas,
        "rank": rank,
        "shuffle": is_shuffled and not run.config.overfit_batches,
        "seed": run.data.common_seed,
    }
    if stage == "predict":
        return UnrepeatedDistributedSamplerWrapper(given, **options)
    if isinstance(given, RandomSampler | SequentialSampler):
        return DistributedSampler(dataset, **options)
    wrapper: Any = DistributedSamplerWrapper(given, **options)
    # Keep a reference to the user's sampler, so that checkpoints contain the sampler's state.
    wrapper.given_sampler = given
    return wrapper


def remake_batch_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """Create a batch sampler of the same class and options with a different sampler."""
    if batch_sampler is None:
        return None
    kind = type(batch_sampler)
    try:
        return kind(sampler, batch_size=batch_sampler.batch_size, drop_last=batch_sampler.drop_last)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"batch_sampler: got the class {kind.__name__}, expected a class with the same"
            f" arguments as torch's BatchSampler ({error}). Use such a class, or write"
            " DataLoader(data, sampler=batch_sampler, batch_size=None). With"
            " batch_size=None, the dataset's __getitem__ receives a list of indices."
        ) from error


def warn_of_loader(run: Run, loader: DataLoader, stage: str) -> None:
    """Warn about shuffled evaluation data, iterable datasets with a length, and too few workers."""
    if stage != "train" and isinstance(loader.sampler, RandomSampler):
        run.warn_once(
            f"Your `{stage}_dataloader`'s sampler has shuffling enabled, it is strongly recommended"
            " that you turn shuffling off for val/test dataloaders.",
            category=PossibleUserWarning,
        )
    if isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
        run.warn_once(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data"
            " loading (when num_workers > 1), `__len__` could be inaccurate if each worker is not"
            " configured independently to avoid having duplicate data."
        )
    most = suggested_max_num_workers(run.loop.num_devices)
    if loader.num_workers < 2 and most > 1:
        run.warn_once(
            f"The '{stage}_dataloader' does not have many workers which may be a bottleneck."
            f" Consider increasing the value of the `num_workers` argument` to `num_workers={most}`"
            " in the `DataLoader` to improve performance.",
            category=PossibleUserWarning,
        )


class TrackingBatchSampler(BatchSampler):
    """A batch sampler that records the sample indices of each batch in ``seen``."""

    def __init__(self, batch_sampler: Any) -> None:
        vars(self).update(vars(batch_sampler))
        self._batch_sampler = batch_sampler
        self.seen: list[list[int]] = []

    def __iter__(self) -> Iterator[Any]:
        self.seen = []
        for indices in self._batch_sampler:
            self.seen.append(list(indices))
            yield indices

    def batch_indices(self, batch_idx: int) -> list[int]:
        return self.seen[batch_idx] if batch_idx < len(self.seen) else []

    def __len__(self) -> int:
        return len(self._batch_sampler)


class Predictions:
    """Collects predictions, grouped by loader and batch.

    Attributes:
        outputs: The predictions on the CPU. With return_predictions=False, the lists are empty.
        batch_indices: The indices of the samples in each batch.
        current_indices: The indices of the samples in the current batch.
    """

    def __init__(self) -> None:
        self.outputs: list[list[Any]] = []
        self.batch_indices: list[list[list[int]]] = []
        self.current_indices: list[int] = []
        self._loaders: list[Any] = []

    def start(self, loaders: StageLoaders) -> None:
        self._loaders = loaders.loaders
        self.outputs = [[] for _ in loaders.loaders]
        self.batch_indices = [[] for _ in loaders.loaders]

    def start_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        part = self._loaders[dataloader_idx]
        if not isinstance(part, TensorLoader):
            part = getattr(part, "batch_sampler", None)
        has_indices = isinstance(part, TensorLoader | TrackingBatchSampler)
        self.current_indices = part.batch_indices(batch_idx) if has_indices else []

    def end_batch(self, output: Any, dataloader_idx: int, keeps_output: bool) -> None:
        if self.current_indices:
            self.batch_indices[dataloader_idx].append(self.current_indices)
        if keeps_output:
            self.outputs[dataloader_idx].append(move_data_to_device(output, "cpu"))

    def as_returned(self) -> list[Any]:
        """Return a list of predictions, or a list per loader if there are several loaders."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs
