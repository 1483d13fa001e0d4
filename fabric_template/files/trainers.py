"""Trainers: a checkpoint that Trainer wrote, as our counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def counters_of(checkpoint: Mapping[str, Any], window: int) -> dict[str, Any]:
    """Where Trainer stood when it wrote this file: it saves in the middle of its own bookkeeping."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    epoch = fit.get("epoch_progress", {}).get("current", {})
    batches = fit.get("epoch_loop.batch_progress", {})
    epochs_done = epoch.get("processed", int(checkpoint.get("epoch", -1)) + 1)
    current = batches.get("current", {})
    ready, done = current.get("ready", 0), current.get("processed", 0)
    is_last = batches.get("is_last_batch") and ready == done  # and not only at hand
    # one that is ready and no more is in on_train_epoch_start, its batches those of the epoch before
    is_open = epoch.get("started", epoch.get("ready", 0)) > epoch.get("processed", 0)
    if ready and not is_open and not is_last:  # max_steps ended the epoch in its middle
        epochs_done, is_open = epochs_done - 1, True
    batches_done = done if is_open else 0
    if is_open and is_last:  # saved in validation, after the last batch
        epochs_done, batches_done = epochs_done + 1, 0
    stepped = fit.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", int(checkpoint.get("global_step", 0)))
    if is_open and ready == done and batches_done % window == 0:  # it counts a step after the hooks behind a batch
        stepped += 1
    return {
        "epoch": epochs_done,
        "batch_idx": batches_done,
        "total_batches": batches.get("total", {}).get("processed", 0),
        "batches_that_stepped": stepped,
        "steps_in_epoch": batches_done // window,
        "is_last_batch": False,
    }
