"""Implement the attributes of Trainer that LightningModules, callbacks and loggers read."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from copy import copy
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import accelerators, profilers
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType

from .checkpoint.distributed import remove_shards, save_checkpoint
from .checkpoint.manager import CheckpointManager
from .checkpoint.state import build_checkpoint, loops_state, make_counts, make_loop_counters
from .config import LoopConfig
from .data.samplers import Predictions
from .distributed.launch import join_processes, starts_processes
from .errors import ConfigurationError, describe
from .lightning_compat.overrides import find_callbacks, overridden
from .training.optimization import clip_gradients, is_logging_due
from .training.progress import Progress, StopCondition

if TYPE_CHECKING:
    from .training.run import Run


_OF_FABRIC = ("is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "print")
# Maps Trainer's read-only attributes to functions that compute them from a FabricLoop.
_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    # The run
    "global_step": lambda loop: loop.run.progress.global_step if loop.run else 0,
    "current_epoch": lambda loop: loop.run.progress.trainer_epoch if loop.run else 0,
    "is_last_batch": lambda loop: bool(loop.run and loop.run.progress.is_last_batch),
    "enable_validation": lambda loop: bool(loop.run and loop.run.should_validate),
    "lightning_module": lambda loop: loop.run and loop.run.model,
    # Return the wrapper around the model, such as DistributedDataParallel, if there is one.
    "model": lambda loop: loop.run and (loop.run.steps.wrapped or loop.run.model),
    "datamodule": lambda loop: loop.run and loop.run.datamodule,
    "lr_scheduler_configs": lambda loop: (
        loop.fit_run.optimization.lr_schedulers if loop.fit_run else []
    ),
    "interrupted": lambda loop: loop.status == TrainerStatus.INTERRUPTED,
    "evaluating": lambda loop: loop.validating or loop.testing or loop.sanity_checking,
    "callback_metrics": lambda loop: loop.metrics("callback_metrics"),
    "logged_metrics": lambda loop: loop.metrics("logged_metrics"),
    "progress_bar_metrics": lambda loop: loop.metrics("progress_bar_metrics"),
    # Limits
    "max_epochs": lambda loop: loop.limits.max_epochs,
    "min_epochs": lambda loop: loop.limits.min_epochs,
    "gradient_clip_algorithm": lambda loop: (
        loop.config.gradient_clip_algorithm
        and GradClipAlgorithmType(loop.config.gradient_clip_algorithm.lower())
    ),
    "num_training_batches": lambda loop: (
        loop.fit_run.progress.num_train_batches if loop.fit_run else math.inf
    ),
    "num_val_batches": lambda loop: loop.eval_limits(
        "validate" if loop.run and loop.run.stage == "validate" else "fit"
    ),
    "num_sanity_val_batches": lambda loop: [
        limit
        if loop.config.num_sanity_val_steps == -1
        else min(limit, loop.config.num_sanity_val_steps)
        for limit in loop.eval_limits("fit")
    ],
    "num_test_batches": lambda loop: loop.eval_limits("test"),
    "num_predict_batches": lambda loop: loop.eval_limits("predict"),
    "val_check_batch": lambda loop: (
        loop.fit_run.validation_schedule.every_n_batches if loop.fit_run else None
    ),
    # Loaders
    "train_dataloader": lambda loop: getattr(
        created_loaders(loop.fit_run, "train"), "as_given", None
    ),
    "val_dataloaders": lambda loop: loop.loaders_of("fit", "validate"),
    "test_dataloaders": lambda loop: loop.loaders_of("test"),
    "predict_dataloaders": lambda loop: loop.loaders_of("predict"),
    # Callbacks
    "checkpoint_callbacks": lambda loop: find_callbacks(loop.callbacks, "Checkpoint"),
    "early_stopping_callbacks": lambda loop: find_callbacks(loop.callbacks, "EarlyStopping"),
    "early_stopping_callback": lambda loop: next(iter(loop.early_stopping_callbacks), None),
    # Devices
    **{name: attrgetter(f"fabric.{name}") for name in _OF_FABRIC},
    "precision": lambda loop: loop.fabric.strategy.precision.precision,
    "precision_plugin": lambda loop: loop.strategy.precision_plugin,
    "scaler": lambda loop: getattr(loop.fabric.strategy.precision, "scaler", None),
    "num_nodes": lambda loop: getattr(loop.fabric.strategy, "num_nodes", 1),
    "num_devices": lambda loop: len(loop.device_ids),
    "distributed_sampler_kwargs": lambda loop: getattr(
        loop.fabric.strategy, "distributed_sampler_kwargs", None
    ),
    # Loops and connectors
    "fit_loop": lambda loop: LoopAPI(loop, "fit_loop"),
    "validate_loop": lambda loop: LoopAPI(loop, "validate_loop"),
    "test_loop": lambda loop: LoopAPI(loop, "test_loop"),
    "predict_loop": lambda loop: LoopAPI(loop, "predict_loop"),
    # ThroughputMonitor reads the number of evaluated batches from ``_evaluation_loop``.
    "_evaluation_loop": lambda loop: LoopAPI(loop, "validate_loop"),
    # ``LightningModule.log(sync_dist=True)`` reads ``_accelerator_connector.is_distributed``.
    "_accelerator_connector": lambda loop: SimpleNamespace(is_distributed=loop.world_size > 1),
}
# Maps attributes of Trainer's loops, such as batch_idx, to functions that return their values.
_LOOP_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("epoch_loop", "automatic_optimization", "manual_optimization"), lambda api: api
    ),
    "val_loop": lambda api: LoopAPI(api.trainer, "validate_loop"),
    "total_batch_idx": lambda api: api.progress.total_batches - 1,
    "batch_idx": lambda api: api.progress.batches_done - 1,
    # LearningRateMonitor and DeviceStatsMonitor log their values at step ``_batches_that_stepped``.
    "_batches_that_stepped": lambda api: api.progress.logging_step,
    # StochasticWeightAveraging sets ``_skip_backward`` to update BatchNorm without backward passes.
    "_skip_backward": lambda api: api.current_run.optimization.is_backward_skipped,
    # Some modules step torch optimizers without Lightning's wrapper, and then increment
    # ``optim_step_progress.total.completed`` to count the step.
    **dict.fromkeys(("optim_step_progress", "total"), lambda api: api),
    "completed": lambda api: api.progress.global_step,
    # If the monitored metric is missing, ModelCheckpoint raises an error if ``val_loop._has_run``
    # is True, and otherwise only warns.
    "_has_run": lambda api: api.progress.eval_batches_done > 0,
    # Some LightningModules read ``_data_source`` to find out whether there is a validation loader.
    # If there is none, these LightningModules monitor a training metric.
    "_data_source": lambda api: SimpleNamespace(
        is_defined=lambda: api.current_run.data.has_loader("val")
    ),
    # Prediction callbacks
    "predictions": lambda api: api.current_predictions.as_returned(),
    "epoch_batch_indices": lambda api: api.current_predictions.batch_indices,
    "current_batch_indices": lambda api: api.current_predictions.current_indices,
}


# Options that cannot be changed after the loop is created.
_OPTIONS_OF_CREATION = (
    *("name", "version", "monitor", "mode", "default_root_dir", "max_time"),
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins"),
)


class TrainerAPI:
    """Implement Trainer's attributes and methods for FabricLoop."""

    config: LoopConfig
    fabric: Any
    callbacks: list[Any]
    loggers: list[Any]
    default_root_dir: str
    run: Run | None
    runs: dict[str, Run]
    status: TrainerStatus
    strategy: StrategyAPI
    profiler: Any
    next_ckpt_path: Any
    enable_autolog_hparams = True

    def require_run(self, name: str) -> Run:
        """Return the current or last run, or raise an error if the loop has not run yet."""
        if self.run is None:
            raise RuntimeError(
                f"FabricLoop.{name}: the loop has not run yet. Call fit, validate, test or predict"
                " first."
            )
        return self.run

    @property
    def active_run(self) -> Run | None:
        """The run that is in progress, or None outside of fit, validate, test and predict."""
        return None if self.run is None or self.run.progress.stage is None else self.run

    @property
    def fit_run(self) -> Run | None:
        """The run of the last ``fit`` call, or None before the first call."""
        return self.runs.get("fit")

    # Settable attributes

    @property
    def should_stop(self) -> bool:
        """Set ``should_stop = True`` to end training after the current batch."""
        return bool(self.run and self.run.stop.should_stop)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.require_run("should_stop").stop.request(value)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the last ``fit`` call."""
        run = self.fit_run
        if run is None:
            return []
        # In manual optimization, a model that is not a LightningModule calls step() on the returned
        # optimizers. Return wrapped optimizers, whose step() handles precision, hooks and counters.
        is_plain = not run.is_lightning_module and not run.module.automatic_optimization
        optimization = run.optimization
        return optimization.lightning_optimizers if is_plain else optimization.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        optimization = self.require_run("optimizers").optimization
        optimization.use(list(optimizers), optimization.lr_schedulers)
        optimization.setup()

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def ckpt_path(self) -> str | None:
        """The path of the checkpoint from which the run started.

        If user code sets ``ckpt_path``, the next run starts from that checkpoint.
        """
        return self.next_ckpt_path or (self.run.plan.start.path if self.run else None)

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self.next_ckpt_path = path

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A changed option affects the current run and all later runs."""
        # Only the constructor may set these options. The last attribute that it sets is `recipe`.
        if name in _OPTIONS_OF_CREATION and "recipe" in vars(self):
            raise ConfigurationError(
                f"{name}: got {describe(value)} for an existing loop, but this option can only be"
                f" set when the loop is created. Write FabricLoop({name}={value!r})."
            )
        is_option = "config" in vars(self) and name in vars(self.config)
        is_attribute = name in ("default_root_dir", "profiler") or hasattr(type(self), name)
        if not is_option and (name in _ATTRIBUTES or name.upper() in RunningStage.__members__):
            raise AttributeError(
                f"FabricLoop.{name}: got {describe(value)}, but this attribute is read-only."
            )
        if not is_option or is_attribute:
            super().__setattr__(name, value)
            return
        self.config = self.config.with_options(**{name: value})
        if self.run is not None:
            self.run.set_options(self.config)

    # Read-only attributes

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self)
        # Derive flags such as loop.training from the current stage.
        if name.upper() in RunningStage.__members__:
            return self.state.stage == RunningStage[name.upper()]
        if "config" in vars(self) and name in vars(self.config):
            return getattr(self.config, name)
        instead = "trainer_api.py lists the supported attributes of Trainer."
        if name != "fabric" and hasattr(self.fabric, name):
            instead = f"Write loop.fabric.{name}."
        raise AttributeError(f"FabricLoop has no attribute {name!r}. {instead}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_ATTRIBUTES, *vars(self.config)]

    @property
    def limits(self) -> StopCondition | LoopConfig:
        """The object that stores the current values of max_epochs and min_epochs."""
        return self.config if self.run is None else self.run.stop

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps that fit will take, or infinity if there is no limit."""
        run = self.require_run("estimated_stepping_batches")
        max_steps = math.inf if run.stop.max_steps == -1 else run.stop.max_steps
        if run.stop.max_epochs == -1:
            return max_steps
        run.data.setup_train_loader()
        if run.progress.num_train_batches == math.inf:
            return max_steps
        steps = math.ceil(run.progress.num_train_batches / run.progress.accumulate_grad_batches)
        return min(max_steps, steps * max(run.stop.max_epochs, 1))

    def eval_limits(self, stage: str) -> list[int | float]:
        loaders = created_loaders(self.runs.get(stage), "evaluation")
        return loaders.limits if loaders else []

    def loaders_of(self, *stages: str) -> Any:
        """Return the evaluation loaders if the run is in one of ``stages``, or else None."""
        run = self.run if self.run and self.run.stage in stages else None
        return getattr(created_loaders(run, "evaluation"), "as_given", None)

    def metrics(self, view: str) -> dict[str, Any]:
        if self.run is None:
            return {}
        self.run.results.update_metrics()
        return getattr(self.run.results, view)

    @property
    def checkpoint_callback(self) -> Any:
        """The first checkpoint callback, or the loop's CheckpointManager if there is none."""
        if self.checkpoint_callbacks:
            return self.checkpoint_callbacks[0]
        if not self.config.enable_checkpointing:
            return None
        return self.run.checkpoints if self.run else CheckpointManager(self.config)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar among the callbacks, or a disabled one if the loop draws its own."""
        bars = find_callbacks(self.callbacks, "ProgressBar")
        if bars or not self.config.enable_progress_bar:
            return next(iter(bars), None)
        # Modules and callbacks call methods such as get_metrics() on Trainer's progress bar.
        bar = TQDMProgressBar()
        bar.disable()
        return bar

    @property
    def log_dir(self) -> str | None:
        """The log folder of the first logger, or default_root_dir if there is no logger."""
        if not self.loggers:
            return self.default_root_dir
        logger = self.loggers[0]
        folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        return self.fabric.broadcast(folder) if self.fabric.world_size > 1 and self.run else folder

    @property
    def accelerator(self) -> Any:
        kind = type(self.fabric.accelerator)
        return getattr(accelerators, kind.__name__, kind)()

    @property
    def device_ids(self) -> list[int]:
        devices = getattr(self.fabric.strategy, "parallel_devices", None) or [self.fabric.device]
        return [index if d.index is None else d.index for index, d in enumerate(devices)]

    @property
    def state(self) -> TrainerState:
        if self.run is None:
            return TrainerState(self.status)
        stage = self.run.progress.stage
        return TrainerState(
            self.status, TrainerFn(self.run.stage), RunningStage(stage) if stage else None
        )

    @property
    def received_sigterm(self) -> bool:
        if self.run is None:
            return False
        return signal.SIGTERM in (self.run.signals.received, self.run.stop.signal)

    # Private attributes

    @property
    def _logger_connector(self) -> SimpleNamespace:
        """The attributes of Trainer's logger connector that Lightning's own code uses."""
        run = self.require_run("_logger_connector")
        return SimpleNamespace(
            should_update_logs=is_logging_due(run),
            log_metrics=run.loggers.log_metrics,
            should_reset_tensors=lambda hook: False,
            _current_fx=None,
        )

    @property
    def _results(self) -> SimpleNamespace | None:
        """The object through which LightningModule.log stores values."""
        if self.run is None or self.run.stage == "predict":
            return None
        results = self.run.results

        def log(hook: str, name: str, value: Any, sync_dist_fn: Any = None, **rest: Any) -> None:
            results.log(name, value, **rest)

        return SimpleNamespace(log=log, DATALOADER_SUFFIX="/dataloader_idx_{}")

    @property
    def _data_connector(self) -> SimpleNamespace:
        """Let ModelSummary find the object whose hooks move example_input_array to the device."""

        def get_instance(hook_name: str) -> Any:
            run = self.require_run("_data_connector")
            has_own = overridden(run.datamodule, hook_name) is not None
            return run.datamodule if has_own else run.module

        return SimpleNamespace(_datahook_selector=SimpleNamespace(get_instance=get_instance))

    # Methods

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of the last ``fit`` run.

        If the last run evaluated a model that this ``fit`` run did not train, save the evaluated
        model instead.
        """
        if self.run is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did"
                " you call"
                " `Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        fit = self.fit_run
        # The checkpoint of an evaluation would lack the optimizers. If the last fit trained the
        # same model, write the checkpoint of that fit.
        run = fit if fit is not None and fit.model is self.run.model else self.run
        if run.stop.failure is not None and run.fabric.world_size > 1:
            raise RuntimeError(
                "save_checkpoint: an error ended the run in this process, but all processes must"
                " save together. Resume from the previous checkpoint with resume='last'."
            )
        with run.hooks.profiled("save_checkpoint"):
            checkpoint = build_checkpoint(run, bool(weights_only))
            save_checkpoint(run, checkpoint, Path(filepath).expanduser(), storage_options)
        self.fabric.barrier()

    def init_module(self, empty_init: bool | None = None) -> Any:
        """Return a context in which new modules get the loop's device and precision."""
        if not starts_processes(self.fabric):
            join_processes(self.fabric)
        return self.fabric.init_module(empty_init=empty_init)


def created_loaders(run: Run | None, kind: str) -> Any:
    """Return a run's "train" or "evaluation" loaders, or None if they have not been created yet."""
    return None if run is None else run.data.created.get(kind)


class Loaders(NamedTuple):
    """The attributes of Lightning's CombinedLoader that LightningModules read."""

    iterables: Any
    flattened: tuple[Any, ...]


class LoopAPI:
    """Implement the attributes of Trainer's loops, such as ``trainer.fit_loop.epoch_progress``.

    A single LoopAPI object implements both ``fit_loop`` and its inner loop ``fit_loop.epoch_loop``.
    """

    __slots__ = ("_key", "trainer")

    def __init__(self, trainer: Any, key: str) -> None:
        self.trainer, self._key = trainer, key

    @property
    def current_run(self) -> Run:
        return self.trainer.require_run(self._key)

    @property
    def progress(self) -> Progress:
        run = self.trainer.run
        return Progress() if run is None else run.progress

    @property
    def max_batches(self) -> Any:
        run = self.trainer.run
        if self._key == "fit_loop":
            return self.progress.num_train_batches
        if self.trainer.sanity_checking:
            return self.trainer.num_sanity_val_batches
        return [] if run is None else self.trainer.eval_limits(run.stage)

    @property
    def current_predictions(self) -> Predictions:
        """The Predictions object of the current or last run, or a new one before the first run."""
        run = self.trainer.run
        return Predictions() if run is None else run.data.predictions

    @property
    def batch_progress(self) -> Any:
        if self._key == "fit_loop":
            return as_namespace(self.state_dict()["epoch_loop.batch_progress"])
        progress = self.progress
        return as_namespace(make_counts(progress.total_eval_batches, progress.eval_batches_done))

    def state_dict(self) -> dict[str, Any]:
        run = self.trainer.run
        loops = make_loop_counters(Progress(), None, True, []) if run is None else loops_state(run)
        return loops[self._key]

    @property
    def _combined_loader(self) -> Loaders | None:
        """The training or evaluation loaders, or None if they have not been created yet.

        Some modules call ``set_epoch`` on the datasets in ``flattened``.
        """
        kind = "train" if self._key == "fit_loop" else "evaluation"
        loaders = created_loaders(self.trainer.run, kind)
        return loaders and Loaders(loaders.as_given, tuple(loaders.loaders))

    def setup_data(self) -> None:
        self.current_run.data.setup_train_loader()

    def _should_accumulate(self) -> bool:
        """Return whether the loop continues to accumulate gradients after the current batch."""
        return not self.progress.is_window_end

    def _should_check_val_epoch(self) -> bool:
        """Return whether the loop validates in this epoch, for Lightning's progress bar."""
        run = self.current_run
        return run.should_validate and run.validation_schedule.is_in_this_epoch()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("max_epochs", "min_epochs", "max_steps", "min_steps", "global_step"):
            return getattr(self.trainer, name)
        if name in _LOOP_ATTRIBUTES:
            return _LOOP_ATTRIBUTES[name](self)
        for key, value in self.state_dict().items():
            if key.rpartition(".")[2] == name:
                return as_namespace(value)
        raise AttributeError(f"FabricLoop's {self._key} has no attribute {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("max_epochs", "max_steps"):
            setattr(self.trainer, name, -1 if value is None else value)
        elif name in ("min_epochs", "min_steps"):
            setattr(self.trainer, name, value)
        elif name == "max_batches":
            self.progress.count_train_batches(value)
        elif name == "completed":
            self.progress.count_steps(value - self.progress.global_step)
        elif name == "_skip_backward":
            self.current_run.optimization.skip_backward(value)
        else:
            super().__setattr__(name, value)


def as_namespace(value: Any) -> Any:
    """Convert a nested dict to nested SimpleNamespace objects."""
    if not isinstance(value, dict):
        return value
    return SimpleNamespace(**{name: as_namespace(part) for name, part in value.items()})


class StrategyAPI:
    """Add the methods of Trainer's strategies to Fabric's strategy."""

    def __init__(self, loop: TrainerAPI) -> None:
        self._loop = loop

    @property
    def _lightning_optimizers(self) -> list[Any]:
        """The LightningOptimizers that ``self.optimizers()`` returns in a LightningModule."""
        fit_run = self._loop.fit_run
        return fit_run.optimization.lightning_optimizers if fit_run else []

    @property
    def optimizers(self) -> list[Any]:
        return self._loop.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._loop.optimizers = optimizers

    def setup_optimizers(self, trainer: Any = None) -> None:
        """Call ``configure_optimizers`` again, for example after a hook has added parameters."""
        optimization = self._loop.require_run("setup_optimizers").optimization
        optimization.configure()
        optimization.setup()

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> Any:
        run = self._loop.require_run("optimizer_step")
        return run.optimization.optimizer_step(optimizer, closure, **kwargs)

    def backward(self, loss: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        self._loop.require_run("backward").optimization.backward(loss, *args, **kwargs)

    def block_backward_sync(self) -> Any:
        return self._loop.require_run("block_backward_sync").steps.no_backward_sync()

    @property
    def precision_plugin(self) -> Any:
        """Fabric's precision plugin, with the ``clip_gradients`` method of Trainer's plugins."""

        def clip(optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = None) -> None:
            algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_gradients(parameters, clip_val, algorithm)

        plugin = copy(self._loop.fabric.strategy.precision)
        plugin.clip_gradients = clip
        return plugin

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        return self._loop.fabric.all_reduce(tensor, group=group, reduce_op=reduce_op)

    def remove_checkpoint(self, filepath: str | os.PathLike) -> None:
        if self._loop.fabric.is_global_zero:
            self._loop.checkpoint_io.remove_checkpoint(filepath)
            remove_shards(Path(filepath))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loop" not in self.__dict__:
            raise AttributeError(name)
        if name in ("lightning_module", "model", "lr_scheduler_configs"):
            return getattr(self._loop, name)
        return getattr(self._loop.fabric.strategy, name)


def make_profiler(given: Any) -> Any:
    """Convert the ``profiler`` option, such as "simple" or None, to a Lightning profiler."""
    if given is None:
        return PassThroughProfiler()
    if not isinstance(given, str):
        return given
    kinds = {
        "simple": profilers.SimpleProfiler,
        "advanced": profilers.AdvancedProfiler,
        "pytorch": profilers.PyTorchProfiler,
    }
    if given.lower() not in kinds:
        raise ConfigurationError(
            f"profiler: got {given!r}, expected 'simple', 'advanced' or 'pytorch', or a Lightning"
            " profiler."
        )
    return kinds[given.lower()]()
