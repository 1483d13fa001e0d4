"""Raise the learning rate until the loss blows up, and suggest one from the curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class LearningRateRamp:
    """Callback that raises the learning rate at each optimizer step until the loss blows up."""

    def __init__(self, low: float = 1e-7, high: float = 10.0, steps: int = 100) -> None:
        self.low, self.factor, self.steps = low, (high / low) ** (1 / (steps - 1)), steps
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop schedulers, which may need a validation."""
        for config in trainer.lr_scheduler_configs:
            config.frequency = 10**9

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Set the rate of the optimizer step that this batch belongs to."""
        self.rates.append(self.low * self.factor**trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rates[-1]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
        """Record the loss, and stop if it is not finite or far above the lowest one."""
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))
        lowest = min(self.losses)
        limit = lowest + 4 * max(abs(lowest), self.losses[0] - lowest)
        if not self.losses[-1] <= limit:
            trainer.should_stop = True


def save_curve(rates: list[float], losses: list[float], path: Path) -> float | None:
    """Write the curve as CSV and PNG; return the rate where the smoothed loss falls fastest."""
    from matplotlib.figure import Figure
    from pandas import DataFrame

    curve = DataFrame({"lr": rates, "loss": losses})
    curve["smoothed"] = curve["loss"].rolling(9, center=True, min_periods=1).mean()
    # A loss that blows up can fall steeply, too. It does so after the minimum.
    change = curve["smoothed"].diff().loc[: curve["smoothed"].idxmin()]
    suggestion = float(curve["lr"][change.idxmin()]) if change.min() < 0 else None
    curve.to_csv(path.with_suffix(".csv"), index=False)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = curve.plot(x="lr", logx=True, ax=figure.subplots())
    height = losses[0] - min(losses) or 1.0
    axes.set_ylim(min(losses) - 0.1 * height, losses[0] + height)
    axes.set(xlabel="learning rate", ylabel="training loss")
    if suggestion is not None:
        axes.axvline(suggestion, color="C2", label=f"suggested: {suggestion:.2g}")
        axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=150)
    return suggestion
