"""Views: the few words of Trainer's insides that Lightning's callbacks and modules read or set; and no more than that.

None of these names is public, yet LearningRateMonitor, DeviceStatsMonitor, ThroughputMonitor, ModelCheckpoint, ModelSummary,
StochasticWeightAveraging, BasePredictionWriter and the progress bars ask for them, and LightningModule.log does. They are
views of the run: nothing is kept here. tests/contract/test_private_names.py has each name and who asks for it;
test_callbacks_both.py and test_output_both.py in tests/trainer run each of those callbacks, and tests/contract/test_packages.py
that log, so that a release which asks for more fails there.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..core.clipping import clip_gradients
from ..core.overrides import overrides
from ..core.run import Run
from ..files.storage import door
from .shows import shows


def _so_far(current: int, total: int, processed: bool = True, completed: bool = True, **more: Any) -> SimpleNamespace:
    """How many epochs or batches so far, of this pass and in all; whether the one at hand is through, and its hooks, too."""

    def of(ready: int) -> SimpleNamespace:
        done = {"processed": ready - (not processed), "completed": ready - (not completed)}
        return SimpleNamespace(ready=ready, started=ready, **done)

    return SimpleNamespace(current=of(current), total=of(total), **more)


class _View:
    """A view of the run at hand; a name that is not offered raises, also when it is set."""

    _loop: Any
    trainer = shows("_loop", "The loop itself.")

    def __init__(self, loop: Any) -> None:
        vars(self)["_loop"] = loop

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(type(self), name)
        super().__setattr__(name, value)

    @property
    def _run(self) -> Run:
        return self._loop._required(type(self).__name__)


class FitLoopView(_View):
    """``trainer.fit_loop``: how far training is; a callback may move its limits."""

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs; set it to train longer or shorter."""
        return self._loop.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        loop = self._loop
        loop.config = loop.config.changed(max_epochs=value)
        if loop._run is not None:
            loop._run.stop.max_epochs = value

    max_steps = property(
        lambda self: self._loop.max_steps if self._loop._run is None else self._run.stop.limits()[1],
        lambda self, value: self._set_steps(value),
        doc="The limit of optimizer steps, -1 for none; set it to train longer or shorter.",
    )

    def _set_steps(self, value: int) -> None:
        loop = self._loop
        loop.max_steps = value
        if loop._run is not None:
            loop._run.stop._max_steps = value

    min_epochs = shows("_loop.min_epochs", "How many epochs no ``should_stop`` can end.")
    min_steps = shows("_loop.config.min_steps", "How many steps no ``should_stop`` can end.")
    max_batches = property(
        lambda self: self._run.at.num_batches,
        lambda self, value: self._run.at.expect(value),
        doc="Training batches of an epoch.",
    )
    batch_idx = property(lambda self: self._run.at.batches_done - 1, doc="The batch at hand, counted in its epoch.")
    total_batch_idx = property(lambda self: self._run.at.total_batches - 1, doc="The same, counted over all epochs.")
    epoch_loop = property(lambda self: EpochLoopView(self._loop), doc="The loop over the batches.")

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """Epochs so far."""
        at, fx = self._run.at, self._run.metrics.fx
        ready = at.epochs_done + (not at.between_epochs)
        return _so_far(ready, ready, at.between_epochs or fx == "on_train_epoch_end", at.between_epochs)

    def setup_data(self) -> None:
        """Make the training loader, unless it is made."""
        self._run.data.set_up_train()

    @property
    def _skip_backward(self) -> bool:
        return self._run.update.skips_backward

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        update = self._run.update
        vars(update).pop("closure", None)
        if value:
            vars(update)["closure"] = update.forward_only

    def _should_accumulate(self) -> bool:
        return self._run.at.accumulates


class EpochLoopView(_View):
    """``trainer.fit_loop.epoch_loop``."""

    batch_idx, total_batch_idx = FitLoopView.batch_idx, FitLoopView.total_batch_idx
    max_steps, min_steps, _set_steps = FitLoopView.max_steps, FitLoopView.min_steps, FitLoopView._set_steps

    global_step = shows("_run.at.global_step", "Optimizer steps so far.")
    _batches_that_stepped = shows("_run.at.batches_that_stepped", "The step that loggers see.")
    val_loop = property(lambda self: EvaluationLoopView(self._loop), doc="The validation inside fit.")
    manual_optimization = property(lambda self: SimpleNamespace(optim_step_progress=StepsView(self._loop)))

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Training batches so far."""
        at, metrics = self._run.at, self._run.metrics
        idle = metrics.train.batch is None
        processed = idle or metrics.fx == "on_train_batch_end"
        return _so_far(at.batches_done, at.total_batches, processed, idle, is_last_batch=at.is_last_batch)

    def _should_check_val_epoch(self) -> bool:
        return self._run.validation.in_this_epoch


class StepsView(_View):
    """``optim_step_progress`` of manual optimization: a module that steps its optimizers as they are counts here."""

    total = property(lambda self: self, doc="Over all epochs.")
    completed = ready = property(
        lambda self: self._run.at.global_step,
        lambda self, steps: self._run.at.stepped_by_hand(steps - self.completed),
        doc="Steps so far; set it to have more counted.",
    )

    def increment_completed(self) -> None:
        """Count one."""
        self.completed += 1


class EvaluationLoopView(_View):
    """``trainer._evaluation_loop``, and the validation loop inside fit."""

    max_batches = property(
        lambda self: (
            self._loop.num_sanity_val_batches if self._loop.sanity_checking else self._loop._limits_of(self._run.fn)
        ),
        doc="Batches of each loader.",
    )
    num_dataloaders = property(lambda self: len(self._run.data.val.loaders), doc="How many loaders there are.")

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Batches of this evaluation so far, of all its loaders, and in all."""
        at, fx = self._run.at, self._run.metrics.fx or ""
        idle = not fx.endswith(("_step", "_batch_start", "_batch_end"))
        return _so_far(at.evaluated, at.evaluated_in_all, idle or fx.endswith("_end"), idle)

    _has_run = property(lambda self: self._run.at.evaluated > 0)
    # asked by modules that choose what to monitor
    _data_source = property(lambda self: SimpleNamespace(is_defined=lambda: self._run.data.given.has("val")))


class PredictLoopView(EvaluationLoopView):
    """``trainer.predict_loop``: what was predicted, and of which samples."""

    epoch_batch_indices = property(
        lambda self: [[found for found in batches if found] for batches in self._run.predicted.indices],
        doc="The indices of the samples, by loader and batch; of a loader that notes none an empty list.",
    )

    @property
    def predictions(self) -> list[Any]:
        """What was predicted so far, by batch; a list of such lists for several loaders."""
        made = self._run.predicted.made
        return made if len(made) != 1 else made[0]

    @property
    def current_batch_indices(self) -> list[int]:
        """The indices of the samples of the batch at hand."""
        return next((batches[-1] for batches in reversed(self._run.predicted.indices) if batches), [])


class DataView(_View):
    """``trainer._data_connector``: whose transfer hooks bring ``example_input_array`` to the device."""

    _datahook_selector = property(lambda self: self)

    def get_instance(self, hook_name: str) -> Any:
        """The datamodule if it has this hook, otherwise the module."""
        run = self._run
        return run.trained.owner if overrides(run.trained.datamodule, hook_name) is None else run.trained.datamodule


class LoggerView(_View):
    """``trainer._logger_connector``: whether loggers are due, and how to write to all of them."""

    @property
    def should_update_logs(self) -> bool:
        """Whether the batch at hand is one of every ``log_every_n_steps``."""
        run = self._run
        every = run.config.log_every_n_steps
        if not every or run.at.stage is None:
            return every != 0
        done = run.at.batches_that_stepped + 1 if run.at.stage == "train" else run.at.evaluated
        return done % every == 0 or run.stop.should_stop

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values to all loggers; without a step at the one where the run stands, beside the epoch."""
        self._run.log.values(metrics, step)

    def should_reset_tensors(self, fx: str) -> bool:
        """No: `Metrics.log` sees to it."""
        return False

    # Lightning's ``log`` says from which hook it was called; `Metrics.log` knows
    _current_fx = property(lambda self: self._run.metrics.fx, lambda self, fx: None)


class ResultsView(_View):
    """``trainer._results``: where Lightning's own ``log`` brings its values, under a module that overrides ``log``."""

    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def log(self, fx: str, name: str, value: Any, sync_dist_fn: Any = None, **words: Any) -> None:
        """Log a value that Lightning has checked."""
        self._run.metrics.log(name, value, **words)


class StrategyFace:
    """Fabric's strategy in the words of Trainer's, for modules and callbacks."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    # LightningModule.optimizers() asks by this name
    _lightning_optimizers = shows("_loop._fitted.optimizing.wrapped", "The optimizers, each as a module sees it.", list)
    root_device = shows("_loop.fabric.device", "This process's device.")

    @property
    def precision_plugin(self) -> Any:
        """Fabric's precision, which clips beside, for LightningModule.clip_gradients."""

        def clip(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = None) -> None:
            # Lightning's enum, or its word
            algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            clip_gradients(self._loop._required("clip_gradients"), optimizer, clip_val, algorithm)

        face = copy(self._loop.fabric.strategy.precision)
        face.clip_gradients = clip
        return face

    lightning_module = shows("_loop.lightning_module", "The module.")
    model = shows("_loop.model", "The module, or its wrapper.")
    optimizers = property(
        lambda self: self._loop.optimizers,
        lambda self, others: setattr(self._loop, "optimizers", others),
        doc="The optimizers; a callback may bring others.",
    )
    lr_scheduler_configs = shows("_loop.lr_scheduler_configs", "The schedulers with their intervals and monitors.")

    def block_backward_sync(self) -> Any:
        """A context in which a backward adds no gradients over the ranks, for manual optimization."""
        return self._loop._required("block_backward_sync").steps.no_sync()

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Backward with its hooks, for LightningModule.manual_backward."""
        self._loop._required("backward").update.backward(loss, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Reduce a tensor over all processes."""
        return self._loop.fabric.all_reduce(tensor, group=group, reduce_op=reduce_op)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state."""
        return self._loop.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state."""
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: Any, filepath: str | Path, storage_options: Any = None) -> None:
        """Write what is given to a file, on rank zero."""
        if self._loop.fabric.is_global_zero:
            door(self._loop.fabric).save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """What stands in a file."""
        return door(self._loop.fabric).load_checkpoint(checkpoint_path)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint file, on rank zero."""
        if self._loop.fabric.is_global_zero:
            door(self._loop.fabric).remove_checkpoint(filepath)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loop" not in vars(self):  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(self._loop.fabric.strategy, name)
