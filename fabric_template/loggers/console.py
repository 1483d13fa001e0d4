"""Show a run in a terminal, a log file or a notebook: a progress bar, a table and the results."""

from __future__ import annotations

import html
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..training.hooks import is_instance_of
from .history import train_values_first
from .result_collection import to_numbers

if TYPE_CHECKING:
    from ..training.run_state import RunState

# Draw no more often than a reader can see, because drawing slows training down.
SECONDS_BETWEEN_DRAWS = 0.2
SECONDS_BETWEEN_LINES = 60.0
LOG_FILE_BAR = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
# Limit the rows during a run, because a notebook receives the whole table at each draw.
MAX_NOTEBOOK_ROWS = 20
NO_METRICS = ("epoch", "step", "samples_per_second", "time")


class Console:
    """Show the progress bar and the table of a run on the main process.

    If drawing fails, Console warns, turns the bar off and lets training continue.
    """

    def __init__(self, config: Any, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._table = EpochTable(config.monitor, config.mode)
        self._screen: Screen | None = None
        self._due = math.inf
        self._started, self._first = 0.0, 0
        self._total: int | float = 0
        self._num_eval_batches: int | float = 0

    @contextmanager
    def shown(self, run: RunState) -> Iterator[None]:
        """Show the run until the context exits. An error leaves the bar at the failed batch."""
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self._guard(self._close, run, is_complete)

    def start_epoch(self, run: RunState) -> None:
        self._guard(self._start, run, run.progress.num_train_batches, run.progress.batches_done)

    def start_evaluation(self, run: RunState, num_batches: int | float) -> None:
        """Show the progress of an evaluation. A validation in fit is shown in the epoch's bar."""
        self._num_eval_batches = num_batches
        if run.stage != "fit":
            self._guard(self._start, run, num_batches, 0)

    def add_row(self, row: Mapping[str, Any]) -> None:
        if self._screen is not None:
            self._guard(self._screen.add_row, row)

    def update(self, run: RunState) -> None:
        """Draw the bar if enough time has passed since the last draw."""
        if time.monotonic() >= self._due:
            self._guard(self._draw, run)

    def _guard(self, function: Callable, *args: Any) -> None:
        if not self.is_enabled:
            return
        try:
            function(*args)
        except Exception as error:
            self.is_enabled, self._due = False, math.inf
            if self._screen is not None:
                with suppress(Exception):
                    self._screen.close()
            warnings.warn(
                f"The progress bar is off for the rest of this run: {type(error).__name__}: {error}",
                stacklevel=3,
            )

    def _start(self, run: RunState, total: int | float, first: int) -> None:
        self._total, self._first, self._started = total, first, time.monotonic()
        if self._screen is not None:
            return
        self._screen = make_screen(self._table)
        # In a resumed run, also compare new values with the best values before the resume.
        self._table.earlier = list(run.history.rows)
        self._due = self._started + self._screen.seconds_between_draws
        if not self._screen.is_log_file:
            self._draw(run)

    def _draw(self, run: RunState, is_complete: bool = False) -> None:
        assert self._screen is not None
        progress = run.progress
        done = progress.batches_done if run.stage == "fit" else progress.eval_batches_done
        if run.stage == "fit" and progress.phase == "batch":
            # Do not count the current batch, which may have raised an error.
            done -= 1
        total: int | float | None = None if self._total == math.inf else self._total
        values = [f"{name}={value:.4g}" for name, value in bar_values(run).items()]
        # The keys are the names of tqdm.format_meter's arguments.
        meter = {
            "n": done,
            "total": done if is_complete else total,
            "elapsed": time.monotonic() - self._started,
            "initial": self._first,
            "prefix": self._describe(run, is_complete),
            "postfix": ", ".join(values),
        }
        self._screen.draw(meter)
        self._due = time.monotonic() + self._screen.seconds_between_draws

    def _describe(self, run: RunState, is_complete: bool) -> str:
        """Return the text before the bar, such as "epoch 3/10, validating 2/5"."""
        if run.stage != "fit":
            return run.stage
        if is_complete:
            return format_count(run.progress.epochs_done, "epoch")
        limit = "" if run.stop.max_epochs == -1 else f"/{run.stop.max_epochs}"
        text = f"epoch {run.progress.epochs_done}{limit}"
        if run.progress.stage != "train":
            total = "" if self._num_eval_batches == math.inf else f"/{self._num_eval_batches}"
            text += f", validating {run.progress.eval_batches_done}{total}"
        return text

    def _close(self, run: RunState, is_complete: bool) -> None:
        if self._screen is None:
            return
        if not self._screen.is_log_file:
            self._draw(run, is_complete)
        self._due = math.inf
        reason = end_reason(run) if is_complete and run.stage == "fit" else ""
        if reason and not run.stop.has_max_epochs:
            epoch, step = run.progress.epochs_done - 1, run.progress.global_step
            self._screen.print(f"ended in epoch {epoch}, after step {step}: {reason}")
        self._screen.close()


def bar_values(run: RunState) -> dict[str, float]:
    """Read the values to show beside the bar. Reading a value waits for the device."""
    logs_itself = run.is_lightning_module and (run.results.active or run.results.callback_metrics)
    values = {} if logs_itself else train_values_first(run.results.latest_means())
    values.update(run.results.progress_bar_metrics)
    if run.progress.stage == "train" and run.results.active:
        values.update(to_numbers(run.results.current_values().progress_bar))
    return values


class EpochTable:
    """Format the rows of a run as aligned lines. An asterisk marks each new best value."""

    def __init__(self, monitor: str | None, mode: str) -> None:
        self.monitor, self.mode = monitor or "", mode
        self.rows: list[dict[str, str]] = []
        self.earlier: list[Mapping[str, Any]] = []
        self._widths: dict[str, int] = {}

    def add(self, row: Mapping[str, Any]) -> str:
        """Add a row and return its line, after a header line if the row has new columns."""
        cells = {n: format_value(n, value) for n, value in row.items() if value is not None}
        self.earlier.append(row)
        if self.monitor in cells:
            is_best = best_row(self.earlier, self.monitor, self.mode) is row
            cells[self.monitor] += "*" if is_best else " "
        self.rows.append(cells)
        has_new_columns = not cells.keys() <= self._widths.keys()
        if has_new_columns:
            # Put the columns of this row first, in the row's order, and the time last.
            names = list(dict.fromkeys([*cells, *self._widths]))
            names.sort(key=lambda name: name == "time")
            self._widths = {name: self._widths.get(name, len(name)) for name in names}
        for name, text in cells.items():
            smallest = 8 if name.startswith("lr") else 5
            self._widths[name] = max(self._widths[name], len(text), smallest)
        return self.text(1) if has_new_columns else self._line(cells)

    def text(self, num_rows: int) -> str:
        """Return the header and the last num_rows rows."""
        head = {name: name for name in self._widths}
        return "\n".join(map(self._line, [head, *self.rows[-num_rows:]])) if self.rows else ""

    def _line(self, cells: Mapping[str, str]) -> str:
        padded = [f"{cells.get(name, ''):>{width}}" for name, width in self._widths.items()]
        return "  ".join(padded).rstrip()


class Screen:
    """Write a line per epoch to a log file, and in a long epoch a line per minute."""

    is_log_file = True
    seconds_between_draws = SECONDS_BETWEEN_LINES

    def __init__(self, table: EpochTable) -> None:
        self.table = table

    def draw(self, meter: dict[str, Any]) -> None:
        """Draw the bar. The dict ``meter`` has the arguments of tqdm.format_meter."""
        self.print(tqdm.format_meter(**meter, bar_format=LOG_FILE_BAR))

    def add_row(self, row: Mapping[str, Any]) -> None:
        self.print(self.table.add(row))

    def print(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """End the output of the run."""


class TerminalBar(tqdm):
    """A tqdm bar without a thread, because forking a process with threads can deadlock."""

    monitor_interval = 0


class TerminalScreen(Screen):
    """Keep the bar in the last line of a terminal, below the rows."""

    is_log_file = False
    seconds_between_draws = SECONDS_BETWEEN_DRAWS

    def __init__(self, table: EpochTable) -> None:
        super().__init__(table)
        self._bar = TerminalBar(dynamic_ncols=True)

    def draw(self, meter: dict[str, Any]) -> None:
        bar = self._bar
        bar.n, bar.total, bar.initial = meter["n"], meter["total"], meter["initial"]
        bar.last_print_t = time.time()
        bar.start_t = bar.last_print_t - meter["elapsed"]
        bar.set_description(meter["prefix"], refresh=False)
        bar.set_postfix_str(meter["postfix"])

    def print(self, text: str) -> None:
        self._bar.write(text)

    def close(self) -> None:
        self._bar.close()


class NotebookScreen(Screen):
    """Show the table and the bar as HTML below a cell, where a saved notebook keeps both."""

    is_log_file = False
    seconds_between_draws = SECONDS_BETWEEN_DRAWS

    def __init__(self, table: EpochTable) -> None:
        super().__init__(table)
        self._handle: Any = None
        self._bar = ""
        self._texts: list[str] = []

    def draw(self, meter: dict[str, Any]) -> None:
        # One line with the bar and the values would be wider than a notebook.
        bar = tqdm.format_meter(**{**meter, "postfix": None})
        self._bar = f"{bar}\n{meter['postfix']}".rstrip()
        self._show(MAX_NOTEBOOK_ROWS)

    def add_row(self, row: Mapping[str, Any]) -> None:
        self.table.add(row)

    def print(self, text: str) -> None:
        self._texts.append(text)

    def close(self) -> None:
        self._show(len(self.table.rows))

    def _show(self, num_rows: int) -> None:
        from IPython.display import display

        text = "\n".join(filter(None, [self.table.text(num_rows), self._bar, *self._texts]))
        page = f'<pre style="white-space: pre; font-family: monospace">{html.escape(text)}</pre>'
        data = {"text/html": page, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def make_screen(table: EpochTable) -> Screen:
    """Return a Screen for the place of the output: a notebook cell, a terminal or a log file."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    # A process that a notebook has started cannot write into the cell.
    if getattr(shell, "kernel", None) is not None and multiprocessing.parent_process() is None:
        return NotebookScreen(table)
    return TerminalScreen(table) if sys.stderr.isatty() else Screen(table)


# Summary


def summarize_run(run: RunState, checkpoints: Sequence[Path]) -> dict[str, list[str]]:
    """Summarize a fit in lines of text, keyed by headings such as "trained" and "ended"."""
    config, rows, progress = run.config, run.history.rows, run.progress
    seconds = sum(row["time"] for row in rows)
    data = "" if run.datamodule is None else f" on {type(run.datamodule).__name__}"
    done = f"{format_count(progress.epochs_done, 'epoch')}, {format_count(progress.global_step, 'step')}"
    name = getattr(run.model, "__name__", type(run.model).__name__)
    devices = f", {run.fabric.world_size} processes" if run.fabric.world_size > 1 else ""
    logs = [Path(logger.log_dir, "metrics.csv") for logger in run.history.csv_loggers]
    newest: dict[str, Any] = {}
    for row in rows:
        newest |= row
    metrics = [
        f"{name} {format_value(name, value)}"
        for name, value in newest.items()
        if name not in NO_METRICS and not name.startswith("lr")
    ]
    monitor = config.monitor or ""
    best = best_row(rows, monitor, config.mode)
    best_value = (
        "" if best is None else f"{format_value('', best[monitor])} in epoch {best['epoch']}"
    )
    lines = {
        "trained": [f"{name}{data}: {done}, {format_duration(seconds)}"],
        "ended": [end_reason(run)],
        "at the end": [", ".join(metrics)],
        "best": [f"{monitor} {best_value}" if best_value else ""],
        "device": [f"{run.fabric.device}, {run.fabric.strategy.precision.precision}{devices}"],
        "log": [shorten_path(path) for path in logs if path.is_file()],
        "checkpoint": [shorten_path(path) for path in dict.fromkeys(checkpoints)],
    }
    if any(path.name == "last.ckpt" for path in checkpoints):
        lines["resume"] = ["fit(..., resume='last')"]
    return {heading: texts for heading, texts in lines.items() if texts and texts[0]}


def format_summary(lines: Mapping[str, Sequence[str]]) -> str:
    """Format the summary of a run, with a label before each line."""
    return "\n".join(f"{heading:<12}{text}" for heading, texts in lines.items() for text in texts)


def end_reason(run: RunState) -> str:
    """Return the reason why training ended, or an empty string during training."""
    stop = run.stop
    if stop.signal is not None:
        return signal.Signals(stop.signal).name
    if run.exception is not None:
        return f"{type(run.exception).__name__}: {run.exception}"
    if stop.divergence:
        return stop.divergence
    if stop.has_max_steps:
        return f"max_steps={stop.max_steps} is reached"
    if stop.has_max_epochs:
        return f"max_epochs={stop.max_epochs} is reached"
    if not stop.is_requested:
        return ""
    for callback in run.hooks.callbacks:
        if is_instance_of(callback, "EarlyStopping") and callback.stopped_epoch:
            return f"should_stop was set by EarlyStopping on {callback.monitor!r}"
    return "should_stop was set"


def best_row(
    rows: Sequence[Mapping[str, Any]], monitor: str, mode: str
) -> Mapping[str, Any] | None:
    """Return the first row with the best value of the monitored metric, or None without a value."""
    found = [row for row in rows if not math.isnan(row.get(monitor, math.nan))]
    choose = max if mode == "max" else min
    return choose(found, key=lambda row: row[monitor], default=None)


def format_results(results: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Return the metrics of an evaluation as a table with a column for each loader."""
    import pandas

    loaders = {}
    for index, result in enumerate(results):
        # Remove the loader's index from the name, because the column's header has the index.
        values = {name.split("/dataloader_idx_")[0]: value for name, value in result.items()}
        loaders[f"DataLoader {index}"] = values
    table = (
        pandas.DataFrame(loaders).sort_index().rename_axis(columns=f"{stage} metric".capitalize())
    )
    return "" if table.empty else table.to_string(na_rep="", float_format=str)


def format_value(name: str, value: Any) -> str:
    """Format a value for the tables, as 0.2500, 2.00e-07 (small) or 0.0003 (learning rate)."""
    if isinstance(value, bool) or not isinstance(value, float):
        return " ".join(str(value).split())[:20]
    if name in ("time", "left"):
        return format_duration(value)
    if name == "samples_per_second":
        return f"{value:.0f}"
    if name == "lr" or name.startswith("lr_") or not math.isfinite(value):
        return f"{value:.3g}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def format_duration(seconds: float) -> str:
    """Format a duration, such as "0.3 s", "1:15" or "25:00:00"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside that directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
