"""FabricLoop: fit, validate, test, predict. The page to read first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from .core.config import parse_config
from .core.errors import Misuse, MisuseOfType
from .core.evaluate import evaluate, predict, print_results
from .core.run import Run
from .core.schedulers import step_schedulers
from .files.fingerprint import tell_differences
from .files.noticed import Noticed
from .files.opening import is_file
from .process.finished import heeds_time, time_left
from .process.launch import launch
from .process.parts import Parts
from .process.place import files_settled, make_loggers, with_safe_files
from .process.prepare import prepare
from .process.session import Session, finish_batch, heed_signals, restore_position, start_fit, stay_finished, stop_for
from .process.signals import Signals, is_launched
from .record.bar import is_interactive
from .trainer.attributes import TrainerFace
from .trainer.callbacks import parse_callbacks
from .trainer.profiling import make_profiler
from .trainer.strategies import as_fabrics
from .trainer.views import StrategyFace


class FabricLoop(Parts, TrainerFace):
    """A training loop on Lightning Fabric with Trainer's words and Trainer's numbers.

    Args:
        fabric: a ready lightning.Fabric, or give Fabric's own arguments (not both):
        accelerator, strategy, devices, num_nodes, precision, plugins, loggers: see lightning.Fabric.
        callbacks: Lightning's or your own; an object with methods named like hooks.
        **config: the fields of LoopConfig, such as max_epochs=10.

    Raises:
        TypeError: for words that mean nothing.
        Misuse, MisuseOfType: for values that do not, all at once.

    Example:
        >>> from fabric_template import FabricLoop, TensorLoader
        >>> net = torch.nn.Linear(2, 1)
        >>> data = TensorLoader(torch.ones(8, 2), torch.zeros(8, 1), batch_size=4)
        >>> words = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        >>> loop = FabricLoop(accelerator="cpu", max_epochs=2, **words)
        >>> history = loop.fit(
        ...     net, data, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        ...     training_step=lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1]),
        ... )
        >>> list(history.columns)
        ['epoch', 'step', 'train_loss', 'lr', 'time']
    """

    def __init__(
        self, fabric: Fabric | None = None, *, accelerator: Any = "auto", strategy: Any = "auto", devices: Any = "auto",
        num_nodes: int = 1, precision: Any = None, plugins: Any = None, loggers: Any = None, callbacks: Any = None,
        **config: Any,
    ) -> None:  # fmt: skip
        given = parse_config(config)
        self.config = given.resolved()
        words = {"accelerator": accelerator, "strategy": as_fabrics(strategy), "devices": devices, "num_nodes": num_nodes,
                 "precision": precision, "plugins": plugins}  # fmt: skip
        if fabric is not None:
            if isinstance(fabric, type) or not all(hasattr(fabric, name) for name in ("launch", "setup", "strategy")):
                what = f"the class {fabric.__name__}" if isinstance(fabric, type) else f"a {type(fabric).__name__}"
                raise MisuseOfType(
                    f"FabricLoop(fabric) got {what}: expected a ready lightning.Fabric, FabricLoop(Fabric(devices=2)); all"
                    " other words are given by name, as in FabricLoop(max_epochs=10, accelerator='cpu')"
                )
            defaults = {"accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1}
            if both := [word for word, value in words.items() if value != defaults.get(word)]:
                raise Misuse(f"FabricLoop got a ready fabric and {', '.join(both)}: give these to Fabric itself")
        if loggers is not None and given.logger is not None:
            raise Misuse("FabricLoop got logger and loggers: expected one of them (Trainer's word or Fabric's)")
        self.fabric = with_safe_files(fabric if fabric is not None else Fabric(**words), self.config.trusted)
        self.callbacks = parse_callbacks(callbacks, given)
        self.default_root_dir = os.fspath(self.config.default_root_dir or os.getcwd())
        self.loggers, self._own_logger = make_loggers(self.config, loggers, self.fabric)
        self.own_profiler = make_profiler(self.config.profiler)
        self._strategy_face = StrategyFace(self)
        self._run, self._runs = None, {}
        self._status = "initializing"
        if self.config.seed is not None:  # for a model that is made after the loop; fit seeds once more
            Fabric.seed_everything(self.config.seed, workers=True, verbose=False)

    # ---- the four verbs

    def fit(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        resume: str | Path | None = None, load: str | Path | None = None, optimizer: Any = None,
        training_step: Callable | None = None, validation_step: Callable | None = None, *, ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> Any:  # fmt: skip
        """Train; hooks fire where they stand here::

            check everything; launch the processes
            prepare_data, setup, configure_model; configure_optimizers; on_fit_start
            a few validation batches, to see that they run
            on_train_start
            until max_epochs, max_steps, max_time or should_stop:
                on_train_epoch_start
                for each batch:
                    on_train_batch_start
                    training_step, backward; at the end of a window clip, step    # update.py
                    schedulers by step; after the last batch those by epoch
                    on_train_batch_end
                    validate, if due                                             # evaluate.py
                on_train_epoch_end; schedulers that follow a metric
                one row of metrics.csv; last.ckpt and best.ckpt
            on_train_end, on_fit_end, teardown

        Args:
            model: a LightningModule, an nn.Module or object with step methods, or an nn.Module with step functions.
            train_dataloaders: an iterable of batches; a list or dict of them; or a datamodule.
            val_dataloaders: an iterable of batches, or several.
            datamodule: in the loaders' place.
            resume: a checkpoint to go on from, exactly: a path, "last", "best", or "auto" (the newest good one, if any).
            load: a checkpoint to take the weights from.
            optimizer: whatever configure_optimizers may return, for modules that have none.
            training_step: ``fn(model, batch)`` or ``fn(model, batch, batch_idx)``, returns the loss.
            validation_step: the same; returns a loss, a pair (loss, acc) or a dict.
            ckpt_path: Trainer's word for resume; for load in the other verbs.
            weights_only: Trainer's word: False trusts this call's file, as trusted=True of the loop does any.

        Returns:
            The history, a pandas DataFrame with the rows of metrics.csv: one per epoch.
        """  # noqa: D401
        functions = {"training_step": training_step, "validation_step": validation_step}
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        run = prepare(self, "fit", model, loaders, datamodule, resume=resume, load=load, optimizer=optimizer,
                      functions=functions, ckpt_path=ckpt_path, weights_only=weights_only)  # fmt: skip
        launch(self, self._fit, run)
        return run.history.frame()

    def validate(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, load: str | Path | None = None,
        verbose: bool = True, *, validation_step: Callable | None = None, ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Run validation_step over the loaders; returns what was logged, a dict for each loader."""
        run = prepare(self, "validate", model, {"val": dataloaders}, datamodule, load=load, ckpt_path=ckpt_path,
                      functions={"validation_step": validation_step}, weights_only=weights_only)  # fmt: skip
        return self._evaluate(run, "val", verbose)

    def test(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, load: str | Path | None = None,
        verbose: bool = True, *, test_step: Callable | None = None, ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Run test_step over the loaders; returns what was logged, a dict for each loader."""
        run = prepare(self, "test", model, {"test": dataloaders}, datamodule, load=load, ckpt_path=ckpt_path,
                      functions={"test_step": test_step}, weights_only=weights_only)  # fmt: skip
        return self._evaluate(run, "test", verbose)

    def predict(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        load: str | Path | None = None, *, predict_step: Callable | None = None, ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """Run predict_step (or forward) over the loaders; returns the outputs by batch, on the CPU."""
        run = prepare(self, "predict", model, {"predict": dataloaders}, datamodule, load=load, ckpt_path=ckpt_path,
                      functions={"predict_step": predict_step}, weights_only=weights_only)  # fmt: skip
        return launch(self, self._predict, run, return_predictions is not False).results

    # ---- training

    def _fit(self, fabric: Fabric, run: Run) -> Any:
        together = fabric.world_size > 1 and torch.distributed.is_initialized()
        signals = run.signals = Signals(together, patience=1.0 if is_launched(fabric) else 0.0)
        listening = ExitStack()
        listening.enter_context(files_settled(fabric))
        if together:  # alone, a signal ends the set-up at once; here the others would wait for ever
            listening.enter_context(signals)
        with listening, Session(self, run), torch.autograd.set_detect_anomaly(run.config.detect_anomaly):
            start_fit(self, run)
            self._sanity_check(run)
            heed_signals(run)
            if not together:
                listening.enter_context(signals)
            with torch.enable_grad():
                self._train(run)
            listening.close()
            stop_for(run, signals.agreed)

    def _train(self, run: Run) -> None:
        """Epoch after epoch, until there is a reason to stop."""
        signals = run.signals
        run.feed.set_up_train()
        if (run.done() and not run.was_cut_short) or run.config.limit_train_batches == 0:
            if run.resume_path is not None:
                stay_finished(run, self)
            if run.saver is not None:
                run.saver.nothing_to_do(run)
            return
        tell_differences(run)
        if run.schedule.in_this_epoch:
            run.feed.set_up_val()
        run.trains_since = time.monotonic()
        if (left := time_left(run)) is not None:
            signals.deadline = run.trains_since + left
        run.schedule.start_clock()
        run.metrics.start(run.metrics.train)
        run.hooks.call("on_train_start")
        run.noticed = Noticed(run)
        while (run.was_cut_short or not run.done()) and signals.agreed is None:
            run.hooks.timed(self._train_epoch, "run_training_epoch")(run)
            run.should_stop |= run.is_late
        if run.saver is not None:
            run.saver.finish(run, interrupted=signals.agreed is not None)
        if signals.agreed is None or is_interactive():
            run.hooks.call("on_train_end")

    def _train_epoch(self, run: Run) -> None:
        """One epoch: every batch of a pass, then its end."""
        hooks, metrics, config, feed, signals = run.hooks, run.metrics, run.config, run.feed, run.signals
        logs, limited = metrics.enabled, config.max_steps != -1
        starts, ends = hooks.heard("on_train_batch_start"), hooks.heard("on_train_batch_end")
        if run.restored is not None:
            restore_position(run)
            finish_batch(run, self._validate)
        if run.starts_epoch():
            feed.set_up_train()
            feed.train.set_epoch(run.current_epoch)
            hooks.call("on_train_epoch_start")
            feed.begin_epoch()
        validates, due, hands = run.schedule.in_this_epoch, run.schedule.due, run.hands_iterator
        train_batch, transfer, bar, num_batches = run.train_batch, run.transfer, run.bar, feed.num_batches
        shows, checks, saves = bar.enabled, signals.checks, run.saver is not None and config.save_every_n_steps
        bar.start(f"epoch {run.current_epoch}", num_batches, run.batches_done)

        for batch in (batches := feed.batches):
            run.is_last_batch = batches.is_last
            if transfer is not None:
                batch = transfer(batch, 0)
            batch_idx = run.batches_done
            run.batches_done += 1
            run.total_batches += 1
            if logs:
                metrics.batch_starts(batch)
            if skips := batch is None and not hands:  # the batch still counts, as under Trainer
                run.warn_once("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            elif starts and hooks.call("on_train_batch_start", batch, batch_idx) == -1:  # leave out the rest
                run.is_last_batch = True
                self._step_schedulers(run)
                break
            last = run.is_last_batch or batch_idx + 1 == num_batches
            accumulates = not last and (batch_idx + 1) % run.window != 0
            outputs = None if skips else train_batch(batch, batch_idx, not accumulates)
            if hands:  # the step has taken its batches itself
                batch = batches.handed.latest[0]
            if run.schedulers and not accumulates:
                self._step_schedulers(run)
            if ends:
                hooks.call("on_train_batch_end", outputs, batch, batch_idx)
            if logs:
                metrics.batch_ends()
                if metrics.train.any_on_step and not accumulates:
                    run.record.step()
            if shows:
                bar.advance(batch_idx + 1)
            validated = validates and due()
            if validated:
                self._validate(run)
            if not accumulates:
                if run.schedulers:
                    step_schedulers(run, "step", plateau=True)
                run.batches_that_stepped += 1
                if checks and not last and signals.check(run.total_batches) and heeds_time(run):
                    self._cut_short(run, validates and not validated)
            if last or (limited and run.steps_done) or (run.should_stop and run.may_stop):
                break
            if not accumulates:
                if signals.agreed is not None:
                    return
                if saves:
                    run.saver.save_step(run)
        else:
            if not (run.is_last_of_epoch or run.stops):
                feed.ran_out()
                self._end_pass(run, validates)
        if run.saver is not None and not run.is_last_of_epoch:
            run.saver.cut_short(run)
        self._end_epoch(run)

    def _cut_short(self, run: Run, validates: bool) -> None:
        """Time is over (max_time): saved here, to go on exactly; then the epoch ends as a whole one does."""
        if run.saver is not None:
            run.saver.cut_short(run)
        run.should_stop = True
        if validates:
            self._validate(run)

    def _end_pass(self, run: Run, validates: bool) -> None:
        """No batch was known to be the last one: what comes after that comes now."""
        run.record.note_rates()
        step_schedulers(run, "epoch", plateau=False)
        if validates and run.schedule.due_at_end():
            self._validate(run)

    def _step_schedulers(self, run: Run) -> None:
        """After an update: schedulers by step; after the epoch's last batch, those by epoch."""
        if run.is_last_of_epoch or run.steps_done:
            run.record.note_rates()
        step_schedulers(run, "step", plateau=False)
        if run.is_last_of_epoch:
            step_schedulers(run, "epoch", plateau=False)

    def _end_epoch(self, run: Run) -> None:
        """Hooks, metrics, schedulers that follow them, the row, the checkpoint."""
        run.metrics.batches_end()
        run.history.end_train(run.total_batches - 1, run.all_reduce)
        if run.saved_in != "on_train_epoch_end":  # resumed from a file that a callback saved there: they were called
            run.hooks.call_epoch_end("on_train_epoch_end")
        run.saved_in = None
        run.metrics.merge()
        if run.is_last_of_epoch:
            step_schedulers(run, "epoch", plateau=True)
        score = run.score()
        run.record.epoch(run.metrics.merge())
        run.metrics.epoch_ends()
        run.end_epoch()
        # before it is saved how late it is
        run.is_late = run.signals.check(run.total_batches, now=True) and heeds_time(run)
        if run.saver is not None:
            run.saver.save_epoch(run, score)
            run.check_monitor(score)

    def _validate(self, run: Run) -> None:
        """A validation inside the training epoch."""
        feed = run.feed
        if not run.accumulates:
            run.clear_gradients()
        kept, before = run.metrics.pause(), run.measured()
        feed.set_up_val()
        feed.val.set_epoch(run.current_epoch)
        evaluate(run, feed.val, "validate")
        score = None if run.measured() is before else run.score()
        run.metrics.resume(kept)
        if run.saver is not None:
            run.saver.save_validation(run, score)
        run.has_validated = True
        run.schedule.start_clock()

    def _sanity_check(self, run: Run) -> None:
        """A few validation batches before training; random numbers and metrics are as before afterwards."""
        if not run.schedule.validates or run.config.num_sanity_val_steps == 0 or run.resume_path is not None:
            return
        with run.isolated_rng():
            run.stage = "sanity_check"
            run.hooks.call_callbacks("on_sanity_check_start")
            run.feed.set_up_val()
            run.feed.val.set_epoch(run.current_epoch)
            evaluate(run, run.feed.val, "sanity_check", most=run.config.num_sanity_val_steps)
            run.hooks.call_callbacks("on_sanity_check_end")
            run.metrics.forget()
            run.history.val.reset()
            run.stage, run.evaluated = "train", 0

    # ---- evaluation

    def _evaluate(self, run: Run, stage: str, verbose: bool) -> list:
        results = launch(self, self._run_evaluation, run, run.fn, stage).results
        if verbose and self.fabric.is_global_zero:
            print_results(results, run.fn)
        return results

    def _run_evaluation(self, fabric: Fabric, run: Run, fn: str, stage: str) -> list[dict]:
        with Session(self, run):
            run.metrics.name_metrics(run.net)
            run.transfer = run.make_transfer()
            due = run.feed.set_up_evaluation(stage)
            return evaluate(run, run.feed.val, fn, inference=run.inference()) if due else []

    def _predict(self, fabric: Fabric, run: Run, keep: bool) -> Any:
        with Session(self, run):
            run.transfer = run.make_transfer()
            due = run.feed.set_up_evaluation("predict")
            return predict(run, run.feed.val, keep, run.inference()) if due else None

    def __getstate__(self) -> dict[str, Any]:
        """Without the last runs: their parts belong to this process."""
        return {**vars(self), "_run": None, "_runs": {}}

    def checkpoint_path(self, word: str) -> Path | None:
        """The "last" or "best" checkpoint that this loop, or a ModelCheckpoint among its callbacks, has saved."""
        path = getattr(self.checkpoint_callback, f"{word}_model_path", "")
        return Path(path) if path and is_file(path) else None
