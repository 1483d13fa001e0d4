"""Log: what a run writes down: values per step and rows per epoch, to the CSV and to any other logger."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.outputs import name_outputs
from ..core.run import Run
from .loggers import Loggers, rows_state

if TYPE_CHECKING:
    from .screen import Screen

_NONE: Mapping[str, Any] = {}


class Log:
    """Sends what was logged where it belongs, and knows what can be monitored."""

    def __init__(self, run: Run) -> None:
        self.run, self.history = run, run.history
        self.metrics = run.metrics
        self.every = run.config.log_every_n_steps
        self.loggers = Loggers(run)
        self.began = time.monotonic()
        self.rates: list[float] = []
        self.screen: Screen | None = None  # where the rows are seen, too
        self.seen: dict[int, int] = {}  # evaluation batches by loader, for the step of their log
        self.seen_before: dict[int, int] = {}  # the same, as the evaluation at hand began

    # ---- a batch

    def size_of_batch(self) -> int:
        """The size of the batch at hand; 1 where none can be found. Where its tensors do not agree, what the step has said."""
        active = self.metrics.active
        if active.batch_size is None and active.said_size is not None:
            from .sizes import batch_size_of

            return batch_size_of(active.batch, active.said_size)
        try:
            return active.batch_size or active.size_of_batch()
        except ValueError:
            return 1

    def note_returned(self, output: Any, loss: Tensor) -> None:
        """Keep what the training step returned, for the history and to notice a loss that is no number."""
        named_itself = self.run.trained.is_lightning and self.metrics.active  # the rest, by logging it
        only_loss = isinstance(output, Tensor) or named_itself
        values = {"train_loss": loss} if only_loss else name_outputs(output, "train")
        self.history.train.add(values, self.size_of_batch(), self.run.at.total_batches - 1)

    def end_batches(self) -> None:
        """The epoch's batches are over: its means are known."""
        self.metrics.batches_end(seen=self.run.validation.ran_behind == self.run.at.total_batches)
        self.history.end_train(self.run.at.total_batches - 1, self.all_reduce)

    def evaluated(self, index: int) -> None:
        """After an evaluation batch of this loader: values that are logged per step."""
        if self.run.at.evaluated <= 1:
            self.seen_before = dict(self.seen)
        seen = self.seen.get(index, 0)
        self.seen[index] = seen + 1
        if self.metrics.active.any_on_step:
            self.values(self.metrics.views()[1], seen)

    @property
    def all_reduce(self) -> Callable[..., Any] | None:
        """How to reduce over the ranks; None for one process."""
        fabric = self.run.fabric
        return fabric.all_reduce if fabric.world_size > 1 else None

    # ---- what can be monitored

    def known_metrics(self) -> dict[str, Any]:
        """What can be monitored now: the logged metrics, and what the steps of a module that logs nothing returned."""
        if self.metrics.active:
            self.metrics.merge()
        return {**self.history.returned, **self.metrics.callback}

    def measured(self) -> Any:
        """The monitor's newest value as it was made, None where there is none."""
        return {**self.history.returned, **self.metrics.callback}.get(self.run.config.monitor or "")

    def beside_bar(self) -> dict[str, Any]:
        """What was logged for the bar; of a module that logs nothing, what its steps return."""
        run = self.run
        if run.metrics.active:
            run.metrics.merge()
        logs = run.trained.is_lightning and run.metrics.callback
        return run.metrics.progress if logs else run.history.latest() | run.metrics.progress

    def score(self) -> float | None:
        """The monitor's value for checkpoints; None where none are kept, or where this epoch did not measure it."""
        monitor = self.run.config.monitor
        if monitor is None or not self.run.keeper.keeps:
            return None
        value = self.known_metrics().get(monitor)
        return None if value is None else float(value)

    # ---- to the loggers

    def step(self) -> None:
        """As a window ends: the step's values, when they are due."""
        run = self.run
        due = self.every and (run.at.batches_that_stepped + 1) % self.every == 0
        if due or (run.stop.should_stop and self.every):
            self.values(run.metrics.views()[1])
            run.history.warn_of_nan(run.at.total_batches - 1)

    def values(
        self, metrics: Mapping[str, Any], step: int | None = None, by_row: bool = True, more: Mapping[str, Any] = _NONE,
        behind: int = 0,
    ) -> None:  # fmt: skip
        """Values at one step, and more for our CSV; None: at a logged "step", or where the run stands, beside the epoch.

        Or so many steps ``behind`` that.
        """
        run = self.run
        if not (metrics or (more and by_row)) or not run.home.loggers:
            return
        run.metrics.logged.update(metrics)
        scalars = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if step is None and "step" in scalars:  # a logged "step" is the x axis
            step = int(scalars.pop("step"))
        elif step is None:
            scalars.setdefault("epoch", run.at.current_epoch)
            step = run.at.batches_that_stepped - behind
        self.loggers.values(scalars if metrics else None, {**more, **scalars} if by_row else None, step)

    def validation(self, metrics: Mapping[str, Any], returned: Mapping[str, Any]) -> None:
        """A validation is over; in the middle of an epoch its values, those returned, too, are a row of the steps."""
        run, is_inside = self.run, not self.run.at.is_last_of_epoch
        self.values(metrics, by_row=is_inside, more=returned)
        if self.screen is not None and run.fn == "fit" and is_inside and not run.stop.is_asked:
            place = {"epoch": run.at.current_epoch, "step": run.at.global_step, **run.history.train.means()}
            found = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
            self.screen.row({**place, **found, "time": time.monotonic() - self.began}, None)

    def note_rates(self) -> None:
        """The learning rates of the step just taken, before a scheduler of the epoch changes them."""
        self.rates = self.run.optimizing.learning_rates()

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """The epoch is over: Trainer's values for the others, one whole row for the CSV and the history."""
        run = self.run
        returned = {} if run.trained.is_lightning else run.history.returned  # a plain module's values are its metrics
        others = tuple(f"{name}_" for name in (run.data.val.names if run.data.val else ()))  # such as "train_again"
        trained = {k: value for k, value in returned.items() if k.startswith("train_") and not k.startswith(others)}
        self.values({**trained, **metrics}, by_row=False, behind=1)  # the epoch's values stand at its last step
        seconds, self.began = time.monotonic() - self.began, time.monotonic()
        rates = self.rates or run.optimizing.learning_rates()
        row = run.history.add(run.at.current_epoch, run.at.global_step, run.metrics.take_row(), rates, seconds)
        self.rates = []
        if self.screen is not None:
            from .screen import seconds_left

            self.screen.row(row, seconds_left(run, row))
        self.loggers.row(row)

    # ---- across a restart

    def rows_state(self) -> dict[str, Any]:
        """Where the rows so far are, for a checkpoint."""
        return rows_state(self.run)
