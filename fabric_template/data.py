"""Data: loaders of every kind, how many of their batches count, and one pass over them. TensorLoader for tensors in memory."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

INFINITE = float("inf")
RECENT = 1024  # steps of which a handed pass knows what they began with: more than a window of accumulation has


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
        words = {"shuffle": shuffle, "seed": global_seed()}
        self.share = DistributedSampler(range(len(self.tensors[0])), world_size, rank, **words)
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
        slices = cuts(self._num_samples, self.batch_size, self._most, done)
        for cut in islice(slices, max(len(self) - done, 0)):
            yield tuple(tensor[cut] if order is None else tensor[order[cut]] for tensor in tensors)


def _has_samples(tensor: Any) -> bool:
    return tensor.dim() > 0 if isinstance(tensor, Tensor) else hasattr(tensor, "device") and hasattr(tensor, "__len__")


def global_seed() -> int:
    """What seed_everything has set, from which the ranks draw one order of the samples."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def without_repeats(sampler: DistributedSampler) -> DistributedSampler:
    """Each sample once: the ranks' parts may differ by one sample. Fewer samples than ranks are repeated all the same."""
    total = len(sampler.dataset)
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


class Pass:
    """One pass over batches that knows, when it hands out a batch, whether it is the last.

    Without a length it looks one batch ahead, as Trainer does; `note` is called before each look.

    Args:
        iterator: gives the batches that are left.
        length: of the whole pass.
        start: batches that count as handed out before; `fetched` counts on from there.
        note: called before each look ahead.

    Example:
        >>> batches = Pass(iter("ab"), length=INFINITE)
        >>> [(batch, batches.is_last) for batch in batches]
        [('a', False), ('b', True)]
    """

    def __init__(
        self, iterator: Iterator, length: int | float, start: int = 0, note: Callable[[], None] | None = None
    ) -> None:
        self._iterator, self._length, self.fetched, self._note = iterator, length, start, note
        self._ahead: list[Any] = []
        if length == INFINITE:
            self._look_ahead()
        over = start >= length or (length == INFINITE and not self._ahead)
        self.is_last = start > 0 and over

    def __iter__(self) -> Iterator:
        if self._length == INFINITE:
            while self._ahead:
                batch = self._ahead.pop()
                self._look_ahead()
                self.fetched += 1
                self.is_last = not self._ahead
                yield batch
            return
        for batch in self._iterator if self.fetched < self._length else ():
            self.fetched += 1
            self.is_last = self.fetched >= self._length
            yield batch
            if self.is_last:
                return

    def close(self, kept: Sequence[Any] = ()) -> None:
        """End the worker processes of this pass, if it is none of those that loaders keep."""
        if callable(shut_down := getattr(self._iterator, "_shutdown_workers", None)) and self._iterator not in kept:
            shut_down()
        self._iterator, self._ahead = iter(()), []

    def _look_ahead(self) -> None:
        if self._note is not None:
            self._note()
        for batch in self._iterator:
            self._ahead.append(batch)
            break


class Handed:
    """A pass that is handed to the step itself, as ``dataloader_iter``: the step takes as many batches as it likes.

    `next` gives ``(batch, batch_idx, dataloader_idx)``; the last such triple stays in `latest`.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, int, int, bool]],
        note: Callable[[Any], None] | None = None,
        done: bool = False,
    ) -> None:
        self._batches, self._note, self.done = batches, note, done
        self.latest: tuple[Any, int, int] = (None, 0, 0)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        self.done = True  # unless there is one more
        *latest, self.done = next(self._batches)
        self.latest = tuple(latest)
        if self._note is not None:
            self._note(self.latest[0])
        return self.latest

    def turns(self) -> Iterator[tuple[Any, int, int, bool]]:
        """What was taken last, for each step, until nothing is left."""
        while not self.done:
            yield *self.latest, False


class HandedPass:
    """A training pass that is handed to the step itself; the loop sees what was taken before."""

    is_last = False  # nobody knows before the step

    def __init__(self, batches: Any, start: int, note: Callable[[Any], None]) -> None:
        self._batches, self._start = batches, start
        triples = ((batch, idx, 0, batches.is_last) for idx, batch in enumerate(batches, batches.fetched))
        self.handed = Handed(triples, note, done=batches.is_last)
        self._steps = 0  # begun
        self._fetched: deque[int] = deque(maxlen=RECENT)  # batches fetched before each of the last ones

    def __iter__(self) -> Iterator:
        for batch, *_ in self.handed.turns():
            self._steps += 1
            self._fetched.append(self._batches.fetched)
            yield batch

    def fetched_after(self, done: int) -> int:
        """How many batches were fetched for the first so many steps, which are all or nearly all that have begun."""
        undone = self._steps - (done - self._start)
        return self._fetched[-undone] if undone > 0 else self._batches.fetched

    def close(self, kept: Sequence[Any] = ()) -> None:
        """End the worker processes of this pass, and the pass: no step begins any more."""
        self._batches.close(kept)
        self.handed.done = True


def length_of(loader: Any) -> int | float:
    """len(loader), or infinity where it has none."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        return INFINITE
    if is_combined(loader):  # it knows its own length in a pass only
        return max(map(length_of, loader.flattened), default=0)
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return INFINITE


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to all that ask for it."""
    for part in told_the_epoch(loader):
        part.set_epoch(epoch)


def told_the_epoch(loader: Any) -> list[Any]:
    """Those with set_epoch, of a loader, its sampler, its batch sampler, that one's sampler, and a TensorLoader's share."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "share", None),
    ]
    told = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return list(told.values())


def make_transfer(fabric: Fabric, convert: Callable | None, hooks: list[Callable | None]) -> Callable | None:
    """What brings a batch to its device: precision, ``on_before_batch_transfer``, the move, ``on_after_batch_transfer``.

    None when there is nothing to do.
    """
    before, move, after = hooks
    device = fabric.device

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if convert is not None:
            batch = convert(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = move(batch, device, dataloader_idx) if move is not None else fabric.to_device(batch)
        return after(batch, dataloader_idx) if after is not None else batch

    needless = device.type == "cpu" and convert is None and before is None and move is None and after is None
    return None if needless else transfer


def is_combined(source: Any) -> bool:
    """Whether this is Lightning's CombinedLoader, of either package."""
    return hasattr(source, "flattened") and hasattr(source, "limits")
