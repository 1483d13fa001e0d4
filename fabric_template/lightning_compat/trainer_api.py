"""Trainer's public attributes, which LightningModules, callbacks and loggers read."""

from __future__ import annotations

import math
import os
import signal
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType

from ..checkpoint.distributed import remove_shards, save_checkpoint
from ..checkpoint.manager import CheckpointManager
from ..checkpoint.state import build_checkpoint
from ..config import LoopConfig
from ..distributed.launch import join_processes, starts_processes
from ..errors import ConfigurationError
from ..training.hooks import is_instance_of
from ..training.optimization import clip_gradients
from ..training.progress import Progress, StopCondition
from .loops_api import LoopsAPI
from .private import wrap_optimizer

if TYPE_CHECKING:
    from ..training.run_state import RunState

_FUNCTIONS = {"fit": TrainerFn.FITTING, "validate": TrainerFn.VALIDATING}
_FUNCTIONS |= {"test": TrainerFn.TESTING, "predict": TrainerFn.PREDICTING}
_STAGES = {"train": RunningStage.TRAINING, "validate": RunningStage.VALIDATING}
_STAGES |= {"sanity_check": RunningStage.SANITY_CHECKING, "test": RunningStage.TESTING}
_STAGES |= {"predict": RunningStage.PREDICTING}
# Attributes that are True while a stage runs.
_STAGE_FLAGS = {"training": "train", "validating": "validate", "testing": "test"}
_STAGE_FLAGS |= {"predicting": "predict", "sanity_checking": "sanity_check"}
# Options with setters of their own.
_SETTERS = ("accumulate_grad_batches", "profiler", "logger", "max_epochs", "max_steps")
_OF_FABRIC = ("is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "print")


class TrainerAPI(LoopsAPI):
    """The part of FabricLoop that code written for Trainer knows."""

    config: LoopConfig
    fabric: Any
    loggers: list[Any]
    default_root_dir: str
    run: RunState | None
    runs: dict[str, RunState]
    status: TrainerStatus
    _callbacks: list[Any]
    given_profiler: Any
    next_ckpt_path: Any

    # Progress

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.run.progress.global_step if self.run else 0

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.run.progress.epochs_done if self.run else 0

    @property
    def should_stop(self) -> bool:
        """Return whether training ends after the current batch. Set it to stop."""
        return bool(self.run and self.run.stop.should_stop)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.require_run("should_stop").stop.should_stop = value

    @property
    def is_last_batch(self) -> bool:
        return bool(self.run and self.run.progress.is_last_batch)

    @property
    def limits(self) -> StopCondition:
        """The limits of the current or the next run, with Trainer's defaults filled in."""
        if self.run is not None:
            return self.run.stop
        has_timer = any(is_instance_of(callback, "Timer") for callback in self.callbacks)
        return StopCondition(self.config, Progress(), has_timer)

    @property
    def max_epochs(self) -> int | None:
        return self.limits.max_epochs

    @property
    def min_epochs(self) -> int | None:
        return self.limits.min_epochs

    @property
    def max_steps(self) -> int:
        return self.limits.max_steps

    @property
    def gradient_clip_algorithm(self) -> GradClipAlgorithmType | None:
        algorithm = self.config.gradient_clip_algorithm
        return None if algorithm is None else GradClipAlgorithmType(algorithm.lower())

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of one optimizer step. A callback may change it between epochs."""
        return self.run.accumulate_grad_batches if self.run else self.config.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self.config = self.config.changed(accumulate_grad_batches=value)
        if self.run is not None:
            self.run.accumulate_grad_batches = value

    @property
    def num_training_batches(self) -> int | float:
        return self.runs["fit"].progress.num_train_batches if "fit" in self.runs else math.inf

    @property
    def num_val_batches(self) -> list[int | float]:
        stage = "validate" if self.run and self.run.stage == "validate" else "fit"
        return self._limits_of(stage)

    @property
    def num_test_batches(self) -> list[int | float]:
        return self._limits_of("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self._limits_of("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        most = self.config.num_sanity_val_steps or 0
        return [limit if most == -1 else min(most, limit) for limit in self._limits_of("fit")]

    def _limits_of(self, stage: str) -> list[int | float]:
        run = self.runs.get(stage)
        return run.data.eval_loaders.limits if run and run.data.eval_loaders else []

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps that fit will take; infinite where nothing limits it."""
        run = self.require_run("estimated_stepping_batches")
        max_steps = math.inf if run.stop.max_steps == -1 else run.stop.max_steps
        if run.stop.max_epochs == -1:
            return max_steps
        run.data.setup_train_loader()
        if run.progress.num_train_batches == math.inf:
            return max_steps
        steps = math.ceil(run.progress.num_train_batches / run.accumulate_grad_batches)
        return min(max_steps, steps * max(run.stop.max_epochs, 1))

    @property
    def val_check_batch(self) -> int | float | None:
        return self.runs["fit"].validation_schedule.every_n_batches if "fit" in self.runs else None

    # What was logged

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Every metric by its name."""
        return self._metrics("callback_metrics")

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Return what was sent to the loggers."""
        return self._metrics("logged_metrics")

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """Return what was logged with prog_bar=True."""
        return self._metrics("progress_bar_metrics")

    def _metrics(self, view: str) -> dict[str, Any]:
        if self.run is None:
            return {}
        if self.run.results.active:
            self.run.results.update_metrics()
        return getattr(self.run.results, view)

    # Parts

    @property
    def lightning_module(self) -> Any:
        return self.run and self.run.model

    @property
    def model(self) -> Any:
        """The model, or the wrapper of DDP around it."""
        return self.run and (self.run.steps.ddp or self.run.steps.wrapped or self.run.model)

    @property
    def datamodule(self) -> Any:
        return self.run and self.run.datamodule

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the last fit. A plain object that steps them itself gets those that count steps."""
        run = self.runs.get("fit")
        if run is None:
            return []
        is_plain = not run.is_lightning_module and not run.module.automatic_optimization
        return self.strategy.lightning_optimizers if is_plain else run.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        run = self.require_run("optimizers")
        run.optimizers = list(optimizers)
        run.loop.strategy.reset_lightning_optimizers()
        if run.optimization is not None:
            run.optimization.setup()

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return self.runs["fit"].lr_schedulers if "fit" in self.runs else []

    @property
    def train_dataloader(self) -> Any:
        run = self.runs.get("fit")
        return run.data.train.as_given if run and run.data.train else None

    @property
    def val_dataloaders(self) -> Any:
        return self._loaders_of("fit", "validate")

    @property
    def test_dataloaders(self) -> Any:
        return self._loaders_of("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._loaders_of("predict")

    def _loaders_of(self, *stages: str) -> Any:
        run = self.run
        if run is None or run.stage not in stages or run.data.eval_loaders is None:
            return None
        return run.data.eval_loaders.as_given

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks in the order of their calls. A change counts from the next hook on."""
        return self.run.hooks.callbacks if self.run else self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        self._callbacks = list(callbacks)
        if self.run is not None:
            self.run.hooks.callbacks[:] = callbacks

    @property
    def profiler(self) -> Any:
        """The profiler, one that measures nothing where there is none."""
        return self.given_profiler or PassThroughProfiler()

    @profiler.setter
    def profiler(self, profiler: Any) -> None:
        self.given_profiler = make_profiler(profiler)

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger."""
        if not self.loggers:
            return self.default_root_dir
        logger = self.loggers[0]
        folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        return self.fabric.broadcast(folder) if self.fabric.world_size > 1 and self.run else folder

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        return self._callbacks_of("Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints, or the loop's own manager."""
        if self.checkpoint_callbacks:
            return self.checkpoint_callbacks[0]
        if not self.config.enable_checkpointing:
            return None
        return self.run.checkpoints if self.run else CheckpointManager(None, self.config)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return self._callbacks_of("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar among the callbacks. Before a run this adds Lightning's in place of the console."""
        bars = self._callbacks_of("ProgressBar")
        if not bars and self.config.enable_progress_bar and self.status != TrainerStatus.RUNNING:
            bars = [TQDMProgressBar()]
            self.callbacks = [*bars, *self.callbacks]
        return next(iter(bars), None)

    def _callbacks_of(self, kind: str) -> list[Any]:
        return [callback for callback in self.callbacks if is_instance_of(callback, kind)]

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that this run started from. Set it to start the next runs from there."""
        return self.next_ckpt_path or (self.run.checkpoint_path if self.run else None)

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self.next_ckpt_path = path

    # Devices

    @property
    def strategy(self) -> StrategyAPI:
        return self.strategy_api

    @property
    def precision(self) -> Any:
        return self.fabric.strategy.precision.precision

    @property
    def precision_plugin(self) -> Any:
        return self.strategy.precision_plugin

    @property
    def scaler(self) -> Any:
        return getattr(self.fabric.strategy.precision, "scaler", None)

    @property
    def accelerator(self) -> Any:
        from lightning.pytorch import accelerators

        own = self.fabric.accelerator
        kind = getattr(accelerators, type(own).__name__, None)
        return own if kind is None else kind()

    @property
    def num_nodes(self) -> int:
        return getattr(self.fabric.strategy, "num_nodes", 1)

    @property
    def num_devices(self) -> int:
        return len(self.device_ids)

    @property
    def device_ids(self) -> list[int]:
        devices = getattr(self.fabric.strategy, "parallel_devices", None) or [self.fabric.device]
        return [index if d.index is None else d.index for index, d in enumerate(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        return getattr(self.fabric.strategy, "distributed_sampler_kwargs", None)

    # Stages

    @property
    def state(self) -> TrainerState:
        """The function and the stage that run."""
        run = self.run
        stage = _STAGES.get(run.progress.stage or "") if run else None
        return TrainerState(self.status, _FUNCTIONS[run.stage] if run else None, stage)

    @property
    def interrupted(self) -> bool:
        return self.status == TrainerStatus.INTERRUPTED

    def _is_in(self, *stages: str) -> bool:
        return bool(self.run and self.run.progress.stage in stages)

    @property
    def evaluating(self) -> bool:
        return self._is_in("validate", "test", "sanity_check")

    @property
    def enable_validation(self) -> bool:
        return bool(self.run and self.run.should_validate)

    @property
    def received_sigterm(self) -> bool:
        if self.run is None or self.run.signals is None:
            return False
        return signal.SIGTERM in (self.run.signals.received, self.run.stop.signal)

    # Actions

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of the run as it is now."""
        if self.run is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call"
                " `Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        fit = self.runs.get("fit")
        # After a test of the trained model the checkpoint is that of its training.
        run = fit if fit is not None and fit.model is self.run.model else self.run
        if run.exception is not None and run.fabric.world_size > 1:
            raise RuntimeError(
                "save_checkpoint: an error has ended the run in this process, and a checkpoint of several"
                " processes needs all of them. Resume from the one before: resume='last'."
            )
        with run.hooks.profiled("save_checkpoint"):
            checkpoint = build_checkpoint(run, bool(weights_only))
            save_checkpoint(run, checkpoint, Path(filepath), storage_options)
        self.fabric.barrier()

    def init_module(self, empty_init: bool | None = None) -> Any:
        """Return a context in which a module is made on the device and in the precision."""
        if not starts_processes(self.fabric):
            join_processes(self.fabric)
        return self.fabric.init_module(empty_init=empty_init)

    def require_run(self, name: str) -> RunState:
        if self.run is None:
            raise RuntimeError(
                f"FabricLoop.{name}: nothing has run yet. Call fit, validate, test or predict first."
            )
        return self.run

    @property
    def enable_autolog_hparams(self) -> bool:
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option for the current run and those to come; any other attribute as it is."""
        config = self.__dict__.get("config")
        if config is None or name not in vars(config) or name in ("default_root_dir", *_SETTERS):
            super().__setattr__(name, value)
            return
        LoopConfig(**{name: value})  # Refuses what the constructor refuses.
        self.config = config.changed(**{name: value})
        if self.run is not None:
            self.run.config = self.config
            if self.run.optimization is not None:
                self.run.optimization.setup()

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("config")
        if name in _OF_FABRIC:
            return getattr(self.fabric, name)
        if name in _STAGE_FLAGS:
            return self._is_in(_STAGE_FLAGS[name])
        if config is not None and name in vars(config):
            return getattr(config, name)
        raise AttributeError(
            f"FabricLoop has no attribute {name!r}: it offers what modules and callbacks read from a"
            " Trainer (lightning_compat/trainer_api.py lists it), not all of Trainer."
        )


class StrategyAPI:
    """Fabric's strategy with the methods of Trainer's."""

    def __init__(self, loop: TrainerAPI) -> None:
        self._loop = loop
        self._wrapped: list[Any] | None = None

    @property
    def lightning_optimizers(self) -> list[Any]:
        """The optimizers as modules see them: ``step`` goes through precision, hooks and counters."""
        if self._wrapped is None:
            fit = self._loop.runs.get("fit")
            optimizers = fit.optimizers if fit else []
            self._wrapped = [wrap_optimizer(optimizer, self) for optimizer in optimizers]
        return self._wrapped

    # LightningModule.optimizers() asks for this name.
    _lightning_optimizers = lightning_optimizers

    def reset_lightning_optimizers(self) -> None:
        self._wrapped = None

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> Any:
        run = self._loop.require_run("optimizer_step")
        return run.optimization.optimizer_step(optimizer, closure, **kwargs)

    @property
    def root_device(self) -> Any:
        return self._loop.fabric.device

    @property
    def optimizers(self) -> list[Any]:
        return self._loop.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._loop.optimizers = optimizers

    @property
    def precision_plugin(self) -> Any:
        """Fabric's precision, with ``clip_gradients`` of Trainer's."""

        def clip(optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = None) -> None:
            algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            run = self._loop.require_run("clip_gradients")
            clip_gradients(run, optimizer, clip_val, algorithm)

        plugin = copy(self._loop.fabric.strategy.precision)
        plugin.clip_gradients = clip
        return plugin

    def backward(self, loss: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        self._loop.require_run("backward").optimization.backward(loss, *args, **kwargs)

    def block_backward_sync(self) -> Any:
        return self._loop.require_run("block_backward_sync").steps.no_backward_sync()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        return self._loop.fabric.all_reduce(tensor, group=group, reduce_op=reduce_op)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._loop.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self._loop.fabric.is_global_zero:
            io = self._loop.checkpoint_io
            io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        return self._loop.checkpoint_io.load_checkpoint(checkpoint_path)

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
    """Return the profiler of an option: an object, "simple", "advanced" or None."""
    if given is None or not isinstance(given, str):
        return None if isinstance(given, PassThroughProfiler) else given
    from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

    kinds = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    if given.lower() not in kinds:
        raise ConfigurationError(
            "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of"
            f" {sorted(kinds)}. profiler: got {given!r}."
        )
    return kinds[given.lower()]()
