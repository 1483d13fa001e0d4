"""Trainer's loops and other attributes that Lightning's own callbacks, modules and loggers read.

Every name with an underscore has its reason beside it. The counters come from the same function that
writes them into checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..checkpoint.state import loops_state
from ..training.hooks import overridden
from ..training.optimization import is_step_due

if TYPE_CHECKING:
    from ..training.run_state import RunState


class LoopsAPI:
    """Trainer's loops, and the private attributes that Lightning's own code reads."""

    run: RunState | None
    world_size: int
    require_run: Callable[[str], RunState]

    @property
    def _logger_connector(self) -> LoggerConnectorAPI:
        """LearningRateMonitor, DeviceStatsMonitor and ThroughputMonitor ask whether to log."""
        return LoggerConnectorAPI(self)

    @property
    def _results(self) -> ResultsAPI | None:
        """``LightningModule.log`` writes here, where a module overrides ``log`` and calls its parent's."""
        has_results = self.run is not None and self.run.stage != "predict"
        return ResultsAPI(self) if has_results else None

    @property
    def _accelerator_connector(self) -> SimpleNamespace:
        """``LightningModule.log(sync_dist=True)`` asks whether there are several processes."""
        return SimpleNamespace(is_distributed=self.world_size > 1)

    @property
    def _data_connector(self) -> SimpleNamespace:
        """ModelSummary brings ``example_input_array`` to the device with the transfer hooks."""

        def get_instance(hook_name: str) -> Any:
            run = self.require_run("_data_connector")
            has_own = overridden(run.datamodule, hook_name) is not None
            return run.datamodule if has_own else run.module

        return SimpleNamespace(_datahook_selector=SimpleNamespace(get_instance=get_instance))

    @property
    def _evaluation_loop(self) -> EvaluationLoopAPI:
        """ThroughputMonitor counts batches of the evaluation."""
        return EvaluationLoopAPI(self)

    @property
    def fit_loop(self) -> FitLoopAPI:
        return FitLoopAPI(self)

    @property
    def validate_loop(self) -> EvaluationLoopAPI:
        return EvaluationLoopAPI(self, "validate_loop")

    @property
    def test_loop(self) -> EvaluationLoopAPI:
        return EvaluationLoopAPI(self, "test_loop")

    @property
    def predict_loop(self) -> PredictLoopAPI:
        return PredictLoopAPI(self, "predict_loop")


class LoopAPI:
    """One of Trainer's loops."""

    def __init__(self, loop: Any, key: str = "fit_loop") -> None:
        self.trainer, self._key = loop, key

    @property
    def _run(self) -> RunState:
        return self.trainer.require_run(self._key)

    def _counts(self, key: str) -> Any:
        return as_namespace(loops_state(self._run)[self._key][key])

    def state_dict(self) -> dict[str, Any]:
        return loops_state(self._run)[self._key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("trainer", "_key") and not hasattr(type(self), name):
            raise AttributeError(
                f"FabricLoop's {type(self).__name__.removesuffix('API')} has no attribute {name!r} to set:"
                " it has no meaning here."
            )
        super().__setattr__(name, value)


class FitLoopAPI(LoopAPI):
    """``trainer.fit_loop`` and its ``epoch_loop``, in one object."""

    @property
    def epoch_loop(self) -> FitLoopAPI:
        return self

    @property
    def val_loop(self) -> EvaluationLoopAPI:
        return EvaluationLoopAPI(self.trainer)

    @property
    def max_epochs(self) -> int | None:
        return self.trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._set_limit("max_epochs", -1 if value is None else value)

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._set_limit("max_steps", value)

    def _set_limit(self, name: str, value: int) -> None:
        self.trainer.config = self.trainer.config.changed(**{name: value})
        if self.trainer.run is not None:
            setattr(self.trainer.run.stop, name, value)

    @property
    def max_batches(self) -> int | float:
        return self._run.progress.num_train_batches

    @max_batches.setter
    def max_batches(self, value: int | float) -> None:
        self._run.progress.num_train_batches = value

    @property
    def total_batch_idx(self) -> int:
        return self._run.progress.total_batches - 1

    @property
    def batch_idx(self) -> int:
        return self._run.progress.batches_done - 1

    @property
    def epoch_progress(self) -> SimpleNamespace:
        return self._counts("epoch_progress")

    @property
    def batch_progress(self) -> SimpleNamespace:
        return self._counts("epoch_loop.batch_progress")

    @property
    def _batches_that_stepped(self) -> int:
        """The loggers' step, for LearningRateMonitor and DeviceStatsMonitor."""
        return self.trainer.run.progress.logging_step if self.trainer.run else 0

    @property
    def manual_optimization(self) -> ManualOptimizationAPI:
        return ManualOptimizationAPI(self._run)

    def _should_accumulate(self) -> bool:
        """Return whether no optimizer step follows the batch, for ThroughputMonitor."""
        return not is_step_due(self._run)

    def _should_check_val_epoch(self) -> bool:
        """Return whether this epoch is validated, for the totals of progress bars."""
        return self._run.should_validate and self._run.validation_schedule.is_in_this_epoch()

    @property
    def _skip_backward(self) -> bool:
        """StochasticWeightAveraging updates the statistics of BatchNorm by forward passes alone."""
        return self._run.optimization.skip_backward

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        self._run.optimization.skip_backward = value

    def __getattr__(self, name: str) -> Any:
        if name in ("min_epochs", "min_steps", "global_step"):
            return getattr(self.trainer, name)
        raise AttributeError(name)

    def setup_data(self) -> None:
        self._run.data.setup_train_loader()


class ManualOptimizationAPI:
    """``manual_optimization.optim_step_progress``: modules count steps there that nobody else counts.

    One object stands for both, and for the ``total`` and ``current`` counts.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.optim_step_progress = self.total = self.current = self

    @property
    def completed(self) -> int:
        return self._run.progress.global_step

    @completed.setter
    def completed(self, value: int) -> None:
        self._run.progress.global_step = value

    def increment_completed(self) -> None:
        self.completed += 1

    def increment_ready(self) -> None:
        """Do nothing: a step counts when it is completed."""


class EvaluationLoopAPI(LoopAPI):
    """``trainer.validate_loop``, ``trainer.test_loop``, and the validation inside of fit."""

    @property
    def max_batches(self) -> list[int | float]:
        trainer = self.trainer
        if trainer.sanity_checking:
            return trainer.num_sanity_val_batches
        loaders = self._run.data.eval_loaders
        return loaders.limits if loaders is not None else []

    @property
    def num_dataloaders(self) -> int:
        return len(self.max_batches)

    @property
    def batch_progress(self) -> SimpleNamespace:
        progress, hook = self._run.progress, self._run.hooks.current or ""
        is_in_batch = hook.endswith(("_step", "_batch_start", "_batch_end"))
        counts = {}
        current = progress.eval_batches_done
        total = current if self.trainer.sanity_checking else progress.total_eval_batches
        for name, count in (("current", current), ("total", total)):
            completed = count - is_in_batch
            processed = count if hook.endswith("_end") else completed
            counts[name] = {
                "ready": count,
                "started": count,
                "processed": processed,
                "completed": completed,
            }
        return as_namespace(counts)

    @property
    def _has_run(self) -> bool:
        """Return whether there was a validation, for ModelCheckpoint's message about a missing monitor."""
        return self._run.progress.eval_batches_done > 0

    @property
    def _data_source(self) -> SimpleNamespace:
        """Return whether there is a validation loader, for modules that choose what to monitor."""
        return SimpleNamespace(is_defined=lambda: self._run.data.has_loader("val"))


class PredictLoopAPI(EvaluationLoopAPI):
    """``trainer.predict_loop``, for callbacks that write predictions."""

    @property
    def predictions(self) -> list[Any]:
        return self._run.predictions.as_returned()

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        return self._run.predictions.batch_indices

    @property
    def current_batch_indices(self) -> list[int]:
        return self._run.predictions.current_indices


class LoggerConnectorAPI:
    """``trainer._logger_connector``."""

    # LightningModule.log notes from which hook it was called. Our own log knows.
    _current_fx: str | None = None

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    @property
    def should_update_logs(self) -> bool:
        run = self._loop.require_run("_logger_connector")
        return run.loggers.is_step_due()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._loop.require_run("_logger_connector").loggers.log_metrics(metrics, step)

    def should_reset_tensors(self, fx: str) -> bool:
        return False


class ResultsAPI:
    """``trainer._results``: where ``LightningModule.log`` brings what it has checked."""

    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def log(
        self, fx: str, name: str, value: Any, sync_dist_fn: Any = None, **arguments: Any
    ) -> None:
        self._loop.require_run("_results").results.log(name, value, **arguments)


def as_namespace(value: Any) -> Any:
    """Return nested dicts as objects with attributes."""
    if not isinstance(value, dict):
        return value
    return SimpleNamespace(**{name: as_namespace(part) for name, part in value.items()})
