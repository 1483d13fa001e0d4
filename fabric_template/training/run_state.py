"""The parts of one call of fit, validate, test or predict, in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import WarnOnce
from .progress import Progress, StopCondition

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch.utilities.types import LRSchedulerConfig
    from torch import nn
    from torch.optim import Optimizer

    from ..checkpoint.manager import CheckpointManager
    from ..config import LoopConfig
    from ..data.loaders import DataConnector
    from ..distributed.signals import SignalHandler
    from ..loggers.console import Console
    from ..loggers.history import History
    from ..loggers.logger_connector import LoggerConnector
    from ..loggers.result_collection import ResultCollection
    from .fit_loop import ValidationSchedule
    from .hooks import Hooks
    from .module_adapter import StepRunner
    from .optimization import AutomaticOptimization, ManualOptimization
    from .prediction_loop import Predictions


@dataclass
class RunState:
    """Everything that the functions of a run work with.

    Attributes:
        stage: The call: "fit", "validate", "test" or "predict".
        loop: The FabricLoop, which modules and callbacks know as their trainer.
        model: What the user gave.
        module: A LightningModule: the model itself, or an adapter around it.
        network: The nn.Module that holds the parameters.
        steps: The step methods with precision, strategy and compilation around them.
        checkpoint: The checkpoint that this run starts from, until it is restored.
        own_state: The part of the checkpoint that only this loop saves; hooks do not see it.
        resumes: Whether it is continued with its optimizers and counters.
        frozen_at_start: The parameters that were not trained when training was about to start.
        is_last_model: Whether no model was given, so that the model of the run before is used.
    """

    stage: str
    loop: Any
    config: LoopConfig
    fabric: Fabric
    model: Any
    module: Any
    network: nn.Module
    datamodule: Any
    hooks: Hooks
    results: ResultCollection
    history: History
    data: DataConnector
    progress: Progress
    stop: StopCondition
    steps: StepRunner
    loggers: LoggerConnector
    console: Console
    checkpoints: CheckpointManager
    warn_once: WarnOnce
    optimizers: list[Optimizer] = field(default_factory=list)
    lr_schedulers: list[LRSchedulerConfig] = field(default_factory=list)
    optimization: AutomaticOptimization | ManualOptimization = None  # type: ignore[assignment]
    validation_schedule: ValidationSchedule = None  # type: ignore[assignment]
    signals: SignalHandler = None  # type: ignore[assignment]
    predictions: Predictions = None  # type: ignore[assignment]
    given_optimizer: Any = None
    accumulate_grad_batches: int = 1
    frozen_at_start: list[str] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None
    own_state: dict[str, Any] | None = None
    checkpoint_path: str | None = None
    checkpoint_error: Exception | None = None
    resumes: bool = False
    is_last_model: bool = False
    resume_keyword: str | None = None
    exception: BaseException | None = None

    @property
    def is_lightning_module(self) -> bool:
        """Return whether the model itself is a LightningModule."""
        return self.module is self.model

    def make_step(self, name: str, method: Callable) -> Callable:
        """Return a step with precision and strategy around it, and its name for log and the profiler."""
        action = f"[Strategy]{type(self.fabric.strategy).__name__}.{name}"
        step = self.hooks.with_profiler(action, self.steps.get(name, method))
        return self.hooks.inside(name, step)

    @property
    def should_validate(self) -> bool:
        """Return whether fit validates at all."""
        has_step = self.hooks.is_overridden("validation_step")
        return has_step and self.config.limit_val_batches > 0 and self.data.has_loader("val")
