"""The state of one call of fit, validate, test or predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.run_folders import RunFolders
from ..checkpoint.start_point import StartPoint
from ..data.loaders import DataConnector
from ..errors import WarnOnce
from ..loggers.console import Console
from ..loggers.logger_connector import LoggerConnector
from ..loggers.result_collection import ResultCollection
from ..loggers.row import RowWriter
from .check_arguments import LOADER_OF_STAGE, check_call, check_idle, check_sources
from .configure_optimizers import has_several_optimizers
from .evaluation_loop import Predictions
from .hooks import Hooks
from .module_adapter import (
    StepRunner,
    adapt_model,
    find_new_modules,
    unwrap,
    unwrap_compiled,
)
from .optimization import Optimization
from .progress import Progress, StopCondition

if TYPE_CHECKING:
    from torch import nn

    from ..config import LoopConfig
    from ..distributed.signals import SignalHandler
    from ..loop import FabricLoop
    from ..plain_state import PlainState
    from .progress import ValidationSchedule


class RunState:
    """Holds the model, the loaders, the hooks, the counters and the loggers of one call.

    Args:
        loop: The FabricLoop, which modules and callbacks get as their trainer.
        stage: The call: "fit", "validate", "test" or "predict".
        model: The given model. None: the model of the previous run, in an evaluation.
        loaders: The loaders that were given, keyed by "train", "val", "test" and "predict".
        functions: The step functions that were given, keyed by name.

    Attributes:
        module: A LightningModule: the model itself, or an adapter around the model.
        network: The nn.Module that holds the parameters.
        steps: Wraps the steps for the precision, the strategy and the compilation.
        start: The checkpoint that this run starts from.
        flags_at_start: The flags of parameters and modules before the sanity check.
        plain_state: The attributes of the model, the datamodule and the callbacks.
    """

    model: Any
    module: Any
    network: nn.Module
    steps: StepRunner
    checkpoints: CheckpointManager

    def __init__(
        self,
        loop: FabricLoop,
        stage: str,
        model: Any,
        loaders: dict[str, Any],
        datamodule: Any,
        functions: dict[str, Any],
        optimizer: Any = None,
    ) -> None:
        check_idle(loop, stage)
        self.loop, self.stage, self.config, self.fabric = loop, stage, loop.config, loop.fabric
        last = loop.run if stage != "fit" else None
        first = LOADER_OF_STAGE[stage]
        if is_datamodule(loaders.get(first)):
            datamodule, loaders[first] = loaders[first], None
        check_sources(stage, model if last is None else last.model, loaders, datamodule)
        self.is_last_model = model is None
        # Remove the wrapper that FabricLoop.setup() may have added. The run adds its own wrapper.
        self.model, compiler = unwrap_compiled(unwrap(model), functions)
        if last is not None and (self.model is None or self.model is last.model):
            self.model = last.model
            given = {name: function for name, function in functions.items() if function}
            functions = {**getattr(last.module, "functions", {}), **given}
        self.module, self.network = adapt_model(self.model, functions)
        self.is_lightning_module = self.module is self.model
        self.given_optimizer = unwrap(optimizer)
        if functions.get("training_step") and has_several_optimizers(self.given_optimizer):
            # With several optimizers, the step function steps the optimizers itself.
            self.module.automatic_optimization = False
        self.data = DataConnector(loaders, self.module if datamodule is None else datamodule)
        self.datamodule = datamodule
        if datamodule is None and last is not None and last.datamodule is not None:
            # Keep the previous run's datamodule, and use its loaders if no loaders were given.
            self.datamodule = last.datamodule
            if not self.data.has_loader(first):
                self.data.source = self.datamodule
        self._make_parts(last, compiler or self.config.compile)
        check_call(self)

    def _make_parts(self, last: RunState | None, compiler: Any) -> None:
        loop, config, fabric = self.loop, self.config, self.fabric
        self.hooks = Hooks(loop, self.module, self._module_for)
        before: Progress = Progress() if last is None else last.progress
        # Give an evaluation the counters of the previous run.
        self.progress: Progress = Progress(
            stage="train" if self.stage == "fit" else self.stage,
            global_step=before.global_step,
            epochs_done=before.epochs_done,
            total_batches=before.total_batches,
            logging_step=before.logging_step,
        )
        has_timer = bool(self.hooks.callbacks_of("Timer"))
        has_bar = bool(self.hooks.callbacks_of("ProgressBar"))
        shows_console = bool(config.enable_progress_bar) and not has_bar and fabric.is_global_zero
        self.is_distributed = fabric.world_size > 1
        self.results = ResultCollection(self)
        self.row = RowWriter(self)
        self.data.run = self
        self.stop = StopCondition(config, self.progress, has_timer or config.max_time is not None)
        self.steps = StepRunner(fabric, self.module, self.network, compiler)
        self.loggers = LoggerConnector(self)
        self.console = Console(config, shows_console)
        self.folders: RunFolders = RunFolders() if last is None else last.folders
        self.checkpoints = CheckpointManager(None, config) if last is None else last.checkpoints
        self.warn_once = WarnOnce(fabric.is_global_zero)
        self.accumulate_grad_batches = config.accumulate_grad_batches
        self.optimization = Optimization(self)
        self.validation_schedule: ValidationSchedule = None  # type: ignore[assignment]
        self.signals: SignalHandler = None  # type: ignore[assignment]
        self.plain_state: PlainState = None  # type: ignore[assignment]
        self.returns_predictions = True
        self.predictions = Predictions()
        self.flags_at_start: dict[str, dict[str, bool]] = {}
        self.start = StartPoint()
        # The class and message of an error that ended the run. The error itself is not kept,
        # because its traceback holds the last batch and the graph of the last loss in memory.
        self.failure: str | None = None

    def _module_for(self, callback: Any) -> Any:
        """Return the argument ``pl_module`` for a callback's hooks."""
        # Lightning's callbacks need a LightningModule.
        packages = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.")
        bases = [base for base in type(callback).__mro__ if base.__name__ != "Callback"]
        is_lightnings = any(base.__module__.startswith(packages) for base in bases)
        return self.module if is_lightnings else self.model

    def set_options(self, config: LoopConfig) -> None:
        """Use other options for the rest of the run."""
        self.config = config
        self.stop.set_limits(config)
        self.checkpoints.set_options(config)

    def start_optimization(self) -> None:
        """Train with automatic or manual optimization, which hooks may choose until on_fit_start."""
        self.optimization = self.optimization.start()

    def find_new_modules(self) -> None:
        """Add the modules that the hooks of an object have created to its network."""
        find_new_modules(self.model, self.network)

    @property
    def should_validate(self) -> bool:
        has_step = self.hooks.is_overridden("validation_step")
        return has_step and self.config.limit_val_batches != 0 and self.data.has_loader("val")

    def make_step(self, name: str, method: Callable) -> Callable:
        """Wrap a step for precision, strategy and profiler. ``self.log`` reads the step's name."""
        action = f"[Strategy]{type(self.fabric.strategy).__name__}.{name}"
        step = self.hooks.with_profiler(action, self.steps.get(name, method))
        return self.hooks.inside(name, step)


def is_datamodule(given: Any) -> bool:
    names = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
    return any(callable(getattr(given, name, None)) for name in names)
