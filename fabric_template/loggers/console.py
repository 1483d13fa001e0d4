"""Show a run's progress bar, table and results in a terminal, a log file or a notebook."""

from __future__ import annotations

import html
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..distributed.signals import find_shell
from ..lightning_compat.overrides import is_instance_of
from .result_collection import to_numbers
from .row import train_values_first

if TYPE_CHECKING:
    from ..training.run import Run

# Drawing the progress bar slows training, so do not draw it more often than users can notice.
SECONDS_BETWEEN_DRAWS = {"terminal": 0.2, "notebook": 0.2, "log file": 60.0}
LOG_FILE_BAR = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
# The minimum width of the progress bar in characters. A narrow terminal shows fewer metrics to
# keep this width.
MIN_BAR_WIDTH = 10
# Each redraw sends all lines to the notebook, so limit the table to its newest rows.
MAX_NOTEBOOK_LINES = 20
# The last columns of the table. "waiting" is shown only if training often waits for batches.
CLOCKS = ("time", "waiting", "gpu_memory")
NO_METRICS = ("epoch", "step", "samples_per_second", *CLOCKS)


class Console:
    """Shows a run's progress bar and its table of metrics, in the main process only.

    The progress bar is on the last line of a terminal, or below the metrics table in a notebook. A
    log file gets one line per table row and, in long epochs, one progress line per minute. If
    drawing fails, a warning is shown, and training continues without a bar.
    """

    def __init__(self, config: Any, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._monitor, self._mode = config.monitor or "", config.mode
        # The best value of the monitored metric so far.
        self._best = math.nan
        self._columns: list[str] = []
        # The columns of the table that fit into the terminal.
        self._shown: list[str] = []
        # Where progress is shown: "terminal", "notebook" or "log file". Empty until a bar starts.
        self._output = ""
        self._bar = ""
        self._lines: list[str] = []
        self._notebook_output: Any = None
        self._due = math.inf
        self._has_hinted = False
        self._started, self._first_batch = 0.0, 0
        self._num_eval_batches: int | float = 0

    @contextmanager
    def shown(self, run: Run) -> Iterator[None]:
        """Show the progress bar during the `with` block."""
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self._guard(self._close, run, is_complete)

    def start_epoch(self, run: Run) -> None:
        self._guard(self._start, run, run.progress.batches_done)

    def start_evaluation(self, run: Run, num_batches: int | float) -> None:
        self._num_eval_batches = num_batches
        # A validation during fit has no bar of its own. The epoch's bar shows its progress.
        if run.stage != "fit":
            self._guard(self._start, run, 0)

    def add_row(self, row: Mapping[str, Any]) -> None:
        self._guard(self._add_row, row)

    def close(self, run: Run) -> None:
        """Stop the progress bar at the current batch, and move the cursor to a new line."""
        self._guard(self._close, run, False)

    def update(self, run: Run) -> None:
        """Draw the progress bar if enough time has passed since the last draw."""
        if time.monotonic() >= self._due:
            self._guard(self._draw, run)

    def _guard(self, function: Callable, *args: Any) -> None:
        if not self.is_enabled:
            return
        try:
            function(*args)
        except Exception as error:
            self.is_enabled, self._due = False, math.inf
            warnings.warn(
                "The progress bar is off for the rest of this run, because drawing it failed:"
                f" {type(error).__name__}: {error}",
                stacklevel=3,
            )

    def _start(self, run: Run, first_batch: int) -> None:
        self._started, self._first_batch = time.monotonic(), first_batch
        if self._output:
            return
        self._output = detect_output()
        self._due = self._started + SECONDS_BETWEEN_DRAWS[self._output]
        # In a resumed run, the best value may be in a row that was written before the checkpoint.
        best = best_row(run.row.rows, self._monitor, self._mode)
        self._best = math.nan if best is None else best[self._monitor]
        if self._output != "log file":
            self._draw(run)

    def _draw(self, run: Run, is_complete: bool = False) -> None:
        texts = [f"{name}={value:.4g}" for name, value in bar_values(run).items()]
        values = ", ".join(texts)
        meter = self._measure(run, is_complete)
        if self._output == "log file":
            print(tqdm.format_meter(**meter, postfix=values, bar_format=LOG_FILE_BAR), flush=True)
        elif self._output == "notebook":
            # Show the bar and the metrics on two lines, because one line would be too wide.
            self._bar = f"{tqdm.format_meter(**meter)}\n{values}".rstrip()
            self._show_in_notebook([*self._lines[:1], *self._lines[1:][-MAX_NOTEBOOK_LINES:]])
        else:
            columns = shutil.get_terminal_size().columns - 1
            values = ", ".join(fitting_values(texts, columns, meter))
            is_ascii = "utf" not in (sys.stderr.encoding or "").lower()
            bar = tqdm.format_meter(**meter, postfix=values, ncols=columns, ascii=is_ascii)
            self._write(f"\r{bar[:columns]:<{len(self._bar)}}")
            self._bar = bar[:columns]
        self._due = time.monotonic() + SECONDS_BETWEEN_DRAWS[self._output]

    def _measure(self, run: Run, is_complete: bool) -> dict[str, Any]:
        """Return the arguments for tqdm.format_meter."""
        progress, total = run.progress, self._num_eval_batches
        done = progress.eval_batches_done
        if run.stage == "fit":
            # Do not count an unfinished batch, which may have raised an error.
            done = progress.batches_done - (progress.phase == "train_batch")
            total = progress.num_train_batches
        if is_complete:
            total = done
        return {
            "n": done,
            "total": None if total == math.inf else total,
            "elapsed": time.monotonic() - self._started,
            "initial": self._first_batch,
            "prefix": self._describe(run, is_complete),
        }

    def _describe(self, run: Run, is_complete: bool) -> str:
        """Return the text before the progress bar, such as "epoch 3/10, validating 2/5"."""
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

    def _add_row(self, row: Mapping[str, Any]) -> None:
        """Print a row of the table, and mark a new best value of the monitored metric with "*"."""
        if not self._output:
            return
        cells = {n: format_value(n, value) for n, value in row.items() if value is not None}
        share = row.get("waiting", 0.0)
        is_slow = share > 0.1 and share * row["time"] >= 0.1
        if not is_slow:
            cells.pop("waiting", None)
        columns = dict.fromkeys([*cells, *self._columns])
        if len(columns) > len(self._columns):
            self._columns = sorted(columns, key=lambda name: name in CLOCKS)
            self._shown = self._columns
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns
                self._shown = fitting_columns(self._columns, self._monitor, width)
            more = "  …" if len(self._shown) < len(self._columns) else ""
            self._print(align_cells({name: name for name in columns}, self._shown) + more)
        if self._monitor in cells:
            cells[self._monitor] += "*" if self._update_best(row[self._monitor]) else " "
        self._print(align_cells(cells, self._shown))
        if is_slow and not self._has_hinted:
            self._has_hinted = True
            text = f"Training spends {share:.0%} of the time waiting for batches."
            self._print(f"{text} Try loop.tune(model, loader).")

    def _update_best(self, value: float) -> bool:
        """If ``value`` is the best value so far, store the value and return True."""
        is_better = value > self._best if self._mode == "max" else value < self._best
        if math.isnan(value) or not (is_better or math.isnan(self._best)):
            return False
        self._best = value
        return True

    def _print(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._output == "notebook":
            self._lines.append(text)
            return
        if self._bar:
            self._write(f"\r{' ' * len(self._bar)}\r")
        print(text, flush=True)
        self._write(self._bar)

    def _write(self, text: str) -> None:
        if text:
            print(text, end="", file=sys.stderr, flush=True)

    def _show_in_notebook(self, lines: Sequence[str]) -> None:
        from IPython.display import display

        text = "\n".join([*lines, self._bar])
        page = f'<pre style="white-space: pre; font-family: monospace">{html.escape(text)}</pre>'
        data = {"text/html": page, "text/plain": text}
        if self._notebook_output is None:
            self._notebook_output = display(data, raw=True, display_id=True)
        else:
            self._notebook_output.update(data, raw=True)

    def _close(self, run: Run, is_complete: bool) -> None:
        if not self._output:
            return
        reason = end_reason(run) if is_complete and run.stage == "fit" else ""
        if reason and not run.stop.has_max_epochs:
            epoch, step = run.progress.epochs_done - 1, run.progress.global_step
            self._print(f"ended in epoch {epoch}, after step {step}: {reason}")
        if self._output != "log file":
            self._draw(run, is_complete)
        if self._output == "notebook":
            self._show_in_notebook(self._lines)
        elif self._bar:
            self._write("\n")
        self._bar = self._output = ""
        self._due = math.inf


def detect_output() -> str:
    """Return where the run prints its progress: "notebook", "terminal" or "log file"."""
    is_in_kernel = getattr(find_shell(), "kernel", None) is not None
    # A child process of a notebook cannot display its output in the notebook's cells.
    if is_in_kernel and multiprocessing.parent_process() is None:
        return "notebook"
    return "terminal" if sys.stderr.isatty() else "log file"


def fitting_values(texts: Sequence[str], columns: int, meter: Mapping[str, Any]) -> list[str]:
    """Return the strings, such as "loss=0.25", that fit next to the terminal's progress bar."""
    bar_format = None if meter["total"] is None else "{l_bar}{r_bar}"
    space = columns - len(tqdm.format_meter(**meter, bar_format=bar_format))
    if meter["total"] is not None:
        space -= MIN_BAR_WIDTH
    fitting = []
    for text in texts:
        if len(text) + 2 <= space:
            fitting.append(text)
            space -= len(text) + 2
    return fitting


def bar_values(run: Run) -> dict[str, float]:
    """Return the numbers to show next to the progress bar. This call waits for the GPU."""
    results = run.results
    logs_itself = run.is_lightning_module and (results.active.metrics or results.callback_metrics)
    values = {} if logs_itself else train_values_first(results.latest_means())
    values.update(results.progress_bar_metrics)
    if run.progress.stage == "train":
        values.update(to_numbers(results.current_values().progress_bar))
    return values


def align_cells(cells: Mapping[str, str], columns: Sequence[str]) -> str:
    """Format a row of the table, with columns of fixed width."""
    return "  ".join(f"{cells.get(n, ''):>{column_width(n)}}" for n in columns).rstrip()


def column_width(name: str) -> int:
    return max(len(name), 5 if name in ("epoch", "step") else 8)


def fitting_columns(columns: Sequence[str], monitor: str, width: int) -> list[str]:
    """Return the table columns that fit into a terminal with ``width`` characters per line."""
    fitting = list(columns)
    for name in reversed(columns):
        # If columns are left out, reserve space for the ellipsis at the end of the header.
        space = width if len(fitting) == len(columns) else width - 3
        if sum(column_width(other) + 2 for other in fitting) - 2 < space:
            break
        if name not in ("epoch", "step", "time", "waiting", monitor):
            fitting.remove(name)
    return fitting


# Summary


def summarize_run(run: Run, checkpoints: Sequence[Path]) -> dict[str, list[str]]:
    """Return the lines of a run's summary, keyed by headings such as "trained" and "best"."""
    rows, progress, monitor = run.row.rows, run.progress, run.config.monitor or ""
    name = getattr(run.model, "__name__", type(run.model).__name__)
    data = "" if run.datamodule is None else f" on {type(run.datamodule).__name__}"
    done = (
        f"{format_count(progress.epochs_done, 'epoch')},"
        f" {format_count(progress.global_step, 'step')}"
    )
    seconds = format_duration(sum(row["time"] for row in rows))
    newest = {name: value for row in rows for name, value in row.items()}
    metrics = [
        f"{name} {format_value(name, value)}"
        for name, value in newest.items()
        if name not in NO_METRICS and not name.startswith("lr")
    ]
    best, best_text = best_row(rows, monitor, run.config.mode), ""
    if best is not None:
        best_text = f"{monitor} {format_value('', best[monitor])} in epoch {best['epoch']}"
    devices = f", {run.fabric.world_size} processes" if run.fabric.world_size > 1 else ""
    logs = [Path(logger.log_dir, "metrics.csv") for logger in run.loggers.csv_loggers]
    lines = {
        "trained": [f"{name}{data}: {done}, {seconds}"],
        "ended": [end_reason(run)],
        "at the end": [", ".join(metrics)],
        "best": [best_text],
        "device": [f"{run.fabric.device}, {run.fabric.strategy.precision.precision}{devices}"],
        "log": [shorten_path(path) for path in logs if path.is_file()],
        "checkpoint": [shorten_path(path) for path in dict.fromkeys(checkpoints)],
    }
    if any(path.name == "last.ckpt" for path in checkpoints):
        lines["resume"] = ["fit(..., resume='last')"]
    return {heading: texts for heading, texts in lines.items() if any(texts)}


def format_summary(lines: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"{heading:<12}{text}" for heading, texts in lines.items() for text in texts)


def end_reason(run: Run) -> str:
    """Return the reason why training ended, or an empty string during training."""
    stop = run.stop
    if stop.signal is not None:
        return signal.Signals(stop.signal).name
    if run.stop.failure is not None:
        return run.stop.failure
    if stop.divergence:
        return stop.divergence
    if stop.has_max_steps:
        return f"max_steps={stop.max_steps} is reached"
    if stop.has_max_epochs:
        return f"max_epochs={stop.max_epochs} is reached"
    if not stop.is_requested:
        return ""
    if stop.is_out_of_time:
        return "max_time is reached"
    for callback in run.hooks.callbacks:
        if is_instance_of(callback, "EarlyStopping") and callback.stopped_epoch:
            return f"should_stop was set by EarlyStopping on {callback.monitor!r}"
    return "should_stop was set"


def best_row(
    rows: Sequence[Mapping[str, Any]], monitor: str, mode: str
) -> Mapping[str, Any] | None:
    """Return the first row with the best value of ``monitor``, or None if no row has a value."""
    # Skip texts, because a user may have edited the CSV file of a resumed run.
    found = [row for row in rows if isinstance(row.get(monitor), int | float)]
    found = [row for row in found if not math.isnan(row[monitor])]
    choose = max if mode == "max" else min
    return choose(found, key=lambda row: row[monitor], default=None)


def format_results(results: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Format the metrics of an evaluation as a table with one column per loader."""
    import pandas

    loaders = {}
    for index, result in enumerate(results):
        # The column header contains the loader's index, so remove the index from the metric's name.
        values = {name.split("/dataloader_idx_")[0]: value for name, value in result.items()}
        loaders[f"DataLoader {index}"] = values
    table = pandas.DataFrame(loaders).sort_index()
    table = table.rename_axis(columns=f"{stage} metric".capitalize())
    return "" if table.empty else table.to_string(na_rep="", float_format=str)


def format_value(name: str, value: Any) -> str:
    """Format a metric's value in about eight characters, such as 0.2500 or 2.00e-07."""
    if not isinstance(value, float):
        return " ".join(str(value).split())[:20]
    if name == "time":
        return format_duration(value)
    if name == "waiting":
        return f"{value:.0%}"
    if name == "samples_per_second":
        return f"{value:.0f}"
    if name == "lr" or name.startswith("lr_") or not math.isfinite(value):
        return f"{value:.3g}"
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4f}"
    return f"{value:.1f}" if 1e3 <= abs(value) < 1e6 else f"{value:.2e}"


def format_duration(seconds: float) -> str:
    """Format a number of seconds, for example as "0.3 s" or "0:01:15"."""
    return f"{seconds:.1f} s" if seconds < 59.95 else str(timedelta(seconds=round(seconds)))


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten_path(path: Path) -> str:
    """Make a path inside the working directory relative, and return any other path unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
