"""Create the objects of one run, such as Progress, Hooks and CheckpointManager."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import WarningCache

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.state import make_plain_state
from ..data.loaders import DataConnector
from ..distributed.signals import SignalHandler
from ..loggers.console import Console
from ..loggers.logger_connector import LoggerConnector
from ..loggers.result_collection import ResultCollection
from ..loggers.row import RowWriter
from ..plain_state import PlainState
from .hooks import Hooks
from .module_adapter import ObjectNetwork, StepRunner, creates_modules
from .optimization import Optimization
from .progress import Progress, StopCondition, ValidationSchedule

if TYPE_CHECKING:
    from ..config import LoopConfig
    from .plan import Plan

# The attributes of Run that a checkpoint contains, in the order in which they are restored.
SAVED_PARTS = ["progress", "stop", "results", "row", "data", "validation_schedule"]
SAVED_PARTS += ["plain_state", "checkpoints"]


class Run:
    """Creates and holds the objects for one call to fit, validate, test or predict.

    Join the process group before you create a Run, because some of the objects need the rank.

    Args:
        plan: The checked arguments of the call.

    Attributes:
        config: The current options.
        given_options: The options as the script passed them, before hooks changed any of them.
        module: A LightningModule: the model itself, or an adapter around the model.
        network: The nn.Module whose state_dict is saved. A LightningModule is its own network.
        steps: Runs the steps with the precision, the strategy and torch.compile.
        plain_state: Finds the changed attributes of the model, the datamodule and the callbacks.
    """

    def __init__(self, plan: Plan) -> None:
        loop, config, fabric = plan.loop, plan.config, plan.loop.fabric
        self.plan, self.loop, self.stage = plan, loop, plan.stage
        self.config, self.fabric = config, fabric
        self.given_options = dict(vars(config))
        self.model, self.module, self.network = plan.model, plan.module, plan.network
        self.is_lightning_module = plan.is_lightning_module
        self.hooks = Hooks(loop, self.module, self.model, self.datamodule)
        self.progress: Progress = Progress("train" if plan.stage == "fit" else plan.stage)
        self.progress.set_options(config)
        timers = self.hooks.callbacks_of("Timer")
        self.stop: StopCondition = StopCondition(config, self.progress, timers)
        self.checkpoints: CheckpointManager = CheckpointManager(config)
        if plan.stage != "fit" and loop.run is not None:
            # An evaluation takes over the counters, the should_stop flag and the checkpoint manager
            # of the previous run.
            self.progress.continue_after(loop.run.progress)
            self.stop.request(loop.run.stop.should_stop)
            self.checkpoints = loop.run.checkpoints
        self.signals = SignalHandler(fabric)
        self.results = ResultCollection(self)
        self.row = RowWriter(self)
        self.data = DataConnector(self)
        self.steps = StepRunner(fabric, self.module, self.network, plan.compile)
        self.optimization: Optimization = Optimization(self)
        self.validation_schedule = ValidationSchedule(self)
        self.plain_state: PlainState = PlainState({})
        self.loggers = LoggerConnector(self)
        has_bar = bool(self.hooks.callbacks_of("ProgressBar"))
        is_shown = bool(config.enable_progress_bar) and not has_bar and fabric.is_global_zero
        self.console = Console(config, is_shown)
        # Show each warning once per run, and only in the main process.
        self.warn_once = WarningCache().warn

    @property
    def datamodule(self) -> Any:
        """The datamodule that was passed to the loop, or None."""
        return self.plan.datamodule

    def saved_parts(self) -> dict[str, Any]:
        """Return the run's attributes that are saved in a checkpoint, such as ``progress``.

        For an object with ``is_per_process = True``, a checkpoint contains one state_dict per
        process.
        """
        return {name: getattr(self, name) for name in SAVED_PARTS}

    def set_options(self, config: LoopConfig) -> None:
        """Use the options in ``config`` for the rest of the run."""
        self.config = config
        self.progress.set_options(config)
        self.stop.set_options(config)
        self.checkpoints.set_options(config)

    def record_attributes(self) -> None:
        """Record the attributes of the model, the datamodule and the callbacks before training."""
        self.plain_state = make_plain_state(self)

    def mark_changes(self) -> None:
        """Mark the values that on_train_start has changed, so that checkpoints contain them.

        A resumed run calls this hook again, and must restore these values afterwards.
        """
        self.plain_state.mark_changes()
        self.data.mark_changes()
        self.steps.mark_changed_flags(self.optimization.named_parameters())

    def start_optimization(self) -> None:
        """After on_fit_start, choose automatic or manual optimization."""
        # Wait for the hook on_fit_start, because it may set automatic_optimization.
        self.optimization = self.optimization.start()

    def find_new_modules(self) -> None:
        """If the model is not an nn.Module, add modules that its hooks created to ``network``."""
        if isinstance(self.network, ObjectNetwork) and creates_modules(self.model):
            self.network.collect(self.model)

    @property
    def has_validation(self) -> bool:
        return self.hooks.is_overridden("validation_step") and self.data.has_loader("val")

    @property
    def should_validate(self) -> bool:
        return self.config.limit_val_batches != 0 and self.has_validation

    def make_step(self, name: str, method: Callable) -> Callable:
        """Wrap a step method so that it uses the run's precision, strategy and profiler."""
        action = f"[Strategy]{type(self.fabric.strategy).__name__}.{name}"
        step = self.hooks.with_profiler(action, self.steps.get(name, method))
        return self.hooks.inside(name, step)
