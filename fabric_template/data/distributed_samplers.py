"""Samplers that give each process its share of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from ..distributed.launch import gather_objects
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..training.run_state import RunState


def shares_of(run: RunState) -> tuple[int, int]:
    """Return the number of shares and the one of this process. A tensor-parallel group has one share."""
    fabric = run.fabric
    if fabric.world_size == 1:
        return 1, 0
    kwargs = getattr(fabric.strategy, "distributed_sampler_kwargs", None)
    if kwargs is None:
        return fabric.world_size, fabric.global_rank
    return kwargs["num_replicas"], kwargs["rank"]


def share_tensors(run: RunState, loader: Any, stage: str) -> Any:
    """Return a TensorLoader of this process's share."""
    shares, share = shares_of(run)
    is_overfitting = bool(run.config.overfit_batches) and run.stage == "fit"
    return loader.for_rank(
        share,
        shares,
        shuffle=loader.shuffle and not is_overfitting,
        seed=run.data.sampler_seed,
        repeats_samples=stage == "train",
    )


def share_samples(run: RunState, loader: DataLoader, stage: str) -> tuple[DistributedSampler, Any]:
    """Return the sampler and the batch sampler that give this process its share of a loader.

    Training shares are equally long, as under Trainer. In an evaluation each sample comes once; Trainer
    repeats some of them. A loader with a batch sampler of its own keeps its class.
    """
    shares, share = shares_of(run)
    given = loader.sampler
    is_shuffled = stage == "train" or isinstance(given, RandomSampler)
    is_overfitting = bool(run.config.overfit_batches) and run.stage == "fit"
    is_plain = isinstance(given, RandomSampler | SequentialSampler)
    kind: Any = DistributedSampler if is_plain else DistributedSamplerWrapper
    sampler = kind(
        loader.dataset if is_plain else given,
        num_replicas=shares,
        rank=share,
        shuffle=is_shuffled and not is_overfitting,
        seed=run.data.sampler_seed,
    )
    batch_sampler: Any = loader.batch_sampler
    if stage == "train":
        return sampler, remake_batch_sampler(batch_sampler, sampler)
    is_plain_batches = type(batch_sampler) is BatchSampler
    if stage == "predict" or (is_plain_batches and not batch_sampler.drop_last):
        remove_padding(sampler)
    needs_even_batches = stage != "predict" or run.steps.is_model_parallel
    if is_plain_batches and not batch_sampler.drop_last and needs_even_batches:
        return sampler, EvenBatchSampler(sampler, batch_sampler.batch_size)
    return sampler, remake_batch_sampler(batch_sampler, sampler, stage == "predict")


def check_lengths(run: RunState, lengths: list[int | float], stage: str) -> None:
    """Refuse loaders whose numbers of batches differ between processes that wait for each other.

    Raises:
        RuntimeError: A loader is empty in one process only.
        ConfigurationError: Processes with more batches would wait forever.
    """
    if run.fabric.world_size == 1:
        return
    most = math.inf
    if stage == "train" and run.config.max_steps > 0:
        most = run.config.max_steps * run.accumulate_grad_batches
    by_process = gather_objects(run, [min(length, most) for length in lengths])
    for found in zip(*by_process, strict=False):
        if len(set(found)) == 1:
            continue
        if 0 in found:
            raise RuntimeError(
                "`DataLoader` within local rank has zero length. Please make sure that it returns at least 1"
                " batch."
            )
        # DDP sends the first process's buffers before each step, FSDP gathers parameters.
        has_buffers = any(True for _ in run.network.buffers())
        if stage == "train" or has_buffers or run.steps.is_model_parallel:
            raise ConfigurationError(
                f"{stage}_dataloader: got {list(found)} batches by process, expected one number. The others"
                f" would wait forever. Write limit_{stage}_batches={min(found)}, or leave the sampler out, so"
                " that the loop shares the samples."
            )


def remake_batch_sampler(batch_sampler: Any, sampler: Any, keeps_all: bool = False) -> Any:
    """Return a batch sampler of the same class around another sampler.

    Args:
        keeps_all: Keep a last batch that is not full, for predictions.

    Raises:
        ConfigurationError: Its class takes other arguments than torch's BatchSampler.
    """
    if batch_sampler is None:
        # A loader with batch_size=None.
        return None
    kind = type(batch_sampler)
    if kind is EvenBatchSampler:
        return EvenBatchSampler(sampler, batch_sampler.batch_size)
    try:
        drop_last = batch_sampler.drop_last and not keeps_all
        return kind(sampler, batch_size=batch_sampler.batch_size, drop_last=drop_last)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"batch_sampler: got {kind.__name__}, which cannot be made again for the share of a process:"
            f" {error}. Give it the arguments of torch's BatchSampler (sampler, batch_size, drop_last), or"
            " give the loader a DistributedSampler."
        ) from error


def remove_padding(sampler: DistributedSampler) -> DistributedSampler:
    """Let a sampler give each sample to one process. Fewer samples than processes are still repeated."""
    total = len(sampler.dataset)  # type: ignore[arg-type]
    if total >= sampler.num_replicas:
        sampler.total_size = total
        sampler.num_samples = len(range(sampler.rank, total, sampler.num_replicas))
    return sampler


class EvenBatchSampler(BatchSampler):
    """Gives every process the same number of batches, though shares may differ by one sample.

    A process that lacks a last batch of one sample splits its own last one. A step that reduces over the
    processes would wait forever otherwise.

    Example:
        >>> sampler = remove_padding(DistributedSampler(range(9), 2, rank=1, shuffle=False))
        >>> list(EvenBatchSampler(sampler, 4))
        [[1, 3, 5], [7]]
    """

    sampler: DistributedSampler

    def __init__(self, sampler: DistributedSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for start, stop in even_cuts(len(indices), self.batch_size, len(self)):
            yield indices[start:stop]

    def __len__(self) -> int:
        return count_even_batches(self.sampler, self.batch_size)


def count_even_batches(sampler: DistributedSampler, batch_size: int) -> int:
    """Return the number of batches of each process. Batches of one sample cannot be split."""
    if batch_size == 1:
        return len(sampler)
    longest_share = math.ceil(sampler.total_size / sampler.num_replicas)
    return math.ceil(longest_share / batch_size)


def even_cuts(
    num_samples: int, batch_size: int, num_batches: int, first: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield where batches start and stop, from a batch on. The last one is split if there are too few."""
    is_split = math.ceil(num_samples / batch_size) < num_batches
    for index in range(first, num_batches):
        start, stop = index * batch_size, min((index + 1) * batch_size, num_samples)
        if is_split and index == num_batches - 2:
            stop = num_samples - 1
        elif is_split and index == num_batches - 1:
            start = num_samples - 1
        yield start, stop
