"""Start or join the processes of a run: spawned and forked ones, scripts, torchrun and SLURM."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, ParallelStrategy
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessException
from torch.optim import Optimizer

from ..errors import ConfigurationError, ConfigurationTypeError
from ..training.hooks import is_instance_of, overridden
from .signals import SignalForwarder, error_of_signal, signal_of_exit_code
from .strategies import gather_tensors, has_mesh

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..training.run_state import RunState

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PATHS = ("best_model_path", "last_model_path", "best_model_score")
# How long torch itself waits until all processes have come.
_SECONDS_TO_JOIN = 1800.0


# Processes of a launcher, or scripts that Fabric starts


def is_joined() -> bool:
    """Return whether this process is one of a group already."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def join_processes(fabric: Fabric) -> None:
    """Join the group of the run's processes, unless an earlier call has done it."""
    strategy = fabric.strategy
    if not isinstance(strategy, ParallelStrategy):
        return
    is_child = is_instance_of(strategy.launcher, "_MultiProcessingLauncher") and is_joined()
    is_from_cli = os.environ.get("LT_CLI_USED") == "1"
    has_started = bool(getattr(strategy.launcher, "procs", ())) or has_mesh(strategy)
    if not (is_child or is_from_cli or has_started):
        if not is_joined():
            atexit.register(_leave_group)
        # The store has to stay open until all processes have joined.
        store = open_store_of_attempt() if not is_joined() else None
        fabric.launch()
        del store


def seed_processes(fabric: Fabric) -> None:
    """Seed all processes alike, as Trainer does. Fabric's other strategies do it themselves."""
    if isinstance(fabric.strategy, DDPStrategy):
        reset_seed()


def gather_objects(run: RunState, item: Any) -> list[Any]:
    """Return an object of every process, in the order of their ranks."""
    if run.fabric.world_size == 1:
        return [item]
    gathered: list[Any] = [None] * run.fabric.world_size
    torch.distributed.all_gather_object(gathered, item)
    return gathered


def _leave_group() -> None:
    if is_joined():
        torch.distributed.destroy_process_group()


def is_started_externally(fabric: Fabric) -> bool:
    """Return whether somebody else starts the processes, so that they meet only when they join."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    return bool(getattr(environment, "creates_processes_externally", False))


def end_processes(fabric: Fabric) -> None:
    """Kill the scripts that this process has started, because they would wait for it."""
    for process in getattr(fabric.strategy.launcher, "procs", ()):
        process.kill()


def started_by_launcher() -> tuple[str, int, int] | None:
    """Return who has started this process, with how many others on each machine, and on how many machines."""
    env = os.environ
    if env.get("LT_CLI_USED") == "1":
        return None
    if TorchElasticEnvironment.detect():
        world_size, devices = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
        return "torchrun", devices, world_size // devices
    if SLURMEnvironment.detect() and env["SLURM_NTASKS"] != "1":
        nodes = int(env.get("SLURM_NNODES", 1))
        return "SLURM", int(env["SLURM_NTASKS"]) // nodes, nodes
    return None


def launched_devices(devices: Any, num_nodes: int) -> tuple[Any, int]:
    """Return the devices and machines of ``devices="auto"``, which Fabric takes as one on the CPU."""
    started = started_by_launcher()
    if devices != "auto" or started is None:
        return devices, num_nodes
    return started[1], started[2] if num_nodes == 1 else num_nodes


def check_launched(fabric: Fabric, is_fit: bool) -> None:
    """Refuse other numbers of processes than were started, which would wait for each other.

    Raises:
        ConfigurationError: devices or num_nodes are not those of the launcher.
    """
    started, strategy = started_by_launcher(), fabric.strategy
    if started is None or started[1] * started[2] == 1:
        return
    launcher, devices, nodes = started
    environment = getattr(strategy, "cluster_environment", None)
    if not (is_fit or is_instance_of(environment, "TorchElasticEnvironment", "SLURMEnvironment")):
        # One process may evaluate by itself.
        return
    given = getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)
    is_spawning = is_instance_of(strategy.launcher, "_MultiProcessingLauncher")
    if is_spawning or given != (devices, nodes):
        raise ConfigurationError(
            f"devices, num_nodes: got {given[0]} and {given[1]}, but {launcher} has started {devices} processes"
            f" on each of {nodes} machines. Leave both out, and use strategy='ddp' or none."
        )


def open_store_of_attempt() -> TCPStore | None:
    """Let the processes that torchrun has started again find each other through a new store.

    torchrun's own store outlives its workers: torch finds the addresses of dead processes in it and waits
    for them. So the first process opens a store for this attempt. Every process takes a number in torchrun's
    store that none had before, and the first one answers each number with the address, until all have come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(host, port, is_master=False)
    number = shared.add("fabric_template/number", 1)
    store, last_answered = None, 0
    deadline = time.monotonic() + _SECONDS_TO_JOIN
    if os.environ["RANK"] == "0":
        # As torch does. One machine needs no name that others can resolve.
        is_alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        host = "localhost" if is_alone else socket.getfqdn()
        store = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        port, joined = store.port, f"fabric_template/joined/{number}"
        while shared.add(joined, 0) < int(os.environ["WORLD_SIZE"]) - 1:
            newest = shared.add("fabric_template/number", 0)
            for other in range(last_answered + 1, newest + 1):
                shared.set(f"fabric_template/answer/{other}", f"{host} {port} {joined}")
            last_answered = newest
            _wait(deadline)
    else:
        # A blocking call would hear no signal.
        answer = f"fabric_template/answer/{number}"
        while not shared.check([answer]):
            _wait(deadline)
        host, port_text, joined = shared.get(answer).decode().split()
        port = int(port_text)
        shared.add(joined, 1)
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return store


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"Not all processes have started within {_SECONDS_TO_JOIN:.0f} s.")
    time.sleep(0.01)


# Processes that are spawned or forked for one call


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
                raise ConfigurationTypeError(
                    "strategy: got one that spawns processes, which get the arguments of the call by pickle:"
                    f" {error}. Define functions and classes at the top of a file, or use strategy='ddp' in a"
                    " script and 'ddp_fork' in a notebook."
                ) from error
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
    model = arguments["model"]
    for part in [model, *getattr(model, "__dict__", {}).values()]:
        if isinstance(part, torch.nn.Module):
            _copy_shared([*part.parameters(), *part.buffers()])
    optimizers: list[Optimizer] = []
    apply_to_collection(arguments.get("optimizer"), Optimizer, optimizers.append)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            _copy_shared(state.values())


def _copy_shared(items: Iterable[Any]) -> None:
    for item in items:
        if isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.is_shared():
            item.data = item.data.clone()


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
