"""Predicted: what a prediction collects."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities import move_data_to_device

from .functions import takes_iterator
from .overrides import is_a
from .run import Run


class Predictions:
    """What a prediction collects: what its step returns, and of which samples, for callbacks that write them."""

    looks = False
    batch_taken = None

    def __init__(self, run: Run, several: bool, keep: bool) -> None:
        self.run, self._several, self._keep = run, several, keep
        writers = [callback.interval for callback in run.hooks.callbacks if is_a(callback, "BasePredictionWriter")]
        self._keeps = keep or any(interval.on_epoch for interval in writers)
        self._notes = bool(writers) and not takes_iterator(getattr(run.trained.owner, "predict_step", None))
        run.predicted.made = [[] for _ in run.data.val.loaders]
        run.predicted.indices = [[] for _ in run.data.val.loaders]

    def batch_starts(self, batch: Any, loader: int | None) -> None:
        """Note which samples of the dataset a batch has; none when the loader's sampler did not note them."""
        if self._notes:
            index = loader or 0
            sampler = getattr(self.run.data.val.loaders[index], "batch_sampler", None)
            seen = getattr(sampler, "seen_batch_indices", None)
            if not seen:
                self.run.said.warn(
                    "Couldn't infer the batch indices fetched from your dataloader: a BasePredictionWriter gets none;"
                    " expected a DataLoader with a batch sampler"
                )
            noted = self.run.predicted.indices[index]
            noted.append(seen[len(noted)] if seen else [])

    def end_batch(self, output: Any, index: int) -> None:
        """Keep it, on the CPU."""
        if output is None:
            self.run.said.warn("predict returned None if it was on purpose, ignore this warning...")
        if self._keeps:
            self.run.predicted.made[index].append(move_data_to_device(output, "cpu"))

    def end_loader(self) -> None:
        """Nothing is summed up."""

    end_pass = end_epoch = end_loader

    def results(self) -> Any:
        """What was predicted, by batch; by loader, if there are several."""
        made = self.run.predicted.made
        return None if not self._keep else made if self._several else made[0]
