"""Origin: where a run comes from: the checkpoint that it goes on from, or takes its weights from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Origin:
    """What ``resume=`` and ``load=`` mean for one run, and what is still to be taken from the file."""

    resume_path: str | Path | None = None
    load_path: str | Path | None = None
    is_auto: bool = False  # resume="auto"
    awaits: tuple[Any, Any] | None = None  # (resume, load), still to be agreed on by the ranks
    may_lack: bool = False  # a file that is not there is none
    trusted: bool = False  # it may run any program
    checkpoint: dict[str, Any] | None = None  # until it is restored
    pending: dict[str, Any] | None = None  # our part of it, until the first epoch has begun
    saved_in: str | None = None  # the hook in which a callback saved it, with the rest of its batch or epoch to come

    @property
    def path(self) -> str | Path | None:
        """The file, whatever is taken from it."""
        return self.resume_path or self.load_path

    def take_pending(self) -> dict[str, Any]:
        """Our part, which is now put back."""
        pending, self.pending = self.pending or {}, None
        return pending
