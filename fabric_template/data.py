"""Data: loaders of every kind, how many of their batches count, and one pass over them. TensorLoader for tensors in memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

INFINITE = float("inf")


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
        sizes = [len(tensor) for tensor in tensors]
        if not tensors or len(set(sizes)) > 1:
            raise ValueError(f"TensorLoader: expected tensors of one length, got lengths {sizes}")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"TensorLoader: batch_size={batch_size!r}: expected an int >= 1")
        self.tensors = tuple(tensor if device is None else tensor.to(device) for tensor in tensors)
        self.batch_size, self.shuffle, self.drop_last, self.generator = batch_size, shuffle, drop_last, generator
        self._sampler: DistributedSampler | None = None

    def to(self, device: torch.device | str) -> TensorLoader:
        """The same loader with its tensors on another device."""
        other = copy.copy(self)
        other.tensors = tuple(tensor.to(device) for tensor in self.tensors)
        return other

    def distribute(self, world_size: int, rank: int, shuffle: bool, repeat: bool = True) -> None:
        """Give this process its share of the samples; all shares are equally long, or (``repeat=False``) none comes twice."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._sampler = DistributedSampler(range(len(self.tensors[0])), world_size, rank, shuffle=shuffle, seed=seed)
        if not (repeat or self.drop_last):
            without_repeats(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch, the same on all ranks."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    @property
    def _num_samples(self) -> int:
        return len(self.tensors[0]) if self._sampler is None else len(self._sampler)

    def __len__(self) -> int:
        return self._num_samples // self.batch_size if self.drop_last else len(self._cuts())

    def _cuts(self) -> list[slice]:
        most = self._num_samples if self._sampler is None else longest_share(self._sampler)
        return cuts(self._num_samples, self.batch_size, most)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = None
        if self._sampler is not None:
            order = torch.tensor(list(self._sampler))
        elif self.shuffle:
            order = torch.randperm(self._num_samples, generator=self.generator)
        return self._batches(order)

    def _batches(self, order: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
        tensors = self.tensors
        if order is not None:
            order = order.to(tensors[0].device)
        for cut in self._cuts()[: len(self)]:
            yield tuple(tensor[cut] if order is None else tensor[order[cut]] for tensor in tensors)


def without_repeats(sampler: DistributedSampler) -> DistributedSampler:
    """Each sample once: the ranks' parts may differ by one sample. Fewer samples than ranks are repeated all the same."""
    total = len(sampler.dataset)
    if total >= sampler.num_replicas:
        sampler.num_samples, sampler.total_size = len(range(sampler.rank, total, sampler.num_replicas)), total
    return sampler


def longest_share(sampler: DistributedSampler) -> int:
    """Samples of the rank that has the most."""
    return -(-sampler.total_size // sampler.num_replicas)


def cuts(samples: int, batch_size: int, most: int) -> list[slice]:
    """Where to cut batches, the last one shorter; as many batches as a rank has that has ``most`` samples.

    Where that one has a batch of a single sample more, the last batch here is split: a step that talks to the other ranks
    would wait for ever.

    Example:
        >>> cuts(4, 2, most=5)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    starts = list(range(0, samples, batch_size))
    if batch_size > 1 and len(starts) < -(-most // batch_size):
        starts.append(samples - 1)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], samples], strict=True)]


class Pass:
    """One pass over batches that knows, when it hands out a batch, whether it is the last.

    Without a length it looks one batch ahead, as Trainer does; `note` is called before each look.

    Example:
        >>> batches = Pass(iter("ab"), length=INFINITE)
        >>> [(batch, batches.is_last) for batch in batches]
        [('a', False), ('b', True)]
    """

    def __init__(
        self, iterator: Iterator, length: int | float, start: int = 0, note: Callable[[], None] | None = None
    ) -> None:
        self._iterator, self._length, self._fetched, self._note = iterator, length, start, note
        self.is_last = False
        self._ahead: list[Any] = []
        if length == INFINITE:
            self._look_ahead()

    def __iter__(self) -> Iterator:
        return self if self._length == INFINITE else self._counted()

    def _counted(self) -> Iterator:
        """The same as `__next__` again and again, as a generator, which costs a third of the calls."""
        for batch in self._iterator if self._fetched < self._length else ():
            self._fetched += 1
            self.is_last = self._fetched >= self._length
            yield batch
            if self.is_last:
                return

    def __next__(self) -> Any:
        if self._length == INFINITE:
            if not self._ahead:
                raise StopIteration
            batch = self._ahead.pop()
            self._look_ahead()
            self.is_last = not self._ahead
            return batch
        if self._fetched >= self._length:
            raise StopIteration
        batch = next(self._iterator)
        self._fetched += 1
        self.is_last = self._fetched >= self._length
        return batch

    def close(self) -> None:
        """End the worker processes of this pass."""
        if callable(shut_down := getattr(self._iterator, "_shutdown_workers", None)):
            shut_down()
        self._iterator, self._ahead = iter(()), []

    def _look_ahead(self) -> None:
        if self._note is not None:
            self._note()
        for batch in self._iterator:
            self._ahead.append(batch)
            break


class Loaders:
    """The loaders of one stage: made ready, counted and limited.

    Args:
        source: what fit was given, or what the datamodule or module returned: an iterable of batches; for training also
            a list or dict of them (the shorter start again) or Lightning's CombinedLoader; for evaluation a list or
            dict of them, one after another.
        stage: "train", "val", "test" or "predict".
        limit: batches (int) or a fraction of them (float) of each.
        ready: makes each loader what this rank is to use.
        origin: where the source comes from, for errors.
        records: whether checkpoints hold where a pass stands.
    """

    def __init__(
        self, source: Any, stage: str, limit: int | float, ready: Callable[[Any], Any] | None = None,
        origin: str = "given", records: bool = False,
    ) -> None:  # fmt: skip
        from .position import Sources  # here, so that TensorLoader can be copied without it

        self.source, self.stage = source, stage
        self.combined: Any = None  # Lightning's CombinedLoader, where several loaders give one batch
        found = loaders_in(source)
        for loader in found:
            check_iterable(loader, origin)
        self.loaders = found if ready is None else [ready(loader) for loader in found]
        self.limits = [count_batches(loader, limit, stage) for loader in self.loaders]
        if _is_combined(source):
            if stage == "train" or source._mode != "sequential":
                self.combined = source
            source.flattened = self.loaders
        elif stage == "train" and found != [source]:
            from lightning.pytorch.utilities import CombinedLoader

            self.combined = CombinedLoader(source, "max_size_cycle")
            self.combined.flattened = self.loaders
        cheap = [isinstance(loader, TensorLoader | Sequence) for loader in self.loaders]
        self.sources = Sources(self.loaders, cheap, self.combined is not None, stage == "train", records)
        if self.combined is not None:
            self.combined.limits = self.limits
            self._combine([_Sized(loader) for loader in self.loaders])

    def _combine(self, iterables: list[Any]) -> None:
        """Begin a pass over these in the loaders' place; who looks at the CombinedLoader finds the loaders."""
        self.combined.flattened = iterables
        iter(self.combined)
        self.combined.flattened = self.loaders

    @property
    def num_batches(self) -> int | float:
        """Batches of one training pass."""
        if self.combined is None:
            return self.limits[0]
        try:
            return len(self.combined)
        except (TypeError, NotImplementedError):
            return INFINITE

    def check_mode(self) -> None:
        """Train on loaders together, predict from one after another.

        Raises:
            Misuse: for a CombinedLoader of another mode.
        """
        if self.combined is None or (self.combined._mode == "sequential") == (self.stage == "predict"):
            return
        from .errors import Misuse

        if self.stage == "train":
            raise Misuse(
                '`FitLoop` does not support the `CombinedLoader(mode="sequential")` mode: expected "max_size_cycle",'
                ' "min_size" or "max_size"'
            )
        if self.stage == "predict":
            raise Misuse('`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.')

    @property
    def as_given(self) -> Any:
        """The loaders in the shape in which they came."""
        ready = iter(self.loaders)

        def fill(part: Any) -> Any:
            if isinstance(part, Mapping) and _is_loader(part):
                return {name: fill(value) for name, value in part.items()}
            return [fill(item) for item in part] if _holds_loaders(part) else next(ready)

        return self.source.iterables if _is_combined(self.source) else fill(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Tell every sampler the epoch, so that it shuffles anew and alike on all ranks."""
        for loader in self.loaders:
            set_epoch(loader, epoch)

    def start(self, done: int = 0) -> Pass:
        """Begin a training pass, of which so many batches count as done: after `resume` they are not loaded.

        This draws the pass's random numbers, so it is called where Trainer calls it.
        """
        is_resumed = self.sources.begin()
        if self.combined is None:
            iterator = iter(self.sources.each[0])
        else:
            self._combine(self.sources.each)
            iterator = map(itemgetter(0), iter(self.combined.__next__, None))
            for _ in range(done if is_resumed else 0):  # the loaders stand behind these, and give nothing for them
                next(iterator)
        return Pass(iterator, self.num_batches, done, self.sources.note)

    def start_evaluation(self, most: int | float = INFINITE) -> Iterator[tuple[Any, int, int, bool]]:
        """Begin an evaluation pass of (batch, batch_idx, dataloader_idx, is_last), at most so many batches of each."""
        if self.combined is not None:
            self.combined.limits = [min(limit, most) for limit in self.limits]
            self._combine(self.sources.each)
            batches = iter(self.combined.__next__, None)
            return ((batch, idx, 0, False) for batch, idx, _ in Pass(batches, self.num_batches))
        limits = [min(limit, most) for limit in self.limits]
        first = iter(self.sources.each[0]) if self.loaders else iter(())  # drawn here, as Trainer does
        return self._sequence(first, limits)

    def _sequence(self, first: Iterator, limits: list) -> Iterator[tuple[Any, int, int, bool]]:
        final = max((index for index, limit in enumerate(limits) if limit), default=0)
        for index, limit in enumerate(limits):
            batches = Pass(first if index == 0 else iter(self.sources.each[index]), limit)
            for batch_idx, batch in enumerate(batches):
                yield batch, batch_idx, index, batches.is_last and index == final

    def close(self) -> None:
        """End the worker processes that loaders keep between passes (persistent_workers)."""
        if self.combined is not None:
            self.combined.reset()
        for loader in self.loaders:
            iterator = getattr(loader, "_iterator", None)
            if callable(shut_down := getattr(iterator, "_shutdown_workers", None)):
                shut_down()
                loader._iterator = None

    def generators(self) -> list[Any]:
        """The random generators that loaders, samplers and datasets own; their states are part of a checkpoint."""
        return self.sources.generators()

    def state(self, done: int | None) -> dict[str, Any] | None:
        """Where the training pass stands after so many batches, for `resume`; None: between two passes."""
        return self.sources.state(done)

    def resume(self, state: dict[str, Any]) -> None:
        """Let the next pass begin there."""
        self.sources.resume(state)

    def put_back_generators(self, state: dict[str, Any]) -> None:
        """Put the random generators of the loaders where they were."""
        self.sources.put_back_generators(state)


class _Sized:
    """A loader's length alone, to ask how many batches several loaders give."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        return iter(())


def count_batches(loader: Any, limit: int | float, stage: str) -> int | float:
    """How many batches of a loader count under a limit.

    Raises:
        Misuse: for a fraction of a loader without length, or of less than one batch.

    Example:
        >>> count_batches(range(10), 0.25, "val"), count_batches(range(10), 4, "val")
        (2, 4)
    """
    from .errors import Misuse  # here, so that TensorLoader can be copied without it

    length = length_of(loader)
    if length == 0:
        return 0
    if isinstance(limit, int):
        return min(length, limit)
    if length == INFINITE:
        if limit == 1.0:
            return length
        raise Misuse(no_fraction(loader, limit, stage))
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise Misuse(
            f"You requested to check {limit} of the `{stage}_dataloader` but {limit} * {length} < 1. Please increase the"
            f" `limit_{stage}_batches` argument. Try at least `limit_{stage}_batches={1.0 / length}`, or a number of"
            f" batches: limit_{stage}_batches=1"
        )
    return batches


def no_fraction(loader: Any, limit: float, stage: str) -> str:
    """What is wrong with a fraction of a loader without length; Trainer's reason, and what to write."""
    return (
        f"limit_{stage}_batches={limit}: the {stage} loader ({type(loader).__name__}) has no length, so there is no fraction"
        f" of it. When using an `IterableDataset`, `Trainer(limit_{stage}_batches)` must be `1.0` or an int: write"
        f" limit_{stage}_batches=100"
    )


def length_of(loader: Any) -> int | float:
    """len(loader), or infinity where it has none."""
    if (
        isinstance(loader, DataLoader)
        and isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader.dataset, "__len__")
    ):
        return INFINITE
    if _is_combined(loader):  # it knows its own length in a pass only
        return max(map(length_of, loader.flattened), default=0)
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return INFINITE


def set_epoch(loader: Any, epoch: int) -> None:
    """Call set_epoch on a loader, its sampler and its batch sampler's sampler, where they have it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners: list[Any] = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    seen: list[Any] = []
    for owner in owners:
        if owner is not None and all(owner is not other for other in seen):
            seen.append(owner)
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)


def make_transfer(fabric: Fabric, convert: Callable | None, hooks: list[Callable | None]) -> Callable | None:
    """What brings a batch to its device: precision, ``on_before_batch_transfer``, the move, ``on_after_batch_transfer``.

    None when there is nothing to do.

    Args:
        fabric: has the device.
        convert: the precision's conversion, or None.
        hooks: the three hooks' methods, None where nobody overrides them.
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


def loaders_in(source: Any) -> list[Any]:
    """The loaders in a source, one after another: lists and dicts of loaders are opened, lists of batches are loaders.

    Example:
        >>> one, other = range(3), TensorLoader(torch.zeros(2))
        >>> loaders_in({"a": one, "b": [other, one]}) == [one, other, one]
        True
        >>> batches = [torch.zeros(2), torch.ones(2)]
        >>> loaders_in(batches) == [batches]
        True
    """
    if _is_combined(source):
        return list(source.flattened)
    parts = source.values() if isinstance(source, Mapping) else source if _holds_loaders(source) else None
    return [source] if parts is None else [loader for part in parts for loader in loaders_in(part)]


def check_iterable(loader: Any, origin: str) -> None:
    """Refuse what is no loader.

    Raises:
        MisuseOfType: for something that has no batches, and for a list that holds neither loaders nor batches of one kind.
    """
    holds = {type(item) for item in loader} if isinstance(loader, list | tuple) else set()
    if len(holds) > 1 and not all(issubclass(kind, int | float | str) for kind in holds):
        why = "holds neither loaders nor batches of one kind"
    elif isinstance(loader, Iterable) or hasattr(loader, "__getitem__"):
        return
    else:
        why = "cannot be iterated over"
    from .errors import MisuseOfType

    raise MisuseOfType(
        f"An invalid dataloader was {origin}. Found {loader}: a {type(loader).__name__}, which {why}; expected a DataLoader,"
        " a TensorLoader or any iterable of batches"
    )


def _is_combined(source: Any) -> bool:
    """Whether this is Lightning's CombinedLoader, of either package."""
    return hasattr(source, "flattened") and hasattr(source, "limits")


def _holds_loaders(source: Any) -> bool:
    """Whether a list holds loaders, and not batches: lists of tensors and the like are themselves loaders of batches."""
    return isinstance(source, list | tuple) and bool(source) and all(_is_loader(item) for item in source)


def _is_loader(item: Any) -> bool:
    if isinstance(item, Mapping):
        return bool(item) and all(_is_loader(value) for value in item.values())
    if isinstance(item, list | tuple):  # a list of numbers or strings is a loader for Trainer, too
        return _holds_loaders(item) or bool(item) and all(isinstance(part, int | float | str) for part in item)
    return hasattr(item, "__iter__") and not isinstance(item, Tensor | str | bytes)
