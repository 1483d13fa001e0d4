"""FabricLoop: fit, validate, test and predict on Lightning Fabric."""

from __future__ import annotations

import os
import signal as signal_module
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from .checkpoint.checkpoint_io import AtomicCheckpointIO
from .checkpoint.manager import CheckpointManager
from .checkpoint.resolve import resolve_checkpoint, version_folder, version_of_checkpoint
from .checkpoint.run_lock import lock_folders
from .checkpoint.state import OWN_KEY, restore_model, restore_training
from .config import LoopConfig, parse_options
from .data.loaders import DataConnector
from .distributed.launch import is_joined, launch_processes, starts_processes
from .distributed.signals import SignalHandler
from .errors import ConfigurationError, WarnOnce
from .lightning_compat.callbacks import add_model_callbacks, as_list, parse_callbacks
from .lightning_compat.checkpoints import (
    checkpoint_of_callbacks,
    default_keyword,
    no_best_checkpoint,
)
from .lightning_compat.trainer_api import StrategyAPI, TrainerAPI, make_profiler
from .loggers.console import Console
from .loggers.csv_logger import CSVLogger, claim_version
from .loggers.history import History
from .loggers.logger_connector import LoggerConnector
from .loggers.result_collection import ResultCollection
from .loggers.run_config import write_run_config
from .loggers.run_summary import (
    end_reason,
    format_results,
    format_summary,
    short_path,
    summarize_run,
)
from .training.checks import LOADER_OF_STAGE, check_call
from .training.evaluation_loop import evaluate
from .training.fit_loop import fit as run_fit
from .training.hooks import Hooks, is_instance_of
from .training.module_adapter import adapt_model
from .training.optimization import AutomaticOptimization, ManualOptimization
from .training.prediction_loop import predict as run_predict
from .training.progress import Progress, StopCondition
from .training.run_state import RunState
from .training.setup import attach_logs, attach_run, configure_optimizers, prepare_data
from .training.step_runner import StepRunner


class FabricLoop(TrainerAPI):
    """A training loop on Lightning Fabric with Trainer's options and Trainer's numbers.

    Args:
        fabric: A ready Fabric. Or give Fabric's own arguments:
        accelerator, strategy, devices, num_nodes, precision, plugins: See lightning.Fabric.
        callbacks: Lightning's callbacks, or objects with methods named like hooks.
        loggers: Fabric's name for the option logger.
        **options: The fields of LoopConfig, such as max_epochs=10.
    """

    def __init__(
        self,
        fabric: Fabric | None = None,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        **options: Any,
    ) -> None:
        if loggers is not None:
            options["logger"] = loggers
        given = parse_options(options)
        self.config: LoopConfig = given.resolve()
        self.fabric = fabric or Fabric(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
        )
        self._callbacks = parse_callbacks(callbacks, self.config)
        self.default_root_dir = os.fspath(self.config.default_root_dir or os.getcwd())
        self.checkpoint_io = AtomicCheckpointIO()
        self._own_logger: CSVLogger | None = None
        self._has_fitted = False
        self.loggers = self._make_loggers()
        self._profiler = make_profiler(self.config.profiler)
        self.run: RunState | None = None
        self.runs: dict[str, RunState] = {}
        self.status = TrainerStatus.INITIALIZING
        self._strategy_api = StrategyAPI(self)
        self._ckpt_path: Any = None
        of_fabric = {
            "accelerator": accelerator,
            "strategy": strategy,
            "devices": devices,
            "num_nodes": num_nodes,
        }
        of_fabric |= {"precision": precision, "plugins": plugins, "callbacks": callbacks}
        # What config.yaml records. The command line adds the model and the data.
        self.recipe: dict[str, Any] = {**vars(given)}
        self.recipe |= {
            name: value for name, value in of_fabric.items() if value is not None and fabric is None
        }
        if self.config.seed is not None:
            Fabric.seed_everything(self.config.seed, workers=True, verbose=False)

    def _make_loggers(self) -> list[Any]:
        config = self.config
        if config.logger is False or config.logger is None:
            return []
        if config.fast_dev_run:
            return [DummyLogger()]
        # A ready Fabric may have loggers of its own.
        asked = self.fabric.loggers or True if config.logger is True else config.logger
        given = asked if isinstance(asked, list | tuple) else [asked]
        root = Path(self.default_root_dir, "logs")
        checkpoints = Path(self.default_root_dir, "checkpoints", config.name)
        if any(logger is True for logger in given):
            self._own_logger = CSVLogger(root, config.name, config.version, checkpoints)
        return [self._own_logger if logger is True else logger for logger in given]

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        resume: str | Path | None = None,
        load: str | Path | None = None,
        ckpt_path: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        training_step: Callable | None = None,
        validation_step: Callable | None = None,
        epoch_end: Callable | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Train a model. Returns the rows of metrics.csv as a DataFrame."""
        if scheduler is not None:
            optimizer = ([optimizer], scheduler if isinstance(scheduler, list) else [scheduler])
        functions = {
            "training_step": training_step,
            "validation_step": validation_step,
            "epoch_end": epoch_end,
        }
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        run = self._make_run("fit", model, loaders, datamodule, functions, optimizer)
        self._resolve_checkpoint(run, resume or ckpt_path, load, weights_only)
        self._call(run, _fit)
        return run.history.frame()

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        load: str | Path | None = None,
        verbose: bool = True,
        validation_step: Callable | None = None,
        epoch_end: Callable | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the loaders. Returns what was logged, a dict for each loader."""
        functions = {"validation_step": validation_step, "epoch_end": epoch_end}
        run = self._make_run("validate", model, {"val": dataloaders}, datamodule, functions)
        self._resolve_checkpoint(run, None, load or ckpt_path, weights_only)
        results = self._call(run, _evaluate)
        if verbose:
            self._print_results(results, stage=run.stage)
        return results

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        load: str | Path | None = None,
        verbose: bool = True,
        test_step: Callable | None = None,
        epoch_end: Callable | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the loaders. Returns what was logged, a dict for each loader."""
        functions = {"test_step": test_step, "epoch_end": epoch_end}
        run = self._make_run("test", model, {"test": dataloaders}, datamodule, functions)
        self._resolve_checkpoint(run, None, load or ckpt_path, weights_only)
        results = self._call(run, _evaluate)
        if verbose:
            self._print_results(results, stage=run.stage)
        return results

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        load: str | Path | None = None,
        predict_step: Callable | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Run ``predict_step`` or ``forward`` over the loaders. Returns the outputs by batch."""
        functions = {"predict_step": predict_step}
        run = self._make_run("predict", model, {"predict": dataloaders}, datamodule, functions)
        self._resolve_checkpoint(run, None, load or ckpt_path, weights_only)
        return self._call(run, partial(_predict, keep=return_predictions is not False))

    def _print_results(self, results: list[dict[str, float]], stage: str) -> None:
        table = format_results(results, stage)
        if table and self.fabric.is_global_zero:
            print(table)

    def profile(
        self, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **options: Any
    ) -> Any:
        """Find where the time of a training step goes. See ``fabric_template.profile``."""
        return _import_tool("profile")(self, model, train_dataloaders, datamodule, **options)

    def tune(
        self, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **options: Any
    ) -> Any:
        """Find settings that make a training faster. See ``fabric_template.tune``."""
        return _import_tool("tune")(self, model, train_dataloaders, datamodule, **options)

    def ending(self) -> dict[str, list[str]]:
        """Return the result of the last fit, the reason of its end and its files, as lines by heading."""
        run = self.runs.get("fit")
        if run is None:
            return {}
        paths = [self.checkpoint_path("best"), self.checkpoint_path("last")]
        return summarize_run(run, [path for path in paths if path is not None])

    def __repr__(self) -> str:
        summary = self.ending() if hasattr(self, "runs") else {}
        headings = ("trained", "ended", "log", "checkpoint")
        parts = [f"{heading} {text}" for heading in headings for text in summary.get(heading, ())]
        name = self.config.name if hasattr(self, "config") else ""
        return f"<{type(self).__name__} {name!r}: {'; '.join(parts) or 'nothing is trained yet'}>"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """Return what a notebook shows for a loop."""
        return {"text/plain": format_summary(self.ending()) or repr(self)}

    # Set-up of a run

    def _make_run(
        self,
        stage: str,
        model: Any,
        loaders: dict[str, Any],
        datamodule: Any,
        functions: dict[str, Any],
        optimizer: Any = None,
    ) -> RunState:
        is_last_model = model is None
        first = LOADER_OF_STAGE[stage]
        if is_datamodule(loaders.get(first)):
            datamodule, loaders[first] = loaders[first], None
        last = self.run if stage != "fit" else None
        if model is None:
            if last is None:
                raise TypeError(
                    f"`Trainer.{stage}()` requires a `LightningModule` when it hasn't been passed in a previous run"
                )
            model = last.model
            given = {name: function for name, function in functions.items() if function}
            functions = {**getattr(last.module, "functions", {}), **given}
        module, source, network = adapt_model(model, functions)
        warn_once = WarnOnce(self.fabric.is_global_zero)

        def module_for(callback: Any) -> Any:
            is_lightnings = type(callback).__module__.startswith(
                ("lightning.", "pytorch_lightning.")
            )
            return module if is_lightnings else model

        data = DataConnector(loaders, datamodule if datamodule is not None else source)
        if datamodule is None and last is not None:
            # The datamodule of the run before stays. Its loaders are used where there are no others.
            datamodule = last.datamodule
            if datamodule is not None and not data.has_loader(first):
                data.source = datamodule
        hooks = Hooks(self, self.callbacks, source, module_for, self._profiler)
        progress = Progress()
        if last is not None:
            progress.continue_from(last.progress)
        has_timer = any(is_instance_of(callback, "Timer") for callback in self.callbacks)
        stop = StopCondition(self.config, progress, has_timer or self.config.max_time is not None)
        all_reduce = self.fabric.all_reduce if self.fabric.world_size > 1 else None
        run = RunState(
            stage=stage,
            loop=self,
            config=self.config,
            fabric=self.fabric,
            model=model,
            module=module,
            network=network,
            datamodule=datamodule,
            hooks=hooks,
            results=ResultCollection(
                hooks, network, stage, all_reduce, not self.config.barebones, not self.loggers
            ),
            history=History(),
            data=data,
            progress=progress,
            stop=stop,
            steps=StepRunner(self.fabric, source, network, self.config.compile),
            loggers=None,  # type: ignore[arg-type]
            console=Console(self.config, self._shows_console()),
            checkpoints=last.checkpoints
            if last is not None
            else CheckpointManager(None, self.config),
            warn_once=warn_once,
            is_last_model=is_last_model,
            given_optimizer=optimizer,
            accumulate_grad_batches=self.config.accumulate_grad_batches,
        )
        run.loggers = LoggerConnector(run)
        run.history.run = run.data.run = run
        check_call(run)
        return run

    def _shows_console(self) -> bool:
        has_bar = any(is_instance_of(callback, "ProgressBar") for callback in self.callbacks)
        is_enabled = bool(self.config.enable_progress_bar) and not has_bar
        return is_enabled and self.fabric.is_global_zero

    def _resolve_checkpoint(
        self, run: RunState, resume: Any, load: Any, weights_only: bool | None
    ) -> None:
        if resume is not None and load is not None:
            raise ConfigurationError(
                f"{run.stage}: got resume={str(resume)!r} and load={str(load)!r}, expected one of them."
            )
        resumes = resume is not None
        keyword = resume if resume is not None else load
        if keyword is None:
            keyword = self._ckpt_path or default_keyword(self, run)
            resumes = run.stage == "fit"
        elif self._ckpt_path is not None:
            run.warn_once(
                f"`trainer.ckpt_path = {self._ckpt_path!r}` was called but then you passed"
                f" `trainer.fit(ckpt_path={keyword!r})`. The latter will be loaded."
            )
            self._ckpt_path = None
        path = None if keyword is None else self._find_checkpoint(run, os.fspath(keyword))
        if path is None:
            return
        run.checkpoint_path = str(path)
        run.checkpoint = self.checkpoint_io.load_checkpoint(
            path, weights_only=weights_only is not False
        )
        run.own_state = run.checkpoint.pop(OWN_KEY, None)
        run.resumes = resumes
        run.resume_keyword = "auto" if resumes and keyword == "auto" else None
        if resumes and self.config.version is None:
            root = Path(self.default_root_dir)
            version = version_of_checkpoint(Path(path), root, self.config.name)
            for logger in self.loggers if version is not None else ():
                if isinstance(logger, CSVLogger):
                    logger.version = version

    def _find_checkpoint(self, run: RunState, keyword: str) -> str | Path | None:
        """Return the file that "best", "last" or "auto" means, or the path that was given."""
        if keyword in ("best", "last", "auto") and self.checkpoint_callbacks:
            return checkpoint_of_callbacks(self, keyword, run)
        if keyword == "best":
            if not self.config.enable_checkpointing:
                raise no_best_checkpoint(self, run.stage)
            if run.checkpoints.best_model_path:
                return run.checkpoints.best_model_path
        root = Path(self.default_root_dir)
        return resolve_checkpoint(keyword, root, self.config.name, self.config.version)

    def _make_checkpoint_manager(self, run: RunState) -> CheckpointManager:
        config = self.config
        if not config.enable_checkpointing or any(
            is_instance_of(callback, "Checkpoint") for callback in self.callbacks
        ):
            return CheckpointManager(None, config)
        runs = Path(self.default_root_dir, "checkpoints", config.name)
        version = self._choose_version(run, runs)
        return CheckpointManager(runs / version_folder(version), config)

    def _choose_version(self, run: RunState, runs: Path) -> int | str:
        """Return the version of a run, which the first process chooses for all."""
        own = [logger for logger in self.loggers if isinstance(logger, CSVLogger)]
        version = own[0].version if own else self.config.version
        if version is None and run.resumes:
            version = version_of_checkpoint(
                Path(str(run.checkpoint_path)), runs.parent.parent, runs.name
            )
        if version is None and self.fabric.is_global_zero:
            version = claim_version(runs)
        version = self.fabric.broadcast(version)
        for logger in own:
            logger.version = version
        return version

    def _call(self, run: RunState, function: Callable[[RunState], Any]) -> Any:
        """Run a stage with everything around it, and handle what ends it."""
        self.run = self.runs[run.stage] = run
        self._strategy_api.reset_lightning_optimizers()
        self.status = TrainerStatus.RUNNING
        run.progress.stage = "train" if run.stage == "fit" else run.stage
        try:
            if starts_processes(self.fabric):
                result = launch_processes(run)
            else:
                if self.fabric.strategy.launcher is not None and not is_joined():
                    self.fabric.launch()
                result = self._run_stage(run, function)
        except BaseException as error:
            self._handle_exception(run, error)
            raise
        self.status = TrainerStatus.FINISHED
        return result

    def _run_stage(self, run: RunState, function: Callable) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(True))
            stack.enter_context(torch.autograd.set_detect_anomaly(self.config.detect_anomaly))
            stack.enter_context(run.console.shown(run))
            return self._run_attached(run, function, stack)

    def _run_attached(self, run: RunState, function: Callable, stack: ExitStack) -> Any:
        attach_run(run, stack)
        own_callbacks = run.hooks.module_method("configure_callbacks")
        if own_callbacks is not None:
            self.callbacks = add_model_callbacks(self.callbacks, as_list(own_callbacks()))
            attach_logs(run, stack)
        prepare_data(run)
        if run.stage == "fit":
            self._open_folders(run, stack)
        run.hooks.call_with_stage("setup", run.stage, run.datamodule)
        run.hooks.call_module("configure_model")
        run.steps.convert_network()
        if run.checkpoint is not None:
            restore_model(run, run.checkpoint)
            run.checkpoint = run.checkpoint if run.resumes else None
        run.steps.setup(run.stage == "fit")
        result = function(run)
        if run.stage == "fit":
            run.hooks.call("on_fit_end")
        run.hooks.call_with_stage("teardown", run.stage, run.datamodule)
        if run.stage == "fit":
            run.checkpoints.finish(run)
        run.data.teardown()
        run.loggers.finalize("success")
        run.progress.stage = None
        if self._profiler is not None:
            self._profiler.describe()
        return result

    def _open_folders(self, run: RunState, stack: ExitStack) -> None:
        """Choose the version of a fit and lock its folders. A new run starts with empty files."""
        own, version = self._own_logger, self.config.version
        if own is not None and version is None and self._has_fitted and not run.resumes:
            own.version = None
        self._has_fitted = True
        run.checkpoints = self._make_checkpoint_manager(run)
        if not self.fabric.is_global_zero:
            return
        resumed_from = None
        if run.resumes and run.checkpoint is not None:
            resumed_from = f"step {run.checkpoint['global_step']} from {run.checkpoint_path}"
        stack.enter_context(lock_folders(self._run_folders(run), resumed_from))
        if own is not None and version is not None and not run.resumes:
            own.rewind({})

    def _handle_exception(self, run: RunState, error: BaseException) -> None:
        self.status = TrainerStatus.INTERRUPTED
        run.exception = error
        run.hooks.call_callbacks("on_exception", error)
        run.hooks.call_datamodule(run.datamodule, "on_exception", error)
        if run.stage == "fit" and run.stop.signal is None:
            run.checkpoints.save_exception(run)
        run.loggers.finalize("failed")
        run.data.teardown()
        run.progress.stage = None

    def _run_folders(self, run: RunState) -> list[Path]:
        """Return the folders that a run writes to."""
        folders = [Path(logger.log_dir) for logger in self.loggers if isinstance(logger, CSVLogger)]
        return folders if run.checkpoints.folder is None else [*folders, run.checkpoints.folder]

    @property
    def checkpoint_dir(self) -> Path | None:
        """The folder of the checkpoints of the last fit; None before it, or if it saves none."""
        return self.runs["fit"].checkpoints.folder if "fit" in self.runs else None

    def checkpoint_path(self, keyword: str = "last") -> Path | None:
        """Return the "last" or "best" checkpoint that this loop has saved, None if there is none.

        ModelCheckpoint callbacks come before the loop's own files.
        """
        fit = self.runs.get("fit")
        savers = self.checkpoint_callbacks or ([fit.checkpoints] if fit is not None else [])
        paths = [getattr(saver, f"{keyword}_model_path", "") for saver in savers]
        if keyword == "best":
            paths = paths[:1]
        found = [Path(path) for path in paths if path and os.path.exists(path)]
        return max(found, key=os.path.getmtime) if found else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_callbacks": list(self.callbacks), "run": None, "runs": {}}


def _fit(run: RunState) -> None:
    """Prepare training, restore a checkpoint, check the validation, train."""
    configure_optimizers(run)
    run.hooks.call("on_fit_start")
    run.network.zero_grad()
    run.loggers.log_hyperparameters(run)
    if run.fabric.is_global_zero:
        write_run_config(run)
    is_automatic = run.module.automatic_optimization
    run.optimization = AutomaticOptimization(run) if is_automatic else ManualOptimization(run)
    if run.checkpoint is not None:
        restore_training(run, run.checkpoint)
        print_if_finished(run)
    with SignalHandler() as signals:
        run.signals = signals
        run.results.start_training()
        if not run.is_lightning_module:
            run.network.train()
        run_sanity_check(run)
        run.progress.stage = "train"
        run.results.start_training()
        run_fit(run)
    run.results.active = None
    finish_signal(run)


def print_if_finished(run: RunState) -> None:
    """Print that a finished run was resumed, for example by a job scheduler that restarts it."""
    progress, is_done = run.progress, run.stop.is_fit_done and not run.progress.is_in_epoch
    if is_done and run.fabric.is_global_zero:
        place = f"epoch {progress.epochs_done}, step {progress.global_step}"
        text = (
            f"resume: {run.checkpoint_path} is from a finished run ({place}); it trains no further:"
            f" {end_reason(run)}."
        )
        print(text, file=sys.stderr)


def finish_signal(run: RunState) -> None:
    """Save where a signal ended training, and pass the signal on."""
    number = run.stop.signal
    if number is None:
        return
    if run.checkpoints.is_enabled:
        run.checkpoints.save_last(run)
    if run.fabric.is_global_zero:
        name, path, step = (
            end_reason(run),
            run.checkpoints.last_model_path,
            run.progress.global_step,
        )
        saved = (
            f" {short_path(Path(path))!r} is saved: resume='last' continues there." if path else ""
        )
        print(
            f"{name}: training stops in epoch {run.progress.epochs_done}, after step {step}.{saved}",
            file=sys.stderr,
        )
    if number == signal_module.SIGINT:
        raise KeyboardInterrupt
    raise (
        SIGTERMException(128 + number)
        if number == signal_module.SIGTERM
        else SystemExit(128 + number)
    )


def _evaluate(run: RunState) -> list[dict[str, Any]]:
    stage = "val" if run.stage == "validate" else run.stage
    run.loggers.log_hyperparameters(run)
    run.data.setup_eval_loaders(stage)
    results = evaluate(run, run.stage)
    run.results.active = None
    return results


def _predict(run: RunState, keep: bool) -> list[Any] | None:
    run.data.setup_eval_loaders("predict")
    return run_predict(run, keep)


def run_sanity_check(run: RunState) -> None:
    """Validate a few batches before training, so that a broken validation fails at once."""
    most = run.config.num_sanity_val_steps
    if not run.should_validate or most == 0 or run.checkpoint is not None:
        return
    from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

    states = _collect_rng_states()
    run.progress.stage = "sanity_check"
    run.hooks.call("on_sanity_check_start")
    run.data.setup_eval_loaders("val")
    evaluate(run, "sanity_check", None if most == -1 else most)
    run.hooks.call("on_sanity_check_end")
    run.results.forget_evaluation()
    run.history.returned.clear()
    run.progress.stage, run.progress.eval_batches_done = "train", 0
    _set_rng_states(states)


def _import_tool(name: str) -> Any:
    """Return a function of tools/, which copies of this package may lack."""
    try:
        return getattr(import_module(f"{__package__}.tools.{name}"), name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(f"{__package__}.tools"):
            raise
        raise ConfigurationError(
            f"loop.{name}: this copy has no folder tools/, expected fabric_template/tools/{name}.py. Copy it, too."
        ) from error


def is_datamodule(given: Any) -> bool:
    names = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
    return any(callable(getattr(given, name, None)) for name in names)
