"""Together: a pass that ends on all ranks at once, where nobody can count the batches beforehand: with the first to end.

A rank that went on alone would wait for the others in its next step, until a timeout. Imported only where a loader of several
ranks has no length to rely on: it costs each batch one small collective on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..core.said import Said
from .sharing import NotedBatches

MORE, LAST, NONE = range(3)  # what a rank has; the largest of all ranks' counts


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
