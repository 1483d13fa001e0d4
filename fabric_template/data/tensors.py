"""Tensors: TensorLoader, batches cut from tensors in memory; where the ranks' shares of them are cut."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


class TensorLoader:
    """Batches cut from tensors that stay where they are: no workers, no collation, no copies from the host.

    Args:
        *tensors: all with the same first dimension; a batch is a tuple of one slice of each.
        batch_size: samples per batch.
        shuffle: a new order in each pass, drawn from ``generator`` or PyTorch's global one.
        drop_last: leave out a last batch that is not full.
        generator: a CPU torch.Generator.
        device: move the tensors there, once.

    Under several processes the loop gives each its share, reshuffled every epoch, as DistributedSampler does.

    Example:
        >>> loader = TensorLoader(torch.arange(5), batch_size=2)
        >>> [batch[0].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self, *tensors: Tensor, batch_size: int = 1, shuffle: bool = False, drop_last: bool = False,
        generator: torch.Generator | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        if wrong := [type(part).__name__ for part in tensors if not _has_samples(part)]:
            raise TypeError(
                f"TensorLoader: expected tensors with a first dimension of samples, got {', '.join(wrong)}; write"
                " TensorLoader(x, y, batch_size=32), and torch.as_tensor(x) for what is no tensor yet"
            )
        sizes = [len(tensor) for tensor in tensors]
        if not tensors or len(set(sizes)) > 1:
            raise ValueError(
                f"TensorLoader: expected tensors of one length, got lengths {sizes}: write TensorLoader(x, y)"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"TensorLoader: batch_size={batch_size!r}: expected an int >= 1")
        self.tensors = tuple(tensor if device is None else tensor.to(device) for tensor in tensors)
        self.batch_size, self.shuffle, self.drop_last, self.generator = batch_size, shuffle, drop_last, generator
        self.share: DistributedSampler | None = None  # of one process among several

    def to(self, device: torch.device | str) -> TensorLoader:
        """The same loader with its tensors on another device."""
        other = copy.copy(self)
        other.tensors = tuple(tensor.to(device) for tensor in self.tensors)
        return other

    def distribute(self, world_size: int, rank: int, shuffle: bool, repeat: bool = True) -> None:
        """Give this process its share of the samples; all shares are equally long, or (``repeat=False``) none comes twice."""
        samples: Any = range(len(self.tensors[0]))  # of a Dataset it takes the length only
        self.share = DistributedSampler(samples, world_size, rank, shuffle=shuffle, seed=global_seed())
        if not (repeat or self.drop_last):
            without_repeats(self.share)

    @property
    def _num_samples(self) -> int:
        return len(self.tensors[0]) if self.share is None else len(self.share)

    def __len__(self) -> int:
        samples = self._num_samples
        return samples // self.batch_size if self.drop_last else count_cuts(samples, self.batch_size, self._most)

    @property
    def _most(self) -> int:
        return self._num_samples if self.share is None else longest_share(self.share)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self.behind(0)

    def behind(self, done: int) -> Iterator[tuple[Tensor, ...]]:
        """A pass that begins behind so many batches: its order is drawn whole, these batches are not cut."""
        order = None
        if self.share is not None:
            order = torch.tensor(list(self.share))
        elif self.shuffle:
            order = torch.randperm(self._num_samples, generator=self.generator)
        return self._batches(order, done)

    def _batches(self, order: Tensor | None, done: int) -> Iterator[tuple[Tensor, ...]]:
        tensors = self.tensors
        if order is not None:
            order = order.to(tensors[0].device)
        slices = islice(cuts(self._num_samples, self.batch_size, self._most, done), max(len(self) - done, 0))
        if order is None:
            for cut in slices:
                yield tuple([tensor[cut] for tensor in tensors])
            return
        takers = [_taker(tensor) for tensor in tensors]
        for cut in slices:
            rows = order[cut]
            yield tuple([take(rows) for take in takers])


def _taker(tensor: Any) -> Callable[[Tensor], Any]:
    """What takes rows out of a tensor: on the CPU index_select copies each row in one piece, twice as fast as an index does."""
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous():
        return partial(torch.index_select, tensor, 0)
    return tensor.__getitem__  # keeps the order of dimensions in memory (channels_last), and a subclass


def _has_samples(tensor: Any) -> bool:
    return tensor.dim() > 0 if isinstance(tensor, Tensor) else hasattr(tensor, "device") and hasattr(tensor, "__len__")


def global_seed() -> int:
    """What seed_everything has set, from which the ranks draw one order of the samples."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def without_repeats(sampler: DistributedSampler) -> DistributedSampler:
    """Each sample once: the ranks' parts may differ by one sample. Fewer samples than ranks are repeated all the same."""
    dataset: Any = sampler.dataset
    total = len(dataset)
    if total >= sampler.num_replicas:
        sampler.num_samples, sampler.total_size = len(range(sampler.rank, total, sampler.num_replicas)), total
    return sampler


def longest_share(sampler: DistributedSampler) -> int:
    """Samples of the rank that has the most."""
    return -(-sampler.total_size // sampler.num_replicas)


def count_cuts(samples: int, batch_size: int, most: int) -> int:
    """How many batches `cuts` gives."""
    number = -(-samples // batch_size)
    return number + (batch_size > 1 and number < -(-most // batch_size))


def cuts(samples: int, batch_size: int, most: int, done: int = 0) -> Iterator[slice]:
    """Where to cut batches, the last one shorter, behind the first ones; as many as a rank has that has ``most`` samples.

    Where that one has a batch of a single sample more, the last batch here is split: a step that talks to the other ranks
    would wait for ever.

    Example:
        >>> list(cuts(4, 2, most=5))
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    plain = range(0, samples, batch_size)
    split = [samples - 1] * (count_cuts(samples, batch_size, most) - len(plain))
    split = split[max(done - len(plain), 0) :]
    starts, ends = chain(plain[done:], split), chain(plain[done:], split, [samples])
    return map(slice, starts, islice(ends, 1, None))
