"""Loaders: what a verb may be given, in every shape that Trainer takes; counted, limited, and begun."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..core.errors import Misuse, MisuseOfType
from ..core.inputs import is_combined, length_of, why_no_loader
from ..core.passes import INFINITE, Pass, Turn, end_workers
from ..exact.position import Sources, told_the_epoch

USED_UP = (
    "an iterator is used up after one pass; give what begins anew with each pass (a DataLoader, a TensorLoader, a list, an"
    " object whose __iter__ makes its iterator)"
)


class Loaders:
    """The loaders of one stage: made ready, counted and limited.

    `source` is an iterable of batches; for training also a list or dict of them (the shorter start again) or Lightning's
    CombinedLoader; for evaluation a list or dict of them, one after another. ``ready`` makes of each what this rank is to use.
    """

    def __init__(
        self, source: Any, stage: str, limit: int | float, ready: Callable[[Any], Any], origin: str, records: bool
    ) -> None:
        self.source, self.stage = source, stage
        self.combined: Any = None  # Lightning's CombinedLoader, where several loaders give one batch
        self._evaluated: Iterator | None = None  # the loader whose evaluation is on
        self._never_taken = 0  # batches of the training pass that count as done all the same, by another trainer's file
        # makes a pass end on all ranks at once, where that is not counted
        self.together: Callable[[Any], Any] | None = None
        found = loaders_in(source)
        self.names = names_of(source) if found != [source] else []
        for loader in found:
            check_iterable(loader, origin)
            if not (isinstance(loader, DataLoader) or _is_tensor_loader(loader)):
                iter(loader)  # as Trainer's own check does: one that draws its order in there draws it once more
        self.loaders = [ready(loader) for loader in found]
        self.limits = [count_batches(loader, limit, stage) for loader in self.loaders]
        if is_combined(source):
            if stage == "train" or source._mode != "sequential":
                self.combined = source
            source.flattened = self.loaders
        elif stage == "train" and found != [source]:
            from lightning.pytorch.utilities import CombinedLoader

            self.combined = CombinedLoader(source, "max_size_cycle")
            self.combined.flattened = self.loaders
        self.sources = Sources(self.loaders, self.combined is not None, stage == "train", records)
        if self.combined is not None:
            self.combined.limits = self.limits
            lengths = map(length_of, self.loaders)  # alone, to ask how many batches they give together
            self._combine([iter(()) if length == INFINITE else range(int(length)) for length in lengths])

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
        """Train on loaders together, predict from one after another."""
        if self.combined is None or (self.combined._mode == "sequential") == (self.stage == "predict"):
            return
        if self.stage == "train":
            raise Misuse(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. The available modes are:'
                " ['min_size', 'max_size_cycle', 'max_size']"
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

        return self.source.iterables if is_combined(self.source) else fill(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Tell every sampler the epoch, so that it shuffles anew and alike on all ranks."""
        for loader in self.loaders:
            for part in told_the_epoch(loader):
                part.set_epoch(epoch)

    def start(self, done: int = 0, is_over: bool = False, make: Callable[..., Pass] = Pass) -> Pass:
        """Begin a training pass, of which so many batches, or all, count as done: after `resume` they are not loaded.

        This draws the pass's random numbers, so it is called where Trainer calls it.
        """
        resumed, taken = self.sources.begin(), 0
        if resumed is not None:
            taken, done = resumed.get("taken", done), resumed.get("fetched", done)
        if self.combined is None:
            iterator = iter(self.sources.each[0])
        else:
            self._combine(self.sources.each)
            iterator = map(itemgetter(0), iter(self.combined.__next__, None))
            for _ in range(taken):  # the loaders stand behind these, and give nothing for them
                next(iterator)
        self._never_taken = done - taken
        return make(iterator, done if is_over else self.num_batches, done, self.sources.note)

    def start_evaluation(self, most: int | float = INFINITE) -> Iterator[Turn]:
        """Begin an evaluation pass of (batch, batch_idx, dataloader_idx, is_last), at most so many batches of each."""
        if self.combined is not None:
            self.combined.limits = [min(limit, most) for limit in self.limits]
            self._combine(self.sources.each)
            batches = iter(self.combined.__next__, None)
            taken = self._joined(Pass(batches, self.num_batches))
            return ((batch, idx, 0, False) for batch, idx, _ in taken)
        limits = [min(limit, most) for limit in self.limits]
        self._evaluated = iter(self.sources.each[0]) if self.loaders else None  # drawn here, as Trainer does
        return self._sequence(limits)

    def _sequence(self, limits: list) -> Iterator[Turn]:
        final = max((index for index, limit in enumerate(limits) if limit), default=0)
        for index, limit in enumerate(limits):
            if self._evaluated is None:
                self._evaluated = iter(self.sources.each[index])
            batches = self._joined(Pass(self._evaluated, limit))
            for batch_idx, batch in enumerate(batches):
                yield batch, batch_idx, index, batches.is_last and index == final
            self._end_evaluated()
            if limit and not batches.fetched:
                name = type(self.loaders[index]).__name__
                warnings.warn(f"the {self.stage} loader ({name}) gave no batch: {USED_UP}", stacklevel=2)

    def _joined(self, batches: Pass) -> Any:
        return batches if self.together is None else self.together(batches)

    def _end_evaluated(self) -> None:
        """End the worker processes of a pass of evaluation, those kept for the next one aside."""
        end_workers(self._evaluated, self.kept())
        self._evaluated = None

    def kept(self) -> list[Any]:
        """The iterators that loaders keep between passes (persistent_workers)."""
        return [getattr(loader, "_iterator", None) for loader in self.loaders]

    def close(self) -> None:
        """End the worker processes: of a pass that an error has ended, and those kept between passes (persistent_workers)."""
        self._end_evaluated()
        if self.combined is not None:
            self.combined.reset()
        for loader in self.loaders:
            if end_workers(getattr(loader, "_iterator", None)):
                loader._iterator = None

    def state(self, fetched: int | None) -> dict[str, Any] | None:
        """Where the training pass stands after so many batches, for `resume`; None: between two passes."""
        if fetched is None:
            return self.sources.state(None)
        taken = fetched - self._never_taken
        state = self.sources.state(taken)
        return state and {**state, "taken": taken, "fetched": fetched}

    def load_states(self, states: list[Any]) -> None:
        """Give it back to them, before a pass begins."""
        stateful = [source.loader for source in self.sources.each if source.is_stateful]
        if states and len(states) != len(stateful):
            raise Misuse(
                f"resume: the checkpoint has the states of {len(states)} loaders with state_dict and load_state_dict, this run"
                f" has {len(stateful)} of them: give the same loaders, or use load= to start a new run from the weights"
            )
        for loader, state in zip(stateful, states, strict=False):
            loader.load_state_dict(state)


def names_of(source: Any) -> list[str]:
    """The names of several loaders, where they have some.

    Example:
        >>> names_of({"val": range(2), "train_again": range(2)}), names_of([range(2), range(2)])
        (['val', 'train_again'], [])
    """
    if not isinstance(source, Mapping) or any(loaders_in(part) != [part] for part in source.values()):
        return []
    return [str(name) for name in source]


def count_batches(loader: Any, limit: int | float, stage: str) -> int | float:
    """How many batches of a loader count under a limit.

    Raises:
        Misuse: for a fraction of a loader without length, or of less than one batch.

    Example:
        >>> count_batches(range(10), 0.25, "val"), count_batches(range(10), 4, "val")
        (2, 4)
    """
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
        f" of it. When using an `IterableDataset`, `Trainer(limit_{stage}_batches)` must be `1.0` or an int. An"
        f" int specifies `num_{stage}_batches` to use: write limit_{stage}_batches=100"
    )


def loaders_in(source: Any) -> list[Any]:
    """The loaders in a source, one after another: lists and dicts of loaders are opened, lists of batches are loaders.

    Example:
        >>> import torch
        >>> from fabric_template import TensorLoader
        >>> one, other = range(3), TensorLoader(torch.zeros(2))
        >>> loaders_in({"a": one, "b": [other, one]}) == [one, other, one]
        True
        >>> batches = [torch.zeros(2), torch.ones(2)]
        >>> loaders_in(batches) == [batches]
        True
    """
    if is_combined(source):
        return list(source.flattened)
    parts = source.values() if isinstance(source, Mapping) else source if _holds_loaders(source) else None
    return [source] if parts is None else [loader for part in parts for loader in loaders_in(part)]


def check_iterable(loader: Any, origin: str) -> None:
    """Refuse what is no loader."""
    if (why := why_no_loader(loader)) is not None:
        found = " ".join(str(loader).split())[:200]
        raise MisuseOfType(
            f"An invalid dataloader was {origin}. Found {found}: a {type(loader).__name__}, which {why}; expected a"
            " DataLoader, a TensorLoader or any iterable of batches"
        )


def _is_tensor_loader(loader: Any) -> bool:
    """Whether this is a TensorLoader, which who gives none need not import."""
    return any(base.__module__ == f"{__package__}.tensors" for base in type(loader).__mro__)


def _holds_loaders(source: Any) -> bool:
    """Whether a list holds loaders, and not batches: lists of tensors and the like are themselves loaders of batches."""
    return isinstance(source, list | tuple) and bool(source) and all(_is_loader(item) for item in source)


def _is_loader(item: Any) -> bool:
    if isinstance(item, Mapping):
        return bool(item) and all(_is_loader(value) for value in item.values())
    if isinstance(item, list | tuple):  # a list of numbers or strings is a loader for Trainer, too
        return _holds_loaders(item) or bool(item) and all(isinstance(part, int | float | str) for part in item)
    return hasattr(item, "__iter__") and not isinstance(item, Tensor | str | bytes)
