"""Set: words of the configuration that are set on a loop after it was made, as on a Trainer; imported where one is."""

from __future__ import annotations

from typing import Any

from ..core.config import LoopConfig


def set_word(loop: Any, name: str, value: Any) -> None:
    """From now on the word has this value: for the run at hand where it is still to be asked, and for those to come.

    Raises:
        Misuse, MisuseOfType: for a value that means nothing, as in the constructor.
    """
    value = getattr(LoopConfig(**{name: value}).resolved(), name)
    run = loop._run if loop._status == "running" else None
    for config in [loop.config] if run is None else [loop.config, run.config]:
        object.__setattr__(config, name, value)  # in place: all that ask it share it
    loop.recipe[name] = value
    if run is not None:
        run.log.every = run.config.log_every_n_steps  # of which the log has a copy of its own
    if run is not None and run.update is not None:
        run.update.set_up()  # which keeps whether there is something to clip


def accumulate(loop: Any, window: int) -> None:
    """So many batches per optimizer step: of the run at hand, or of the next one."""
    if loop._run is not None:
        loop._run.at.accumulate(window)
    if loop._status != "running":
        set_word(loop, "accumulate_grad_batches", window)


def set_profiler(loop: Any, profiler: Any) -> None:
    """The profiler of the runs to come."""
    from .profiling import make_profiler

    loop.own_profiler = None if profiler is None else make_profiler(profiler)
