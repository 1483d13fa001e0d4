"""Resumed: how a run goes on from where a checkpoint left it, once all its parts are there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ..core.halfway import finish_batch
from ..core.ranks import share_of
from ..core.run import Run
from ..exact.put_back import put_back
from ..exact.randomness import set_rng_state
from ..files import differences
from ..files.fingerprint import of_data
from ..files.restoring import of_this_rank
from ..trainer import averaging


def tell_differences(run: Run) -> None:
    """As the first pass begins: note the data, too, and say what is other than in the run that goes on."""
    _regroup(run)
    run.bookmark.fingerprint |= of_data(run)
    differences.tell_differences(run, run.bookmark.fingerprint)


def _regroup(run: Run) -> None:
    """In the middle of an epoch another number of processes may go on."""
    ours = run.origin.pending
    if not ours or not ours["batch_idx"]:
        return
    were, now = len(ours["ranks"]), run.fabric.world_size
    is_same = were == now and ours.get("shares", were) == share_of(run.fabric)[0]
    if not is_same or "order" in ours:
        from .regroup import regroup

        run.origin.pending, run.bookmark.order = regroup(run, ours)


def stay_finished(run: Run) -> None:
    """Of a finished run everything is as it was at its end."""
    if run.origin.pending is not None and (held := of_this_rank(run, run.origin.pending).get("held")):
        put_back(run, run.bookmark.held, held)
    averaging.end_again(run)


def had_val(run: Run) -> bool:
    """Whether the validation loaders were made by the time of the checkpoint, which says so of some."""
    ours, every = run.origin.pending, run.config.check_val_every_n_epoch
    if ours is None or ours["loaders_epoch"]:
        return ours is not None and "val" in ours["loaders_epoch"]
    before = run.config.num_sanity_val_steps > 0 or every in (None, 1) or run.at.epochs_done >= every
    return of_this_rank(run, ours)["val"] is not None or (before and run.validation.in_this_epoch)


def go_on(run: Run) -> None:
    """Put random numbers, loaders and running sums where the checkpoint left them, as the first epoch begins."""
    feed = run.data
    if had_val(run):
        feed.set_up_val()
    ours = run.origin.take_pending()
    mine = of_this_rank(run, ours)
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
        with _in_order(run):
            feed.start_pass()
        run.history.train.load_state_dict(mine["returned"], run.fabric.device)
    run.metrics.load_state_dict(mine["metrics"], run.fabric.device)
    run.history.returned = dict(ours["returned"])
    run.log.seen = dict(enumerate(ours.get("evaluated", ())))
    averaging.go_on(run)
    run.at.accumulate(ours.get("window") or run.at.window)
    for stage, state in loaders:
        stage.sources.put_back_generators(state)
    if held := mine.get("held"):
        put_back(run, run.bookmark.held, held)
    set_rng_state(mine["rng"])
    finish_batch(run)


def _in_order(run: Run) -> AbstractContextManager[None]:
    """Within, a pass takes its samples in the order that the checkpoint says, if it says one."""
    if run.bookmark.order is None:
        return nullcontext()
    from .regroup import in_order

    return in_order(run, run.bookmark.order)
