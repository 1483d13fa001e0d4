"""Evaluate: one pass of validation, test or prediction with its hooks, and what a validation or test collects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .functions import FunctionSteps, takes, takes_batch_idx, takes_iterator
from .inputs import check_names
from .net import Modes
from .outputs import name_outputs
from .overrides import overrides
from .passes import INFINITE, Turn
from .run import Run

if TYPE_CHECKING:
    from .epoch_end import EpochEnd


def evaluate(run: Run, stage: str, *, most: int | float = INFINITE, inference: bool = False, keep: bool = True) -> Any:
    """Run ``validation_step``, ``test_step`` or ``predict_step`` over the loaders of the run, one after another.

    The module is handed back in the modes in which it came, also after an error.

    Args:
        run: whose module, hooks and metrics these are; without ``predict_step`` it is called with the batch.
        stage: "validate", "sanity_check", "test" or "predict".
        most: batches of each loader at most.
        inference: under torch.inference_mode; False: torch.no_grad.
        keep: what is measured or predicted; False: nothing is.

    Returns:
        What was logged, a dict for each loader. Of "predict" what was returned, by batch, on the CPU, for several loaders
        a list of such lists; None when not kept.
    """
    kind, loaders = KINDS[stage], run.data.val
    if sum(min(limit, most) for limit in loaders.limits) == 0:
        return None if stage == "predict" else []
    step = getattr(run.trained.owner, kind.step, None)
    several = len(loaders.loaders) > 1 and loaders.combined is None
    if step is not None:
        check_dataloader_idx(run, kind, several)
    stage_before = run.at.begin_evaluation(stage)
    collection = kind.collection(run, kind, several, keep)
    with torch.inference_mode() if inference else torch.no_grad():
        turns = loaders.start_evaluation(most)
        if run.hooks.profiler is not None:
            from .timing import timed_batches

            turns = timed_batches(run.hooks.profiler, turns, f"[{kind.loop}].{kind.prefix}_next", itemgetter(3))
        run.steps.modes = modes = Modes(run.trained.net)
        try:
            _switch(run, f"on_{kind.word}_model_eval", run.trained.net.eval)
            run.hooks.call(f"on_{kind.word}_start")
            run.hooks.call(f"on_{kind.word}_epoch_start")
            if run.fn == "fit":
                run.bar.validate(sum(min(limit, most) for limit in loaders.limits), run.at.batches_done)
            _take_turns(run, kind, turns, collection, several)
            run.bar.go_on()
            collection.end_pass()
            run.hooks.call(f"on_{kind.word}_epoch_end")
            collection.end_epoch()
            run.hooks.call(f"on_{kind.word}_end")
            run.metrics.epoch_ends()
            _switch(run, f"on_{kind.word}_model_train", modes.restore)
        except BaseException:
            modes.restore()
            raise
        finally:
            run.hooks.enter(None)
            run.steps.modes = None
    run.at.enter(stage_before)  # behind an error, callbacks are still to see where it came
    return collection.results()


def _take_turns(run: Run, kind: Kind, turns: Iterator[Turn], collection: Any, several: bool) -> None:
    """Every batch with its hooks."""
    hooks, at, bar, transfer = run.hooks, run.at, run.bar, run.data.transfer
    method = getattr(run.trained.owner, kind.step, None)
    timed = hooks.timed(
        run.steps.get("forward" if method is None else kind.step),
        f"[Strategy]{type(run.fabric.strategy).__name__}.{kind.step}",
    )
    step = hooks.named(kind.step, timed)
    batch_starts, batch_ends = hooks.caller(f"on_{kind.word}_batch_start"), hooks.caller(f"on_{kind.word}_batch_end")
    handed, given = None, slice(0)  # which of (batch_idx, dataloader_idx) the step takes beside the batch
    if method is not None:
        if takes_iterator(method):
            from .handed import Handed

            handed = Handed(turns, collection.batch_taken)
        given = slice(0 if takes_batch_idx(method) else 1, 2 if takes(method, "dataloader_idx") else 1)
    current = before = 0
    for batch, batch_idx, index, _ in turns if handed is None else handed.turns():
        if index != current:
            collection.end_loader()
            current, before = index, at.evaluated
        at.evaluate_batch()
        if transfer is not None and handed is None:
            batch = transfer(batch, index)
        place: tuple[int, ...] = (batch_idx, index) if several else (batch_idx,)
        collection.batch_starts(batch, index if several else None)
        if batch_starts is not None:
            batch_starts(batch, *place)
        if handed is None:
            output = step(batch, *place[given])
        else:
            try:
                output = step(handed)
            except StopIteration:  # it asked for more than there are
                break
            batch, batch_idx, index = handed.latest
            place = (batch_idx, index) if several else (batch_idx,)
        if collection.looks:
            collection.look(output, *place)
        if batch_ends is not None:
            batch_ends(output, batch, *place)
        collection.end_batch(output, index)
        if bar.enabled:
            bar.advance(before + batch_idx + 1)


def _switch(run: Run, hook: str, otherwise: Callable[[], Any]) -> None:
    """Into another mode: the module's own way, or ours."""
    if (
        overrides(run.trained.owner, hook) and hook != "on_predict_model_train"
    ):  # of which Trainer's modules do not hear
        run.hooks.call(hook)
    else:
        run.hooks.call_callbacks(hook)
        otherwise()


class Measured:
    """What a validation or test collects: what is logged, and what its step returns beside that."""

    def __init__(self, run: Run, kind: Kind, several: bool, keep: bool) -> None:
        self.run, self._prefix, self._keep = run, kind.prefix, keep
        self.batch_starts, self.batch_taken = run.metrics.batch_starts, run.metrics.batch_taken
        self.looks = True  # at what the step returns, of this loader
        self._results: list[dict[str, Any]] = []
        self._returned: dict[str, Any] = {}
        self._loader_of: dict[str, int] = {}  # by the names of what is returned
        self._loaders = [] if run.trained.is_lightning else run.data.val.names
        check_names(self._loaders)
        self._end: EpochEnd | None = None
        self._fx = f"on_{kind.word}_epoch_end"
        if isinstance(run.trained.owner, FunctionSteps) and "epoch_end" in run.trained.owner.functions:
            from .epoch_end import EpochEnd

            count = len(run.data.val.loaders)
            self._end = EpochEnd(run.trained.owner.epoch_end, count, self._loaders, kind.prefix)
        run.metrics.start(run.metrics.val)

    def look(self, output: Any, batch_idx: int, loader: int | None = None) -> None:
        """Keep what a step returned beside what it logs, of a LightningModule that logs the loss only.

        Of several loaders it stands under Trainer's names. Who logs all that it returns pays for that once in a pass.
        """
        run, values = self.run, name_outputs(output, self._prefix)
        if run.metrics.active:
            logged = {name for _, name, index in run.metrics.active if index == loader}
            allowed = {f"{self._prefix}_loss"} if run.trained.is_lightning else values.keys()
            values = {name: values[name] for name in values if name in allowed and name not in logged}
            self.looks = bool(values)
        if values:
            if loader is not None or self._loaders:
                values = {self._named(name, loader): value for name, value in values.items()}
            run.history.val.add(values, run.log.size_of_batch(), batch_idx)

    def _named(self, name: str, loader: int | None) -> str:
        index = loader or 0
        if self._loaders:
            name = f"{self._loaders[index]}{name.removeprefix(self._prefix)}"
        elif loader is not None:
            name = f"{name}/dataloader_idx_{loader}"
        self._loader_of[name] = index
        return name

    def end_batch(self, output: Any, index: int) -> None:
        """Behind the hooks of a batch."""
        self.run.metrics.batch_ends()
        if self._end is not None:
            self._end.keep(output, index)
        if self._keep:
            self.run.log.evaluated(index)

    def end_loader(self) -> None:
        """Behind the batches of one of several loaders."""
        self.looks = True
        self.run.metrics.batches_end()
        self._results.append(dict(self.run.metrics.merge()) if self._keep else {})

    def end_pass(self) -> None:
        """Behind the batches of all."""
        run = self.run
        self.end_loader()
        run.metrics.val.dataloader_idx = None
        if self._keep:
            self._returned = run.history.end_validation(run.log.all_reduce)
        if not run.trained.is_lightning:  # a plain module's returned values are its metrics
            run.metrics.callback.update({name: torch.tensor(value) for name, value in self._returned.items()})
        if self._end is not None:
            before = run.hooks.enter(self._fx)
            for name, value in self._end.values().items():
                run.metrics.log(name, value, sync_dist=True)
            run.hooks.enter(before)

    def end_epoch(self) -> None:
        """Behind ``on_*_epoch_end``."""
        if not self._keep:
            return
        run, at_end = self.run, self.run.metrics.merge()
        everything = {name: value for result in reversed(self._results) for name, value in result.items()} | at_end
        for result in self._results:
            result.update(at_end)
        run.log.validation(everything if run.trained.is_lightning else {**self._returned, **everything}, self._returned)

    def results(self) -> list[dict[str, Any]]:
        """What was measured, a dict for each loader."""
        results = self._results
        if self._returned and not (self.run.trained.is_lightning and any(results)):
            results = [
                {name: value for name, value in self._returned.items() if self._loader_of.get(name, 0) == index}
                | result
                for index, result in enumerate(results)
            ]
        return [
            {name: value.item() if isinstance(value, Tensor) else value for name, value in result.items()}
            for result in results
        ]


def _predictions(run: Run, kind: Kind, several: bool, keep: bool) -> Any:
    from .predicted import Predictions

    return Predictions(run, several, keep)


class Kind(NamedTuple):
    """What tells one kind of pass from another."""

    word: str  # in the names of its hooks
    step: str
    prefix: str  # of its loaders, and of what its step returns
    collection: Callable[[Run, Kind, bool, bool], Any]
    loop: str  # Trainer's, for its profilers


KINDS = {
    "validate": Kind("validation", "validation_step", "val", Measured, "_EvaluationLoop"),
    "test": Kind("test", "test_step", "test", Measured, "_EvaluationLoop"),
    "predict": Kind("predict", "predict_step", "predict", _predictions, "_PredictionLoop"),
}
KINDS["sanity_check"] = KINDS["validate"]


def check_dataloader_idx(run: Run, kind: Kind, several: bool) -> None:
    """Several loaders need ``dataloader_idx`` in the step and the batch hooks; one loader must not require it.

    A plain model's step may leave it out: what it returns is told apart by its name.
    """
    for hook in (kind.step, f"on_{kind.word}_batch_start", f"on_{kind.word}_batch_end"):
        method = overrides(run.trained.owner, hook)
        if method is None or (several and hook == kind.step and not run.trained.is_lightning):
            continue
        given = inspect.signature(method).parameters.get("dataloader_idx")
        loader, name = f"{kind.prefix}_dataloader", run.trained.name
        if several and not takes(method, "dataloader_idx") and not takes_iterator(method):
            raise RuntimeError(
                f"You provided multiple `{loader}`, but no `dataloader_idx` argument in `{name}.{hook}()`."
                " Try adding `dataloader_idx=0` to its signature."
            )
        if not several and given is not None and given.default is inspect.Parameter.empty:
            raise RuntimeError(
                f"You provided only a single `{loader}`, but have included `dataloader_idx` in `{name}.{hook}()`. Either"
                " remove the argument or give it a default value i.e. `dataloader_idx=0`."
            )
