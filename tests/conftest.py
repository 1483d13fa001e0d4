"""Fixtures that guard the room: every test leaves the process and the repository as it found them."""

import gc
import os
import random
import signal
import sys
import threading
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path

# before torch or matplotlib are imported, and inherited by the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks with a pool each are slower than one thread each

import numpy as np
import pytest
import torch
from hypothesis import settings
from interpreter import end, ready_python
from ports import free_port

# of whoever runs this: a git of theirs, words for launchers and for the look of a terminal
for name in list(os.environ):
    if name.startswith(("GIT_", "SLURM_", "TORCHELASTIC_", "PL_", "PYTHONWARN", "PYTHONUNBUF", "PYTEST_ADDOPTS")) or name in (
        "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    ):  # fmt: skip
        del os.environ[name]
os.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

REPOSITORY = Path(__file__).resolve().parent.parent
# may write their own folder at any time
TOOLS = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".git"}
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell ignores Ctrl-C for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no deadline: the first call may import; no database: it would be a folder in the repository
settings.register_profile("house", deadline=None, database=None, derandomize=True)
settings.load_profile("house")


def pytest_configure(config):
    """Two suites that do not mix: `pytest -m gpu` has the CUDA device, everything else runs as if there were none.

    A process that has once used CUDA cannot fork ranks that do, nor any that go backward. And it has two processors, so
    that advice which depends on their number is the same everywhere.
    """
    if (found := Path(find_spec("fabric_template").origin).parents[1].resolve()) != REPOSITORY:
        raise pytest.UsageError(
            f"these are the tests of '{REPOSITORY}', but the package that is imported is of '{found}': type"
            " PYTHONPATH=. python -m pytest"
        )
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 2:
            first = 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
            os.sched_setaffinity(0, {cores[first % len(cores)], cores[(first + 1) % len(cores)]})
        elif len(cores) < 2:  # so they say: two workers are then one too many, of which torch warns
            os.sched_getaffinity = lambda pid: {0, 1}
    elif (os.cpu_count() or 1) < 2:
        os.cpu_count = lambda: 2


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, which `pytest -m gpu` alone sees"))


def pytest_sessionfinish():
    end()  # of what starts interpreters


@pytest.fixture(scope="session", autouse=True)
def frozen():
    """What was imported is not looked through by each collection: half a million objects, of which none will go."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: equal means bit-identical, and the tests share the machine
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files(tmp_path_factory):
    """Who asks `tempfile` for a place, as docstrings' examples and processes of torch do, gets one among pytest's own."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as session:
        session.setenv("TMPDIR", folder)
        session.setattr("tempfile.tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """The working folder is the test's own; nothing is written in the repository (logs/ and checkpoints/ included)."""
    before = _repository_names()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # a repository around it is not the test's
    yield
    new = sorted(_repository_names() - before)
    assert not new, f"this test left files in the repository: {new}; write under tmp_path"


@pytest.fixture(autouse=True)
def own_environment():
    """Variables are restored: seed_everything and the launchers of Lightning set them on purpose, and for good."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def own_ports(monkeypatch, own_environment):
    """Ranks of one run meet where no other process can have come between; so do those of scripts."""
    monkeypatch.setattr("lightning.fabric.plugins.environments.lightning.find_free_network_port", free_port)
    os.environ["STANDALONE_PORT"] = str(free_port())


@pytest.fixture(autouse=True)
def own_random_numbers():
    """Each test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def torch_as_found():
    """What must be handed back as found is asserted; what a user sets for good (deterministic=True) is restored."""
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
    # the next test starts clean even where this one failed
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn_deterministic
    if not found["no process group left"]:
        torch.distributed.destroy_process_group()
    broken = [claim for claim, holds in found.items() if not holds]
    assert not broken, f"this test left torch in another state; no longer true: {', '.join(broken)}"


@pytest.fixture(autouse=True)
def signals_as_found():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    changed = [number for number, handler in before.items() if signal.getsignal(number) != handler]
    if threading.current_thread() is threading.main_thread():  # the only one that may set them
        for number in changed:
            signal.signal(number, before[number])
    names = ", ".join(signal.Signals(number).name for number in changed)
    assert not changed, f"this test left another handler for {names}"


@pytest.fixture
def quick_spawn(monkeypatch):
    """Processes that multiprocessing spawns have imported torch and Lightning already."""
    resource_tracker.ensure_running()  # which is started so, too, and outlives the test
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(ready_python()))


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")  # not imported for the tests that draw nothing
    if pyplot is not None:
        pyplot.close("all")


def _repository_names() -> set[str]:
    """The repository's first level, and two levels (name, version) where runs are kept: cheap enough for every test."""
    names = {path.name for path in REPOSITORY.iterdir() if path.name not in TOOLS and path.suffix != ".egg-info"}
    for folder in ("logs", "checkpoints"):
        for pattern in ("*", "*/*"):
            names.update(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / folder).glob(pattern))
    return names
