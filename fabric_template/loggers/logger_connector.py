"""Send logged values to a run's loggers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from ..errors import ConfigurationError
from .csv_logger import CSVLogger
from .result_collection import to_numbers
from .run_config import log_settings, merge_hyperparameters

if TYPE_CHECKING:
    from ..training.run import Run


class LoggerConnector:
    """Sends the values from steps, epochs and evaluations to a run's loggers."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def loggers(self) -> list[Any]:
        return self.run.loop.loggers

    @property
    def csv_loggers(self) -> list[CSVLogger]:
        """The loggers that write metrics.csv and steps.csv."""
        return [logger for logger in self.loggers if isinstance(logger, CSVLogger)]

    def use_version(self, version: int | str) -> None:
        """Let the CSV loggers write to the folder of ``version``."""
        for logger in self.csv_loggers:
            logger.use_version(version)

    def log_step(self) -> None:
        run = self.run
        values = run.results.current_values()
        row = {**run.row.step_row(), **values.row}
        self.log_metrics(values.logged, row=row)
        run.row.check_loss(row)

    def log_evaluation_step(self, dataloader_idx: int) -> None:
        """Send the loggers the values that an evaluation step logged with on_step=True."""
        run = self.run
        if run.progress.stage == "sanity_check":
            return
        count = run.progress.count_eval_step(dataloader_idx)
        if run.results.evaluation.has_step_values:
            values = run.results.current_values()
            self.log_metrics(values.logged, step=count, row=values.row)

    def log_evaluation(self, metrics: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        run = self.run
        if run.progress.stage == "sanity_check":
            return
        has_row = run.stage == "fit" and (run.row.is_step_based or run.progress.is_epoch_complete)
        self.log_metrics(metrics, row=None if has_row else row)

    def log_train_epoch(self) -> None:
        # Subtract 1, because the step counter is already past the epoch's last step.
        self.log_metrics(self.run.results.update_metrics().logged, step_offset=-1)

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        step_offset: int = 0,
        row: Mapping[str, Any] | None = None,
    ) -> None:
        """Send metrics to every logger.

        Args:
            step: The step to log the values at. If None, use the value logged as "step". If "step"
                was not logged, use the run's own count of steps plus ``step_offset``. The "step"
                column of steps.csv always contains the number of optimizer steps.
            row: The row that the CSV logger writes to steps.csv. If None, write no row.
        """
        self.run.results.logged_metrics.update(metrics)
        progress = self.run.progress
        values = to_numbers(metrics)
        if step is None and "step" in values:
            step = int(values.pop("step"))
        elif step is None and values:
            values.setdefault("epoch", progress.epochs_done)
            step = progress.logging_step + step_offset
        for logger in self.loggers:
            if not isinstance(logger, CSVLogger):
                if metrics:
                    logger.log_metrics(metrics=values, step=step)
                    logger.save()
            elif row:
                epoch = {"epoch": progress.epochs_done}
                in_row = {**epoch, **to_numbers(row), **epoch}
                logger.log_metrics(in_row, step=progress.global_step)

    def log_hyperparameters(self) -> None:
        run = self.run
        hparams: dict[str, Any] = {}
        if self.loggers:
            hparams = merge_hyperparameters(run.model, run.datamodule, run.config.hparams)
        # In TensorBoard, logging the hyperparameters again would add a second value of hp_metric.
        done = list(filter(has_hyperparameters, self.loggers)) if run.plan.start.resumes else []
        for logger in self.loggers:
            is_csv = isinstance(logger, CSVLogger)
            if (run.stage == "fit" or not is_csv) and logger not in done:
                log_settings(logger, hparams, run.config)
            if not is_csv:
                logger.log_graph(run.module)
                logger.save()

    def finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)


def has_hyperparameters(logger: Any) -> bool:
    """Return whether a TensorBoard folder already contains the hyperparameters of a run."""
    if not isinstance(logger, TensorBoardLogger):
        return False
    folder = Path(logger.log_dir)
    # Do not check only for event files, because a setup hook may have created them before any
    # hyperparameters were logged.
    has_file = Path(folder, logger.NAME_HPARAMS_FILE).is_file()
    return has_file and any(folder.glob("events.out.tfevents.*"))


class RunTensorBoardLogger(TensorBoardLogger):
    """Writes TensorBoard's event files to the folder that contains metrics.csv."""

    def __init__(self, own: CSVLogger) -> None:
        super().__init__(own.root_dir, own.name)
        self._own = own

    @property
    def version(self) -> int | str:
        return self._own.version


def make_logger(given: Any, own: CSVLogger | None) -> Any:
    """Create a logger from a name such as "wandb", or wrap the user's logger if necessary."""
    if given is True or given == "csv":
        return own
    if not isinstance(given, str) or own is None:
        return given if hasattr(given, "after_save_checkpoint") else LoggerAdapter(given)
    folder = Path(own.root_dir, own.name)
    try:
        if given == "tensorboard":
            return RunTensorBoardLogger(own)
        if given == "wandb":
            return WandbLogger(project=own.name, save_dir=folder)
        # Let MLflow write to a database, because MLflow 3 no longer writes runs to plain files.
        folder.mkdir(parents=True, exist_ok=True)
        database, artifacts = f"sqlite:///{folder}/mlflow.db", str(folder / "mlflow")
        return MLFlowLogger(own.name, tracking_uri=database, artifact_location=artifacts)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"logger: got {given!r}, which needs a package that is not installed. Run pip install"
            f" {given}."
        ) from error


class LoggerAdapter(Logger):
    """Makes a Fabric logger, or any object with log_metrics, usable as a Lightning logger."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    @property
    def name(self) -> str | None:
        return getattr(self._logger, "name", None)

    @property
    def version(self) -> int | str | None:
        return getattr(self._logger, "version", None)

    @property
    def save_dir(self) -> str | None:
        # Fabric's loggers have root_dir instead of save_dir.
        return getattr(self._logger, "save_dir", None) or getattr(self._logger, "root_dir", None)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._logger.log_metrics(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        if hasattr(self._logger, "log_hyperparams"):
            self._logger.log_hyperparams(*args, **kwargs)

    def finalize(self, status: str) -> None:
        if hasattr(self._logger, "finalize"):
            self._logger.finalize(status)

    def __getattr__(self, name: str) -> Any:
        if name == "_logger":
            raise AttributeError(name)
        return getattr(self._logger, name)
