"""TrainerFace: what modules and callbacks read from a trainer, offered by the loop; and no more than that.

Counted over public packages and Lightning's own callbacks. What has no meaning here is refused with a clear
AttributeError, so that nobody takes silence for an answer.
"""

from __future__ import annotations

import math
import signal
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .errors import Misuse
from .hooks import is_a
from .machine import MachineFace
from .views import AcceleratorView, DataView, EvaluationLoopView, FitLoopView, LoggerView, PredictLoopView, ResultsView

if TYPE_CHECKING:
    from .run import Run


class Word(str):
    """A word that equals the member of Trainer's enum that has it, and has its ``value``."""

    @property
    def value(self) -> str:
        """The word itself."""
        return str(self)


class State(SimpleNamespace):
    """What runs: ``fn`` ("fit", "validate", "test", "predict"), ``stage``, ``status``; Trainer's enums equal these words."""

    def __eq__(self, other: object) -> bool:
        return all(getattr(other, name, None) == value for name, value in vars(self).items())

    @property
    def finished(self) -> bool:
        """Whether the last run came to its end."""
        return self.status == "finished"

    @property
    def interrupted(self) -> bool:
        """Whether the last run was interrupted or failed."""
        return self.status == "interrupted"


class TrainerFace(MachineFace):
    """Trainer's attributes, read from the run at hand (or the last one); what belongs to fit, from the last fit."""

    _run: Run | None
    _runs: dict[str, Run]  # the last one of each verb: what it has set up stays readable, as under Trainer

    # ---- progress

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, counted from 0; after fit, the number of epochs trained."""
        return self._run.current_epoch if self._run else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self._run.global_step if self._run else 0

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs, -1 for none."""
        return self._run.limits()[0] if self._run else self.config.max_epochs

    @property
    def min_epochs(self) -> int | None:
        """How many epochs no ``should_stop`` can end, 0 for none; as configured before anything has run."""
        return self._run.min_epochs if self._run else self.config.min_epochs

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch at hand is the last of the epoch."""
        return bool(self._fitted and self._fitted.is_last_batch)

    @property
    def should_stop(self) -> bool:
        """Set it to end training after the batch at hand (when min_epochs and min_steps allow)."""
        return bool(self._fitted and self._fitted.should_stop)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if self._fitted is not None:
            self._fitted.should_stop = value

    @property
    def gradient_clip_algorithm(self) -> Word | None:
        """What gradient_clip_val limits."""
        algorithm = self.config.gradient_clip_algorithm
        return algorithm and Word(algorithm)

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches per optimizer step; a callback may change it between epochs."""
        return self._run.window if self._run else self.config.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._required("accumulate_grad_batches").window = value

    @property
    def num_training_batches(self) -> int | float:
        """Training batches of an epoch."""
        return self._fitted.feed.num_batches if self._fitted else math.inf

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader; fit's, unless the last run was validate."""
        return self._limits_of("validate" if self._run and self._run.fn == "validate" else "fit")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return self._limits_of("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict."""
        return self._limits_of("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in fit's sanity check."""
        return [min(self.num_sanity_val_steps, limit) for limit in self._limits_of("fit")]

    def _limits_of(self, verb: str) -> list[int | float]:
        """The batches of each evaluation loader of the last such run."""
        run = self._runs.get(verb)
        return run.feed.val.limits if run and run.feed.val else []

    @property
    def val_check_batch(self) -> int | float | None:
        """Validation runs every so many batches."""
        return self._fitted.schedule.batch if self._fitted else None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps that fit is going to take; infinity when nothing limits it.

        May be asked in ``configure_optimizers``: the training loader is made then.

        Raises:
            Misuse: where there is no training loader, as in a test.
        """
        run = self._required("estimated_stepping_batches")
        max_epochs, max_steps = run.limits()
        if max_epochs == -1 and not run.has_timer:
            return math.inf if max_steps == -1 else max_steps
        if not run.feed.has("train"):
            raise Misuse(
                f"FabricLoop.estimated_stepping_batches: {run.fn} has no train loader, and `train_dataloader` must be"
                " implemented to count its batches: ask for it in fit"
            )
        run.feed.set_up_train()
        if run.feed.num_batches == math.inf:
            return max_steps if max_steps != -1 else math.inf
        per_epoch = math.ceil(run.feed.num_batches / run.window)
        total = per_epoch * max(max_epochs, 1)
        return min(max_steps, total) if max_steps != -1 else total

    # ---- what was logged

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Every metric logged so far by name, as callbacks see it."""
        if self._run is None:
            return {}
        if self._run.metrics.active:
            self._run.metrics.merge()
        return self._run.metrics.callback

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What was sent to the loggers."""
        if self._run is None:
            return {}
        if self._run.metrics.active:
            self._run.metrics.merge()
        return self._run.metrics.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What stands beside the progress bar."""
        if self._run is None:
            return {}
        if self._run.metrics.active:
            self._run.metrics.merge()
        return self._run.metrics.progress

    # ---- parts

    @property
    def lightning_module(self) -> Any:
        """The object whose steps run."""
        return self._run.owner if self._run else None

    @property
    def model(self) -> Any:
        """The same; under DDP the wrapper."""
        if self._run is None:
            return None
        return getattr(getattr(self._run, "steps", None), "wrapped", None) or self._run.owner

    @property
    def datamodule(self) -> Any:
        """The datamodule given to this run."""
        return self._run.datamodule if self._run else None

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers themselves."""
        return self._fitted.optimizers if self._fitted else []

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._required("optimizers").replace_optimizers(optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers with their intervals and monitors."""
        return self._fitted.schedulers if self._fitted else []

    @property
    def train_dataloader(self) -> Any:
        """The training loader, in the shape in which it was given."""
        return self._run.feed.train.as_given if self._run and self._run.feed.train else None

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders, in the shape in which they were given."""
        return self._loaders_of("fit", "validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders, in the shape in which they were given."""
        return self._loaders_of("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loaders to predict, in the shape in which they were given."""
        return self._loaders_of("predict")

    def _loaders_of(self, *verbs: str) -> Any:
        """The evaluation's loaders, if the last run was one of these verbs: they don't outlive it."""
        run = self._run
        return run.feed.val.as_given if run and run.feed.val and run.fn in verbs else None

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers, self._own_logger = [] if logger is None else [logger], False

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger's files."""
        if not self.loggers:
            return self.default_root_dir
        logger = self.loggers[0]
        folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        known = hasattr(type(logger), "claim")  # our own: the version was agreed on when the run began
        return folder if known or self.fabric.world_size == 1 or not self._run else self.fabric.broadcast(folder)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if is_a(callback, "Checkpoint")]

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints; without one, the loop's own saver."""
        callbacks = self.checkpoint_callbacks
        return callbacks[0] if callbacks else self._run.saver if self._run else None

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """EarlyStopping callbacks."""
        return [callback for callback in self.callbacks if is_a(callback, "EarlyStopping")]

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback."""
        callbacks = self.early_stopping_callbacks
        return callbacks[0] if callbacks else None

    @property
    def progress_bar_callback(self) -> Any:
        """A progress bar among the callbacks, if there is one."""
        return next((callback for callback in self.callbacks if is_a(callback, "ProgressBar")), None)

    @property
    def profiler(self) -> Any:
        """The profiler, one that does nothing when none was asked for."""
        if self.own_profiler is not None:
            return self.own_profiler
        from lightning.pytorch.profilers import PassThroughProfiler

        return PassThroughProfiler()

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that this run started from."""
        path = self._run and (self._run.resume_path or self._run.load_path)
        return str(path) if path else None

    # ---- loops: Lightning's callbacks look into them

    @property
    def fit_loop(self) -> FitLoopView:
        """How far training is, in the few words that callbacks ask for."""
        return FitLoopView(self)

    @property
    def predict_loop(self) -> PredictLoopView:
        """What was predicted, and of which samples."""
        return PredictLoopView(self)

    @property
    def _evaluation_loop(self) -> EvaluationLoopView:
        return EvaluationLoopView(self)

    @property
    def _data_connector(self) -> DataView:
        return DataView(self)

    @property
    def _logger_connector(self) -> LoggerView:
        return LoggerView(self)

    @property
    def _results(self) -> ResultsView | None:
        return ResultsView(self) if self._run is not None and self._run.fn != "predict" else None

    @property
    def _accelerator_connector(self) -> AcceleratorView:
        return AcceleratorView(self)

    # ---- stages

    @property
    def state(self) -> State:
        """What runs."""
        run = self._run
        return State(fn=run and Word(run.fn), stage=run and run.stage and Word(run.stage), status=Word(self._status))

    @property
    def training(self) -> bool:
        """Whether a training epoch runs."""
        return bool(self._run and self._run.stage == "train")

    @property
    def validating(self) -> bool:
        """Whether a validation runs."""
        return bool(self._run and self._run.stage == "validate")

    @property
    def testing(self) -> bool:
        """Whether a test runs."""
        return bool(self._run and self._run.stage == "test")

    @property
    def predicting(self) -> bool:
        """Whether predictions are made."""
        return bool(self._run and self._run.stage == "predict")

    @property
    def sanity_checking(self) -> bool:
        """Whether this is the short validation before training."""
        return bool(self._run and self._run.stage == "sanity_check")

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test runs; the sanity check is one, too."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def interrupted(self) -> bool:
        """Whether the last run was interrupted or failed."""
        return self.state.interrupted

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM has come: fit ends after the step at hand."""
        run = self._run
        return run is not None and signal.SIGTERM in (run.stopped_by, run.signals and run.signals.received)

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates."""
        return bool(self._run and self._run.schedule.validates)

    # ---- deeds

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a checkpoint of the run as it stands now; after a test of what was trained, of its training."""
        from .saver import prove, state_of

        if self._run is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer: expected save_checkpoint after or"
                " in fit, validate, test or predict"
            )
        run = self._run
        if self._fitted is not None and self._fitted.owner is run.owner:  # so that it can be resumed
            run = self._fitted
        state = state_of(run, weights_only=bool(weights_only))
        run.record.sync()  # what it says of the logs is on disk before it
        if self.fabric.is_global_zero:
            save = run.hooks.timed(self.fabric.strategy.checkpoint_io.save_checkpoint, "save_checkpoint")
            save(state, filepath, storage_options=storage_options)
        prove(run, filepath)
        self.fabric.barrier("save_checkpoint")

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager:
        """Make a module inside, and it is on the device and in the precision at once; see ``Fabric.init_module``."""
        return self.fabric.init_module(empty_init)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank zero."""
        self.fabric.print(*args, **kwargs)

    @property
    def _fitted(self) -> Run | None:
        return self._runs.get("fit")

    def _required(self, what: str) -> Run:
        if self._run is None:
            raise RuntimeError(f"FabricLoop.{what}: nothing has run yet; call fit, validate, test or predict first")
        return self._run

    def __getattr__(self, name: str) -> Any:
        # only for names that nothing else answers: the configuration's words, then a clear refusal
        config = self.__dict__.get("config")
        if config is not None and not name.startswith("_") and hasattr(config, name):
            return getattr(config, name)
        raise AttributeError(
            f"FabricLoop has no attribute {name!r}: it offers what modules and callbacks read from a Trainer (trainer.py"
            " lists it), not all of Trainer"
        )
