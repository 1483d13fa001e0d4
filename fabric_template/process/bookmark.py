"""Bookmark: what a checkpoint knows of a run beside the states of its parts, and how the run goes on from there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..core.ranks import share_of
from ..core.run import Run
from ..exact.held import Held
from ..exact.randomness import set_rng_state
from ..files.checkpoint import of_this_rank
from ..files.fingerprint import fingerprint, of_data, tell_differences
from ..files.noticed import Noticed, tell_forgotten


class Bookmark:
    """Where a run goes on, and what it must find there."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.held = Held(run)
        self.noticed: Noticed | None = None  # once training has begun
        self.fingerprint: dict[str, Any] = {}  # what the run is made of
        self.order: Tensor | None = None  # of the samples in the epoch that a checkpoint was in, where no seed tells it

    def note_parts(self) -> None:
        """Note what the run is made of before callbacks change it, as its optimizers are made."""
        self.fingerprint = fingerprint(self._run)
        self.held.set_up_optimizers()

    def tell_differences(self) -> None:
        """As the first pass begins: note the data, too, and say what is other than in the run that goes on."""
        self._regroup()
        self.fingerprint |= of_data(self._run)
        tell_differences(self._run, self.fingerprint)

    def _regroup(self) -> None:
        """In the middle of an epoch another number of processes may go on."""
        run, ours = self._run, self._run.origin.pending
        if not ours or not ours["batch_idx"]:
            return
        were, now = len(ours["ranks"]), run.fabric.world_size
        is_same = were == now and ours.get("shares", were) == share_of(run.fabric)[0]
        if not is_same or "order" in ours:
            from .regroup import regroup

            run.origin.pending, self.order = regroup(run, ours)

    def order_state(self) -> dict[str, Any]:
        """The order of the epoch's samples, as long as that epoch is on."""
        at = self._run.at
        if self.order is None or at.between_epochs:
            self.order = None
            return {}
        return {"order": {"epoch": at.epochs_done, "samples": self.order}}

    def training_begins(self) -> None:
        """Notice from now on what changes."""
        self.noticed = Noticed(self._run)

    def stay_finished(self) -> None:
        """Of a finished run that is resumed everything is as it was at its end."""
        run = self._run
        if run.origin.resume_path is None:
            return
        if run.origin.pending is not None and (held := of_this_rank(run, run.origin.pending).get("held")):
            self.held.put_back(held)
        from ..trainer.averaging import end_again

        end_again(run)

    def _in_order(self) -> AbstractContextManager[None]:
        if self.order is None:
            return nullcontext()
        from .regroup import in_order

        return in_order(self._run, self.order)

    def go_on(self) -> None:
        """Put random numbers, loaders and running sums where the checkpoint left them, as the first epoch begins."""
        from ..core.halfway import finish_batch

        run, feed = self._run, self._run.data
        ours = run.origin.take_pending()
        mine = of_this_rank(run, ours)
        if mine["val"] is not None or "val" in ours["loaders_epoch"]:  # it was made by then
            feed.set_up_val()
        if ours["loaders_epoch"]:  # what was made for this process alone is due when it was due then
            feed.made_in = dict(ours["loaders_epoch"])
        both = ((feed.train, mine["train"]), (feed.val, mine["val"]))
        loaders = [(stage, state) for stage, state in both if state is not None]
        for stage, state in loaders:
            stage.sources.resume(state)
        if run.at.in_pass:
            if mine["train"] is None and len(feed.loader_states) < len(feed.train.loaders):
                run.said.warn(
                    "resume: the checkpoint does not say which batches of its epoch are done (it is of a run with"
                    " enable_checkpointing=False): the rest of the epoch trains on batches of a new pass"
                )
            feed.train.set_epoch(run.at.current_epoch)
            with self._in_order():
                feed.start_pass()
            run.history.train.load_state_dict(mine["returned"], run.fabric.device)
        run.metrics.load_state_dict(mine["metrics"], run.fabric.device)
        run.history.returned = dict(ours["returned"])
        from ..trainer.averaging import go_on

        go_on(run)
        run.at.accumulate(ours.get("window") or run.at.window)
        for stage, state in loaders:
            stage.sources.put_back_generators(state)
        if held := mine.get("held"):
            self.held.put_back(held)
        if self.noticed is not None:
            tell_forgotten(run, self.noticed, ours.get("noticed") or {})
        set_rng_state(mine["rng"])
        finish_batch(run)
