"""Train PyTorch models with a loop that has Trainer's options and that you can copy and edit."""

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from .checkpoint.checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
    from .config import LoopConfig as LoopConfig
    from .data.tensor_loader import TensorLoader as TensorLoader
    from .errors import CheckpointError as CheckpointError
    from .loggers.csv_logger import CSVLogger as CSVLogger
    from .loggers.read_logs import read_logs as read_logs
    from .loop import FabricLoop as FabricLoop
    from .mini import MiniLoop as MiniLoop
    from .tools.compare import compare as compare
    from .tools.plots import LivePlot as LivePlot
    from .tools.plots import plot_logs as plot_logs
    from .tools.profile import profile as profile
    from .tools.runs import list_runs as list_runs
    from .tools.tune import tune as tune

__version__ = "0.2.0"

# Import each name on first use, so that `fabric-template --help` does not import torch.
_MODULES = {
    "AtomicCheckpointIO": "checkpoint.checkpoint_io",
    "CSVLogger": "loggers.csv_logger",
    "CheckpointError": "errors",
    "FabricLoop": "loop",
    "LivePlot": "tools.plots",
    "LoopConfig": "config",
    "MiniLoop": "mini",
    "TensorLoader": "data.tensor_loader",
    "compare": "tools.compare",
    "list_runs": "tools.runs",
    "plot_logs": "tools.plots",
    "profile": "tools.profile",
    "read_logs": "loggers.read_logs",
    "tune": "tools.tune",
}
__all__ = list(_MODULES)


# Hide __getattr__ from type checkers, which would otherwise accept every name in this module.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
