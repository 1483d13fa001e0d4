"""Collect the parts of a call, and prepare data, optimizers, ``self.log`` and ``self.trainer``."""

from __future__ import annotations

import inspect
import os
import warnings
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.manager import CheckpointManager
from ..data.loaders import DataConnector
from ..errors import WarnOnce
from ..lightning_compat.private import set_current_hook, set_device_mesh
from ..loggers.console import Console
from ..loggers.history import History
from ..loggers.logger_connector import LoggerConnector
from ..loggers.result_collection import ResultCollection
from .checks import LOADER_OF_STAGE, check_call, check_sources, missing_model
from .hooks import Hooks, is_instance_of, overridden
from .module_adapter import StepRunner, adapt_model, unwrap
from .optimizers import check_parameters, has_several_optimizers, parse_optimizers
from .progress import Progress, StopCondition
from .run_state import RunState

if TYPE_CHECKING:
    from ..config import LoopConfig
    from ..loop import FabricLoop

_LIGHTNING_MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


def make_run(
    loop: FabricLoop,
    stage: str,
    model: Any,
    loaders: dict[str, Any],
    datamodule: Any,
    functions: dict[str, Any],
    optimizer: Any = None,
) -> RunState:
    """Collect the parts of one call. An evaluation without a model continues the run before it.

    Args:
        loaders: What was given, by "train", "val", "test" and "predict".
        functions: The step functions that were given, by name.
    """
    config, fabric = loop.config, loop.fabric
    is_last_model = model is None
    # A model from FabricLoop.setup() is set up again by the run.
    model = unwrap(model)
    first = LOADER_OF_STAGE[stage]
    if is_datamodule(loaders.get(first)):
        datamodule, loaders[first] = loaders[first], None
    last = loop.run if stage != "fit" else None
    check_sources(stage, loaders, datamodule)
    if model is None and last is None:
        raise missing_model(stage)
    if last is not None and (model is None or model is last.model):
        model = last.model
        given = {name: function for name, function in functions.items() if function}
        functions = {**getattr(last.module, "functions", {}), **given}
    module, source, network = adapt_model(model, functions)
    optimizer = unwrap(optimizer)
    if functions.get("training_step") is not None and has_several_optimizers(optimizer):
        # A step function that gets several optimizers steps them itself.
        module.automatic_optimization = source.automatic_optimization = False

    def module_for(callback: Any) -> Any:
        is_lightnings = any(is_lightning_callback(base) for base in type(callback).__mro__)
        return module if is_lightnings else model

    data = DataConnector(loaders, datamodule if datamodule is not None else source)
    if datamodule is None and last is not None:
        # The datamodule of the run before stays. Its loaders are used where there are no others.
        datamodule = last.datamodule
        if datamodule is not None and not data.has_loader(first):
            data.source = datamodule
    hooks = Hooks(loop, loop.callbacks, source, module_for, loop.given_profiler)
    progress = Progress()
    if last is not None:
        progress.continue_from(last.progress)
    has_timer = any(is_instance_of(callback, "Timer") for callback in loop.callbacks)
    has_bar = any(is_instance_of(callback, "ProgressBar") for callback in loop.callbacks)
    shows_console = bool(config.enable_progress_bar) and not has_bar and fabric.is_global_zero
    run = RunState(
        stage=stage,
        loop=loop,
        config=config,
        fabric=fabric,
        model=model,
        module=module,
        network=network,
        datamodule=datamodule,
        hooks=hooks,
        results=ResultCollection(
            hooks,
            network,
            fabric.all_reduce if fabric.world_size > 1 else None,
            not config.barebones,
        ),
        history=History(),
        data=data,
        progress=progress,
        stop=StopCondition(config, progress, has_timer or config.max_time is not None),
        steps=StepRunner(fabric, source, network, config.compile),
        loggers=None,  # type: ignore[arg-type]
        console=Console(config, shows_console),
        checkpoints=CheckpointManager(None, config) if last is None else last.checkpoints,
        warn_once=WarnOnce(fabric.is_global_zero),
        is_last_model=is_last_model,
        given_optimizer=optimizer,
        accumulate_grad_batches=config.accumulate_grad_batches,
    )
    run.loggers = LoggerConnector(run)
    run.history.run = run.data.run = run
    check_call(run)
    return run


def is_lightning_callback(kind: type) -> bool:
    """Return whether a class is one of Lightning's callbacks, which expect a LightningModule."""
    packages = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.")
    return kind.__module__.startswith(packages) and kind.__name__ != "Callback"


def is_datamodule(given: Any) -> bool:
    names = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
    return any(callable(getattr(given, name, None)) for name in names)


def set_torch_flags(config: LoopConfig) -> None:
    """Apply the options deterministic and benchmark to this process."""
    deterministic, benchmark = config.deterministic, config.benchmark
    if deterministic and benchmark:
        warnings.warn(
            "You passed `deterministic=True` and `benchmark=True`. Note that PyTorch ignores"
            " torch.backends.cudnn.deterministic=True when torch.backends.cudnn.benchmark=True.",
            stacklevel=2,
        )
    if deterministic and benchmark is None:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic is not None:
        is_enabled = bool(deterministic)
        torch.use_deterministic_algorithms(is_enabled, warn_only=deterministic == "warn")
    if deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def configure_model(run: RunState) -> None:
    """Let the module create its layers, on the device and in the dtype of the precision."""
    # The older name of the hook counts only where the class defines it.
    older = overridden(type(run.hooks.source), "configure_sharded_model")
    for hook in (
        ("configure_model",) if older is None else ("configure_sharded_model", "configure_model")
    ):
        with run.fabric.strategy.module_init_context():
            run.hooks.call_module(hook)


def configure_optimizers(run: RunState) -> None:
    """Set the optimizers that were given, or those that the module makes."""
    returned = run.given_optimizer
    where = "optimizer"
    if returned is None:
        where = "configure_optimizers"
        returned = run.hooks.call_module("configure_optimizers")
    elif inspect.isroutine(returned):
        returned = returned(run.model)
    has_own_step = run.hooks.is_overridden("lr_scheduler_step")
    is_automatic = run.module.automatic_optimization
    run.optimizers, run.lr_schedulers = parse_optimizers(
        returned, is_automatic, has_own_step, where
    )
    check_parameters(run.optimizers, run.network)
    for optimizer in run.optimizers:
        # torch keeps the state on the device of its parameters. Move what was made before.
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    state[key] = value.to(run.fabric.device)


def prepare_data(run: RunState) -> None:
    """Call ``prepare_data`` on the first process of each machine, before the others continue."""
    for part in (run.datamodule, run.hooks.source):
        method = overridden(part, "prepare_data")
        if method is None:
            continue
        is_per_node = getattr(part, "prepare_data_per_node", True)
        rank = run.fabric.local_rank if is_per_node else run.fabric.global_rank
        if rank == 0:
            kind = "LightningDataModule" if part is run.datamodule else "LightningModule"
            with run.hooks.profiled(f"[{kind}]{type(part).__name__}.prepare_data"):
                method()
    run.fabric.barrier()


def attach_run(run: RunState, stack: ExitStack) -> None:
    """Give the module its trainer, and ``log`` for the time of the run."""
    for part in {id(part): part for part in (run.module, run.model)}.values():
        if isinstance(getattr(type(part), "trainer", None), property):
            part.trainer = run.loop
        if run.steps.is_model_parallel and run.is_lightning_module:
            set_device_mesh(part, run.fabric.strategy.device_mesh)
        attach_log(part, run, stack)
    if run.datamodule is not None:
        run.datamodule.trainer = run.loop
    attach_logs(run, stack)


def attach_logs(run: RunState, stack: ExitStack) -> None:
    """Give every callback its ``log``."""
    for callback in run.hooks.callbacks:
        attach_log(callback, run, stack)


def attach_log(part: Any, run: RunState, stack: ExitStack) -> None:
    """Put our ``log`` and ``log_dict`` before Lightning's, which are many times slower.

    A class with a ``log`` of its own keeps it. If it calls Lightning's, that one ends in our results.
    """
    attributes = getattr(part, "__dict__", {})
    own_log = getattr(type(part), "log", None)
    if own_log is not None and not _is_lightnings(own_log):
        if any(_is_lightnings(vars(base).get("log")) for base in type(part).__mro__):
            attributes["log"] = partial(_call_own_log, part, run)
            stack.callback(attributes.pop, "log", None)
        return
    for name in ("log", "log_dict"):
        own = getattr(type(part), name, None)
        if name not in attributes and (own is None or _is_lightnings(own)):
            method = getattr(run.results, name)
            # Its counters would become constants of the graph, and compile it again for each batch.
            attributes[name] = torch.compiler.disable(method) if run.config.compile else method
            stack.callback(attributes.pop, name, None)


def _is_lightnings(method: Any) -> bool:
    return getattr(method, "__module__", None) in _LIGHTNING_MODULES


def _call_own_log(part: Any, run: RunState, *args: Any, **kwargs: Any) -> None:
    set_current_hook(part, run.hooks.current)
    type(part).log(part, *args, **kwargs)
