"""Resume with another number of processes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from ..data.tensor_loader import TensorLoader
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..training.run_state import RunState


def change_world_size(run: RunState, own: dict[str, Any], settings: dict[str, Any]) -> None:
    """Bring the position of a checkpoint to the number of processes that there are, in place.

    The processes draw one order of the samples from a seed and take turns in it. So the position counts
    in samples, whoever trained them.

    Args:
        own: The checkpoint's part that only this loop saves.
        settings: This run's settings, as those in ``own["settings"]``.

    Raises:
        CheckpointError: The checkpoint is from the middle of an epoch, and the order of its samples depends
            on the number of processes.
    """
    saved, progress = own["settings"], run.progress
    if saved["shares"] == settings["shares"] or not progress.is_in_epoch:
        return
    if own["sampler_seed"] is None or not _has_shared_order(run):
        raise CheckpointError(
            f"{run.checkpoint_path}: it is from the middle of an epoch of a run with {saved['shares']}"
            f" processes, and this run has {settings['shares']}. Only a DataLoader with PyTorch's samplers or a"
            f" TensorLoader continues, if several processes have started the epoch. Use {saved['shares']}"
            " processes, a checkpoint from the end of an epoch, or load= to start a new run from the weights."
        )
    samples = progress.batches_done * saved["batch size"][0] * saved["shares"]
    of_step = settings["batch size"][0] * settings["shares"] * run.accumulate_grad_batches
    batches = samples // of_step * run.accumulate_grad_batches
    repeated = samples % of_step
    if progress.is_epoch_complete:
        batches, repeated = int(progress.num_train_batches), 0
    run.warn_once(
        f"resume: the epoch was started by {saved['shares']} processes and continues with"
        f" {settings['shares']}, with the samples that are left. {repeated} samples come again. Sums over"
        " processes are rounded differently, and metrics of this epoch count the samples before the resume"
        " of some processes only."
    )
    progress.total_batches += batches - progress.batches_done
    progress.batches_done = progress.batches_at_last_step = batches
    for of_rank in own["ranks"]:
        position = of_rank["data"]["train"]["loaders"][0]
        position["batches"] = batches


def _has_shared_order(run: RunState) -> bool:
    """Return whether the training loader takes turns in an order that we know."""
    loaders = run.data.train.loaders if run.data.train is not None else []
    if len(loaders) != 1:
        return False
    loader = loaders[0]
    if isinstance(loader, TensorLoader):
        return True
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    return type(sampler) is DistributedSampler and type(batches) is BatchSampler


def seed_new_process(rank: int) -> None:
    """Draw other random numbers than the process whose states were restored here."""
    seed = int(torch.randint(2**31, ())) + rank
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
