"""Find the files of ``ckpt_path="best"`` and ``"last"`` among those of Lightning's callbacks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..training.hooks import is_instance_of
from .private import last_checkpoints

if TYPE_CHECKING:
    from ..training.run_state import RunState


def default_keyword(loop: Any, run: RunState) -> str | None:
    """Return the keyword of a call without checkpoint: None, or what Trainer chooses by itself."""
    name = run.stage
    on_exception = [c for c in loop.callbacks if is_instance_of(c, "OnExceptionCheckpoint")]
    if name == "fit":
        if on_exception:
            run.warn_once(
                f"`.{name}(ckpt_path=None)` was called without a model. The last model of the previous `fit`"
                f" call will be used. You can pass `{name}(ckpt_path='best')` to use the best model or"
                f" `{name}(ckpt_path='last')` to use the last model. If you pass a value, this warning will"
                " be silenced."
            )
        return "last" if on_exception else None
    chooses = loop.checkpoint_callbacks or loop.config.monitor
    best = getattr(loop.checkpoint_callback, "best_model_path", None)
    if not run.is_last_model or not chooses or not best:
        return None
    tip = "There is also an on-exception checkpoint available, however it is used by default only when fitting."
    run.warn_once(
        f"`.{name}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call"
        f" will be used. {tip + ' ' if on_exception else ''}You can pass `.{name}(ckpt_path='best')` to use"
        f" the best model or `.{name}(ckpt_path='last')` to use the last model. If you pass a value, this"
        " warning will be silenced."
    )
    return "best"


def checkpoint_of_callbacks(loop: Any, keyword: str, run: RunState) -> str | None:
    """Return the path that a keyword means for the checkpoint callbacks; None where there is none yet."""
    name = run.stage
    if keyword == "best":
        callbacks = loop.checkpoint_callbacks
        if len(callbacks) > 1:
            run.warn_once(
                f'`.{name}(ckpt_path="best")` is called with Trainer configured with multiple'
                " `ModelCheckpoint` callbacks. It will use the best checkpoint path from first checkpoint"
                " callback."
            )
        best = getattr(callbacks[0], "best_model_path", None)
        if not best:
            raise no_best_checkpoint(loop, name)
        return best
    found = [path for path in find_last_checkpoints(loop) if os.path.exists(path)]
    if not found and keyword == "last":
        run.warn_once(
            f'.{name}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint'
            " will be loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
        )
    return max(found, key=os.path.getmtime, default=None)


def find_last_checkpoints(loop: Any) -> list[str]:
    """Return the candidates for "last"."""
    found: set[str] = set()
    for callback in loop.callbacks:
        if is_instance_of(callback, "OnExceptionCheckpoint"):
            found.add(callback.ckpt_path)
        elif is_instance_of(callback, "ModelCheckpoint"):
            found |= last_checkpoints(callback, loop)
    return sorted(path for path in found if path)


def no_best_checkpoint(loop: Any, name: str) -> ValueError:
    """Return the error for "best" where nothing keeps a best checkpoint."""
    if loop.config.fast_dev_run:
        return ValueError(
            f'You cannot execute `.{name}(ckpt_path="best")` with `fast_dev_run=True`. Please pass an exact'
            f" checkpoint path to `.{name}(ckpt_path=...)`"
        )
    why = " to save the best model" if loop.checkpoint_callbacks else ""
    return ValueError(
        f'`.{name}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured{why}.'
    )
