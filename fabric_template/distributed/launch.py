"""Processes that are started for one call, and what they bring back."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch

from ..training.hooks import is_instance_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..training.run_state import RunState


def starts_processes(fabric: Fabric) -> bool:
    """Return whether the strategy spawns or forks processes for each call, and this is not one of them."""
    return is_instance_of(fabric.strategy.launcher, "_MultiProcessingLauncher") and not is_joined()


def is_joined() -> bool:
    """Return whether this process is one of a group already."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def launch_processes(run: RunState) -> Any:
    """Run a call in new processes. Returns its result; the run of the caller gets their state."""
    saved = run.fabric.launch(_call_in_process, run.loop, run.stage, arguments_of(run))
    learned = torch.load(BytesIO(saved), weights_only=False)
    run.network.load_state_dict(learned["weights"])
    run.progress.load_state_dict(learned["progress"])
    run.history.rows = learned["rows"]
    run.results.callback_metrics = learned["callback_metrics"]
    run.results.logged_metrics = learned["logged_metrics"]
    manager = run.loop.checkpoint_callback
    if manager is not None:
        manager.best_model_path = learned["best_model_path"]
    return learned["result"]


def arguments_of(run: RunState) -> dict[str, Any]:
    """Return the arguments of the call that made a run."""
    given = {"model": run.model, "datamodule": run.datamodule, "ckpt_path": run.checkpoint_path}
    given |= getattr(run.module, "functions", {})
    for stage, loaders in run.data.given.items():
        given[f"{stage}_dataloaders" if run.stage == "fit" else "dataloaders"] = loaders
    if run.stage == "fit":
        given["optimizer"] = run.given_optimizer
    # Only what was given, for subclasses that take fewer arguments.
    return {name: value for name, value in given.items() if value is not None}


def _call_in_process(fabric: Fabric, loop: Any, stage: str, arguments: dict[str, Any]) -> bytes:
    """Run the call in a process that was started for it. Returns what the caller's process learns."""
    loop.fabric = fabric
    result = getattr(loop, stage)(**arguments)
    run = loop.run
    learned = {
        "result": result if stage != "fit" else None,
        "weights": run.network.state_dict(),
        "progress": run.progress.state_dict(),
        "rows": run.history.rows,
        "callback_metrics": run.results.callback_metrics,
        "logged_metrics": run.results.logged_metrics,
        "best_model_path": getattr(loop.checkpoint_callback, "best_model_path", ""),
    }
    # As bytes, because tensors in shared memory would end with this process.
    buffer = BytesIO()
    torch.save(learned, buffer)
    return buffer.getvalue()
