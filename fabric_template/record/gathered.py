"""Gathered: self.log of a model in parts, whose values may lie in parts, too (a loss under torch's `loss_parallel`).

Imported only where the strategy is a ModelParallelStrategy.
"""

from __future__ import annotations

from typing import Any

from ..core.sharded import whole
from .metrics import Metrics


class GatheredMetrics(Metrics):
    """``self.log`` with the value as a whole, on all ranks."""

    def log(self, name: str, value: Any, *args: Any, **words: Any) -> None:
        """Log it; see `Metrics.log`."""
        super().log(name, whole(value), *args, **words)
