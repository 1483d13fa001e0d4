"""Fit, validate, test and predict with Lightning Fabric."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .checkpoint.checkpoint_io import find_checkpoint_io
from .checkpoint.find_checkpoint import read_age
from .config import LoopArguments, LoopConfig, parse_options, with_arguments_of
from .data.tensor_loader import TensorLoader
from .distributed.launch import join_processes
from .distributed.process_group import join_by_default
from .distributed.strategies import convert_plugin, convert_strategy
from .errors import (
    ConfigurationError,
    ConfigurationTypeError,
    MissingCheckpointError,
    MissingKeyError,
    describe,
    unknown_argument,
)
from .lightning_compat.callbacks import add_model_callbacks, parse_callbacks
from .lightning_compat.overrides import as_list, has_state, is_instance_of
from .loggers.console import format_results, format_summary, summarize_run
from .loggers.csv_logger import CSVLogger, to_cell
from .loggers.log_arguments import check_metric_name
from .loggers.logger_connector import make_logger
from .loggers.run_config import log_settings
from .trainer_api import StrategyAPI, TrainerAPI, make_profiler
from .training.configure_optimizers import add_scheduler
from .training.lifecycle import run_plan, set_torch_flags
from .training.module_adapter import needs_no_strategy
from .training.plan import Plan, make_plan
from .training.run import Run

Method = TypeVar("Method", bound=Callable[..., Any])
FABRIC_ARGUMENTS = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins")


def refuse_unknown(method: Method) -> Method:
    """Make a method such as fit raise a helpful TypeError if an argument is unknown."""
    name, known = method.__name__, inspect.signature(method).parameters
    options = [field.name for field in fields(LoopArguments)]

    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        for argument in given:
            if argument not in known:
                value = describe(given[argument])
                raise TypeError(unknown_argument(name, argument, value, known, options))
        return method(self, *args, **given)

    return cast(Method, call)


class FabricLoop(TrainerAPI):
    """A training loop on Lightning Fabric with the same options and results as Trainer.

    Args:
        fabric: A lightning.Fabric object, to use instead of the next six arguments.
        accelerator, strategy, devices, num_nodes, precision, plugins: See lightning.Fabric.
        callbacks: Lightning callbacks, or objects with methods such as on_fit_start.
        loggers: An alias of the ``logger`` option, as in lightning.Fabric.
        **options: The fields of LoopConfig, such as max_epochs=10.

    Raises:
        TypeError: An option is unknown.
        ConfigurationError, ConfigurationTypeError: An option has an invalid value.

    Example:
        >>> import torch
        >>> from fabric_template import FabricLoop, TensorLoader
        >>> net = torch.nn.Linear(2, 1)
        >>> batches = TensorLoader(torch.ones(8, 2), torch.zeros(8, 1), batch_size=4)
        >>> def training_step(net, batch):
        ...     return torch.nn.functional.mse_loss(net(batch[0]), batch[1])
        >>> loop = FabricLoop(accelerator="cpu", max_epochs=2, barebones=True)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> history = loop.fit(net, batches, optimizer=optimizer, training_step=training_step)
        >>> list(history["epoch"])
        [0, 1]
    """

    @with_arguments_of(LoopArguments)
    def __init__(self, fabric: Fabric | None = None, **options: Any) -> None:
        given, of_fabric = parse_options({"fabric": fabric, **options})
        self.config: LoopConfig = given.resolve()
        set_torch_flags(self.config)
        self.fabric = make_fabric(of_fabric)
        self.callbacks = parse_callbacks(of_fabric["callbacks"], self.config)
        # Make the path absolute, because a step function may change the working directory.
        self.default_root_dir = os.path.abspath(self.config.default_root_dir or os.getcwd())
        self.checkpoint_io = find_checkpoint_io(self.fabric)
        self.own_logger: CSVLogger | None = None
        self.has_fitted = False
        self.loggers = self._make_loggers()
        self.profiler = make_profiler(self.config.profiler)
        self._has_logged_hparams = False
        self.run: Run | None = None
        self.runs: dict[str, Run] = {}
        self.status = TrainerStatus.INITIALIZING
        self.strategy = StrategyAPI(self)
        self.next_ckpt_path: Any = None
        # The loop writes its options to config.yaml. ``fabric-template fit`` also writes the names
        # of the model and the data to config.yaml.
        self.recipe: dict[str, Any] = {**vars(given)}
        if fabric is None:
            recorded = {name: of_fabric[name] for name in (*FABRIC_ARGUMENTS, "callbacks")}
            self.recipe |= {name: value for name, value in recorded.items() if value is not None}
        self.seed_generators()

    def seed_generators(self) -> None:
        """Seed the random generators when the loop is created, and again when ``fit`` starts."""
        if self.config.seed is not None:
            Fabric.seed_everything(self.config.seed, workers=True, verbose=False)

    def _make_loggers(self) -> list[Any]:
        config = self.config
        if not as_list(config.logger):
            return []
        if config.fast_dev_run:
            return [DummyLogger()]
        # With logger=True, use the loggers of the user's Fabric object if it has any.
        given = as_list(self.fabric.loggers or True if config.logger is True else config.logger)
        # Keep the CSV logger if the user adds a logger by name, such as logger="wandb".
        names = [logger for logger in given if logger is True or isinstance(logger, str)]
        if names:
            root = Path(self.default_root_dir)
            checkpoints = root / "checkpoints" / config.name
            self.own_logger = CSVLogger(root / "logs", config.name, config.version, checkpoints)
            if True not in names and "csv" not in names:
                given.append("csv")
        return [make_logger(logger, self.own_logger) for logger in given]

    @refuse_unknown
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
        training_step: Callable[..., Any] | None = None,
        validation_step: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Train and validate a model. Return the rows of metrics.csv as a DataFrame. In short::

            for epoch in range(max_epochs):
                for batch in train_dataloaders:
                    training_step(model, batch).backward()
                    optimizer.step()
                    # Step the schedulers, log, validate and save at their intervals.

        Args:
            model: A LightningModule, an object with the same methods, or an nn.Module.
            train_dataloaders, val_dataloaders: A loader, or a list or dict of loaders.
            datamodule: A LightningDataModule to use instead of loaders.
            resume, ckpt_path: The checkpoint to resume from: a path, "last", "best" or "auto".
            load: The checkpoint with the initial weights: a path, "last" or "best".
            optimizer: An optimizer, or a function that takes the model and returns an optimizer. If
                None, the model's configure_optimizers() is called.
            scheduler: A scheduler for the optimizer, or a list of schedulers.
            training_step, validation_step: Functions fn(model, batch[, batch_idx]) to use instead
                of the model's methods.
            weights_only: If False, torch.load reads objects of any class, which may run code from
                the checkpoint.
        """
        functions = {"training_step": training_step, "validation_step": validation_step}
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        start = {"resume": resume, "load": load, "ckpt_path": ckpt_path}
        given = (model, loaders, datamodule, functions, start, weights_only)
        run_plan(make_plan(self, "fit", *given, add_scheduler(optimizer, scheduler)))
        return self.require_run("fit").row.frame()

    @refuse_unknown
    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        load: str | Path | None = None,
        verbose: bool = True,
        validation_step: Callable[..., Any] | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` on all batches. Return one dict of metrics per loader."""
        start = {"load": load, "ckpt_path": ckpt_path}
        parts = (model, {"val": dataloaders}, datamodule, {"validation_step": validation_step})
        return self._evaluate(make_plan(self, "validate", *parts, start, weights_only), verbose)

    @refuse_unknown
    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        load: str | Path | None = None,
        verbose: bool = True,
        test_step: Callable[..., Any] | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` on all batches. Return one dict of metrics per loader."""
        start = {"load": load, "ckpt_path": ckpt_path}
        parts = (model, {"test": dataloaders}, datamodule, {"test_step": test_step})
        return self._evaluate(make_plan(self, "test", *parts, start, weights_only), verbose)

    def _evaluate(self, plan: Plan, verbose: bool) -> list[dict[str, float]]:
        results: list[dict[str, float]] = run_plan(plan)
        table = format_results(results, plan.stage)
        if verbose and table and self.fabric.is_global_zero:
            print(table)
        return results

    @refuse_unknown
    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        load: str | Path | None = None,
        predict_step: Callable[..., Any] | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Run ``predict_step`` or ``forward`` on all batches.

        Return a list with one output per batch. With several loaders, return one such list per
        loader. With return_predictions=False, return None.
        """
        start = {"load": load, "ckpt_path": ckpt_path}
        parts = (model, {"predict": dataloaders}, datamodule, {"predict_step": predict_step})
        is_returned = return_predictions is not False
        given = (*parts, start, weights_only)
        outputs: list[Any] | None = run_plan(
            make_plan(self, "predict", *given, returns_predictions=is_returned)
        )
        return outputs

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Store the current run in ``loop.run``, and keep ``loop.status`` up to date."""
        self.run = self.runs[run.stage] = run
        self.next_ckpt_path, self.status = None, TrainerStatus.RUNNING
        try:
            yield
        except BaseException:
            self.status = TrainerStatus.INTERRUPTED
            raise
        finally:
            # Do not clear loop.run after the run, because loop.global_step reads it.
            self.has_fitted = self.has_fitted or run.stage == "fit"
        is_interrupted = run.stop.signal is not None
        self.status = TrainerStatus.INTERRUPTED if is_interrupted else TrainerStatus.FINISHED

    def add_callbacks_of_model(self, callbacks: list[Any]) -> None:
        """Add the module's callbacks, which replace the loop's callbacks of the same class."""
        self.callbacks = add_model_callbacks(self.callbacks, callbacks)

    # Your own loop

    def setup(self, model: Any, optimizer: Any = None, *loaders: Any) -> Any:
        """Prepare a model, an optimizer and loaders for the device and the strategy.

        On one device in float32, setup returns the model and the optimizer unchanged. On several
        devices, or in a precision such as bf16-mixed, setup wraps the model and the optimizer.
        After wrapping, ``model.module`` is the original model. Clip gradients with
        ``loop.fabric.clip_gradients(model, optimizer, max_norm=1.0)``.

        With several processes, each process gets its share of a DataLoader's or a TensorLoader's
        samples. A plain iterable, such as a generator, is returned unchanged.

        Example:
            >>> loop = FabricLoop(accelerator="cpu")
            >>> net = torch.nn.Linear(2, 1)
            >>> net, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
            >>> loop.backward(net(torch.ones(1, 2)).sum())
            >>> optimizer.step()
        """
        expected = "loop.setup(model, optimizer, *loaders)"
        check_type("setup", model, nn.Module, f"an nn.Module. Write {expected}")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            check_type("setup", optimizer, Optimizer, f"an optimizer. Write {expected}")
        check_setup_loaders(loaders)
        join_processes(self.fabric)
        parts = [model] if optimizer is None else [model, optimizer]
        prepared: Any = self.fabric.setup(*parts)
        if not needs_no_strategy(self.fabric):
            parts = [prepared] if optimizer is None else list(prepared)
        parts += [self._setup_loader(loader) for loader in loaders]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _setup_loader(self, loader: Any) -> Any:
        if isinstance(loader, DataLoader):
            return self.fabric.setup_dataloaders(loader)
        rank, size = self.fabric.global_rank, self.fabric.world_size
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        if isinstance(loader, TensorLoader):
            loader = loader.to(self.fabric.device)
            return loader.for_rank(rank, size, seed, has_order_per_pass=True)
        if size > 1 and callable(getattr(loader, "for_rank", None)):
            return loader.for_rank(rank, size, seed)
        if size > 1 and not is_instance_of(loader, "_FabricDataLoader"):
            rank_zero_warn(
                f"loop.setup: got {describe(loader)}, which setup does not divide among the"
                " processes. Pass a DataLoader. Or select each process's batches yourself, using"
                " loop.global_rank, and do not pass the loader to setup."
            )
        return loader

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients in the loop's precision, like ``fabric.backward``."""
        expected = "the loss as a tensor. Write loop.backward(loss)"
        check_type("backward", loss, torch.Tensor, expected)
        run = self.active_run
        if run is None or run.optimization.is_automatic:
            self.fabric.backward(loss)
        else:
            run.optimization.backward(loss)

    def no_backward_sync(self, model: Any, enabled: bool = True) -> Any:
        """Return a context in which backward() does not average gradients over the processes.

        Call no_backward_sync(model, enabled=False) for the last batch before an optimizer step.
        """
        if needs_no_strategy(self.fabric):
            return nullcontext()
        return self.fabric.no_backward_sync(model, enabled)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        sync_dist: bool = False,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Log a value inside a step function or a hook, like a LightningModule's ``self.log``.

        Args:
            name: The name of the metric, such as "train_loss".
            value: A number, a tensor with one element, or a torchmetrics object.
            prog_bar: Whether to show the value in the progress bar.
            on_step: Whether to log the value of single batches, every log_every_n_steps steps. By
                default, True in training_step and in the hooks of a training batch.
            on_epoch: Whether to log the mean over the epoch. By default, True in all other steps
                and hooks.
            sync_dist: Whether to log the mean over all processes. If True, all processes must call
                log.
            batch_size: The weight of the value in the mean over the epoch. By default, the batch
                size is inferred from the batch.
            **options: Other arguments of LightningModule.log, such as reduce_fx.
        """
        log = self.require_run("log").results.log
        levels: dict[str, Any] = {"on_step": on_step, "on_epoch": on_epoch}
        options |= {"sync_dist": sync_dist, "batch_size": batch_size}
        log(name, value, prog_bar, **levels, **options)

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        step: int | None = None,
        sync_dist: bool = False,
        **options: Any,
    ) -> None:
        """Log several values by name.

        In step functions and epoch-end hooks, log_dict works like ``log``. In your own training
        loop, log_dict writes a dictionary with an "epoch" key to metrics.csv, and a dictionary
        without this key to steps.csv. In a hook such as on_train_batch_end, call
        ``log_dict({"epoch": loop.current_epoch, ...})`` to write the values to metrics.csv.

        Args:
            dictionary: The numbers to log, by name. In a step, it may be a MetricCollection.
            step: The number of optimizer steps so far. Without it, TensorBoard draws a value from
                your own loop at step 0.
            sync_dist: Whether to log the means over all processes. If True, all processes must call
                log_dict.
            **options: Arguments of ``log``, such as on_step, on_epoch and batch_size.
        """
        # Accept torchmetrics' MetricCollection, although this class is not a Mapping.
        is_collection = hasattr(dictionary, "add_metrics")
        expected = "a dict of numbers. Write loop.log_dict({'epoch': 0, 'train_loss': loss})"
        check_type("log_dict", dictionary, object if is_collection else Mapping, expected)
        run = self.active_run
        is_row = step is not None or "epoch" in dictionary
        if run is not None and not is_row and (options or is_collection or is_in_log_hook(run)):
            run.results.log_dict(dictionary, sync_dist=sync_dist, **options)
            return
        if options:
            text = f"loop.log_dict: got {', '.join(options)} outside of a step, expected only a"
            raise TypeError(f"{text} dict. Write loop.log_dict(values).")
        for name in dictionary:
            check_metric_name(name)
        scalars = {name: to_cell(name, value) for name, value in dictionary.items()}
        if sync_dist and self.fabric.world_size > 1:
            scalars |= mean_over_processes(self.fabric, without_coordinates(scalars))
        if run is not None:
            log_in_run(run, scalars, step)
        elif self.fabric.is_global_zero:
            self._log_own_hparams()
            log_rows(self.loggers, scalars, step)

    def _log_own_hparams(self) -> None:
        """Log the ``hparams`` of a hand-written loop before its first row."""
        if not (self._has_logged_hparams or self.has_fitted):
            self._has_logged_hparams = True
            for logger in self.loggers:
                log_settings(logger, dict(self.config.hparams or {}), self.config)

    def save(self, path: str | Path, state: dict[str, Any]) -> None:
        """Atomically write a checkpoint that contains modules, optimizers and other values.

        With several processes, call it in all of them: only the first one writes the file.

        By default, ``loop.load`` reads only state_dicts, tensors, arrays, numbers, strings, dates,
        paths and containers. Save ``vars(args)`` instead of ``args``, because ``load`` refuses an
        argparse.Namespace.
        """
        self._prepare_files("save", path, state)
        kept = {k: StatefulValue(v) if is_container(v) else v for k, v in state.items()}
        try:
            self.fabric.save(path, kept)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigurationError(
                "loop.save: got a value that cannot be pickled, expected tensors, numbers, strings,"
                f" or containers of these. {error}"
            ) from error

    def load(
        self, path: str | Path, state: dict[str, Any], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore the objects in ``state`` from a checkpoint.

        With several processes, call it in all of them.

        Return the checkpoint's values for all keys that ``state`` lacks.

        Args:
            weights_only: If False, read objects of any class, which may run code from the file. By
                default, an object of an unsupported class raises an error.
        """
        self._prepare_files("load", path, state)
        # Replace lists and dicts in ``state`` by None, because Fabric.load replaces them anyway,
        # and raises an error for some of them, such as a range object.
        given = {key: None if is_container(value) else value for key, value in state.items()}
        # Older versions of Fabric.load have no weights_only argument.
        options = {} if weights_only is None else {"weights_only": weights_only}
        try:
            values: dict[str, Any] = self.fabric.load(path, given, **options)
        except MissingCheckpointError as error:
            raise MissingCheckpointError(
                f"loop.load: got {str(path)!r}, but this file does not exist. Check the path."
            ) from error
        except KeyError as error:
            found = re.search("contains a key ('.*') that does not exist", str(error.args[0]))
            if found is None:
                raise
            raise MissingKeyError(
                f"loop.load: got the key {found[1]}, expected keys of the checkpoint {str(path)!r}."
                " Remove the key from the dict, or load a checkpoint that contains it."
            ) from error
        state.update(given)
        return values

    def _prepare_files(self, method: str, path: Any, state: Any) -> None:
        """Check the arguments of save and load, and make Fabric use the loop's CheckpointIO."""
        expected = f"a path and a dict. Write loop.{method}('mine.ckpt', state)"
        check_type(method, path, str | os.PathLike, expected)
        check_type(method, state, dict, expected)
        check_state(method, state)
        join_processes(self.fabric)
        strategy = self.fabric.strategy
        # strategy.checkpoint_io raises NotImplementedError if the strategy shards the model.
        with suppress(NotImplementedError):
            if type(strategy.checkpoint_io) is TorchCheckpointIO:
                strategy.checkpoint_io = self.checkpoint_io

    def profile(
        self, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **options: Any
    ) -> Any:
        """Measure how long each part of a training step takes. See ``fabric_template.profile``."""
        # A copy of the package may lack the tools folder, so import tools.profile only here.
        tool = import_module(f"{__package__}.tools.profile")
        return tool.profile(self, model, train_dataloaders, datamodule, **options)

    def tune(
        self, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **options: Any
    ) -> Any:
        """Find settings that make training faster. See ``fabric_template.tune``."""
        tool = import_module(f"{__package__}.tools.tune")
        return tool.tune(self, model, train_dataloaders, datamodule, **options)

    def ending(self) -> dict[str, list[str]]:
        """Return the lines of the last fit's summary, keyed by headings such as "ended"."""
        run = self.fit_run
        if run is None:
            return {}
        paths = [self.checkpoint_path("best"), self.checkpoint_path("last")]
        return summarize_run(run, [path for path in paths if path is not None])

    def __repr__(self) -> str:
        nothing = f"<{type(self).__name__} {self.config.name!r}: nothing is trained yet>"
        return format_summary(self.ending()) or nothing

    @property
    def checkpoint_dir(self) -> Path | None:
        """The checkpoint folder of the last fit, or None if the fit wrote no checkpoints."""
        return self.fit_run.checkpoints.folder if self.fit_run else None

    def checkpoint_path(self, keyword: str = "last") -> Path | None:
        """Return the path of the "last" or "best" checkpoint that this loop saved, or None.

        With ModelCheckpoint callbacks, return only checkpoints that the callbacks have saved.
        """
        savers = self.checkpoint_callbacks or ([self.fit_run.checkpoints] if self.fit_run else [])
        paths = [getattr(saver, f"{keyword}_model_path", "") for saver in savers]
        if keyword == "best":
            paths = paths[:1]
        found = [Path(path) for path in paths if path and os.path.exists(path)]
        return max(found, key=read_age) if len(found) > 1 else next(iter(found), None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "run": None, "runs": {}}


def make_fabric(given: dict[str, Any]) -> Any:
    """Return the user's Fabric object, or create one from the options."""
    fabric, arguments = given["fabric"], {name: given[name] for name in FABRIC_ARGUMENTS}
    if fabric is None:
        check_fabric_arguments(arguments)
        arguments["plugins"] = [convert_plugin(plugin) for plugin in as_list(arguments["plugins"])]
        arguments["strategy"] = convert_strategy(arguments["strategy"])
        try:
            return Fabric(**join_by_default(arguments))
        except TypeError as error:
            raise ConfigurationTypeError(str(error)) from error
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    if not is_instance_of(fabric, "Fabric"):
        advice = "Pass each option by name, as in FabricLoop(max_epochs=10)."
        if fabric is Fabric:
            advice = "Write FabricLoop(Fabric(accelerator='cpu'))."
        if is_instance_of(fabric, "Trainer"):
            advice = "Pass the Trainer's options to FabricLoop, as in FabricLoop(max_epochs=10)."
        raise ConfigurationTypeError(
            f"fabric: got {describe(fabric)}, expected a lightning.Fabric object. {advice}"
        )
    defaults = inspect.signature(Fabric).parameters
    both = [name for name, value in arguments.items() if value != defaults[name].default]
    if both:
        raise ConfigurationError(
            f"fabric: got a Fabric object together with {', '.join(both)}, expected only one of the"
            f" two. Write FabricLoop(Fabric({both[0]}=...))."
        )
    return fabric


def check_fabric_arguments(arguments: dict[str, Any]) -> None:
    """Raise clearer errors than Fabric for invalid ``devices`` and ``plugins``."""
    devices = arguments["devices"]
    if isinstance(devices, int | str) and devices in (0, "0"):
        raise ConfigurationError(
            f"devices: got {devices!r}, expected at least one device. Write devices=1, or leave out"
            " devices."
        )
    if isinstance(devices, str) and devices != "auto" and re.search("[^0-9, -]", devices):
        raise ConfigurationTypeError(
            f"devices: got {devices!r}, expected a number of devices (int), a list of device"
            " indices, or 'auto'."
        )
    for plugin in as_list(arguments["plugins"]):
        if isinstance(plugin, str):
            raise ConfigurationTypeError(
                f"plugins: got {plugin!r}, expected an object such as MixedPrecision('16-mixed',"
                " 'cuda'). For mixed precision, write precision='16-mixed'."
            )


def check_type(method: str, value: Any, kind: Any, expected: str) -> None:
    """Raise an error with an example call if an argument has the wrong type."""
    if not isinstance(value, kind):
        raise ConfigurationTypeError(f"loop.{method}: got {describe(value)}, expected {expected}.")


def check_setup_loaders(loaders: tuple[Any, ...]) -> None:
    """Raise an error if ``setup`` gets something that is not a loader, such as a list."""
    for loader in loaders:
        is_other = isinstance(loader, list | tuple | Mapping | str | torch.Tensor | nn.Module)
        is_other = is_other or is_instance_of(loader, "CombinedLoader")
        if is_other or not hasattr(loader, "__iter__"):
            check_type("setup", loader, (), "a loader. Pass each loader as a separate argument")


class StatefulValue:
    """Wraps a container so that Fabric.save does not copy it. A copied deque would lack maxlen."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def is_container(value: Any) -> bool:
    """Return whether Fabric.save would copy a value item by item."""
    # Fabric.save copies a bytes object byte by byte, which takes several seconds per MB.
    if isinstance(value, str) or has_state(value):
        return False
    return isinstance(value, Mapping | Sequence) or is_dataclass(value)


def check_state(method: str, state: Mapping[str, Any]) -> None:
    """Raise an error if ``state`` has a list or dict of modules, which Fabric cannot restore."""
    waiting = [(str(key), value, False) for key, value in state.items()]
    while waiting:
        place, value, is_nested = waiting.pop()
        if is_nested and has_state(value):
            raise ConfigurationTypeError(
                f"loop.{method}: got {describe(value)} in {place}, but each module and each"
                " optimizer must be a top-level value of the dict, not nested in a list or a dict."
                " Give each one its own key, or write nn.ModuleList(nets) or nn.ModuleDict(nets)."
            )
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{place}[{key!r}]", part, True) for key, part in items]


def without_coordinates(scalars: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scalars.items() if name not in ("epoch", "step")}


def mean_over_processes(fabric: Fabric, values: dict[str, Any]) -> dict[str, Any]:
    own = torch.tensor(list(values.values()), dtype=torch.float64).to(fabric.device)
    means: Any = fabric.all_reduce(own)
    return dict(zip(values, means.tolist(), strict=True))


def is_in_log_hook(run: Run) -> bool:
    """Return whether a step method or an epoch-end hook is running."""
    hook = str(run.hooks.current)
    # Like Trainer, do not log at the end of a prediction epoch.
    return hook.endswith("_step") or (hook.endswith("epoch_end") and run.stage != "predict")


def log_in_run(run: Run, scalars: dict[str, Any], step: int | None) -> None:
    """Log values during fit, validate, test or predict."""
    is_of_row = run.stage == "fit" and run.progress.is_in_epoch
    if is_of_row and scalars.get("epoch") == run.progress.epochs_done:
        measured = without_coordinates(scalars)
        run.row.collect(measured)
        run.loggers.log_metrics(measured, step)
    else:
        run.loggers.log_metrics(scalars, step, row=scalars)


def log_rows(loggers: list[Any], scalars: dict[str, Any], step: int | None) -> None:
    """Log values outside of fit, validate, test and predict."""
    for logger in loggers:
        if "epoch" in scalars and hasattr(logger, "log_epoch"):
            coordinates = {} if step is None else {"epoch": scalars["epoch"], "step": step}
            logger.log_epoch(coordinates | scalars)
        else:
            logger.log_metrics(scalars, step)
