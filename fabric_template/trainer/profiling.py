"""Profiling: Lightning's profilers around hooks and steps; where there is none, nothing is wrapped and nothing is paid."""

from __future__ import annotations

from typing import Any

from ..core.errors import Misuse, MisuseOfType
from ..core.run import Run

_WORDS = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}
_EXPECTED = ", ".join(f'"{word}"' for word in _WORDS)


def make_profiler(asked: Any) -> Any:
    """The profiler that was asked for, by its word or as an object; None for one that does nothing."""
    if isinstance(asked, str):
        if asked.lower() not in _WORDS:
            raise Misuse(
                f"When passing string value for the `profiler` parameter of `Trainer`, it can only be one of {list(_WORDS)}:"
                f" profiler={asked!r}; or give a Lightning profiler"
            )
        from lightning.pytorch import profilers

        return getattr(profilers, _WORDS[asked.lower()])()
    if not callable(getattr(asked, "profile", None)):
        raise MisuseOfType(f"profiler={asked!r}: expected {_EXPECTED} or an object with profile(action_name)")
    return None if type(asked).__name__ == "PassThroughProfiler" else asked


def begin(profiler: Any, run: Run, log_dir: str | None) -> None:
    """Tell the profiler what runs and where its files go."""
    if callable(setup := getattr(profiler, "setup", None)):
        rank = run.fabric.local_rank if run.fabric.world_size > 1 else None
        if hasattr(profiler, "_lightning_module"):  # PyTorchProfiler names its modules; Trainer sets it, too
            profiler._lightning_module = run.trained.model
        setup(stage=run.fn, local_rank=rank, log_dir=log_dir)
    if callable(watch := getattr(profiler, "watch", None)):  # one of ours, for what Lightning has no name for
        watch(run)
