"""Loggers: those of a run: what each is given, and what is done when one cannot write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.run import Run
from .tables import LogsError

CSV = "metrics.csv"


class Loggers:
    """One with ``log_epoch`` (our CSVLogger) gets one whole row per epoch and the values per step.

    Every other one gets what Trainer would give it, at the same steps.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.by_row = [logger for logger in run.home.loggers if hasattr(type(logger), "log_epoch")]
        self.by_value = [logger for logger in run.home.loggers if logger not in self.by_row]
        self.complaint: str | None = None  # what could not be written to the end

    def hyperparameters(self) -> None:
        """Write the module's and datamodule's hyperparameters; for the CSV a fit's, and the loop's configuration."""
        run = self._run
        hparams: dict[str, Any] = {}
        for owner in (run.trained.datamodule, run.trained.owner):
            if getattr(owner, "_log_hyperparams", True):
                hparams |= dict(getattr(owner, "hparams_initial", None) or getattr(owner, "hparams", None) or {})
        for logger in self.by_value:
            if hparams:
                logger.log_hyperparams(hparams)
            # a graph is traced from the example; Lightning's loggers look for it themselves
            kinds = [base.__module__ for base in logger.__class__.__mro__] if run.trained.is_lightning else []
            is_lightnings = any(kind.startswith(("lightning.pytorch.", "pytorch_lightning.")) for kind in kinds)
            if hasattr(logger, "log_graph") and (
                is_lightnings or getattr(run.trained.owner, "example_input_array", None) is not None
            ):
                logger.log_graph(run.trained.owner)
            if is_lightnings:
                logger.save()
        for logger in self.by_row if run.fn == "fit" else ():
            logger.log_hyperparams({"hparams": hparams, "config": vars(run.config)})

    def values(self, metrics: Mapping[str, Any] | None, for_csv: Mapping[str, Any] | None, step: int) -> None:
        """Values at one step, for our CSV and for the others; None: nothing for these."""
        for loggers, own in ((self.by_value, metrics), (self.by_row, for_csv)):
            for logger in loggers if own is not None else ():
                self._try(logger.log_metrics, metrics=own, step=step)
                if callable(save := getattr(logger, "save", None)):
                    save()

    def row(self, row: Mapping[str, Any]) -> None:
        """The row of an epoch."""
        for logger in self.by_row:
            self._try(logger.log_epoch, row)

    def sync(self) -> None:
        """Make the rows survive a power cut, those that the disk has refused so far as well."""
        for logger in self.by_row:
            if callable(sync := getattr(logger, "sync", None)):
                self._try(sync)

    def finalize(self, status: str) -> None:
        """Close the loggers."""
        for logger in self._run.home.loggers:
            self.complaint = self._try(logger.finalize, status) or self.complaint

    def _try(self, write: Callable, *args: Any, **words: Any) -> str | None:
        """Write to a logger. A full disk costs a warning, not the run: our CSVLogger keeps the rows for the next time."""
        try:
            write(*args, **words)
        except LogsError as error:
            self._run.said.warn(f"{error}; training goes on, the rows are kept and written as soon as that is possible")
            return f"the logs are not complete: {error}."
        return None


def rows_state(run: Run) -> dict[str, Any]:
    """Where the rows are, for a checkpoint: how many and the last, if a CSV of ours has them; otherwise all, as text."""
    logs = [logger.position() if hasattr(type(logger), "position") else None for logger in run.home.loggers]
    places = [place[CSV] for place in logs if place and CSV in place]
    in_csv = any(count_of(place) >= len(run.history.rows) for place in places)
    home = next(
        ([str(logger.name), logger.version] for logger in run.home.loggers if hasattr(type(logger), "rewind")), []
    )
    history = run.history.state_dict(whole=run.fabric.is_global_zero and not in_csv)
    return {"history": {**history, "home": home}, "logs": logs}


def count_of(place: Mapping[str, Any]) -> int:
    """How many rows a checkpoint says that a CSV has, those included that waited for the disk."""
    return place["rows"] + len(place.get("waiting", ()))
