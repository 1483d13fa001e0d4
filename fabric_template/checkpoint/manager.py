"""Which checkpoints a run keeps: last.ckpt, best.ckpt or the best k."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint_io import save_or_warn
from .state import build_checkpoint

if TYPE_CHECKING:
    from ..training.run_state import RunState


class CheckpointManager:
    """Saves checkpoints at the end of epochs, after validations and every N steps.

    Args:
        folder: Where they are kept. None: nothing is saved.
        config: The options monitor, mode, save_top_k, save_last and save_every_n_steps.

    Attributes:
        last_model_path, best_model_path, best_model_score: As those of Lightning's ModelCheckpoint.
    """

    def __init__(self, folder: Path | None, config: Any) -> None:
        self.folder, self.config = folder, config
        self.last_model_path = self.best_model_path = ""
        self.best_model_score: float | None = None
        self._kept: dict[str, float] = {}
        self._judged_step: int | None = None

    @property
    def is_enabled(self) -> bool:
        return self.folder is not None

    @property
    def dirpath(self) -> str | None:
        return None if self.folder is None else str(self.folder)

    def save_step(self, run: RunState) -> None:
        """Save last.ckpt in the middle of an epoch, every save_every_n_steps."""
        every = self.config.save_every_n_steps
        if self.is_enabled and every and run.progress.global_step % every == 0:
            self.save_last(run)

    def save_validation(self, run: RunState) -> None:
        """Save after a validation inside an epoch. At its end the epoch itself is saved."""
        if self.is_enabled and not run.progress.is_epoch_complete:
            self.save_best(run)
            if self.config.save_last:
                self.save_last(run)

    def save_epoch(self, run: RunState) -> None:
        """Save at the end of an epoch."""
        if not self.is_enabled:
            return
        self.save_best(run)
        if self.config.save_last:
            self.save_last(run)

    def save_last(self, run: RunState) -> None:
        path = self.folder / "last.ckpt"
        self.last_model_path = str(path)
        if self.config.monitor is None:
            self.best_model_path = str(path)
        self.write(run, path)

    def save_best(self, run: RunState) -> None:
        """Save the run if its monitored value is among the best k."""
        config = self.config
        if config.monitor is None or config.save_top_k == 0:
            return
        value = run.loggers.monitored_metrics().get(config.monitor)
        if value is None or math.isnan(value := float(value)):
            return
        if config.save_top_k == 1:
            if self._is_better(value, self.best_model_score):
                self.best_model_score = value
                self.best_model_path = str(self.folder / "best.ckpt")
                self.write(run, self.folder / "best.ckpt")
            return
        self._save_top_k(run, value)

    def _save_top_k(self, run: RunState, value: float) -> None:
        k = self.config.save_top_k
        worst = self._worst()
        if k != -1 and len(self._kept) >= k and not self._is_better(value, self._kept[worst]):
            return
        progress = run.progress
        name = f"epoch={progress.epochs_done}-step={progress.global_step}"
        path = self.folder / f"{name}-{self.config.monitor.replace('/', '_')}={value:.4g}.ckpt"
        self._kept[str(path)] = value
        removed = []
        while k != -1 and len(self._kept) > k:
            removed.append(self._worst())
            del self._kept[removed[-1]]
        choose = min if self.config.mode == "min" else max
        self.best_model_path = choose(self._kept, key=self._kept.__getitem__)
        self.best_model_score = self._kept[self.best_model_path]
        self.write(run, path)
        if run.fabric.is_global_zero:
            for old in removed:
                Path(old).unlink(missing_ok=True)

    def _worst(self) -> str:
        choose = max if self.config.mode == "min" else min
        return choose(self._kept, key=self._kept.__getitem__, default="")

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None:
            return True
        return value < best if self.config.mode == "min" else value > best

    def write(self, run: RunState, path: Path) -> None:
        """Write the state of a run to a file. A disk that fails costs a warning."""
        progress = run.progress
        # Trainer saves an epoch before it counts it.
        epoch = progress.epochs_done - (not progress.is_in_epoch)
        checkpoint = build_checkpoint(run, epoch=max(0, epoch))
        if run.fabric.is_global_zero:
            for logger in run.loggers.csv_loggers:
                save_or_warn(logger.sync, path)
            checkpoint_io = run.loop.checkpoint_io
            with run.hooks.profiled("save_checkpoint"):
                save_or_warn(lambda: checkpoint_io.save_checkpoint(checkpoint, path), path)
        run.fabric.barrier()

    def state_dict(self) -> dict[str, Any]:
        folder = str(self.folder or "")

        def relative(path: str) -> str:
            return os.path.relpath(path, folder) if path and folder else path

        return {
            "best": relative(self.best_model_path),
            "score": self.best_model_score,
            "kept": {relative(path): value for path, value in self._kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        # Only names inside the run's folder: a file may have been written by somebody else.
        names = {os.path.basename(name): value for name, value in state["kept"].items()}
        self._kept = {str(self.folder / n): v for n, v in names.items() if (self.folder / n).exists()}
        self.best_model_score = state["score"]
        best = os.path.basename(state["best"])
        self.best_model_path = str(self.folder / best) if best else ""
