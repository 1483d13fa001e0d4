"""TrainerFace: what modules and callbacks read from a trainer, offered by the loop; and no more than that.

Counted over public packages and Lightning's own callbacks. What has no meaning here is refused with a clear
AttributeError, so that nobody takes silence for an answer.
"""

from __future__ import annotations

import math
import signal
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from lightning.fabric import Fabric

from ..core.config import Settings
from ..core.errors import Misuse
from ..core.overrides import is_a
from ..core.run import Run
from .shows import State, Word, shows


def _view(name: str, doc: str | None = None) -> property:
    """A property that is one of the views of this name; who never asks for one never imports them."""

    def view(self: Any) -> Any:
        from . import views

        return getattr(views, name)(self)

    return property(view, doc=doc)


def _setter(deed: str, *names: str) -> Any:
    """What sets a property, by one of the deeds of set.py; who sets none never imports them."""

    def set_it(self: Any, value: Any) -> None:
        from . import set as deeds

        getattr(deeds, deed)(self, *names, value)

    return set_it


class TrainerFace:
    """Trainer's attributes, read from the run at hand (or the last one); what belongs to fit, from the last fit."""

    _run: Run | None
    _runs: dict[str, Run]  # the last one of each verb: what it has set up stays readable, as under Trainer
    fabric: Fabric
    config: Settings
    callbacks: list[Any]
    loggers: list[Any]
    recipe: dict[str, Any]
    _own_logger: bool  # whether the logger is the loop's own CSV
    _status: str  # Trainer's word

    # ---- progress

    current_epoch = shows(
        "_run.at.current_epoch", "The epoch that runs, from 0; after fit, the number of epochs trained.", 0
    )
    global_step = shows("_run.at.global_step", "Optimizer steps taken so far.", 0)
    max_epochs = property(
        lambda self: self._run.stop.limits()[0] if self._run else self.config.max_epochs,
        doc="The limit of epochs, -1 for none.",
    )
    min_epochs = property(
        lambda self: self._fitted.stop.min_epochs if self._fitted else self.config.min_epochs,
        doc="How many epochs no ``should_stop`` can end, 0 for none; as configured before anything is trained.",
    )
    is_last_batch = shows("_fitted.at.is_last_batch", "Whether the training batch at hand is the epoch's last.", False)

    @property
    def should_stop(self) -> bool:
        """Set it to end training after the batch at hand, if it may end."""
        return self._fitted is not None and self._fitted.stop.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if self._fitted is not None:
            self._fitted.stop.ask(value)
            if value:
                self._fitted.stop.tell_held_back("The loop was signaled to stop")

    gradient_clip_algorithm = property(
        lambda self: self.config.gradient_clip_algorithm and Word(self.config.gradient_clip_algorithm),
        _setter("set_word", "gradient_clip_algorithm"),
        doc="What gradient_clip_val limits.",
    )
    accumulate_grad_batches = property(
        lambda self: self._run.at.window if self._run else self.config.accumulate_grad_batches,
        _setter("accumulate"),
        doc="Batches per optimizer step; a callback may change it between epochs.",
    )
    num_training_batches = shows("_fitted.at.num_batches", "Training batches of an epoch.", math.inf)

    num_val_batches = property(
        lambda self: self._limits_of("validate" if self._run and self._run.fn == "validate" else "fit"),
        doc="Batches of each validation loader; fit's, unless the last run was validate.",
    )

    num_test_batches = property(lambda self: self._limits_of("test"), doc="Batches of each test loader.")
    num_predict_batches = property(lambda self: self._limits_of("predict"), doc="Batches of each loader to predict.")

    num_sanity_val_batches = property(
        lambda self: [min(self.num_sanity_val_steps, limit) for limit in self._limits_of("fit")],
        doc="Batches of each validation loader in fit's sanity check.",
    )

    def _limits_of(self, verb: str) -> list[int | float]:
        """The batches of each evaluation loader of the last such run."""
        run = self._runs.get(verb)
        return run.data.val.limits if run and run.data.val else []

    val_check_batch = shows("_fitted.validation.batch", "Validation runs every so many batches.")

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps that fit is going to take; infinity when nothing limits it.

        May be asked in ``configure_optimizers``: the training loader is made then.

        Raises:
            Misuse: where there is no training loader, as in a test.
        """
        run = self._required("estimated_stepping_batches")
        max_epochs, max_steps = run.stop.limits()
        most = math.inf if max_steps == -1 else max_steps
        if max_epochs == -1 and not run.stop.has_timer:
            return most
        if not run.data.given.has("train"):
            raise Misuse(
                f"FabricLoop.estimated_stepping_batches: {run.fn} has no train loader, and `train_dataloader` must be"
                " implemented to count its batches: ask for it in fit"
            )
        run.data.set_up_train()
        if run.at.num_batches == math.inf:
            return most
        return min(most, math.ceil(run.at.num_batches / run.at.window) * max(max_epochs, 1))

    # ---- what was logged

    def _logged(self, view: str) -> dict[str, Any]:
        """One of the three views of what was logged, up to date."""
        if self._run is None:
            return {}
        if self._run.metrics.active:
            self._run.metrics.merge()
        return getattr(self._run.metrics, view)

    callback_metrics = property(lambda self: self._logged("callback"), doc="Every metric by name, as callbacks see it.")
    logged_metrics = property(lambda self: self._logged("logged"), doc="What was sent to the loggers.")
    progress_bar_metrics = property(lambda self: self._logged("progress"), doc="What stands beside the progress bar.")

    # ---- parts

    lightning_module = shows("_run.trained.model", "The model that was given.")

    model = property(
        lambda self: self._run and (self._run.steps.ddp or self._run.steps.wrapped or self._run.trained.model),
        doc="The same; under DDP the wrapper.",
    )
    datamodule = shows("_run.trained.datamodule", "The datamodule given to this run.")

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers themselves; a plain object that steps them itself gets those that count their steps."""
        if (run := self._fitted) is None:
            return []
        themselves = run.trained.is_automatic or run.trained.is_lightning
        return run.optimizing.optimizers if themselves else run.optimizing.wrapped

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        run = self._required("optimizers")
        run.optimizing.replace(optimizers)
        if run.update is not None:
            run.update.set_up()

    lr_scheduler_configs = shows(
        "_fitted.optimizing.schedulers", "The schedulers with their intervals and monitors.", list
    )
    train_dataloader = shows("_run.data.train.as_given", "The training loader, in the shape in which it was given.")
    val_dataloaders = property(
        lambda self: self._loaders_of("fit", "validate"), doc="The validation loaders, as given."
    )
    test_dataloaders = property(lambda self: self._loaders_of("test"), doc="The test loaders, as given.")
    predict_dataloaders = property(lambda self: self._loaders_of("predict"), doc="The loaders to predict, as given.")

    def _loaders_of(self, *verbs: str) -> Any:
        """The evaluation's loaders, if the last run was one of these verbs: they don't outlive it."""
        run = self._run
        return run.data.val.as_given if run and run.data.val and run.fn in verbs else None

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers, self._own_logger = [] if logger is None or logger is False else [logger], False

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger's files."""
        if not self.loggers:
            return self.default_root_dir
        logger = self.loggers[0]
        folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        known = hasattr(type(logger), "claim")  # our own: the version was agreed on when the run began
        return folder if known or self.fabric.world_size == 1 or not self._run else self.fabric.broadcast(folder)

    def _those(self, kind: str) -> list[Any]:
        return [callback for callback in self.callbacks if is_a(callback, kind)]

    checkpoint_callbacks = property(lambda self: self._those("Checkpoint"), doc="Callbacks that save checkpoints.")
    early_stopping_callbacks = property(lambda self: self._those("EarlyStopping"), doc="EarlyStopping callbacks.")
    early_stopping_callback = property(
        lambda self: next(iter(self.early_stopping_callbacks), None), doc="The first EarlyStopping callback."
    )

    @property
    def progress_bar_callback(self) -> Any:
        """A progress bar among the callbacks; whoever asks before a run gets Lightning's, in place of the loop's own."""
        bars = self._those("ProgressBar")
        if not bars and self.config.enable_progress_bar and self._status != "running":
            from lightning.pytorch.callbacks import TQDMProgressBar

            bars = [TQDMProgressBar()]
            self.callbacks = [*bars, *self.callbacks]
        return next(iter(bars), None)

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints; without one, the loop's own saver; None where no files were asked for."""
        saver = next(iter(self.checkpoint_callbacks), self._run and self._run.keeper)
        if not getattr(saver, "keeps", saver is not None):  # none, or none yet
            from ..files.keeper import nothing_kept

            return nothing_kept(self.config, self.recipe.get("enable_checkpointing"))
        return saver

    def _profiler(self) -> Any:
        if self.own_profiler is not None:
            return self.own_profiler
        from lightning.pytorch.profilers import PassThroughProfiler

        return PassThroughProfiler()

    profiler = property(
        _profiler, _setter("set_profiler"), doc="The profiler, one that does nothing when none was asked for."
    )

    _set_path: Any = None  # by whoever writes loop.ckpt_path = path

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that this run started from; set it to start the next runs from there."""
        path = self._set_path or (self._run and self._run.origin.path)
        return str(path) if path else None

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self._set_path = path

    # ---- loops: Lightning's callbacks look into them

    fit_loop = _view("FitLoopView", "How far training is, in the few words that callbacks ask for.")
    validate_loop = test_loop = _view("EvaluationLoopView", "How far the evaluation at hand is.")
    predict_loop = _view("PredictLoopView", "What was predicted, and of which samples.")
    _evaluation_loop = _view("EvaluationLoopView")
    _data_connector = _view("DataView")
    _logger_connector = _view("LoggerView")

    _results_view = _view("ResultsView")
    _results = property(lambda self: self._results_view if self._run and self._run.fn != "predict" else None)
    _accelerator_connector = property(lambda self: SimpleNamespace(is_distributed=self.world_size > 1))

    # ---- where it runs

    @cached_property
    def _strategy_face(self) -> Any:
        from .views import StrategyFace

        return StrategyFace(self)

    strategy = shows("_strategy_face", "Fabric's strategy, with the few words more that callbacks use.")
    precision = shows("fabric.strategy.precision.precision", 'Such as "32-true" or "bf16-mixed".')
    precision_plugin = shows("_strategy_face.precision_plugin", "The strategy's precision, with ``clip_gradients``.")
    is_global_zero = shows("fabric.is_global_zero", "Whether this is the process that writes.")
    global_rank = shows("fabric.global_rank", "This process's number among all.")
    local_rank = shows("fabric.local_rank", "This process's number on its machine.")
    node_rank = shows("fabric.node_rank", "This machine's number.")
    world_size = shows("fabric.world_size", "The number of processes.")

    @property
    def accelerator(self) -> Any:
        """The accelerator, as Trainer has it: it can ``get_device_stats``."""
        from lightning.pytorch import accelerators

        own = self.fabric.accelerator  # Fabric's; Trainer's has the same name
        twin = getattr(accelerators, type(own).__name__, None)
        return own if twin is None else twin()

    scaler = property(
        lambda self: getattr(self.fabric.strategy.precision, "scaler", None), doc="The gradient scaler under 16-mixed."
    )
    num_devices = property(lambda self: len(self.device_ids), doc="Devices on this machine.")
    num_nodes = property(lambda self: getattr(self.fabric.strategy, "num_nodes", 1), doc="Machines.")

    @property
    def device_ids(self) -> list[int]:
        """The indices of this machine's devices."""
        devices = getattr(self.fabric.strategy, "parallel_devices", None) or [self.fabric.device]
        return [device.index if device.index is not None else i for i, device in enumerate(devices)]

    distributed_sampler_kwargs = property(
        lambda self: getattr(self.fabric.strategy, "distributed_sampler_kwargs", None),
        doc="What a DistributedSampler needs, None for one process.",
    )

    # ---- stages

    def _is_in(self, *stages: str) -> bool:
        return bool(self._run and self._run.at.stage in stages)

    @property
    def state(self) -> State:
        """What runs."""
        run = self._run
        return State(fn=run and run.fn, stage=run and run.at.stage and Word(run.at.stage), status=Word(self._status))

    training = property(lambda self: self._is_in("train"), doc="Whether a training epoch runs.")
    validating = property(lambda self: self._is_in("validate"), doc="Whether a validation runs.")
    testing = property(lambda self: self._is_in("test"), doc="Whether a test runs.")
    predicting = property(lambda self: self._is_in("predict"), doc="Whether predictions are made.")
    sanity_checking = property(lambda self: self._is_in("sanity_check"), doc="Whether it is validated before training.")

    evaluating = property(
        lambda self: self._is_in("validate", "test", "sanity_check"),
        doc="Whether a validation or a test runs; the sanity check is one, too.",
    )

    enable_autolog_hparams = property(lambda self: True, doc="Whether loggers get the hyperparameters: always.")
    interrupted = shows("state.interrupted", "Whether the last run was interrupted or failed.")

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM has come: fit ends after the step at hand."""
        run = self._run
        return run is not None and signal.SIGTERM in (run.stop.signal, run.stop.signals and run.stop.signals.received)

    enable_validation = property(
        lambda self: bool(self._run and self._run.validation.validates), doc="Whether fit validates."
    )

    # ---- deeds

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a checkpoint of the run as it stands now; after a test of what was trained, of its training."""
        from .saving import save_checkpoint

        save_checkpoint(self, filepath, bool(weights_only), storage_options)

    init_module = shows("fabric.strategy.module_init_context", "Makes a module on the device and in the precision.")
    print = shows("fabric.print", "Prints on rank zero.")

    def _begin(self, run: Run) -> None:
        """This is the run at hand."""
        self._run = self._runs[run.fn] = run

    _fitted = property(lambda self: self._runs.get("fit"))

    def _required(self, what: str) -> Run:
        if self._run is None:
            raise RuntimeError(f"FabricLoop.{what}: nothing has run yet; call fit, validate, test or predict first")
        return self._run

    def __setattr__(self, name: str, value: Any) -> None:
        config, run = self.__dict__.get("config"), self.__dict__.get("_run")
        if name == "callbacks" and run is not None and self._status == "running":
            run.hooks.callbacks[:] = value  # who hears of this run
            value = run.hooks.callbacks
        if config is None or name not in vars(config) or name == "default_root_dir" or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            _setter("set_word", name)(self, value)

    def __getattr__(self, name: str) -> Any:
        # only for names that nothing else answers: the configuration's words, then a clear refusal
        config = self.__dict__.get("config")
        if config is not None and not name.startswith("_") and hasattr(config, name):
            return getattr(config, name)
        raise AttributeError(
            f"FabricLoop has no attribute {name!r}: it offers what modules and callbacks read from a Trainer"
            " (trainer/attributes.py lists it), not all of Trainer"
        )
