"""Together: ranks whose steps wait for each other have as many batches, or end their pass at once.

Loaders that have a length are compared before a rank waits for ever. Where nobody can count, the pass ends with the first rank
to end: that costs each batch one small collective on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..core.errors import Misuse
from ..core.passes import INFINITE
from ..core.ranks import gather
from ..core.run import Run
from ..core.said import Said
from .loaders import Loaders
from .sharing import NotedBatches

MORE, LAST, NONE = range(3)  # what a rank has; the largest of all ranks' counts


def train_together(run: Run, loaders: Loaders) -> None:
    """Refuse a training loader with more batches than another rank's, or let it end with the others'."""
    config = run.config
    most = (config.max_steps - run.at.global_step) * run.at.window if config.max_steps != -1 else INFINITE
    _come_together(run, loaders, min(loaders.num_batches, run.at.batches_done + most), "in their next step")


def evaluate_together(run: Run, loaders: Loaders) -> None:
    """The same of an evaluation whose steps wait for the other ranks."""
    why = "in their next step" if run.steps.sharded is not None else "for rank zero's buffers (BatchNorm)"
    _come_together(run, loaders, sum(loaders.limits), why)


def _come_together(run: Run, loaders: Loaders, length: int | float, why: str) -> None:
    """Refuse another length than other ranks have; without one to rely on, end with the first rank to end."""
    stage, counted = loaders.stage, all(map(is_counted, loaders.loaders)) and length != INFINITE
    ranks = gather(run.fabric, (length, counted))
    found = [length for length, _ in ranks]
    if max(found) != min(found) and max(found) != INFINITE:
        told = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(found))
        raise Misuse(
            f"the ranks have {stage} loaders of different length ({told} batches): those with more would wait {why} for ever;"
            f" give each as many, write limit_{stage}_batches={min(found)}, or leave the sampler out: the loop shares the"
            " samples itself"
        )
    if not all(is_counted for _, is_counted in ranks) and loaders.together is None:
        loaders.together = partial(PassTogether, stage=stage, said=run.said, group=gloo_group())


class PassTogether:
    """A pass like the one that it is made of, which ends behind the last batch that all ranks have."""

    def __init__(self, batches: Any, stage: str, said: Said, group: Any) -> None:
        self._batches, self._stage, self._said, self._group = batches, stage, said, group
        self.is_last: bool = batches.is_last

    def __iter__(self) -> Iterator:
        for batch in self._batches:
            mine = LAST if self._batches.is_last else MORE
            then = self._agree(mine)
            self.is_last = then == LAST
            if then > mine:  # what this rank has beyond that
                self._say()
            if then != NONE:
                yield batch
            if then != MORE:
                return
        if not self.is_last:  # fewer than its length had said
            self._agree(NONE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def _agree(self, mine: int) -> int:
        value = torch.tensor(mine)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(value)

    def _say(self) -> None:
        rank = torch.distributed.get_rank()
        self._said.warn(
            f"rank {rank} has more batches in its {self._stage} loader than another rank: what is left of"
            " them is not used, as each step needs all ranks; give each as many samples (a map-style dataset, which the loop"
            f" shares), or write limit_{self._stage}_batches= with a number that all have"
        )


def is_counted(loader: Any) -> bool:
    """Whether a loader has as many batches as its length says.

    Example:
        >>> is_counted(DataLoader([1, 2])), is_counted([1, 2]), is_counted(iter([1, 2]))
        (True, True, False)
    """
    if not isinstance(loader, DataLoader):
        return hasattr(loader, "distribute") or isinstance(loader, list | tuple)
    known = isinstance(loader.batch_sampler, BatchSampler | NotedBatches | None)
    return known and not isinstance(loader.dataset, IterableDataset)


def gloo_group() -> Any:
    """The group in which ranks agree on the CPU: all of them, or one of its own beside NCCL's."""
    if torch.distributed.get_backend() == "gloo":
        return torch.distributed.group.WORLD
    return torch.distributed.new_group(backend="gloo")
