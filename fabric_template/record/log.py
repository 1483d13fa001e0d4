"""Record: what a run writes down: values per step and rows per epoch, to the CSV and to any other logger."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .tables import LogsError

if TYPE_CHECKING:
    from ..core.run import Run

_NONE: Mapping[str, Any] = {}


class Record:
    """Sends what was logged where it belongs.

    A logger with ``log_epoch`` (our CSVLogger) gets one whole row per epoch and the values per step. Every other logger
    gets what Trainer would give it, at the same steps.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.every = run.config.log_every_n_steps
        self.by_row = [logger for logger in run.loggers if hasattr(type(logger), "log_epoch")]
        self.by_value = [logger for logger in run.loggers if logger not in self.by_row]
        self.began = time.monotonic()
        self.rates: list[float] = []
        self.complaint: str | None = None  # what could not be written to the end

    def hyperparameters(self) -> None:
        """Write the module's and datamodule's hyperparameters, and for the CSV the loop's configuration."""
        run = self.run
        hparams: dict[str, Any] = {}
        for owner in (run.datamodule, run.owner):
            if getattr(owner, "_log_hyperparams", True):
                hparams |= dict(getattr(owner, "hparams_initial", None) or getattr(owner, "hparams", None) or {})
        for logger in self.by_value:
            if hparams:
                logger.log_hyperparams(hparams)
            has_example = getattr(run.owner, "example_input_array", None) is not None  # a graph is traced from it
            if has_example and callable(log_graph := getattr(logger, "log_graph", None)):
                log_graph(run.owner)
        for logger in self.by_row:
            logger.log_hyperparams({"hparams": hparams, "config": vars(run.config)})

    def step(self) -> None:
        """After a training batch: the step's values, when they are due."""
        run = self.run
        due = self.every and (run.batches_that_stepped + 1) % self.every == 0
        if due or (run.should_stop and self.every):
            self.values(run.metrics.step_log())
            run.history.warn_of_nan(run.total_batches - 1)

    def values(
        self, metrics: Mapping[str, Any], step: int | None = None, by_row: bool = True, more: Mapping[str, Any] = _NONE
    ) -> None:
        """Values at one step, and more for our CSV; None: at a logged "step", or where the run stands, beside the epoch."""
        run = self.run
        if not (metrics or (more and by_row)) or not (self.by_value or self.by_row):
            return
        run.metrics.logged.update(metrics)
        scalars = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if step is None and "step" in scalars:  # a logged "step" is the x axis
            step = int(scalars.pop("step"))
        elif step is None:
            scalars.setdefault("epoch", run.current_epoch)
            step = run.batches_that_stepped
        for logger in (self.by_value if metrics else []) + (self.by_row if by_row else []):
            own = {**more, **scalars} if logger in self.by_row else scalars
            self._try(logger.log_metrics, metrics=own, step=step)
            if callable(save := getattr(logger, "save", None)):
                save()

    def validation(self, metrics: Mapping[str, Any], returned: Mapping[str, Any]) -> None:
        """A validation is over; in the middle of an epoch its values, those returned, too, are a row of the steps."""
        self.values(metrics, by_row=not self.run.is_last_of_epoch, more=returned)

    def given(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """What a hook or a step gives to ``loop.log_dict``; with the epoch that runs among it, it joins that one's row."""
        run = self.run
        joins = run.fn == "fit" and not run.between_epochs and metrics.get("epoch") == run.current_epoch
        if joins:
            run.metrics.row.update({name: value for name, value in metrics.items() if name not in ("epoch", "step")})
        self.values(metrics, step, by_row=not joins)

    def note_rates(self) -> None:
        """The learning rates of the step just taken, before a scheduler of the epoch changes them."""
        self.rates = self.run.learning_rates()

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """The epoch is over: Trainer's values for the others, one whole row for the CSV and the history."""
        run = self.run
        run.batches_that_stepped -= 1  # the epoch's values stand at its last step
        returned = {} if run.is_lightning else run.history.returned  # a plain module's values are its metrics
        trained = {name: value for name, value in returned.items() if name.startswith("train_")}
        try:
            self.values({**trained, **metrics}, by_row=False)
        finally:
            run.batches_that_stepped += 1
        seconds, self.began = time.monotonic() - self.began, time.monotonic()
        rates = self.rates or run.learning_rates()
        row = run.history.add(run.current_epoch, run.global_step, run.metrics.take_row(), rates, seconds)
        self.rates = []
        for logger in self.by_row:
            self._try(logger.log_epoch, row)

    def sync(self) -> None:
        """Make the rows survive a power cut, those that the disk has refused so far as well."""
        for logger in self.by_row:
            if callable(sync := getattr(logger, "sync", None)):
                self._try(sync)

    def finalize(self, status: str) -> None:
        """Close the loggers."""
        for logger in self.run.loggers:
            self.complaint = self._try(logger.finalize, status) or self.complaint

    def _try(self, write: Callable, *args: Any, **words: Any) -> str | None:
        """Write to a logger. A full disk costs a warning, not the run: our CSVLogger keeps the rows for the next time."""
        try:
            write(*args, **words)
        except LogsError as error:
            self.run.warn_once(f"{error}; training goes on, the rows are kept and written as soon as that is possible")
            return f"the logs are not complete: {error}."
        return None
