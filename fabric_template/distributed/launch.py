"""Start the processes of a run, or connect the processes that a launcher has started."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.utilities import move_data_to_device
from torch.distributed import DistError, TCPStore
from torch.multiprocessing.spawn import ProcessException

from ..errors import ConfigurationError, ConfigurationTypeError
from ..lightning_compat.overrides import has_state, overridden
from .process_group import is_joined, is_spawning, remember_group
from .signals import SignalForwarder, error_of_signal
from .strategies import gather_tensors, has_mesh

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..training.plan import Plan
    from ..training.run import Run

# The attributes of a run whose states are copied from a launched process to the main process.
_PARTS = ("progress", "stop", "checkpoints")
_PATHS = ("best_model_path", "last_model_path", "best_model_score")


# Launched processes


def join_processes(fabric: Fabric) -> None:
    """Connect this process to the other processes of the run, unless it is already connected."""
    strategy: Any = fabric.strategy
    if not isinstance(strategy, ParallelStrategy):
        return
    atexit.unregister(_finish_gloo_threads)
    atexit.register(_finish_gloo_threads)
    if os.environ.get("LT_CLI_USED") == "1":
        # The `fabric run` command has launched the processes, and Fabric's constructor has
        # connected them.
        return
    store = None
    if not is_joined():
        remember_group(strategy)
        atexit.register(_leave_group)
        # Keep a reference to the new TCPStore until all processes have connected to it.
        store = open_store_of_attempt()
    elif is_spawning(fabric) or getattr(strategy.launcher, "procs", None) or has_mesh(strategy):
        return
    fabric.launch()
    del store


def _leave_group() -> None:
    if is_joined():
        # In torch 2.6, destroy_process_group() hangs if a gloo thread is still freeing a tensor.
        _finish_gloo_threads()
        torch.distributed.destroy_process_group()


def _finish_gloo_threads() -> None:
    """Wait until gloo's threads have freed the tensors of the last collective operation."""
    # If a gloo thread is still running when Python exits, the process aborts, and the launcher
    # kills all other processes.
    time.sleep(0.05)


def gather_objects(run: Run, item: Any) -> list[Any]:
    """Return a list with one object from each process, in rank order."""
    if run.fabric.world_size == 1:
        return [item]
    gathered: list[Any] = [None] * run.fabric.world_size
    torch.distributed.all_gather_object(gathered, item)
    return gathered


def open_store_of_attempt() -> TCPStore | None:
    """Open a new TCPStore, because torchrun's store may contain addresses of dead processes."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    shared = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store = None
    if env["RANK"] == "0":
        # Other machines cannot connect to localhost, so use this machine's full host name.
        host = "localhost" if env.get("GROUP_WORLD_SIZE", "1") == "1" else socket.getfqdn()
        store = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        shared.set("fabric_template/address", f"{host} {store.port}")
    while True:
        host, port = shared.get("fabric_template/address").decode().split()
        # After a restart, torchrun's store contains rank 0's old address until rank 0 writes its
        # new address, so retry the connection. If rank 0 fails, torchrun kills this process, so the
        # loop needs no time limit.
        with suppress(DistError):
            TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2))
            break
    env |= {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


# Spawned processes


def check_new_parameters(run: Run, before: list[str], hook: str) -> None:
    """With several processes, raise an error if a hook creates parameters too late.

    Args:
        before: The names of the parameters before the hook.
    """
    reason = ""
    if hook == "on_fit_start":
        reason = ", which would not be synchronized between the processes"
    elif is_spawning(run.fabric):
        reason = " in a spawned process, which the calling process would not receive"
    known = set(before)
    created = [name for name, _ in run.network.named_parameters() if name not in known]
    if created and reason and run.fabric.world_size > 1:
        raise ConfigurationError(
            f"{hook}: got the new parameter {created[0]!r}{reason}. Create the parameter in"
            " __init__ or configure_model."
        )


def starts_processes(fabric: Fabric) -> bool:
    """Return whether fit, validate, test and predict start new processes."""
    return is_spawning(fabric) and not is_joined()


def launch_processes(run: Run, run_plan: Callable[[Plan], Any]) -> Any:
    """Run fit, validate, test or predict in new processes, and copy the results to this process."""
    # Restore os.environ after the launch, so that the next fit chooses a new MASTER_PORT.
    with tempfile.TemporaryDirectory(prefix="fabric_template_") as folder, patch.dict(os.environ):
        call = partial(_run_in_process, folder, run.plan, run_plan)
        with SignalForwarder() as signals:
            try:
                run.fabric.launch(call)
            except ProcessException as error:
                if signals.received is not None:
                    raise error_of_signal(signals.received) from error
                raise (_first_error(folder) or error) from error
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise ConfigurationTypeError(
                    "strategy: got a strategy that spawns processes, together with arguments that"
                    f" cannot be pickled: {error}. Define functions and classes at module level, or"
                    " write strategy='ddp' in a script and strategy='ddp_fork' in a notebook."
                ) from error
        outcome = torch.load(Path(folder, "outcome"), weights_only=False)
    run.plan.start.take()
    _apply_outcome(run, outcome)
    run.stop.check_signals(signals)
    if outcome["ending"] is not None:
        raise outcome["ending"]
    return outcome["result"]


def _run_in_process(
    folder: str, plan: Plan, run_plan: Callable[[Plan], Any], fabric: Fabric
) -> None:
    """Run fit, validate, test or predict in a new process, and write the results to a file."""
    loop: Any = plan.loop
    remember_group(fabric.strategy, is_spawned=True)
    if isinstance(multiprocessing.current_process(), SpawnProcess):
        # A spawned process receives tensors in shared memory. Copy them, so that processes do not
        # overwrite each other's tensors.
        plan = plan.copied()
    # Do not return the results or errors through Lightning's launcher. Its queue blocks for large
    # objects, and the launcher passes on only the text of an exception.
    ending = result = None
    try:
        result = run_plan(plan)
    except BaseException as error:
        run = loop.run
        if run is None or run.stop.signal is None or isinstance(error, Exception):
            _write_error(error, folder)
            # Raise a RuntimeError, because torch would treat a process that ends with a
            # KeyboardInterrupt as successful.
            raise RuntimeError(repr(error)) from error
        # After a signal, all processes stop after the same step. Therefore, no process hangs, and
        # rank 0 can return the results.
        ending = error
    outcome = _outcome_of(loop.run)
    if fabric.local_rank == 0:
        outcome |= {"result": result, "ending": ending}
        torch.save(outcome, Path(folder, "outcome"))
    fabric.barrier()
    _leave_group()


def _outcome_of(run: Run) -> dict[str, Any]:
    savers = map(vars, run.hooks.callbacks_of("Checkpoint"))
    outcome = {
        "weights": gather_tensors(run.network.state_dict()),
        "parts": {name: getattr(run, name).state_dict() for name in _PARTS},
        "folder": (run.checkpoints.folder, True, run.checkpoints.last_model_path),
        "metrics": run.results.metrics(),
        "rows": run.row.rows,
        "callbacks": [part.state_dict() for part in run.hooks.callbacks if has_state(part)],
        "paths": [{name: saver[name] for name in _PATHS if name in saver} for saver in savers],
        "version": next((logger.version for logger in run.loggers.csv_loggers), None),
    }
    return move_data_to_device(outcome, "cpu")


def _apply_outcome(run: Run, outcome: dict[str, Any]) -> None:
    """Copy the results of a launched process to this process."""
    weights = outcome["weights"]
    if configure_model := overridden(run.module, "configure_model"):
        configure_model()
        run.find_new_modules()
    for name, tensor in run.network.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name in weights:
            tensor.data = tensor.data.to(weights[name].dtype)
    run.network.load_state_dict(weights)
    run.checkpoints.use_folder(*outcome["folder"])
    for name, state in outcome["parts"].items():
        getattr(run, name).load_state_dict(state)
    run.results.load_metrics(outcome["metrics"])
    run.row.continue_rows(outcome["rows"])
    with_state = filter(has_state, run.hooks.callbacks)
    for callback, state in zip(with_state, outcome["callbacks"], strict=False):
        # Ignore the AttributeError that Lightning's SpikeDetection always raises in
        # load_state_dict(), due to a bug.
        with suppress(AttributeError):
            callback.load_state_dict(state)
    savers = run.hooks.callbacks_of("Checkpoint")
    for saver, paths in zip(savers, outcome["paths"], strict=False):
        vars(saver).update(paths)
    run.loggers.use_version(outcome["version"])


def _write_error(error: BaseException, folder: str) -> None:
    """Write an error to a file, unless another process has already written one."""
    # If an error cannot be pickled, write no file, because the launcher reports the error's text
    # anyway.
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        with Path(folder, "error").open("xb") as file:
            file.write(data)


def _first_error(folder: str) -> BaseException | None:
    path = Path(folder, "error")
    return pickle.loads(path.read_bytes()) if path.exists() else None
