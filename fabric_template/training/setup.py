"""Prepare optimizers, data, ``self.log`` and ``self.trainer`` before the loop of a run."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .hooks import overridden
from .optimizers import parse_optimizers

if TYPE_CHECKING:
    from .run_state import RunState

_LIGHTNING_MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


def configure_optimizers(run: RunState) -> None:
    """Set the optimizers that were given, or those that the module makes."""
    returned = run.given_optimizer
    where = "optimizer"
    if returned is None:
        where = "configure_optimizers"
        own = run.hooks.module_method("configure_optimizers")
        returned = run.hooks.inside("configure_optimizers", own)()
    has_own_step = run.hooks.is_overridden("lr_scheduler_step")
    is_automatic = run.module.automatic_optimization
    run.optimizers, run.lr_schedulers = parse_optimizers(
        returned, is_automatic, has_own_step, where
    )
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
            with run.hooks.profiled(f"[{type(part).__name__}]prepare_data"):
                method()
    run.fabric.barrier()


def attach_run(run: RunState, stack: ExitStack) -> None:
    """Give the module its trainer, and ``log`` for the time of the run."""
    for part in {id(part): part for part in (run.module, run.model)}.values():
        if isinstance(getattr(type(part), "trainer", None), property):
            part.trainer = run.loop
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
            attributes[name] = getattr(run.results, name)
            stack.callback(attributes.pop, name, None)


def _is_lightnings(method: Any) -> bool:
    return getattr(method, "__module__", None) in _LIGHTNING_MODULES


def _call_own_log(part: Any, run: RunState, *args: Any, **kwargs: Any) -> None:
    # Lightning's log looks for the current hook under this private name only.
    part._current_fx_name = run.hooks.current
    type(part).log(part, *args, **kwargs)
