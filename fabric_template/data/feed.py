"""Feed: what a run takes its batches from; when loaders are made, and the pass over the training batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.errors import Misuse
from ..core.overrides import TRANSFER_HOOKS, overrides
from ..core.run import Run
from .loaders import USED_UP, Loaders
from .ready import ready
from .transfer import make_transfer


@dataclass
class Given:
    """Where a run's loaders come from: given to the verb, or asked of the datamodule or module."""

    loaders: dict[str, Any]  # by stage
    source: Any

    def has(self, stage: str) -> bool:
        """Whether there is a loader for this stage, asked without making it."""
        return self.loaders.get(stage) is not None or overrides(self.source, f"{stage}_dataloader") is not None


class Feed:
    """The loaders of one run, by stage, and the pass over the training batches that is on.

    Loaders are given to the verb, or the datamodule or module is asked for them: each time that they are due, not before.
    """

    def __init__(self, run: Run, given: Given) -> None:
        self.run, self.given = run, given
        self.train: Loaders | None = None
        self.val: Loaders | None = None  # what is evaluated, in test and predict too
        self.made_in: dict[str, int] = {}  # the epoch in which each stage's loaders were made
        self.was_short = False  # a pass, by what its length says
        self.batches: Any = None  # the pass over the training batches
        self.transfer: Callable[[Any, int], Any] | None = None  # brings a batch to its device; None: it is there
        self.loader_states: list[Any] = []  # of a checkpoint that has no position of ours, until the pass begins

    def _make(self, stage: str) -> Loaders:
        """The stage's loaders, made ready; asked of the datamodule or module anew each time."""
        run, config, source = self.run, self.run.config, self.given.loaders.get(stage)
        origin = f"passed to `Trainer.{run.fn}({loader_argument(run.fn, stage)}=...)`"
        if source is None:
            origin = f"returned from `{type(self.given.source).__name__}.{stage}_dataloader()`"
            make = run.hooks.own(self.given.source, f"{stage}_dataloader")
            source = make and make()
        overfit = bool(config.overfit_batches) and run.fn == "fit"
        may_be_empty = any(
            getattr(part, "allow_zero_length_dataloader_with_multiple_devices", False)
            for part in (run.trained.owner, self.given.source)
        )
        make_ready = partial(ready, fabric=run.fabric, stage=stage, overfit=overfit, may_be_empty=may_be_empty)
        limit = getattr(config, f"limit_{stage}_batches")
        keeps_position = run.fn == "fit" and (config.enable_checkpointing or run.origin.resume_path is not None)
        return Loaders(source, stage, limit, make_ready, origin, bool(keeps_position))

    def _remade(self, stage: str, before: Loaders | None) -> Loaders:
        """The stage's loaders; where they are the very ones as before, so is what is known of them and their workers."""
        made = self._make(stage)
        if before is None or len(made.sources.each) != len(before.sources.each):
            return made
        pairs = zip(made.sources.each, before.sources.each, strict=True)
        return before if all(new.loader is old.loader for new, old in pairs) else made

    def _is_due(self, stage: str) -> bool:
        every = self.run.config.reload_dataloaders_every_n_epochs
        return bool(every) and self.run.at.current_epoch - self.made_in.get(stage, -math.inf) >= every

    # ---- training

    def set_up_train(self) -> None:
        """Make the training loader when there is none yet or it is due to be made again, and begin a pass over it.

        A run that is resumed begins none: `restore_position` does, if the checkpoint is from the middle of one.
        """
        if self.train is not None and not self._is_due("train"):
            return
        run, config = self.run, self.run.config
        if config.limit_train_batches == 0:
            run.at.expect(0)
            return
        before = self.train if run.origin.resume_path is not None else None
        seeds = before.sources.seeds() if before is not None else []  # of the run that goes on
        self.train = self._remade("train", self.train)
        self.train.sources.put_back_seeds(seeds)
        self.made_in["train"] = run.at.current_epoch
        if run.fabric.world_size > 1:
            from .together import train_together

            train_together(run, self.train)
        if run.origin.pending is None:
            if run.at.batches_done:  # another trainer's checkpoint from the middle of an epoch: what was left of it
                self.train.set_epoch(run.at.current_epoch)
            self.start_pass()
        run.at.expect(self.train.num_batches)
        self.train.check_mode()
        run.validation.set_up(run.at.num_batches)
        few = config.log_every_n_steps > run.at.num_batches and not config.fast_dev_run
        if few and run.home.loggers and any(not hasattr(type(logger), "log_epoch") for logger in run.home.loggers):
            run.said.warn(
                f"The number of training batches ({run.at.num_batches}) is smaller than the logging interval"
                f" Trainer(log_every_n_steps={config.log_every_n_steps}). Set a lower value for log_every_n_steps if you want"
                " to see logs for the training epoch."
            )

    def start_pass(self) -> None:
        """Begin a pass over the training batches, or go on with the one that a checkpoint was in."""
        run, loaders = self.run, self.train
        assert loaders is not None
        self.batches = None  # the workers of the pass before go first
        loaders.load_states(self.loader_states)
        self.loader_states = []
        batches: Any = loaders.start(run.at.batches_done, run.at.is_last_batch)
        if loaders.together is not None:
            batches = loaders.together(batches)
        if run.hooks.profiler is not None:
            from ..core.timing import TimedPass

            batches = TimedPass(batches, run.hooks.profiler)
        self.batches = batches
        if run.trained.hands_iterator:
            from ..core.handed import HandedPass

            self.batches = HandedPass(batches, run.at.batches_done, run.metrics.batch_taken)

    def begin_epoch(self) -> None:
        """Begin the epoch's pass. The first epoch's was begun with the loader, where Trainer begins it."""
        if self.run.at.current_epoch > 0:
            self.start_pass()

    def ran_out(self) -> None:
        """The pass is over before its time: no batch is known to be its last one, and there is no other."""
        run, loaders = self.run, self.train
        assert loaders is not None
        kinds = ", ".join(type(loader).__name__ for loader in loaders.loaders)
        if not run.at.batches_done:
            raise Misuse(
                f"the train loader ({kinds}) gave no batch in epoch {run.at.current_epoch}: {USED_UP}, or max_epochs=1"
            )
        run.at.end_pass()
        if not self.was_short:
            self.was_short = True
            lost = run.at.batches_done % run.at.window
            run.said.warn(
                f"the train loader ({kinds}) gave {run.at.batches_done} batches where {run.at.num_batches} were to come (its"
                " len(), or limit_train_batches): that counts as a whole epoch"
                + f", and the gradients of the last {lost} batches are lost"
                * bool(lost)
            )

    def fetched_after(self, done: int) -> int | None:
        """How many batches of the pass were fetched for the first so many steps; None between two passes."""
        if not self.run.at.in_pass:
            return None
        return self.batches.fetched_after(done) if self.run.trained.hands_iterator else done

    def is_quiet(self) -> bool:
        """Whether a batch is fetched without random numbers of this process, as far as one can know."""
        parts = self.run.trained.owner, self.run.trained.datamodule
        return not any(overrides(part, name) for part in parts for name in TRANSFER_HOOKS) and all(
            hasattr(loader, "tensors") or getattr(loader, "num_workers", 0)
            for loader in (self.train.loaders if self.train is not None else ())
        )

    def set_up_transfer(self) -> None:
        """Know how a batch comes to its device: through the datamodule's or module's hooks."""
        run, source, owner = self.run, self.given.source, self.run.trained.owner
        hooks = [run.hooks.own(source, name) or run.hooks.own(owner, name) for name in TRANSFER_HOOKS]
        transfer = make_transfer(run.fabric, run.steps.convert(), hooks)
        if transfer is not None:
            name = f"[Strategy]{type(run.fabric.strategy).__name__}.batch_to_device"
            self.transfer = run.hooks.timed(transfer, name)

    # ---- evaluation

    def set_up_val(self) -> None:
        """Make the validation loaders when there are none yet or they are due to be made again.

        Those of the sanity check serve the first epoch, too; if that does not validate, they are due at once.
        """
        if self.val is None or self._is_due("val"):
            at = self.run.at
            before = at.enter("validate" if at.stage == "train" else at.stage)  # as whoever makes them sees it
            self.val = self._remade("val", self.val)
            at.enter(before)
            self.run.log.seen.clear()
            self._evaluate_together()
            if at.stage != "sanity_check" or self.run.validation.in_this_epoch:
                self.made_in["val"] = at.current_epoch

    def set_up_evaluation(self, stage: str) -> bool:
        """Make the loaders of validate, test or predict, which shuffle by the last epoch; False under a limit of 0: none."""
        run = self.run
        run.trained.net.zero_grad()
        if getattr(run.config, f"limit_{stage}_batches") == 0:
            return False
        self.val = self._make(stage)
        self.val.check_mode()
        self.val.set_epoch(run.at.current_epoch)
        self._evaluate_together()
        run.bar.start(run.fn, sum(self.val.limits))
        return True

    def _evaluate_together(self) -> None:
        """Where steps wait for the other ranks, no rank may have more of them."""
        if self.val is not None and self.run.steps.talks and self.run.fabric.world_size > 1:
            from .together import evaluate_together

            evaluate_together(self.run, self.val)

    # ---- the end

    def close(self) -> None:
        """End the loaders' worker processes; left to the garbage collector they wait for seconds, at any time."""
        if self.batches is not None:
            self.batches.close(self.train.kept() if self.train is not None else ())
        for part in (self.train, self.val):
            if part is not None:
                part.close()
        self.batches = None


def loader_argument(fn: str, stage: str) -> str:
    """By what name a verb takes the loaders of a stage.

    Example:
        >>> loader_argument("fit", "val"), loader_argument("test", "test")
        ('val_dataloaders', 'dataloaders')
    """
    return f"{stage}_dataloaders" if fn == "fit" else "dataloaders"
