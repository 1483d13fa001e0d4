"""Outcome: what comes back from a run, also from other processes: weights, history, metrics."""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from ..core.hooks import overrides
from ..core.progress import Progress

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..core.run import Run


@dataclass
class Outcome:
    """The result of one run, made by rank zero of the processes that ran it.

    A strategy that spawns or forks leaves the caller's objects as they were; `bring_back` gives them what was learned.
    """

    results: Any = None
    pid: int = field(default_factory=os.getpid)
    rows: list[dict] = field(default_factory=list)
    at: Progress = field(default_factory=Progress)
    stop: tuple[bool, int | None] = (False, None)  # should_stop; the signal
    resume_path: str | Path | None = None
    views: dict[str, dict] = field(default_factory=dict)
    weights: dict[str, Any] | None = None
    callbacks: list[Any] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    complaint: str = ""  # what could not be saved to the end

    @classmethod
    def of(cls, run: Run, results: Any, elsewhere: bool) -> Outcome:
        """Pack a run's result; with its weights when it ran in another process than its caller's."""
        metrics = run.metrics
        outcome = cls(results=results, rows=run.history.rows)
        complaints = [
            run.keeper.complaint() if run.fn == "fit" else None,
            run.log.complaint,
        ]
        outcome.complaint = " ".join(filter(None, complaints))
        outcome.at, outcome.stop = run.at, (run.stop.should_stop, run.stop.signal)
        outcome.resume_path = run.origin.resume_path
        if elsewhere:
            outcome.views = move_data_to_device(
                {"callback": metrics.callback, "logged": metrics.logged, "progress": metrics.progress}, "cpu"
            )
            if (
                run.stop.signal is None or run.at.total_batches
            ):  # else it was stopped in its set-up: layers may be missing
                outcome.weights = move_data_to_device(run.trained.net.state_dict(), "cpu")
            outcome.callbacks = [
                move_data_to_device(part.state_dict(), "cpu") if hasattr(part, "state_dict") else None
                for part in run.hooks.callbacks
            ]
            if run.keeper.keeps:
                outcome.kept = {"last_model_path": run.keeper.last_model_path, "best": run.keeper.best}
        return outcome

    def to_file(self, folder: str) -> str:
        """Write it for the caller's process; returns the path."""
        torch.save(vars(self), path := os.path.join(folder, "outcome"))
        return path

    @classmethod
    def from_file(cls, path: str) -> Outcome:
        """Read what `to_file` wrote."""
        return cls(**torch.load(path, weights_only=False))  # our own child's file, written a moment ago

    @property
    def is_from_elsewhere(self) -> bool:
        """Whether another process made it."""
        return self.pid != os.getpid()

    def bring_back(self, run: Run) -> None:
        """Give the caller's objects what another process learned; nothing to do in the same one."""
        if not self.is_from_elsewhere:
            return
        run.at.stand_at(self.at)
        run.stop.ask(self.stop[0])
        run.stop.end_for(self.stop[1])
        run.origin.resume_path = self.resume_path
        run.history.rows = self.rows
        run.metrics.show(**self.views)
        if self.weights is not None:
            if (configure := overrides(run.trained.owner, "configure_model")) is not None:
                configure()  # the layers that the other process made
            for name, tensor in run.trained.net.state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor) and name in self.weights:
                    tensor.data = tensor.data.to(self.weights[name].dtype)  # "64-true" is to be seen here, too
            run.trained.net.load_state_dict(self.weights)
        for callback, state in zip(run.hooks.callbacks, self.callbacks, strict=False):
            if state:
                _give_back(callback, state)
        run.keeper.know(**self.kept)


def _give_back(callback: Any, state: Any) -> None:
    """Give a callback the state that it has in the other process; one that cannot take it is no reason to lose the run."""
    try:
        callback.load_state_dict(state)
    except Exception as error:  # such as Lightning's SpikeDetection, which looks for an attribute that it does not have
        name = type(callback).__name__
        warnings.warn(f"{name} stays as it was before the run: its load_state_dict failed with {error!r}", stacklevel=2)


def unshare(net: nn.Module) -> None:
    """Give this process weights of its own: those that a launcher spawned with lie in memory that all ranks share."""
    for tensor in itertools.chain(net.parameters(), net.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def leave() -> None:
    """End this process's part in the group, as the script ends: see `leave_together`, for which nobody waits here."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_together(fabric: Fabric) -> None:
    """End this process's part in the group while all ranks still live.

    What gloo's threads leave behind can abort an interpreter that is being taken down, long after the work is done, and
    the caller would lose the run for it. A forked process ends without that; a spawned one is made to.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        fabric.barrier("leave")
        torch.distributed.destroy_process_group()
    if isinstance(multiprocessing.current_process(), multiprocessing.get_context("spawn").Process):
        atexit.register(_end_now)


def _end_now() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
