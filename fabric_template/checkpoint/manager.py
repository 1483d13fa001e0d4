"""Keep last.ckpt, best.ckpt or the best k checkpoints, and exception.ckpt."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigurationError
from ..training.hooks import is_instance_of
from .checkpoint_io import refused_classes
from .distributed import remove_checkpoint, save_checkpoint
from .state import build_checkpoint

if TYPE_CHECKING:
    from ..training.run_state import RunState


class CheckpointManager:
    """Saves checkpoints at the end of epochs, after validations, every N steps and after an exception.

    A file that cannot be written costs a warning, and training continues. What was never saved is an
    error at the end of training.

    Args:
        folder: Where they are kept. None: nothing is saved.
        config: The options monitor, mode, save_top_k, save_last and save_every_n_steps.

    Attributes:
        last_model_path, best_model_path, best_model_score: As those of Lightning's ModelCheckpoint.
        saved_step: The step of the newest checkpoint of this run; -1 before the first one.
    """

    def __init__(self, folder: Path | None, config: Any) -> None:
        self.folder, self.config = folder, config
        self.last_model_path = self.best_model_path = ""
        self.best_model_score: float | None = None
        self._kept: dict[str, float] = {}
        self._is_validated = False
        self.saved_step, self._last_step = -1, 0
        self._unsaved: dict[str, str] = {}
        self._is_first_file = True

    @property
    def is_enabled(self) -> bool:
        return self.folder is not None

    @property
    def dirpath(self) -> str | None:
        return None if self.folder is None else str(self.folder)

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name

    def save_step(self, run: RunState) -> None:
        """Save last.ckpt in the middle of an epoch, every save_every_n_steps."""
        every = self.config.save_every_n_steps
        if self.is_enabled and every:
            previous, self._last_step = self._last_step, run.progress.global_step
            # Manual optimization may take several steps in a batch.
            is_due = run.progress.global_step // every > previous // every
            # The end of the epoch saves the same step.
            if is_due and not (self.config.save_last and run.progress.is_epoch_complete):
                self.save_last(run)

    def save_validation(self, run: RunState) -> None:
        """Save after a validation inside an epoch. At its end the epoch itself is saved."""
        self._is_validated = True
        if self.is_enabled and not run.progress.is_epoch_complete:
            # Values of training are those of the epoch before.
            if self.config.monitor in run.history.evaluated:
                self.save_best(run)
            if self.config.save_last:
                self.save_last(run)

    def save_stopped(self, run: RunState) -> None:
        """Save last.ckpt where a limit ends an epoch early. A higher limit continues in this epoch."""
        if self.is_enabled and self.config.save_last and not run.progress.is_epoch_complete:
            self.save_last(run)

    def save_signal(self, run: RunState) -> None:
        """Save last.ckpt where a signal ends training."""
        if self.is_enabled:
            self.save_last(run)

    def save_epoch(self, run: RunState) -> None:
        """Save at the end of an epoch."""
        if not self.is_enabled:
            return
        self.save_best(run)
        if self.config.save_last and run.progress.is_epoch_complete:
            self.save_last(run)
        self._check_monitor(run)

    def _check_monitor(self, run: RunState) -> None:
        """Refuse a monitor that was not logged by the end of the first epoch that validated."""
        monitor, metrics = self.config.monitor, run.loggers.monitored_metrics()
        is_early = run.should_validate and not run.history.evaluated
        is_off = self.config.limit_val_batches == 0
        is_known = monitor is None or monitor in metrics or self.best_model_score is not None
        if not (is_known or self._kept or is_early or is_off):
            raise ConfigurationError(
                f"monitor: got {monitor!r}, expected a logged metric: {sorted(metrics)}. Write monitor="
                " with one of these, and resume='last' to continue."
            )

    def save_last(self, run: RunState) -> None:
        if run.stop.is_diverging:
            return
        path = self._path("last.ckpt")
        if self.write(run, path):
            self.last_model_path, self.saved_step = str(path), run.progress.global_step
            if self.config.monitor is None:
                self.best_model_path = str(path)
            if run.fabric.is_global_zero:
                remove_checkpoint(self._path("exception.ckpt"))

    def save_best(self, run: RunState) -> None:
        """Save the run if its monitored value is new and among the best k."""
        config = self.config
        if config.monitor is None or config.save_top_k == 0 or run.stop.is_diverging:
            return
        is_validated, self._is_validated = self._is_validated, False
        if config.monitor in run.history.evaluated and not is_validated:
            return
        value = run.loggers.monitored_metrics().get(config.monitor)
        if run.fabric.world_size > 1:
            # A value that is not reduced differs between processes, but all of them have to save.
            value = run.fabric.broadcast(value)
        if value is None or (math.isnan(float(value)) and config.save_top_k != -1):
            return
        value = float(value)
        if math.isnan(value):
            # All are kept, and this one is the worst.
            value = math.inf if config.mode == "min" else -math.inf
        self._save_among_best(run, value)

    def _save_among_best(self, run: RunState, value: float) -> None:
        """Save a value that is good enough, and remove the files that it replaces."""
        k, previous, removed = self.config.save_top_k, dict(self._kept), []
        is_full = k != -1 and len(previous) >= k
        if is_full and not self._is_better(value, previous[self._worst()]):
            return
        path = self._best_path(run, value)
        self._kept[str(path)] = value
        while k != -1 and len(self._kept) > k:
            removed.append(self._worst())
            del self._kept[removed[-1]]
        self._choose_best()
        if not self.write(run, path):
            self._kept = previous
            self._choose_best()
        elif run.fabric.is_global_zero:
            for old in removed:
                remove_checkpoint(Path(old))

    def _best_path(self, run: RunState, value: float) -> Path:
        if self.config.save_top_k == 1:
            return self._path("best.ckpt")
        step, monitor = run.progress.global_step, self.config.monitor
        name = f"epoch={self._epoch(run)}-step={step}-{monitor}={value:.4g}"
        return self._path(re.sub(r"[^\w.=+-]", "_", name) + ".ckpt")

    def _epoch(self, run: RunState) -> int:
        """Return the epoch that a file names. Trainer saves an epoch before it counts it."""
        progress = run.progress
        return max(0, progress.epochs_done - (not progress.is_in_epoch))

    def _worst(self) -> str:
        choose = max if self.config.mode == "min" else min
        return choose(self._kept, key=self._kept.__getitem__)

    def _choose_best(self) -> None:
        choose = min if self.config.mode == "min" else max
        best = choose(self._kept, key=self._kept.__getitem__, default="")
        self.best_model_path, self.best_model_score = best, self._kept.get(best)

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.config.mode == "min" else value > other

    def save_exception(self, run: RunState, hook: str | None) -> None:
        """Save after an error, to continue after the last whole optimizer step.

        The random numbers and logged sums of a failed step count twice, so exception.ckpt is exact only where
        the step drew and logged nothing. A worker that cannot read a sample fails between two steps, and
        last.ckpt is saved. With several processes the others cannot take part, and nothing is saved.

        Args:
            hook: The hook or step that failed.
        """
        progress = run.progress
        is_new = progress.global_step > max(self.saved_step, 0)
        if not self.is_enabled or not is_new or run.optimization is None:
            return
        if run.fabric.world_size > 1:
            return
        averaging = [c for c in run.hooks.callbacks if is_instance_of(c, "WeightAveraging")]
        if averaging and progress.stage == "validate":
            if hook != "validation_step":
                # Nobody knows whether the weights are exchanged.
                return
            # It exchanges the weights while a fit validates, and takes them back here.
            run.hooks.call_callbacks("on_validation_epoch_end", callbacks=averaging)
        is_between_steps = progress.is_in_epoch and progress.phase is None
        if is_between_steps and not run.data.train.reads_in_process:
            self.save_last(run)
        elif self.write(run, self._path("exception.ckpt")):
            self.saved_step = progress.global_step

    def finish(self, run: RunState) -> None:
        """Try again what could not be written.

        Raises:
            CheckpointError: It still cannot be written.
        """
        if "last.ckpt" in self._unsaved:
            self.save_last(run)
        for logger in run.loggers.csv_loggers:
            try:
                logger.sync()
            except OSError as error:
                self._unsaved["logs"] = f"{logger.log_dir}: {error}"
        if self._unsaved:
            raise CheckpointError(
                "Training has ended, but not everything could be saved. "
                + " ".join(self._unsaved.values())
            )

    def write(self, run: RunState, path: Path) -> bool:
        """Write the state of a run to a file. Returns whether it was written."""
        for logger in run.loggers.csv_loggers:
            # A checkpoint counts the rows of the logs, so they have to survive a power cut before it does.
            with suppress(OSError):
                logger.sync()
        checkpoint = build_checkpoint(run, epoch=self._epoch(run))
        reason = self._write_file(run, checkpoint, path)
        if run.fabric.world_size > 1:
            reason = run.fabric.broadcast(reason)
        if reason is None:
            self._unsaved.pop(path.name, None)
            return True
        self._unsaved[path.name] = f"{path}: {reason}."
        if run.fabric.is_global_zero:
            warnings.warn(
                f"{path}: the checkpoint could not be saved: {reason}. The old file is unchanged, and"
                " training continues.",
                stacklevel=2,
            )
        return False

    def _write_file(self, run: RunState, checkpoint: dict[str, Any], path: Path) -> str | None:
        """Write a checkpoint. Returns the reason if that failed."""
        try:
            with run.hooks.profiled("save_checkpoint"):
                save_checkpoint(run, checkpoint, path)
        except Exception as error:
            if isinstance(error, OSError) and error.strerror:
                return error.strerror
            return f"{type(error).__name__}: {error}"
        if run.fabric.is_global_zero:
            self._warn_of_refused_classes(path)
        return None

    def _warn_of_refused_classes(self, path: Path) -> None:
        """Warn at the first file, while it can be changed, of what a resume will not read."""
        is_first, self._is_first_file = self._is_first_file, False
        names = refused_classes(path) if is_first else []
        if names:
            warnings.warn(
                f"{path}: it holds objects of {', '.join(names)}, which only weights_only=False reads. Keep"
                " plain values and tensors in hyperparameters, state_dict() and on_save_checkpoint.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": os.path.basename(self.best_model_path) if self.config.monitor else "",
            "score": self.best_model_score,
            "kept": {os.path.basename(path): value for path, value in self._kept.items()},
            "is_validated": self._is_validated,
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        # Only names inside the run's folder: a file may have been written by somebody else.
        kept = {self._path(os.path.basename(name)): v for name, v in state["kept"].items()}
        self._kept = {str(path): value for path, value in kept.items() if path.exists()}
        self._choose_best()
        self._is_validated, self._last_step = state["is_validated"], state["last_step"]
