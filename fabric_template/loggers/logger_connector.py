"""Which logged value goes to which logger, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ..training.run_state import RunState


class LoggerConnector:
    """Sends values to the loggers of a run."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.every_n_steps = run.config.log_every_n_steps
        self._evaluated_batches: dict[int, int] = {}

    @property
    def loggers(self) -> list[Any]:
        return self.run.loop.loggers

    def log_step(self, run: RunState) -> None:
        """Log the values of an optimizer step every log_every_n_steps, and at the last step."""
        if not self.every_n_steps or not run.results.train.has_step_values:
            return
        is_due = (run.progress.logging_step + 1) % self.every_n_steps == 0
        if is_due or run.stop.should_stop or run.config.fast_dev_run:
            self.log_metrics(run.results.views()[1], writes_row=True)

    def log_evaluation_step(self, run: RunState, dataloader_idx: int) -> None:
        """Log the values of an evaluation batch that are logged per step."""
        if run.progress.stage == "sanity_check":
            return
        count = self._evaluated_batches.get(dataloader_idx, 0)
        self._evaluated_batches[dataloader_idx] = count + 1
        if run.results.active.has_step_values:
            self.log_metrics(run.results.views()[1], step=count, writes_row=True)

    def log_evaluation(self, run: RunState) -> None:
        """Log what an evaluation measured. Inside an epoch the values are a row of steps.csv, too."""
        if run.progress.stage == "sanity_check":
            run.results.callback_metrics.clear()
            run.results.logged_metrics.clear()
            run.results.progress_bar_metrics.clear()
            run.results.row.clear()
            run.history.returned.clear()
            return
        is_inside_epoch = run.stage != "fit" or not run.progress.is_epoch_complete
        self.log_metrics(run.history.evaluated, writes_row=is_inside_epoch)

    def log_train_epoch(self, run: RunState) -> None:
        """Log the values of an epoch, and write its row."""
        metrics = dict(run.results.update_metrics())
        if not run.is_lightning_module:
            returned = {n: v for n, v in run.history.returned.items() if n.startswith("train_")}
            metrics = {**returned, **metrics}
        # Loggers expect the values of an epoch at its last step.
        self.log_metrics(metrics, step_offset=-1)
        row = run.history.add_row()
        for logger in self.loggers:
            if hasattr(logger, "log_epoch"):
                logger.log_epoch(row)
        run.console.end_epoch(run, row)

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        step_offset: int = 0,
        writes_row: bool = False,
    ) -> None:
        """Send values to every logger.

        Args:
            step: The x axis. None: a logged "step", or the logging step beside the epoch.
            writes_row: Whether the CSV logger writes these values, too.
        """
        if not metrics or not self.loggers:
            return
        self.run.results.logged_metrics.update(metrics)
        scalars = {n: v.item() if isinstance(v, Tensor) else v for n, v in metrics.items()}
        if step is None and "step" in scalars:
            step = int(scalars.pop("step"))
        elif step is None:
            scalars.setdefault("epoch", self.run.progress.epochs_done)
            step = self.run.progress.logging_step + step_offset
        for logger in self.loggers:
            is_own = hasattr(logger, "log_epoch")
            if not is_own or writes_row:
                logger.log_metrics(scalars, step)
                logger.save()

    def log_hyperparameters(self, run: RunState) -> None:
        """Log the hyperparameters of the module and the datamodule."""
        hparams = {}
        for part in (run.datamodule, run.model):
            if getattr(part, "_log_hyperparams", False) and getattr(part, "hparams_initial", None):
                hparams.update(part.hparams_initial)
        for logger in self.loggers:
            if hparams:
                logger.log_hyperparams(hparams)
            if hasattr(logger, "log_graph"):
                logger.log_graph(run.module)
            logger.save()

    def monitored_metrics(self) -> dict[str, Any]:
        """Return everything that can be monitored: what was logged, and what steps returned."""
        run = self.run
        if run.results.active:
            run.results.update_metrics()
        return {**run.history.returned, **run.results.callback_metrics}

    def finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)

    def state_dict(self) -> dict[str, Any]:
        positions = [logger.position() for logger in self.loggers if hasattr(logger, "position")]
        return {"positions": positions, "evaluated_batches": dict(self._evaluated_batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._evaluated_batches = dict(state["evaluated_batches"])
        own = [logger for logger in self.loggers if hasattr(logger, "rewind")]
        for logger, position in zip(own, state["positions"], strict=False):
            logger.rewind(position, self.run.history.rows)
