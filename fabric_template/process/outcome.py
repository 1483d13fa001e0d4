"""Outcome: what comes back from a run; of one in another process than its caller's, see away.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.run import Run


@dataclass
class Outcome:
    """The result of one run, made by rank zero of the processes that ran it."""

    results: Any = None
    complaint: str = ""  # what could not be saved to the end
    learned: dict[str, Any] | None = None  # in another process than the caller's

    @classmethod
    def of(cls, run: Run, results: Any) -> Outcome:
        """The result, and what could not be saved."""
        complaints = [run.keeper.complaint() if run.fn == "fit" else None, run.log.loggers.complaint]
        return cls(results, " ".join(filter(None, complaints)))
