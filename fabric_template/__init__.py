"""fabric_template: the training loop people copy. Lightning Fabric underneath, Trainer's words and numbers."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .config import LoopConfig as LoopConfig
    from .logs import CSVLogger as CSVLogger
    from .logs import read_logs as read_logs
    from .loop import FabricLoop as FabricLoop
    from .opening import CheckpointError as CheckpointError
    from .plots import plot_logs as plot_logs
    from .storage import AtomicCheckpointIO as AtomicCheckpointIO
    from .tensors import TensorLoader as TensorLoader

__version__ = "0.1.0"

# Loaded on first use: torch takes seconds, and a word of help on the command line needs none of it.
_HOMES = {
    "AtomicCheckpointIO": "storage",
    "CSVLogger": "logs",
    "CheckpointError": "opening",
    "FabricLoop": "loop",
    "LoopConfig": "config",
    "TensorLoader": "tensors",
    "plot_logs": "plots",
    "read_logs": "logs",
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
