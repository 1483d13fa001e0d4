"""Save last.ckpt, and either best.ckpt or the best k checkpoints."""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigurationError
from ..files import replaced_file
from .distributed import SHARDS_KEY, remove_checkpoint, save_checkpoint
from .run_folders import RunFolders
from .state import (
    build_checkpoint,
    check_optimizer_states,
    find_unpicklable,
    warn_of_unreadable,
)

if TYPE_CHECKING:
    from ..training.run import Run


class CheckpointManager:
    """Saves checkpoints after each epoch, after validation and every N steps.

    If a checkpoint cannot be written, a warning is issued, and training continues. If a file still
    cannot be written at the end of training, ``finish`` raises an error.

    Args:
        config: The monitor, mode, save_top_k, save_last and save_every_n_steps options.

    Attributes:
        folder: The folder of the checkpoints, or None if no checkpoints are saved.
        folders: The locked folders of the run's checkpoints and CSV files.
        last_model_path: The path of last.ckpt, as in Lightning's ModelCheckpoint.
        resume_keyword: The value of resume= that continues this run: "last" or "auto".
    """

    is_per_process = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.folder: Path | None = None
        self.folders = RunFolders()
        self._is_continued = False
        self.last_model_path = ""
        self.resume_keyword = "last"
        # The monitored values of the best checkpoints, keyed by path.
        self._best_scores: dict[str, float] = {}
        self._resumed_metric: tuple[str | None, str] = (None, config.mode)
        self._has_saved = False
        self._is_validated = False
        self._last_step = 0
        self._unsaved: dict[str, str] = {}

    def use_folder(
        self, folder: Path | None, is_continued: bool, last_model_path: str = ""
    ) -> None:
        """Save checkpoints in ``folder``, or save no checkpoints if ``folder`` is None.

        Args:
            is_continued: Whether the run resumes from a checkpoint in this folder, and therefore
                keeps the folder's best checkpoints.
            last_model_path: The path of the last.ckpt that a spawned process saved.
        """
        self.folder, self._is_continued = folder, is_continued
        self.last_model_path = last_model_path

    def set_options(self, config: Any) -> None:
        self.config = config

    @property
    def dirpath(self) -> str | None:
        return None if self.folder is None else str(self.folder)

    @property
    def _metric(self) -> tuple[str | None, str]:
        """The name of the monitored metric and its mode, such as ("val_loss", "min")."""
        # Without monitor=, a resumed run uses the metric that is named in the checkpoint.
        if self.config.monitor is None:
            return self._resumed_metric
        return self.config.monitor, self.config.mode

    @property
    def best_model_path(self) -> str:
        if self._metric[0] is None:
            return self.last_model_path
        return min(self._best_scores, key=self._rank, default="")

    @property
    def best_model_score(self) -> float | None:
        return self._best_scores.get(self.best_model_path)

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name

    def save_after_step(self, run: Run) -> None:
        """Save last.ckpt every save_every_n_steps optimizer steps."""
        previous, self._last_step = self._last_step, run.progress.global_step
        is_due = run.progress.crosses(self.config.save_every_n_steps, previous)
        if is_due and not (self.config.save_last and run.progress.is_epoch_complete):
            self.save_last(run)

    def save_after_validation(self, run: Run) -> None:
        """Save checkpoints after a validation in the middle of an epoch."""
        self._is_validated = self.folder is not None
        if run.progress.is_epoch_complete:
            return
        # In the middle of an epoch, a training metric still has its value from the previous epoch.
        # Therefore, save the best checkpoint only if the monitored metric is a validation metric.
        if self.config.monitor in run.results.evaluated:
            self.save_best(run)
        self.save_in_epoch(run)
        # If the monitored metric is a validation metric, the first validation run must log it. A
        # training metric may still be logged later.
        if str(self.config.monitor).startswith("val"):
            self._check_monitor(run)

    def save_in_epoch(self, run: Run) -> None:
        if self.config.save_last:
            self.save_last(run)

    def save_after_epoch(self, run: Run) -> None:
        is_checked = self._is_validated or not run.should_validate
        self.save_best(run)
        if self.config.save_last and run.progress.is_epoch_complete:
            self.save_last(run)
        if is_checked:
            self._check_monitor(run)

    def _check_monitor(self, run: Run) -> None:
        """Raise an error if the monitored metric has not been logged."""
        monitor, metrics = self.config.monitor, run.results.monitored_metrics()
        if self.folder is None or monitor is None or monitor in metrics or self._best_scores:
            return
        if self.config.limit_val_batches == 0:
            return
        step = "validation_step" if monitor.startswith("val") else "training_step"
        names = ", ".join(sorted(metrics)) or "none"
        raise ConfigurationError(
            f"monitor: got {monitor!r}, which is not logged. Logged metrics: {names}. Return the"
            f" loss from {step} or log the metric there. Then continue with resume='last'."
        )

    def save_last(self, run: Run) -> None:
        if self.folder is None:
            return
        run.row.check_loss(run.row.step_values)
        if run.stop.divergence:
            return
        path = self._path("last.ckpt")
        if self.write(run, path):
            self.last_model_path = str(path)

    def save_after_signal(self, run: Run) -> None:
        """Save a checkpoint before a signal ends training, also in a run with a ModelCheckpoint."""
        if self.folder is not None:
            self.save_last(run)
            return
        savers = [
            saver
            for saver in run.hooks.callbacks_of("ModelCheckpoint")
            if saver.dirpath and not saver.save_weights_only
        ]
        if not savers or run.stop.divergence or run.config.fast_dev_run:
            return
        saver = next((saver for saver in savers if saver.save_last), None)
        if saver is not None:
            name = saver.CHECKPOINT_NAME_LAST if "{" not in saver.CHECKPOINT_NAME_LAST else "last"
            default = Path(saver.dirpath, name + saver.FILE_EXTENSION)
            path = Path(saver.last_model_path or default)
            # Set the callback's last_model_path, so that the callback later replaces this file
            # instead of saving last-v1.ckpt.
            saver.last_model_path = str(path)
        else:
            # Do not save the checkpoint as last.ckpt. The callback would never replace that file,
            # and a later resume would prefer it to newer checkpoints.
            name = f"signal-step={run.progress.global_step}{savers[0].FILE_EXTENSION}"
            path, self.resume_keyword = Path(savers[0].dirpath, name), "auto"
        if self.write(run, path):
            self.last_model_path = str(path)

    def replace_last(self, run: Run) -> None:
        """Replace last.ckpt with the checkpoint from which the run continues, such as best.ckpt.

        Call this method before the newest CSV rows are removed, because the old last.ckpt may refer
        to these rows.
        """
        if not self._is_continued or not run.fabric.is_global_zero:
            return
        path, last = Path(str(run.plan.start.path)), self._path("last.ckpt")
        # With save_last=False, a new last.ckpt would soon be out of date, so do not create it.
        is_used = self.config.save_last or last.exists()
        # A copy of a sharded checkpoint would refer to the shards of the original.
        is_sharded = SHARDS_KEY in (run.plan.start.checkpoint or {})
        if is_used and not is_sharded and path.is_file() and path.resolve() != last.resolve():
            with replaced_file(last) as file, path.open("rb") as source:
                shutil.copyfileobj(source, file)

    def save_best(self, run: Run) -> None:
        """Save a checkpoint if the monitored metric is one of the save_top_k best values so far."""
        config = self.config
        if self.folder is None or config.monitor is None or config.save_top_k == 0:
            return
        is_validated, self._is_validated = self._is_validated, False
        # Save only one checkpoint per validation, because the validation metric does not change
        # until the next validation.
        is_repeated = config.monitor in run.results.evaluated and not is_validated
        run.row.check_loss(run.row.step_values)
        if is_repeated or run.stop.divergence:
            return
        value = run.results.monitored_metrics().get(config.monitor)
        if run.fabric.world_size > 1:
            # All processes must save together, so all of them use the metric of process 0.
            value = run.fabric.broadcast(value)
        if value is not None and not math.isnan(float(value)):
            self._save_among_best(run, float(value))

    def _save_among_best(self, run: Run, value: float) -> None:
        """Save a checkpoint if ``value`` is among the save_top_k best values so far."""
        k, previous = self.config.save_top_k, self._best_scores
        path = str(self._best_path(run, value))
        ranked = sorted(previous, key=self._rank)
        if k != -1 and len(ranked) >= k and self._sort_key(value) >= self._rank(ranked[k - 1]):
            return
        # After a resume with a smaller save_top_k, there may be several checkpoints to remove.
        others = [name for name in ranked if name != path]
        kept = others if k == -1 else others[: k - 1]
        self._best_scores = {**{name: previous[name] for name in kept}, path: value}
        if not self.write(run, Path(path)):
            self._best_scores = previous
        elif run.fabric.is_global_zero:
            for name in others[len(kept) :]:
                remove_checkpoint(Path(name))

    def _best_path(self, run: Run, value: float) -> Path:
        if self.config.save_top_k == 1:
            return self._path("best.ckpt")
        step, monitor = run.progress.global_step, self.config.monitor
        name = f"epoch={run.progress.newest_epoch}-step={step}-{monitor}={value:.4g}"
        return self._path(re.sub(r"[^\w.=+-]", "_", name) + ".ckpt")

    def _sort_key(self, value: float) -> float:
        return value if self._metric[1] == "min" else -value

    def _rank(self, path: str) -> float:
        return self._sort_key(self._best_scores[path])

    def finish(self, run: Run) -> None:
        """At the end of training, retry failed writes of last.ckpt and of the CSV files.

        Raises:
            CheckpointError: A file could not be written.
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
                "Training ended, but these files could not be saved. "
                + " ".join(self._unsaved.values())
            )

    def write(self, run: Run, path: Path) -> bool:
        """Write a checkpoint of the run to ``path`` and return True on success."""
        for logger in run.loggers.csv_loggers:
            # A checkpoint records the number of CSV rows, so write the rows to disk first.
            with suppress(OSError):
                logger.sync()
        checkpoint = build_checkpoint(run, epoch=run.progress.newest_epoch)
        if not self._has_saved:
            check_optimizer_states(run, checkpoint.get("optimizer_states", []))
        reason = part = None
        try:
            with run.hooks.profiled("save_checkpoint"), run.row.excluded():
                save_checkpoint(run, checkpoint, path)
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            part = None if isinstance(error, OSError) else find_unpicklable(checkpoint)
        if run.fabric.world_size > 1:
            reason, part = run.fabric.broadcast((reason, part))
        if part is not None and not self._has_saved:
            # Stop training, because later checkpoints could not be pickled either.
            raise CheckpointError(
                f"{path}: the part {part!r} of the checkpoint cannot be pickled. Save tensors,"
                f" numbers, strings, or containers of these instead. {reason}"
            )
        if reason is None:
            self._unsaved.pop(path.name, None)
            if not self._has_saved:
                warn_of_unreadable(run, checkpoint)
            self._has_saved = True
            return True
        self._unsaved[path.name] = f"{path}: {reason}."
        if run.fabric.is_global_zero:
            warnings.warn(
                f"{path}: the checkpoint could not be saved: {reason}. The previous file is"
                " unchanged, and training continues.",
                stacklevel=2,
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        # Sort the checkpoints from best to worst, because resume="best" uses the first file name.
        ranked = sorted(self._best_scores, key=self._rank)
        monitor, mode = self._metric
        return {
            "kept": {os.path.basename(path): self._best_scores[path] for path in ranked},
            "monitor": monitor,
            "mode": mode,
            "is_validated": self._is_validated,
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        self._is_validated, self._last_step = state["is_validated"], state["last_step"]
        self._resumed_metric = state["monitor"], state["mode"]
        if self._resumed_metric != self._metric or not self._is_continued:
            # Ignore the saved scores if this run uses a different metric or checkpoint folder.
            return
        # Paths in an untrusted checkpoint could point anywhere, so use only their file names.
        kept = {self._path(os.path.basename(name)): v for name, v in state["kept"].items()}
        self._best_scores = {str(path): value for path, value in kept.items() if path.exists()}
