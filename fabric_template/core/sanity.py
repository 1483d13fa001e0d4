"""Sanity: a few validation batches before training, to see that they run."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .evaluate import evaluate
from .run import Run


def check_sanity(run: Run, isolated: AbstractContextManager) -> None:
    """Validate a little; random numbers (``isolated``) and metrics are as before afterwards."""
    steps = run.config.num_sanity_val_steps
    if not run.validation.validates or steps == 0 or run.origin.resume_path is not None:
        return
    with isolated:
        before = run.at.enter("sanity_check")
        run.hooks.call_callbacks("on_sanity_check_start")
        run.data.set_up_val()
        run.data.val.set_epoch(run.at.current_epoch)
        evaluate(run, "sanity_check", most=steps, keep=False)
        run.hooks.call_callbacks("on_sanity_check_end")
        run.metrics.forget()
        run.history.val.reset()
        run.at.begin_evaluation(before)
