"""Check the arguments of fit, validate, test or predict, and store them in a Plan."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..checkpoint.find_checkpoint import find_start_point
from ..checkpoint.start_point import StartPoint
from ..data.loaders import has_loader
from .check_arguments import LOADER_OF_STAGE, check_call, check_idle, check_sources
from .configure_optimizers import has_several_optimizers
from .module_adapter import adapt_model, unwrap, unwrap_compiled

if TYPE_CHECKING:
    from ..config import LoopConfig
    from ..loop import FabricLoop
    from .run import Run


@dataclass(frozen=True, eq=False)
class Plan:
    """Holds the checked arguments of a call to fit, validate, test or predict.

    Each spawned process creates its own Run from the Plan.

    Attributes:
        loop: The FabricLoop, which modules and callbacks get as their trainer.
        stage: The method that was called: "fit", "validate", "test" or "predict".
        config: The options at the start of the call. Hooks may change the options of the run.
        model: The model passed to the loop, without the wrapper of Fabric or torch.compile.
        module: A LightningModule: the model itself, or an adapter around the model.
        network: The nn.Module that holds the parameters.
        compile: The ``compile`` option, or the compiler of the model's torch.compile wrapper.
        loaders: The loaders passed to the loop, keyed by "train", "val", "test" and "predict".
        source: The datamodule or module with methods such as ``train_dataloader()``.
        optimizer: The ``optimizer`` argument of fit, or None.
        is_model_given: Whether the call passed a model. If False, ``model`` is from the previous
            call.
        start: The checkpoint that the call starts from.
    """

    loop: FabricLoop
    stage: str
    config: LoopConfig
    model: Any
    module: Any
    network: nn.Module
    compile: Any
    loaders: dict[str, Any]
    datamodule: Any
    source: Any
    optimizer: Any
    is_model_given: bool
    returns_predictions: bool = True
    start: StartPoint = field(default_factory=StartPoint)

    @property
    def is_lightning_module(self) -> bool:
        return self.module is self.model

    @property
    def functions(self) -> dict[str, Callable]:
        """The step functions passed to the loop, keyed by step name."""
        return {} if self.is_lightning_module else self.module.functions

    @property
    def loop_name(self) -> str:
        """The loop's name in messages: "Trainer" for a LightningModule, otherwise "FabricLoop"."""
        return "Trainer" if self.is_lightning_module else "FabricLoop"

    def copied(self) -> Plan:
        """Copy the model and optimizer, because a spawned process shares the parent's tensors."""
        names = ("model", "module", "network", "source", "optimizer")
        parts = {name: getattr(self, name) for name in names}
        not_copied = {id(part): part for part in (self.loop, self.datamodule)}
        return replace(self, **deepcopy(parts, not_copied))


def make_plan(
    loop: FabricLoop,
    stage: str,
    model: Any,
    loaders: dict[str, Any],
    datamodule: Any,
    functions: dict[str, Callable[..., Any] | None],
    start: dict[str, Any],
    weights_only: bool | None = None,
    optimizer: Any = None,
    returns_predictions: bool = True,
) -> Plan:
    """Check the arguments of fit, validate, test or predict, and read the checkpoint.

    Args:
        model: The model passed to the loop. If None, an evaluation uses the model of the previous
            call.
        functions: The step functions passed to the loop, keyed by name.
        start: The ``resume``, ``load`` and ``ckpt_path`` arguments.
    """
    check_idle(loop, stage)
    last = loop.run if stage != "fit" else None
    if is_datamodule(given := loaders.get(LOADER_OF_STAGE[stage])):
        datamodule, loaders = given, {**loaders, LOADER_OF_STAGE[stage]: None}
    check_sources(stage, model if last is None else last.model, loaders, datamodule)
    optimizer = unwrap(optimizer)
    model_parts = choose_model(loop, model, functions, optimizer, last)
    data_parts = choose_data(stage, loaders, datamodule, model_parts["module"], last)
    plan = Plan(
        loop,
        stage,
        loop.config,
        **model_parts,
        **data_parts,
        optimizer=optimizer,
        is_model_given=model is not None,
        returns_predictions=returns_predictions,
    )
    check_call(plan)
    return replace(plan, start=find_start_point(plan, start, weights_only))


def choose_model(
    loop: FabricLoop, model: Any, functions: dict[str, Any], optimizer: Any, last: Run | None
) -> dict[str, Any]:
    """Choose the model of a run, and give the model the interface of a LightningModule."""
    # Remove the wrapper that FabricLoop.setup() may have added. The run adds its own wrapper.
    model, compiler = unwrap_compiled(unwrap(model), functions)
    # If no model was passed, use the model of the previous run.
    if last is not None and (model is None or model is last.model):
        given = {name: function for name, function in functions.items() if function}
        model, functions = last.model, {**last.plan.functions, **given}
    # With several optimizers, the step function itself calls optimizer.step().
    is_manual = bool(functions.get("training_step")) and has_several_optimizers(optimizer)
    module, network = adapt_model(model, functions, is_manual)
    compile = compiler or loop.config.compile
    return {"model": model, "module": module, "network": network, "compile": compile}


def choose_data(
    stage: str, loaders: dict[str, Any], datamodule: Any, module: Any, last: Run | None
) -> dict[str, Any]:
    """Choose the loaders and the datamodule of a run.

    Loaders that were not passed come from the datamodule or the module.
    """
    loaders = {name: loader for name, loader in loaders.items() if loader is not None}
    source = module if datamodule is None else datamodule
    if datamodule is None and last is not None and last.datamodule is not None:
        datamodule = last.datamodule
        if not has_loader(loaders, module, LOADER_OF_STAGE[stage]):
            source = datamodule
    return {"loaders": loaders, "datamodule": datamodule, "source": source}


def is_datamodule(given: Any) -> bool:
    names = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
    return any(callable(getattr(given, name, None)) for name in names)
