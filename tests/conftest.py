"""Pytest fixtures that isolate tests from each other, and check that each test restores global state."""

import functools
import gc
import itertools
import os
import random
import re
import signal
import sys
import threading
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path

# Set these variables here, because matplotlib and torch read them at import, and child processes inherit them.
os.environ.setdefault("MPLBACKEND", "Agg")
# Use one thread, because tests with two ranks are slower if each rank has several threads.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings
from interpreter import end, forking_python, start_server
from ports import free_port

# Remove the user's environment variables that would change tests, such as settings of git and SLURM.
for name in list(os.environ):
    if name.startswith(("GIT_", "SLURM_", "TORCHELASTIC_", "PL_", "PYTHONWARN", "PYTHONUNBUF", "PYTEST_ADDOPTS")) or name in (
        "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    ):  # fmt: skip
        del os.environ[name]
os.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

FOLDER_NUMBERS = itertools.count()
REPOSITORY = Path(__file__).resolve().parent.parent
# The check for new files ignores these folders, because tools such as pytest and ruff may write them at any time.
TOOLS = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".git"}
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]

# Tests of Ctrl-C need the default SIGINT handler, but a shell starts background processes with SIGINT ignored.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Disable Hypothesis's deadline, because the first call may import torch. Disable its database, which would be a
# folder in the repository.
settings.register_profile("suite", deadline=None, database=None, derandomize=True)
settings.load_profile("suite")


def pytest_configure(config):
    """Hide CUDA devices, except from `pytest -m gpu`, and let tests see exactly two processors.

    A process that has used CUDA cannot fork ranks that use CUDA. With two processors, hints such as "use more
    workers" are the same on every machine.
    """
    if (found := Path(find_spec("fabric_template").origin).parents[1].resolve()) != REPOSITORY:
        raise pytest.UsageError(
            f"the tests of '{REPOSITORY}' would import the package of '{found}'. Write PYTHONPATH=. python -m pytest"
        )
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 2:
            first = 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
            os.sched_setaffinity(0, {cores[first % len(cores)], cores[(first + 1) % len(cores)]})
        elif len(cores) < 2:
            # Report two processors, because torch warns if there are more workers than processors.
            os.sched_getaffinity = lambda pid: {0, 1}
    elif (os.cpu_count() or 1) < 2:
        os.cpu_count = lambda: 2


def pytest_collection_modifyitems(items):
    """Skip tests that need a GPU. Refuse test names that contain a memory address.

    A memory address differs between pytest-xdist's workers, which must collect the same test names.
    """
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"'{item.nodeid}' has a memory address in its name. Write ids=, or use a function.")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, which only `pytest -m gpu` can see"))


def pytest_sessionstart(session):
    """Start the server that forks Python processes, so that all pytest-xdist workers use the same server."""
    if getattr(session.config.option, "numprocesses", None) and hasattr(os, "pidfd_open"):
        start_server()


def pytest_sessionfinish():
    end()


@pytest.fixture(scope="session", autouse=True)
def freeze_collector():
    """Exclude half a million objects of imported modules from garbage collection, to save time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def use_one_thread():
    before = torch.get_num_threads()
    # With one thread, sums have a fixed order, so results are bitwise equal.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def use_temporary_folder(tmp_path_factory):
    """Make `tempfile` use a folder that pytest cleans up, because docstring examples and torch leave files."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as session:
        session.setenv("TMPDIR", folder)
        session.setattr("tempfile.tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_entry_points():
    """Search the installed packages for Lightning callbacks only once, not for each new Fabric and Trainer."""

    @functools.cache
    def find(group, path):
        return entry_points(group=group)

    with pytest.MonkeyPatch.context() as session:
        name = "lightning.fabric.utilities.registry.entry_points"
        session.setattr(name, lambda group: find(group, tuple(sys.path)))
        yield


@pytest.fixture(scope="session", autouse=True)
def skip_fsync():
    """Replace fsync() to save time. tests/faults checks that files are synced."""
    with pytest.MonkeyPatch.context() as session:
        session.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def skip_seeds_of_absent_devices():
    """Do not seed devices that the machine lacks, because torch formats a traceback for each of them."""
    with pytest.MonkeyPatch.context() as session:
        for name in ("cuda", "xpu", "mtia"):
            device = getattr(torch, name, None)
            if hasattr(device, "manual_seed_all") and not device.is_available():
                session.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture
def tmp_path(tmp_path_factory, request):
    """Return a new folder. pytest's own fixture is slower, because it searches all earlier folders."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(FOLDER_NUMBERS)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="session")
def repository_names():
    return _repository_names()


@pytest.fixture(autouse=True)
def run_in_temporary_folder(monkeypatch, tmp_path, repository_names):
    """Run each test in its own folder, and check that it writes nothing in the repository."""
    monkeypatch.chdir(tmp_path)
    # Git must not find a repository in a parent folder.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    yield
    new = sorted(_repository_names() - repository_names)
    repository_names.update(new)
    assert not new, f"this test left files in the repository: {new}. Write under tmp_path."


@pytest.fixture(autouse=True)
def restore_environment():
    """Restore environment variables, because seed_everything and Lightning's launchers set some."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def use_free_ports(monkeypatch, restore_environment):
    """Give each test ports that no other process uses."""
    monkeypatch.setattr("lightning.fabric.plugins.environments.lightning.find_free_network_port", free_port)
    os.environ["STANDALONE_PORT"] = str(free_port())


@pytest.fixture(autouse=True)
def seed_random_numbers():
    """Seed each test, so that its random numbers do not depend on earlier tests."""
    random.seed(0)
    np.random.seed(0)
    # Seed the generator directly, because torch.manual_seed() also
    # records a traceback for each device type, which is slow.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def check_torch_state():
    """Check that a test restores torch's modes. Reset settings that a run leaves changed, such as deterministic=True."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, cudnn_deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    found = {
        "grad mode": torch.is_grad_enabled(),
        "not in inference mode": not torch.is_inference_mode_enabled(),
        "no anomaly detection": not torch.is_anomaly_enabled(),
        "no autocast": not torch.is_autocast_enabled("cpu"),
        "default dtype float32": torch.get_default_dtype() == torch.float32,
        "no process group left": not (torch.distributed.is_available() and torch.distributed.is_initialized()),
    }
    # Restore torch's global settings, so that a failed test does not affect the next test.
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn_deterministic
    if not found["no process group left"]:
        torch.distributed.destroy_process_group()
    broken = [claim for claim, holds in found.items() if not holds]
    assert not broken, f"this test left torch in a different state; no longer true: {', '.join(broken)}"


@pytest.fixture(autouse=True)
def check_signal_handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    changed = [number for number, handler in before.items() if signal.getsignal(number) != handler]
    if threading.current_thread() is threading.main_thread():
        # Only the main thread may set signal handlers.
        for number in changed:
            signal.signal(number, before[number])
    names = ", ".join(signal.Signals(number).name for number in changed)
    assert not changed, f"this test left a different handler for {names}"


@pytest.fixture
def quick_spawn(monkeypatch):
    """Make spawned processes start quickly, by forking a process that has imported torch and Lightning."""
    # Start multiprocessing's resource tracker with the real Python, because the tracker outlives the test.
    resource_tracker.ensure_running()
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(forking_python()))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    # Close figures only if the test has imported pyplot, because the import is slow.
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")


def _repository_names() -> set[str]:
    """Return the paths at the top of the repository, and two levels inside logs/ and checkpoints/."""
    names = {path.name for path in REPOSITORY.iterdir() if path.name not in TOOLS and path.suffix != ".egg-info"}
    for folder in ("logs", "checkpoints"):
        for pattern in ("*", "*/*"):
            names.update(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / folder).glob(pattern))
    return names
