"""Slice batches from tensors in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ..errors import describe


class TensorLoader:
    """A loader that slices batches from tensors, without workers, collation or host-device copies.

    Args:
        *tensors: Tensors of the same length. A batch is a tuple that contains a copied
            slice of each tensor, so in-place operations on a batch do not change the tensors.
        batch_size: Number of samples per batch.
        shuffle: Draw a new order in each pass, using ``generator`` or torch's default generator.
            With several processes, the order depends on the seed and the epoch number instead.
        drop_last: Drop the last batch if it is not full.
        generator: A torch.Generator on the CPU.
        device: The device to which the tensors are moved when the loader is created.

    Both loops treat a TensorLoader like a DataLoader. With several processes, they shuffle the
    training samples, as Trainer does, and give each process its share.

    Example:
        >>> loader = TensorLoader(torch.arange(5), batch_size=2)
        >>> [batch[0].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_tensors(tensors)
        check_options(batch_size, shuffle, drop_last, generator)
        self.tensors = tensors if device is None else tuple(tensor.to(device) for tensor in tensors)
        self.batch_size, self.generator = int(batch_size), generator
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self._sampler: DistributedSampler[Any] | None = None
        self._has_order_per_pass = False
        # The sample indices in the order of the current epoch. None keeps the original order.
        self._order: Tensor | None = None

    def to(self, device: torch.device | str) -> TensorLoader:
        """Return a copy of the loader whose tensors are on ``device``."""
        return self.with_options(tensors=tuple(tensor.to(device) for tensor in self.tensors))

    def for_rank(
        self,
        rank: int,
        world_size: int,
        seed: int = 0,
        is_padded: bool = True,
        has_order_per_pass: bool = False,
    ) -> TensorLoader:
        """Return a loader that yields only one process's share of the samples.

        Args:
            seed: The seed for shuffling, which must be the same in all processes.
            is_padded: Repeat some samples so that each process gets the same number of samples.
            has_order_per_pass: Draw a new order in each pass. By default, only ``set_epoch``
                changes the order, as in a DistributedSampler.
        """
        if world_size == 1:
            return self
        samples: Any = range(len(self.tensors[0]))
        sampler: Any = DistributedSampler(samples, world_size, rank, self.shuffle, seed)
        if not is_padded:
            # Give each sample to one process. Some processes may get one more sample than others.
            sampler.num_samples = len(range(rank, len(samples), world_size))
            sampler.total_size = len(samples)
        return self.with_options(_sampler=sampler, _has_order_per_pass=has_order_per_pass)

    def with_options(self, **options: Any) -> TensorLoader:
        """Return a copy of the loader with changed options, such as ``shuffle=False``."""
        other = copy.copy(self)
        vars(other).update(options)
        return other

    def batch_indices(self, batch_idx: int) -> list[int]:
        """Return the indices of the samples in a batch of the current epoch."""
        indices = range(self._num_samples) if self._order is None else self._order
        part = indices[batch_idx * self.batch_size : (batch_idx + 1) * self.batch_size]
        return [int(index) for index in part]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the shuffled order in a run with several processes.

        Loaders from ``loop.setup`` draw a new order in each pass without a call to set_epoch.
        """
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    @property
    def _num_samples(self) -> int:
        return len(self.tensors[0]) if self._sampler is None else len(self._sampler)

    def __len__(self) -> int:
        batches = self._num_samples / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = None
        if self._sampler is not None:
            order = torch.tensor(list(self._sampler))
            if self._has_order_per_pass:
                self._sampler.set_epoch(self._sampler.epoch + 1)
        elif self.shuffle:
            order = torch.randperm(self._num_samples, generator=self.generator)
        self._order = order
        return self._batches(order)

    def _batches(self, order: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
        if order is not None:
            order = order.to(self.tensors[0].device)
        for index in range(len(self)):
            cut = slice(index * self.batch_size, (index + 1) * self.batch_size)
            if order is None:
                # Copy the slices, because in-place operations on a batch must not change the data.
                yield tuple([tensor[cut].clone() for tensor in self.tensors])
            else:
                rows = order[cut]
                yield tuple([take_rows(tensor, rows) for tensor in self.tensors])


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous():
        # On the CPU, index_select is twice as fast as indexing.
        return tensor.index_select(0, rows)
    # Unlike index_select, indexing keeps a memory format such as channels_last.
    return tensor[rows]


def check_options(batch_size: Any, shuffle: Any, drop_last: Any, generator: Any) -> None:
    """Raise an error if an option of a TensorLoader has the wrong type."""
    is_int = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not is_int or batch_size < 1:
        raise ValueError(f"TensorLoader: got batch_size={batch_size!r}, expected an int >= 1.")
    for name, value in {"shuffle": shuffle, "drop_last": drop_last}.items():
        if not isinstance(value, bool | int | np.bool_) or value not in (0, 1):
            raise TypeError(f"TensorLoader: got {name}={describe(value)}, expected True or False.")
    if generator is None:
        return
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        raise TypeError(
            f"TensorLoader: got generator={describe(generator)}, expected a torch.Generator on the"
            " CPU. Write generator=torch.Generator().manual_seed(0)."
        )


def check_tensors(tensors: tuple[Any, ...]) -> None:
    """Raise an error unless all values are tensors of shape (samples, ...) and the same length."""
    wrong = [describe(part) for part in tensors if not isinstance(part, Tensor)]
    wrong = wrong or ["a tensor without dimensions" for part in tensors if part.dim() == 0]
    if wrong:
        raise TypeError(
            f"TensorLoader: got {' and '.join(wrong)}, expected tensors of shape (samples, ...)."
            " Write TensorLoader(x, y, batch_size=32). Convert other data with torch.as_tensor(x)."
        )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) != 1:
        given = f"tensors of lengths {lengths}" if lengths else "no tensors"
        raise ValueError(
            f"TensorLoader: got {given}, expected one or more tensors of the same length."
            " Write TensorLoader(x, y, batch_size=32)."
        )
