"""Print a line per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..training.run_state import RunState


class Console:
    """Prints a line per epoch."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._columns: list[str] = []

    def start_epoch(self, run: RunState) -> None:
        pass

    def update(self, run: RunState) -> None:
        pass

    def start_evaluation(self, run: RunState, num_batches: int | float) -> None:
        pass

    def end_evaluation(self, run: RunState) -> None:
        pass

    def end_epoch(self, run: RunState, row: dict[str, Any]) -> None:
        """Print the row of an epoch as an aligned line."""
        if not self.is_enabled:
            return
        if list(row) != self._columns:
            self._columns = list(row)
            print("  ".join(f"{name:>10}" for name in row))
        print("  ".join(f"{_short(value):>{max(10, len(name))}}" for name, value in row.items()))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
