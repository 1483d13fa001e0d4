"""Away: a run in another process than its caller's, and the way home: weights, history, metrics; or the error that ended it.

The launcher's queue is no way home: it is read only after a process has ended, so that more than a pipe holds (64 KB) would
block for ever, and tensors in shared memory would be gone; of an error it brings the text alone. What ranks in other
processes have for the caller's lies in a folder, the desk.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from ..core.errors import MisuseOfType
from ..core.overrides import overrides
from ..core.ranks import is_joined
from ..core.run import Run
from .outcome import Outcome

DAY = 24 * 3600.0  # seconds; what lies on a desk is taken within one


def learned_by(run: Run) -> dict[str, Any]:
    """What a run has learned, for the caller's objects, which a strategy that spawns or forks leaves as they were."""
    states = [part.state_dict() if hasattr(part, "state_dict") else None for part in run.hooks.callbacks]
    keeper, was_stopped = run.keeper, run.stop.signal is not None
    learned: dict[str, Any] = {
        "at": run.at,
        "stop": run.stop.ending(),
        "resume_path": run.origin.resume_path,
        "rows": run.history.rows,
        "views": {name: getattr(run.metrics, name) for name in ("callback", "logged", "progress")},
        # None: it was stopped in its set-up, layers may be missing
        "weights": None if was_stopped and not run.at.total_batches else _whole_weights(run),
        "callbacks": states,
        "kept": {"last_model_path": keeper.last_model_path, "best": keeper.best} if keeper.keeps else {},
    }
    for name in ("views", "weights", "callbacks"):
        learned[name] = move_data_to_device(learned[name], "cpu")
    return learned


def bring_back(run: Run, learned: dict[str, Any]) -> None:
    """Give the caller's objects what another process learned."""
    run.at.stand_at(learned["at"])
    run.stop.know(learned["stop"])
    run.origin.resume_path, run.history.rows = learned["resume_path"], learned["rows"]
    run.metrics.show(**learned["views"])
    if (weights := learned["weights"]) is not None:
        if (configure := overrides(run.trained.owner, "configure_model")) is not None:
            configure()  # the layers that the other process made
        for name, tensor in run.trained.net.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and name in weights:
                tensor.data = tensor.data.to(weights[name].dtype)  # "64-true" is to be seen here, too
        run.trained.net.load_state_dict(weights)
    for callback, state in zip(run.hooks.callbacks, learned["callbacks"], strict=False):
        try:
            if state:
                callback.load_state_dict(state)
        except Exception as error:  # such as SpikeDetection, which looks for an attribute that it lacks
            name, why = type(callback).__name__, f"its load_state_dict failed with {error!r}"
            warnings.warn(f"{name} stays as it was before the run: {why}", stacklevel=2)
    run.keeper.know(**learned["kept"])


def _whole_weights(run: Run) -> dict[str, Any]:
    weights = run.trained.net.state_dict()
    if run.steps.sharded is None:
        return weights
    from ..core.sharded import whole

    return {name: whole(value) for name, value in weights.items()}


def to_file(outcome: Outcome, folder: str) -> str:
    """Write it for the caller's process; returns the path."""
    torch.save(vars(outcome), path := os.path.join(folder, "outcome"))
    return path


def from_file(path: str) -> Outcome:
    """Read what `to_file` wrote."""
    return Outcome(**torch.load(path, weights_only=False))  # our own child's file, written a moment ago


@contextmanager
def desk() -> Iterator[str]:
    """A folder for one launch; those of callers that were killed go after a day.

    Example:
        >>> with desk() as folder:
        ...     leave_error(KeyError("mine"), folder)
        ...     first_error(folder)
        KeyError('mine')
    """
    for old in Path(tempfile.gettempdir()).glob("fabric_template_*.desk"):
        with suppress(OSError):
            if old.lstat().st_mtime < time.time() - DAY:
                shutil.rmtree(old)
    folder = tempfile.mkdtemp(prefix="fabric_template_", suffix=".desk")
    try:
        yield folder
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        # no rank's own, they have not begun; the second are the words of Python 3.13
        if error.__cause__ is None and any(word in str(error) for word in ("pickle", "Can't get local object")):
            raise MisuseOfType(
                "a strategy that spawns sends all that a run is given to its processes by pickle, and this cannot be:"
                f" {error}; write functions and classes at the top of a file, or strategy='ddp' in a script, 'ddp_fork' in a"
                " notebook"
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leave_error(error: BaseException, folder: str) -> None:
    """Leave the error itself; of one that cannot be sent (of a class within a function), the launcher tells the text."""
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)  # some are made with other arguments than they keep
        path = os.path.join(folder, f"{time.monotonic_ns():020}.{os.getpid()}")
        Path(path).write_bytes(data)
        os.rename(path, f"{path}.error")


def first_error(folder: str) -> BaseException | None:
    """The error that came first, of whichever rank: those of the others may be its consequence. None: none was left."""
    paths = sorted(Path(folder).glob("*.error"))
    return pickle.loads(paths[0].read_bytes()) if paths else None  # our own child's


def unshare(net: nn.Module) -> None:
    """Give this process weights of its own: those that a launcher spawned with lie in memory that all ranks share."""
    for tensor in itertools.chain(net.parameters(), net.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def leave() -> None:
    """End this process's part in the group, as the script ends: see `leave_together`, for which nobody waits here."""
    if is_joined():
        torch.distributed.destroy_process_group()


def leave_together(fabric: Fabric) -> None:
    """End this process's part in the group while all ranks still live.

    What gloo's threads leave behind can abort an interpreter that is being taken down, long after the work is done, and
    the caller would lose the run for it. A forked process ends without that; a spawned one is made to.
    """
    if is_joined():
        fabric.barrier("leave")
    leave()
    if isinstance(multiprocessing.current_process(), multiprocessing.get_context("spawn").Process):
        atexit.register(_end_now)


def _end_now() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
