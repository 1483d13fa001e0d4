"""Keeper: which checkpoints of a run are kept, and what happens when one cannot be written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.config import Settings
from ..core.errors import Misuse
from ..core.history import is_better
from ..core.run import Run
from .checkpoint import OURS, in_pieces, point_of, state_of
from .errors import CheckpointError, DamagedError, UnreadableError, cause_of
from .names import ONE, PIECES, name_of
from .ordinary import SHARDS
from .storage import AtomicCheckpointIO, UnsyncedError, door, inside


class Keeper:
    """Keeps ``last.ckpt`` and the best checkpoints of a run, in ``checkpoints/<name>/version_<n>``.

    A save that fails costs a warning, not the run: the old file stays, the next save tries again, and at the end of the
    run `complaint` says what was never saved.

    Modules and callbacks that look for Trainer's ModelCheckpoint find its words: ``best_model_path``,
    ``best_model_score``, ``last_model_path``, ``dirpath``, ``monitor``.

    Args:
        folder: where the files go.
        config: says by ``monitor``, ``mode``, ``save_top_k``, ``save_last`` and ``save_every_n_steps`` what is kept, and when.
    """

    keeps = True

    def __init__(self, folder: Path, config: Settings) -> None:
        self.folder, self.every = folder, config.save_every_n_steps
        self.monitor, self.mode = config.monitor, config.mode
        self.top_k, self.save_last = config.save_top_k, config.save_last
        self.cut: dict[str, Any] | None = None  # the state in which this epoch was cut short
        self.dirpath = str(folder)
        self.best: dict[str, float] = {}  # path -> score
        self.last_model_path = ""
        # of a state in pieces: what is its own, and what the file holds of it
        self._made: tuple[Any, dict[str, Any]] = (None, {})
        self._failures: dict[str, str] = {}  # "last" or "best" -> why its newest save failed
        self._stepped: int | None = None  # optimizer steps after the batch before
        self._judged: int | None = None  # the epoch whose newest validation was judged when it was over
        self._saved_at: tuple[int, ...] | None = None  # where the run stood when last.ckpt was written
        self._follows_pieces = False  # the run goes on from pieces, and may leave them behind
        # "together": what is written is of before; "alone": after an error, by rank zero
        self.settling: str | None = None

    @property
    def best_model_path(self) -> str:
        """The best checkpoint so far; without a monitor, the last."""
        if not self.best:
            return self.last_model_path if self.monitor is None else ""
        return (min if self.mode == "min" else max)(self.best, key=self.best.__getitem__)

    @property
    def best_model_score(self) -> float | None:
        """The monitor's best value so far."""
        return self.best.get(self.best_model_path)

    @property
    def saved_step(self) -> int | None:
        """The optimizer steps in ``last.ckpt``, as this run has written it or gone on from it."""
        return None if self._saved_at is None else self._saved_at[2]

    # ---- when

    def begin_epoch(self) -> None:
        """No epoch is cut short any more."""
        self.cut = None

    def save_epoch(self, run: Run, score: float | None) -> None:
        """The epoch is over: keep its checkpoint if its score is among the best, and as the last."""
        over = run.at.epochs_done - 1  # Trainer's files of an epoch's end name the epoch that ended
        self._keep(run, None if self._judged == over else score, over, f"epoch={over}")
        if self._is_due(run) and not self.save_last and self.cut is None:
            self.write_last(run, epoch=over)
        if self.monitor is not None and score is None:
            self._check_monitor(run)

    def _check_monitor(self, run: Run) -> None:
        """Refuse a monitor that was never logged, once the epoch is safe on disk."""
        rows = run.history.rows
        if (run.validation.validates and not run.validation.ran_behind) or any(self.monitor in row for row in rows):
            return  # max_steps has ended this epoch before its validation
        known = sorted(rows[-1].keys() - {"epoch", "step", "time"}) if rows else []
        raise Misuse(
            f"monitor={self.monitor!r} was not logged in epoch {run.at.current_epoch - 1}; logged were {known}: write monitor="
            " with one of these; last.ckpt is saved, resume='last' goes on from it"
        )

    def save_validation(self, run: Run, score: float | None) -> None:
        """The same after a validation in the middle of an epoch, to go on behind it; a score of None: it did not measure it."""
        self._judged = None
        if run.at.is_last_of_epoch or self.cut is not None or run.stop.now:
            return
        self._judged = None if score is None else run.at.epochs_done
        run.hooks.enter("on_validation_end")  # as if a callback had saved there
        self._keep(run, score, None, f"epoch={run.at.epochs_done}-step={run.at.global_step}")
        run.hooks.enter(None)

    def _keep(self, run: Run, score: float | None, over: int | None, place: str) -> None:
        """Keep the state of now, or of where its epoch was cut short: as one of the best, if it is that, and as the last."""
        path = None if score is None or self.top_k == 0 else self._path_for(place, score)
        if self.monitor is not None:
            path, score = run.fabric.broadcast((path, score))  # they may differ: rank zero's count
        state, before = self.cut, self.best
        if path is not None and score is not None:
            highest = self.best_model_score
            self.best = {**(before if self.top_k > 1 else {}), str(path): score}
            if self.top_k < 0 and not is_better(score, highest, self.mode):
                self.best = before  # all are kept: none is looked for but the best
            state = state_of(run, epoch=over) if state is None else state
        last = self.save_last and (self.cut is None or path is not None)  # of a cut epoch only the best is new
        if last and over is None:
            last = _is_to_go_on_from(run)
        if path is not None or last:
            self._save(run, state, over, best=path, before=before, last=last)

    def save_step(self, run: Run) -> None:
        """In the middle of an epoch: rewrite ``last.ckpt`` every so many optimizer steps."""
        if self._is_due(run):
            self.write_last(run)

    def _is_due(self, run: Run) -> bool:
        every, now = self.every, run.at.global_step
        before, self._stepped = now - 1 if self._stepped is None else self._stepped, now
        # manual optimization may take several at once, or none
        return every is not None and now // every > before // every

    def write_last(self, run: Run, state: dict[str, Any] | None = None, epoch: int | None = None) -> None:
        """Write ``last.ckpt`` as the run stands now."""
        self._save(run, state, epoch)

    def _save(self, run: Run, state: dict[str, Any] | None, epoch: int | None, **files: Any) -> None:
        """Write a state, or that of now, into these files."""
        kept = state is not None
        self._put(run, state_of(run, epoch=epoch) if state is None else state, place_of(run), kept, **files)

    def _put(
        self, run: Run, state: dict[str, Any], place: tuple[int, ...], kept: bool, best: Path | None = None,
        before: dict[str, float] | None = None, last: bool = True,
    ) -> None:  # fmt: skip
        """As the best, whose place others had ``before``, and as the last; ``kept``: the best may be others by now."""
        if best is not None:
            if self._write(run, best, state, "best"):
                self._remove_worst(run)
            else:
                self.best = before or {}
        path = self.folder / "last.ckpt" if last else best
        if last:
            state = {**state, OURS: {**state[OURS], "kept": self.state_dict()}} if kept else state
            if not self._write(run, self.folder / "last.ckpt", state, "last"):
                return
            self.last_model_path, self._saved_at = str(path), place
        if path is not None and self.settling != "alone":
            prove(run, path)

    def cut_short(self, run: Run) -> None:
        """An epoch is ended in its middle: what is saved of it is its state here, so that a resume loses nothing of it."""
        if self.cut is None:
            self.cut = state_of(run)
            if self.save_last and self._saved_at != place_of(run):
                self.write_last(run, self.cut)

    def save_failed(self, run: Run) -> Path | None:
        """An error ends the run: save its state, as ``last.ckpt`` if it is exact, otherwise beside it.

        Returns:
            Where a state lies that is not exact; None if there is none, or if all is on disk already.
        """
        if self._saved_at == place_of(run) or not run.at.global_step or run.at.between_epochs:
            return None
        if point_of(run).is_exact:
            self.write_last(run)
            return None
        path = self.folder / "exception.ckpt"
        return path if self._write(run, path, state_of(run), "exception") else None

    def finish(self, run: Run, interrupted: bool) -> None:
        """Training is over: save the last state, where it is not yet on disk; try again, where that has failed."""
        if (interrupted and self._saved_at != place_of(run)) or "last" in self._failures:
            self.write_last(run, self.cut, epoch=run.at.epochs_done - 1 if run.at.between_epochs else None)

    def nothing_to_do(self, run: Run) -> None:
        """A finished run was resumed; a kill between its last two files may have left ``last.ckpt`` behind the best."""
        path = Path(run.origin.resume_path) if run.origin.is_auto and run.origin.resume_path is not None else None
        if path is not None and path.name != "last.ckpt" and self.save_last:
            from .reading import read_checkpoint

            self._write(run, self.folder / "last.ckpt", read_checkpoint(path, trusted=run.config.trusted), "last")
        self.tidy(run)

    def complaint(self) -> str | None:
        """What could not be saved to the end, None if all is well."""
        return " ".join(self._failures.values()) or None

    # ---- how

    def _write(self, run: Run, path: Path, state: dict[str, Any], kind: str) -> bool:
        """Write one file, on rank zero; every rank learns whether that went well."""
        if run.stop.bad and self.settling is None:  # the newest loss is no number: what lies there is better
            return False
        run.log.loggers.sync()  # what a checkpoint says of the logs must be on disk before it
        failure = None
        if in_pieces(run):
            state, failure = self._in_parts(run, path, state)
        if run.fabric.is_global_zero and failure is None:
            try:
                inside(self.folder, path.name)  # not through a symbolic link to somewhere else
                run.hooks.timed(door(run.fabric).save_checkpoint, "save_checkpoint")(state, path)
            except UnsyncedError as error:  # it is there, and what we know of it must be of this file
                warnings.warn(str(error), stacklevel=2)
            except CheckpointError as error:
                failure = str(error)
            except Exception as error:  # a plugin's own
                failure = f"could not save '{path}': {cause_of(error)}."
        if self.settling != "alone":
            failure = run.fabric.broadcast(failure)
        self.tidy(run, {path.name: state[SHARDS]["folder"]} if failure is None and state.get(SHARDS) else None)
        if failure is None:
            self._failures.pop(kind, None)
            return True
        self._failures[kind] = failure
        if run.fabric.is_global_zero:
            warnings.warn(
                f"{failure}{'' if run.failure.has_come else ' Training goes on without this checkpoint.'}", stacklevel=2
            )
        return False

    def _in_parts(self, run: Run, path: Path, state: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """What the file holds of a model in parts, or why it cannot; two files of one state name the same pieces."""
        from .pieces import for_file

        before, made = self._made
        if before is not state[OURS]["ranks"]:  # a list that is made anew for each state; hooks may change all else
            try:
                made = for_file(run, path, state)
            except CheckpointError as error:
                return state, str(error)
            self._made = state[OURS]["ranks"], made
        return {**made, OURS: state[OURS]}, None

    def tidy(self, run: Run, known: dict[str, str] | None = None) -> None:
        """Remove, on rank zero, the pieces that no file names any more: the model's, or those that a run in parts has left."""
        if run.fabric.is_global_zero and (in_pieces(run) or self._follows_pieces):
            from .shards import clear_unnamed

            clear_unnamed(self.folder, known)

    def settle(self, run: Run, alone: bool = False) -> None:
        """What is being written while training goes on counts from now: nothing is, here."""

    def _path_for(self, place: str, score: float) -> Path | None:
        """The file for this score, None if it is not among the best."""
        beaten = self.best_model_score
        if self.top_k != 1:
            beaten = self.best[self._worst()] if len(self.best) >= self.top_k > 0 else None
        if self.top_k > 0 and not is_better(score, beaten, self.mode):
            return None
        return self.folder / (ONE if self.top_k == 1 else name_of(place, self.monitor or "", score))

    def _worst(self) -> str:
        return (max if self.mode == "min" else min)(self.best, key=self.best.__getitem__)

    def _remove_worst(self, run: Run) -> None:
        """The new one is safe on disk: the worst may go."""
        newest = next(reversed(self.best), None)
        while 0 < self.top_k < len(self.best):
            worst = self._worst()
            del self.best[worst]
            if worst != newest and run.fabric.is_global_zero:
                try:
                    door(run.fabric).remove_checkpoint(worst)
                except Exception as error:
                    warnings.warn(
                        f"could not remove '{worst}', which is no longer among the best: {error}", stacklevel=2
                    )

    # ---- across a restart

    def state_dict(self) -> dict[str, Any]:
        """Scores by file name: the folder may have moved when the run goes on."""
        judged = {} if self._judged is None else {"judged": self._judged}
        return {"best": {Path(path).name: score for path, score in self.best.items()}, **judged}

    def know(self, last_model_path: str = "", best: dict[str, float] | None = None) -> None:
        """Know what another process has kept."""
        self.last_model_path, self.best = last_model_path, best or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know again which files are the best, as far as they are still there."""
        from .opening import is_file

        self._judged = state.get("judged")
        self.best = {
            str(self.folder / name): score
            for name, score in state.get("best", {}).items()
            if is_file(self.folder / name)
        }

    def goes_on_from(self, run: Run, path: str | Path) -> None:
        """The run stands where this file has left it."""
        from .opening import names_in

        self._stepped = run.at.global_step
        with suppress(CheckpointError):
            self._follows_pieces = any(name.endswith(PIECES) for name in names_in(self.folder))
        if Path(path) == self.folder / "last.ckpt":
            self.last_model_path, self._saved_at = str(path), place_of(run)


class KeepsNothing:
    """Stands where no checkpoints are kept, or where callbacks keep them."""

    keeps = False
    every: int | None = None
    cut: dict[str, Any] | None = None
    best: dict[str, float] = {}
    last_model_path = best_model_path = ""
    best_model_score = dirpath = monitor = saved_step = None

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(self, name, None)):  # who watches a run puts itself around what is called
            object.__setattr__(self, name, value)
            return
        raise AttributeError(
            f"checkpoint_callback.{name} cannot be set: what is kept is said by the loop's words monitor=, mode=, save_top_k="
            " and save_last=, or by a ModelCheckpoint among its callbacks"
        )

    def _nothing(self, *run: Any, **words: Any) -> None:
        """Nothing is kept."""

    begin_epoch = save_epoch = save_validation = save_step = cut_short = save_failed = finish = nothing_to_do = _nothing
    complaint = load_state_dict = goes_on_from = know = settle = tidy = _nothing

    def state_dict(self) -> dict[str, Any]:
        """Nothing to know again."""
        return {}


def nothing_kept(config: Settings, asked: bool | None) -> KeepsNothing | None:
    """Who has saved nothing as yet; None where no checkpoints are ``asked`` for (fast_dev_run keeps none all the same)."""
    return KeepsNothing() if config.enable_checkpointing or (config.fast_dev_run and asked is not False) else None


def prove(run: Run, path: str | Path) -> None:
    """A run's first file must be one that our own reader reads; what a later one holds that it does not is said.

    Raises:
        Misuse: names the values, and what to write instead. The file stays: with trusted=True it can be read.
    """
    io = door(run.fabric)
    if type(io) is not AtomicCheckpointIO or io.trusted:
        return
    problem, is_first, is_known = None, not io.is_proved, True
    if run.fabric.is_global_zero:
        try:
            problem = io.complaint(path, reads=is_first)
        except DamagedError as error:  # nothing is gained by ending the run, too
            run.said.warn(f"what was just saved did not reach the disk: {error}")
        except (UnreadableError, OSError, MemoryError):  # the disk's: asked again at the next save, on all ranks
            is_known = False
    if is_first:
        problem, io.is_proved = run.fabric.broadcast((problem, is_known))
        if problem is not None:
            raise Misuse(problem)
    elif problem is not None:
        run.said.warn(problem)


def _is_to_go_on_from(run: Run) -> bool:
    """Whether what is saved behind a validation in an epoch is a state to go on from: what lies there as the last one is."""
    is_exact, window = point_of(run).is_exact, run.at.window
    if not is_exact:
        run.said.warn(
            f"validated in the middle of a window of accumulate_grad_batches={window}: last.ckpt is not written there, as a"
            " model in parts has gradients then that no checkpoint can hold; write val_check_interval= with a multiple of"
            f" {window}"
        )
    return is_exact


def place_of(run: Run) -> tuple[int, ...]:
    """Where a run stands, to see whether it is where it was saved."""
    return run.at.epochs_done, point_of(run).total_batches, run.at.global_step
