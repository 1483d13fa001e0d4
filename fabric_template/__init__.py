"""fabric_template: the training loop people copy. Lightning Fabric underneath, Trainer's words and numbers."""

from .config import LoopConfig
from .data import TensorLoader
from .logs import CSVLogger, read_logs
from .loop import FabricLoop
from .plots import plot_logs
from .storage import AtomicCheckpointIO, CheckpointError

__version__ = "0.1.0"

__all__ = [
    "AtomicCheckpointIO",
    "CSVLogger",
    "CheckpointError",
    "FabricLoop",
    "LoopConfig",
    "TensorLoader",
    "plot_logs",
    "read_logs",
]
