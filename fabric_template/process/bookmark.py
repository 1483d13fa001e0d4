"""Bookmark: what a checkpoint knows of a run beside the states of its parts; resumed.py takes it up again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.run import Run
from ..exact.held import Held
from ..files.fingerprint import fingerprint, of_data


class Bookmark:
    """Where a run goes on, and what it must find there."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.held = Held(run)
        self.fingerprint: dict[str, Any] = {}  # what the run is made of
        self.order: Tensor | None = None  # of the samples in the epoch that a checkpoint was in, where no seed tells it

    def note_parts(self) -> None:
        """Note what the run is made of before callbacks change it, as its optimizers are made."""
        self.fingerprint = fingerprint(self._run)
        self.held.set_up_optimizers()

    def note_data(self) -> None:
        """As the first pass begins: note the data, too; of a run that goes on, say what is other than it was."""
        if self._run.origin.pending is None:
            self.fingerprint |= of_data(self._run)
            return
        from .resumed import tell_differences

        tell_differences(self._run)

    def order_state(self) -> dict[str, Any]:
        """The order of the epoch's samples, as long as that epoch is on."""
        at = self._run.at
        if self.order is None or at.between_epochs:
            self.order = None
            return {}
        return {"order": {"epoch": at.epochs_done, "samples": self.order}}

    def stay_finished(self) -> None:
        """Of a finished run that is resumed everything is as it was at its end."""
        if self._run.origin.resume_path is not None:
            from .resumed import stay_finished

            stay_finished(self._run)

    def had_val(self) -> bool:
        """Whether the validation loaders were made by then."""
        from .resumed import had_val

        return had_val(self._run)

    def go_on(self) -> None:
        """Put random numbers, loaders and running sums where the checkpoint left them, as the first epoch begins."""
        from .resumed import go_on

        go_on(self._run)
