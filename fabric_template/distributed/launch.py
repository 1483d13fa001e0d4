"""Run a call in processes that are spawned or forked for it, and bring its results back to the caller."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.multiprocessing.spawn import ProcessException

from ..errors import ConfigurationTypeError
from ..training.hooks import is_instance_of, overridden
from .environment import is_joined
from .model_parallel import gather_tensors
from .signals import SignalForwarder, error_of_signal, signal_of_exit_code

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..training.run_state import RunState

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PATHS = ("best_model_path", "last_model_path", "best_model_score")


def starts_processes(fabric: Fabric) -> bool:
    """Return whether the strategy spawns or forks processes for each call, and this is not one of them."""
    return is_instance_of(fabric.strategy.launcher, "_MultiProcessingLauncher") and not is_joined()


def launch_processes(run: RunState) -> Any:
    """Run a call in new processes. Returns its result; the caller's objects get the new state.

    Raises:
        BaseException: What the first process that failed has raised.
    """
    with tempfile.TemporaryDirectory(prefix="fabric_template_") as folder, _unchanged_port():
        call = partial(_call_in_process, folder, run.loop, run.stage, arguments_of(run))
        with SignalForwarder(is_quiet=True) as signals:
            try:
                run.fabric.launch(call)
            except ProcessException as error:
                first = _first_error(folder)
                number = signals.received
                if number is None and first is None:
                    number = signal_of_exit_code(getattr(error, "exit_code", None))
                if number is not None:
                    first = error_of_signal(number)
                if first is None:
                    raise
                raise first from error
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise _explain_pickle(error) from error
        # A file that our own child wrote a moment ago.
        outcome = torch.load(Path(folder, "outcome"), weights_only=False)
    _apply_outcome(run, outcome)
    if outcome["ending"] is not None:
        raise outcome["ending"]
    return outcome["result"]


@contextmanager
def _unchanged_port() -> Iterator[None]:
    # Lightning sets the port for its children. The next call needs another one.
    port = os.environ.get("MASTER_PORT")
    try:
        yield
    finally:
        os.environ.pop("MASTER_PORT", None)
        if port is not None:
            os.environ["MASTER_PORT"] = port


def arguments_of(run: RunState) -> dict[str, Any]:
    """Return the arguments of the call that made a run."""
    is_load = run.stage == "fit" and not run.resumes
    given = {"model": run.model, "datamodule": run.datamodule}
    given["load" if is_load else "ckpt_path"] = run.checkpoint_path
    given |= getattr(run.module, "functions", {})
    for stage, loaders in run.data.given.items():
        given[f"{stage}_dataloaders" if run.stage == "fit" else "dataloaders"] = loaders
    if run.stage == "fit":
        given["optimizer"] = run.given_optimizer
    # Only what was given, for subclasses that take fewer arguments.
    given = {name: value for name, value in given.items() if value is not None}
    if run.stage in ("validate", "test"):
        given["verbose"] = False
    return given


def _call_in_process(
    folder: str, loop: Any, stage: str, arguments: dict[str, Any], fabric: Fabric
) -> None:
    """Run the call in a process that was started for it, and write what the caller needs to a file.

    The launcher's own queue is no way back: it blocks on more than a pipe holds, and of an error it
    brings the text only.
    """
    loop.fabric = fabric
    _unshare(arguments)
    ending = result = None
    try:
        result = getattr(loop, stage)(**arguments)
    except BaseException as error:
        run = loop.run
        if run is None or run.stop.signal is None or isinstance(error, Exception):
            _write_error(error, folder)
            if isinstance(error, Exception):
                raise
            # torch takes the others for a regular end.
            raise RuntimeError(repr(error)) from error
        if run.optimization is None:
            # A signal has ended the set-up: there is nothing to bring back.
            raise SystemExit(128 + run.stop.signal) from None
        # A signal has ended all processes after the same step.
        ending = error
    outcome = _outcome_of(loop.run)
    if fabric.local_rank == 0:
        outcome |= {"result": result if stage != "fit" else None, "ending": ending}
        torch.save(outcome, Path(folder, "outcome"))
    fabric.barrier()
    torch.distributed.destroy_process_group()


def _unshare(arguments: dict[str, Any]) -> None:
    """Give this process weights and optimizer states of its own: spawned ones get them in shared memory."""
    model, tensors = arguments["model"], []
    for part in [model, *getattr(model, "__dict__", {}).values()]:
        if isinstance(part, torch.nn.Module):
            tensors += [*part.parameters(), *part.buffers()]
    for optimizer in _flatten(arguments.get("optimizer")):
        states = getattr(optimizer, "state", {})
        tensors += [value for state in states.values() for value in state.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def _flatten(item: Any) -> list[Any]:
    if isinstance(item, dict):
        item = list(item.values())
    if not isinstance(item, list | tuple):
        return [item]
    return [part for inner in item for part in _flatten(inner)]


def _outcome_of(run: RunState) -> dict[str, Any]:
    manager = run.loop.checkpoint_callback
    states = [callback.state_dict() for callback in run.hooks.callbacks if _has_state(callback)]
    return {
        "weights": move_data_to_device(gather_tensors(run.network.state_dict()), "cpu"),
        "progress": run.progress.state_dict(),
        "stop": run.stop.state_dict(),
        "signal": run.stop.signal,
        "rows": run.history.rows,
        "metrics": move_data_to_device({n: getattr(run.results, n) for n in _METRICS}, "cpu"),
        "callbacks": states,
        "folder": run.checkpoints.folder,
        "version": getattr(run.loop.own_logger, "version", None),
        "paths": {name: getattr(manager, name) for name in _PATHS if hasattr(manager, name)},
    }


def _apply_outcome(run: RunState, outcome: dict[str, Any]) -> None:
    """Give the caller's objects what the first process has learned."""
    weights = outcome["weights"]
    if configure_model := overridden(run.hooks.source, "configure_model"):
        configure_model()
    for name, tensor in run.network.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name in weights:
            tensor.data = tensor.data.to(weights[name].dtype)
    run.network.load_state_dict(weights)
    run.progress.load_state_dict(outcome["progress"])
    run.stop.load_state_dict(outcome["stop"])
    run.stop.signal, run.history.rows = outcome["signal"], outcome["rows"]
    for name, value in outcome["metrics"].items():
        setattr(run.results, name, value)
    callbacks = filter(_has_state, run.hooks.callbacks)
    for callback, state in zip(callbacks, outcome["callbacks"], strict=False):
        # SpikeDetection looks for an attribute that it lacks.
        with suppress(AttributeError):
            callback.load_state_dict(state)
    run.checkpoints.folder = outcome["folder"]
    if run.loop.own_logger is not None:
        run.loop.own_logger.version = outcome["version"]
    run.loop.has_fitted = run.loop.has_fitted or run.stage == "fit"
    manager = run.loop.checkpoint_callback
    for name, value in outcome["paths"].items() if manager is not None else ():
        setattr(manager, name, value)


def _has_state(callback: Any) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _write_error(error: BaseException, folder: str) -> None:
    """Write an error for the caller. If it cannot be pickled, the launcher shows its text."""
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        path = Path(folder, f"{time.monotonic_ns():020}-{os.getpid()}")
        path.write_bytes(data)
        path.rename(path.with_suffix(".error"))


def _first_error(folder: str) -> BaseException | None:
    """Return the error that came first: those of other processes may be its consequence."""
    paths = sorted(Path(folder).glob("*.error"))
    return pickle.loads(paths[0].read_bytes()) if paths else None


def _explain_pickle(error: Exception) -> Exception:
    if not any(text in str(error) for text in ("pickle", "Can't get local object")):
        return error
    return ConfigurationTypeError(
        "strategy: got one that spawns processes, which get all that the call was given by pickle, and this"
        f" cannot be pickled: {error}. Define functions and classes at the top of a file, or use"
        " strategy='ddp' in a script and 'ddp_fork' in a notebook."
    )
