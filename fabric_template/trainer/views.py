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
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.hooks import overrides
from ..core.update import clip_gradients

if TYPE_CHECKING:
    from ..core.run import Run


def shows(path: str, doc: str, otherwise: Any = None) -> property:
    """A property that shows what stands at the end of a path; `otherwise` (made of a class) where the way there ends in None.

    Example:
        >>> class Face:
        ...     run = None
        ...     steps = shows("run.at.global_step", "Optimizer steps so far.", 0)
        >>> Face().steps
        0
    """
    *way, last = path.split(".")

    def show(self: Any) -> Any:
        for name in way:
            if (self := getattr(self, name)) is None:
                return otherwise() if isinstance(otherwise, type) else otherwise
        return getattr(self, last)

    return property(show, doc=doc)


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


class Count(NamedTuple):
    """How many batches have been taken from their loader."""

    ready: int


class BatchProgress(NamedTuple):
    """Batches so far: of this epoch or evaluation, in all, and whether the one at hand is the last."""

    current: Count
    total: Count
    is_last_batch: bool = False


class _View:
    """A view of the run at hand; a name that is not offered raises, also when it is set."""

    _loop: Any

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

    @property
    def max_batches(self) -> int | float:
        """Training batches of an epoch."""
        return self._run.at.num_batches

    @max_batches.setter
    def max_batches(self, value: int | float) -> None:
        self._run.at.expect(value)

    @property
    def batch_idx(self) -> int:
        """The batch at hand, counted in its epoch."""
        return self._run.at.batches_done - 1

    @property
    def total_batch_idx(self) -> int:
        """The batch at hand, counted over all epochs."""
        return self._run.at.total_batches - 1

    epoch_loop = property(lambda self: EpochLoopView(self._loop), doc="The loop over the batches.")

    @property
    def _skip_backward(self) -> bool:
        """Whether only the step runs."""
        return self._run.update.skips_backward

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        self._run.update.skips_backward = value

    def _should_accumulate(self) -> bool:
        return self._run.at.accumulates


class EpochLoopView(_View):
    """``trainer.fit_loop.epoch_loop``."""

    global_step = shows("_run.at.global_step", "Optimizer steps so far.")
    _batches_that_stepped = shows("_run.at.batches_that_stepped", "The step that loggers see.")
    val_loop = property(lambda self: EvaluationLoopView(self._loop), doc="The validation inside fit.")

    @property
    def batch_progress(self) -> BatchProgress:
        """Training batches so far."""
        run = self._run
        return BatchProgress(Count(run.at.batches_done), Count(run.at.total_batches), run.at.is_last_batch)

    def _should_check_val_epoch(self) -> bool:
        return self._run.validation.in_this_epoch


class EvaluationLoopView(_View):
    """``trainer._evaluation_loop``, and the validation loop inside fit."""

    @property
    def batch_progress(self) -> BatchProgress:
        """Batches of this evaluation so far, of all its loaders, and in all."""
        run = self._run
        return BatchProgress(Count(run.at.evaluated), Count(run.at.evaluated_in_all))

    @property
    def _has_run(self) -> bool:
        return self._run.at.evaluated > 0

    _data_source = property(lambda self: ValSourceView(self._loop))


class PredictLoopView(EvaluationLoopView):
    """``trainer.predict_loop``: what was predicted, and of which samples."""

    epoch_batch_indices = shows("_run.predicted.indices", "The indices of the samples, by loader and batch.")

    @property
    def predictions(self) -> list[Any]:
        """What was predicted so far, by batch; a list of such lists for several loaders."""
        made = self._run.predicted.made
        return made if len(made) != 1 else made[0]

    @property
    def current_batch_indices(self) -> list[int]:
        """The indices of the samples of the batch at hand."""
        return next((batches[-1] for batches in reversed(self._run.predicted.indices) if batches), [])


class ValSourceView(_View):
    """``trainer.fit_loop.epoch_loop.val_loop._data_source``, asked by modules that choose what to monitor."""

    def is_defined(self) -> bool:
        """Whether there is a validation loader."""
        return self._run.data.has("val")


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

    @property
    def _current_fx(self) -> str | None:
        return self._run.metrics.fx

    @_current_fx.setter
    def _current_fx(self, fx: str) -> None:
        """Lightning's ``log`` says from which hook it was called; `Metrics.log` knows."""


class ResultsView(_View):
    """``trainer._results``: where Lightning's own ``log`` brings its values, under a module that overrides ``log``."""

    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def log(self, fx: str, name: str, value: Any, sync_dist_fn: Any = None, **words: Any) -> None:
        """Log a value that Lightning has checked."""
        self._run.metrics.log(name, value, **words)


class AcceleratorView(_View):
    """``trainer._accelerator_connector``."""

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self._loop.world_size > 1


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
        face = copy(self._loop.fabric.strategy.precision)
        face.__class__ = _clipping(face.__class__)
        face._loop = self._loop
        return face

    lightning_module = shows("_loop.lightning_module", "The module.")
    model = shows("_loop.model", "The module, or its wrapper.")
    optimizers = shows("_loop.optimizers", "The optimizers.")
    lr_scheduler_configs = shows("_loop.lr_scheduler_configs", "The schedulers with their intervals and monitors.")

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Backward with its hooks, for LightningModule.manual_backward."""
        run = self._loop._required("backward")
        run.update.backward(loss, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Reduce a tensor over all processes."""
        return self._loop.fabric.all_reduce(tensor, group=group, reduce_op=reduce_op)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint file, on rank zero."""
        if self._loop.fabric.is_global_zero:
            self._loop.fabric.strategy.checkpoint_io.remove_checkpoint(filepath)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loop" not in vars(self):  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(self._loop.fabric.strategy, name)


class _Clips:
    """What Trainer's precision can do and Fabric's cannot."""

    _loop: Any

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        """Clip, for LightningModule.clip_gradients."""
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)  # Lightning's enum, or its word
        clip_gradients(self._loop.fabric.strategy.precision, optimizer, clip_val, algorithm)


@cache
def _clipping(kind: type) -> type:
    return type(kind.__name__, (_Clips, kind), {})
