"""fabric_template: the training loop people copy. Lightning Fabric underneath, Trainer's words and numbers."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .core.config import LoopConfig as LoopConfig
    from .data.tensors import TensorLoader as TensorLoader
    from .files.errors import CheckpointError as CheckpointError
    from .files.storage import AtomicCheckpointIO as AtomicCheckpointIO
    from .loop import FabricLoop as FabricLoop
    from .mini import MiniLoop as MiniLoop
    from .record.logger import CSVLogger as CSVLogger
    from .record.read_back import read_logs as read_logs
    from .tools.compare import compare as compare
    from .tools.live_plot import LivePlot as LivePlot
    from .tools.plots import plot_logs as plot_logs
    from .tools.profile import profile as profile
    from .tools.runs import list_runs as list_runs
    from .tools.tune import tune as tune

__version__ = "0.1.0"

# Loaded on first use: torch takes seconds, and a word of help on the command line needs none of it.
_HOMES = {
    "AtomicCheckpointIO": "files.storage",
    "CSVLogger": "record.logger",
    "CheckpointError": "files.errors",
    "FabricLoop": "loop",
    "LivePlot": "tools.live_plot",
    "LoopConfig": "core.config",
    "MiniLoop": "mini",
    "TensorLoader": "data.tensors",
    "compare": "tools.compare",
    "list_runs": "tools.runs",
    "plot_logs": "tools.plots",
    "profile": "tools.profile",
    "read_logs": "record.read_back",
    "tune": "tools.tune",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
