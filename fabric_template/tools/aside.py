"""Aside: a training on copies, to see how it goes: all that was given is as it was afterwards, and no file is left."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..core.config import LoopConfig
from ..core.errors import Misuse, MisuseOfType
from ..core.inputs import is_combined
from ..core.net import net_of
from ..core.overrides import is_a
from ..core.passes import end_workers
from ..data.loaders import USED_UP, loaders_in
from ..exact.position import told_the_epoch
from ..exact.randomness import find, find_generators, generator_state, isolated_rng, set_generator_state
from ..loop import FabricLoop
from .stopwatch import Enough

OTHERWISE: dict[str, Any] = {  # than in the loop that was given: one epoch that nothing ends
    "max_steps": -1, "min_steps": None, "min_epochs": None, "max_time": None,
    "limit_train_batches": 1.0, "limit_val_batches": 0, "overfit_batches": 0.0, "fast_dev_run": False,
    "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "validate_every_n_steps": None, "num_sanity_val_steps": 0,
    "reload_dataloaders_every_n_epochs": 0, "profiler": None, "enable_progress_bar": False,
    "enable_model_summary": False, "version": None, "seed": None,
}  # fmt: skip
SHOWN = ("ProgressBar", "ModelSummary", "LivePlot")  # callbacks that are for the screen


@dataclass
class Training:
    """What `fit` would be given."""

    model: Any
    train: Any = None
    datamodule: Any = None
    optimizer: Any = None
    scheduler: Any = None
    training_step: Callable | None = None

    def __post_init__(self) -> None:
        if hasattr(self.train, "train_dataloader"):  # a datamodule there
            if self.datamodule is not None:
                raise Misuse("profile got two datamodules: give it as datamodule= only")
            self.train, self.datamodule = None, self.train
        if is_combined(self.train):
            raise Misuse("profile got a CombinedLoader: expected a loader, or a list or dict of loaders")
        for loader in loaders_in(self.train) if self.train is not None else ():
            if hasattr(loader, "__next__"):
                raise Misuse(f"profile got a {type(loader).__name__}, whose batches a fit would lack then: {USED_UP}")


class Endless:
    """A loader whose passes follow each other without an end; its length is that of one, or what is needed if that is more."""

    def __init__(self, loader: Any, least: int) -> None:
        self.loader, self._least = loader, least
        self._iterator: Any = None
        if hasattr(type(loader), "__len__"):
            self.__class__ = _EndlessOfALength

    def __iter__(self) -> Iterator:
        while True:
            self._iterator, is_empty = iter(self.loader), True
            for batch in self._iterator:
                is_empty = False
                yield batch
            if is_empty:
                raise Misuse(f"profile: the train loader ({type(self.loader).__name__}) gave no batch: {USED_UP}")

    def close(self) -> None:
        """End its workers, those that it keeps, too."""
        for iterator in (self._iterator, getattr(self.loader, "_iterator", None)):
            end_workers(iterator)
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = None

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict", "distribute", "loader"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def _close(loaders: list[Endless]) -> None:
    for loader in loaders:
        loader.close()


class _EndlessOfALength(Endless):
    def __len__(self) -> int:
        try:
            return len(self.loader) and max(len(self.loader), self._least)
        except NotImplementedError as error:
            raise TypeError(str(error)) from error


def train_aside(
    loop: FabricLoop, given: Training, profiler: Any, steps: int, *, change: Callable[[Any], Any] | None = None,
    more_callbacks: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Train on copies under a profiler until it has enough, or until training ends by itself.

    Args:
        loop: says how.
        given: what is trained, on what.
        profiler: raises `Enough`.
        steps: how many there are going to be.
        change: makes another loader of each.
        more_callbacks: beside the loop's own.
    """
    endless: list[Endless] = []

    def prolong(source: Any) -> Any:
        if isinstance(source, Mapping) and loaders_in(source) != [source]:
            return {name: prolong(part) for name, part in source.items()}
        if isinstance(source, list | tuple) and loaders_in(source) != [source]:
            return [prolong(part) for part in source]
        found.enter_context(_as_they_were(find_generators(source), told_the_epoch(source)))
        endless.append(Endless(source if change is None else change(source), steps + 2))
        return endless[-1]

    with ExitStack() as found:
        found.enter_context(isolated_rng())
        found.enter_context(_as_they_were(find_generators(given.datamodule), ()))
        found.enter_context(_untouched(given))
        folder = found.enter_context(tempfile.TemporaryDirectory(prefix="fabric_template_"))
        copies, callbacks = _copies(given, loop.callbacks, folder)
        other = _loop(loop, [*callbacks, *more_callbacks], folder)
        other.own_profiler = profiler  # which no barebones loop would take as a word
        train = None if copies.train is None else prolong(copies.train)
        for part in (copies.datamodule, copies.model):
            if train is None and callable(make := getattr(part, "train_dataloader", None)):
                part.train_dataloader = lambda make=make: prolong(make())
                break
        found.enter_context(_own_scaler(loop.fabric.strategy.precision))
        found.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a fit says them
        found.callback(_close, endless)
        if callable(close := getattr(profiler, "close", None)):
            found.callback(close)
        with suppress(Enough):
            other.fit(
                copies.model, train, datamodule=copies.datamodule, optimizer=copies.optimizer, scheduler=copies.scheduler,
                training_step=copies.training_step,
            )  # fmt: skip


def _loop(loop: FabricLoop, callbacks: list[Any], folder: str) -> FabricLoop:
    words = {field.name: getattr(loop.config, field.name) for field in dataclasses.fields(LoopConfig)}
    epochs = loop.config.max_epochs
    words |= {**OTHERWISE, "max_epochs": epochs and max(epochs, -1) or 1, "default_root_dir": folder}
    words["compile"] = False if words["compile"] == "cuda-graph" else words["compile"]  # a graph has no parts
    words["logger"] = bool(loop.loggers)  # the CSV logger in the place of any other: that one's files are not ours
    return FabricLoop(loop.fabric, **words, callbacks=callbacks)


def _copies(given: Training, callbacks: Sequence[Any], folder: str) -> tuple[Training, list[Any]]:
    """Copies of all that a training changes, which know each other as the originals do; data is not copied."""
    memo: dict[int, Any] = {}
    owned = [given.model, *(given.model.modules() if isinstance(given.model, torch.nn.Module) else ()), *callbacks]
    for part in owned:
        with suppress(RuntimeError):  # as a LightningModule says that it has none
            if (trainer := getattr(part, "trainer", None)) is not None:
                memo[id(trainer)] = trainer
    memo |= {id(part): part for part in (given.datamodule, given.train) if part is not None}
    model = _copy("the model", given.model, memo)
    for optimizer in find({"": [given.optimizer, given.scheduler]}, lambda item: isinstance(item, Optimizer)).values():
        _copy_optimizer(optimizer, memo)
    optimizer, scheduler = _copy("the optimizer", [given.optimizer, given.scheduler], memo)
    kept = [_copy(type(one).__name__, one, memo) for one in callbacks if not is_a(one, *SHOWN)]
    for callback in kept:
        if is_a(callback, "Checkpoint") and getattr(callback, "dirpath", None) is not None:
            callback.dirpath = f"{folder}/checkpoints"
    datamodule = copy.copy(given.datamodule)  # what setup gives it, this one has
    return dataclasses.replace(
        given, model=model, optimizer=optimizer, scheduler=scheduler, datamodule=datamodule
    ), kept


def _copy(what: str, part: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(part, memo)
    except Exception as error:
        raise MisuseOfType(
            f"profile trains on a copy, and {what} cannot be copied ({error}): expected what copy.deepcopy takes; what is"
            " open or running in it (files, locks, threads) is made in setup()"
        ) from error


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> None:
    """With all that it holds, which copy.deepcopy alone leaves out; a scheduler's wrapper around its step is made anew."""
    other = memo[id(optimizer)] = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(other).update(_copy("the optimizer", own, memo))
    if "step" in vars(optimizer):

        def step(*args: Any, **words: Any) -> Any:
            vars(other)["_opt_called"] = True
            return type(other).step(other, *args, **words)

        vars(step)["_wrapped_by_lr_sched"] = True  # by which a scheduler knows it
        vars(other)["step"] = step


@contextmanager
def _as_they_were(generators: Sequence[Any], told: Sequence[Any]) -> Iterator[None]:
    states, epochs = [generator_state(one) for one in generators], [getattr(one, "epoch", None) for one in told]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)
        for part, epoch in zip(told, epochs, strict=True):
            if epoch is not None:
                part.set_epoch(epoch)


@contextmanager
def _untouched(given: Training) -> Iterator[None]:
    """Put back what a step has reached by another way than its argument: by a name from outside, the original's."""
    try:
        net = net_of(given.model)
    except MisuseOfType:  # which fit says better
        net = torch.nn.Module()
    tensors = [(one, one.detach().clone()) for one in chain(net.parameters(), net.buffers()) if not is_lazy(one)]
    gradients = [(parameter, parameter.grad) for parameter in net.parameters()]
    net.zero_grad()  # set to None: what is reached adds to none of these
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _own_scaler(precision: Any) -> Iterator[None]:
    """A scaler of gradients for these steps; the other one stays as it is."""
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        precision.scaler = copy.deepcopy(scaler)
    try:
        yield
    finally:
        if scaler is not None:
            precision.scaler = scaler
