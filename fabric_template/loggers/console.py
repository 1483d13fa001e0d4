"""Show a run as a progress bar and a table in a terminal, a log file or a notebook."""

from __future__ import annotations

import html
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .history import train_values_first
from .result_collection import to_numbers
from .run_summary import count_of, end_reason, format_value

if TYPE_CHECKING:
    from ..training.run_state import RunState

# Drawing more often slows training down and shows nothing more.
SECONDS_BETWEEN_DRAWS = 0.2
SECONDS_BETWEEN_LINES = 60.0
LOG_FILE_BAR = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
# A notebook receives the whole table at each draw. At the end of a run it shows all rows.
MAX_NOTEBOOK_ROWS = 20


class Console:
    """Show the progress bar and the table of a run on the main process.

    An error while drawing is shown once and turns the bar off. Training continues.
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
        """Show the run inside this context. An error leaves the bar at the batch that raised it."""
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self._guard(self._close, run, is_complete)

    def start_epoch(self, run: RunState) -> None:
        self._guard(self._start, run, run.progress.num_train_batches, run.progress.batches_done)

    def start_evaluation(self, run: RunState, num_batches: int | float) -> None:
        """Show the progress of an evaluation. During fit, the epoch's bar shows it, too."""
        self._num_eval_batches = num_batches
        if run.stage != "fit":
            self._guard(self._start, run, num_batches, 0)

    def add_row(self, row: Mapping[str, Any]) -> None:
        if self._screen is not None:
            self._guard(self._screen.add_row, row)

    def update(self, run: RunState) -> None:
        """Draw the bar if it is due. The loop calls this after every batch."""
        if time.monotonic() >= self._due:
            self._guard(self._draw, run, describe(run, self._num_eval_batches))

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
        self._screen = find_screen(self._table)
        for row in run.history.rows:
            # A resumed run compares new values with the best one of its earlier epochs.
            self._table.update_best(row)
        self._due = self._started + self._screen.seconds_between_draws
        if not self._screen.is_log_file:
            self._draw(run, describe(run, self._num_eval_batches))

    def _draw(self, run: RunState, description: str, is_complete: bool = False) -> None:
        assert self._screen is not None
        progress = run.progress
        done = progress.batches_done if run.stage == "fit" else progress.eval_batches_done
        if run.stage == "fit" and progress.phase == "batch":
            # The current batch is not done yet, and may have raised an error.
            done -= 1
        total: int | float | None = None if self._total == math.inf else self._total
        values = [f"{name}={value:.4g}" for name, value in bar_values(run).items()]
        # tqdm.format_meter takes these arguments.
        meter = {
            "n": done,
            "total": done if is_complete else total,
            "elapsed": time.monotonic() - self._started,
            "initial": self._first,
            "prefix": description,
            "postfix": ", ".join(values),
        }
        self._screen.draw(meter)
        self._due = time.monotonic() + self._screen.seconds_between_draws

    def _close(self, run: RunState, is_complete: bool) -> None:
        if self._screen is None:
            return
        is_fit = run.stage == "fit"
        if not self._screen.is_log_file:
            text = describe(run, self._num_eval_batches)
            if is_fit and is_complete:
                text = count_of(run.progress.epochs_done, "epoch")
            self._draw(run, text, is_complete)
        self._due = math.inf
        reason = end_reason(run) if is_complete and is_fit else ""
        if reason and not run.stop.has_max_epochs:
            epoch, step = run.progress.epochs_done - 1, run.progress.global_step
            self._screen.print(f"ended in epoch {epoch}, after step {step}: {reason}")
        self._screen.close()


def describe(run: RunState, num_eval_batches: int | float) -> str:
    """Return the text before the bar, such as "epoch 3/10, validating 2/5"."""
    if run.stage != "fit":
        return run.stage
    limit = "" if run.stop.max_epochs == -1 else f"/{run.stop.max_epochs}"
    text = f"epoch {run.progress.epochs_done}{limit}"
    if run.progress.stage != "train":
        total = "" if num_eval_batches == math.inf else f"/{num_eval_batches}"
        text += f", validating {run.progress.eval_batches_done}{total}"
    return text


def bar_values(run: RunState) -> dict[str, float]:
    """Return the values shown next to the bar. Reading them waits for the device."""
    logs_itself = run.is_lightning_module and (run.results.active or run.results.callback_metrics)
    values = {} if logs_itself else train_values_first(run.results.latest_means())
    values.update(run.results.progress_bar_metrics)
    if run.progress.stage == "train" and run.results.active:
        values.update(to_numbers(run.results.current_values().progress_bar))
    return values


class EpochTable:
    """Format the rows of a run as aligned lines. An asterisk marks each new best value."""

    def __init__(self, monitor: str | None, mode: str) -> None:
        self.monitor, self.mode = monitor, mode
        self.rows: list[dict[str, str]] = []
        self._best: float | None = None
        self._widths: dict[str, int] = {}

    def update_best(self, row: Mapping[str, Any]) -> bool:
        """Update the best value with a row. Return whether the row has the best value so far."""
        value, best = row.get(self.monitor or ""), self._best
        if not isinstance(value, int | float) or math.isnan(value):
            return False
        is_best = best is None or (value < best if self.mode == "min" else value > best)
        if is_best:
            self._best = value
        return is_best

    def add(self, row: Mapping[str, Any]) -> str:
        """Add a row. Return its line, preceded by a header line if the row has new columns."""
        cells = {n: format_value(n, value) for n, value in row.items() if value is not None}
        if self.monitor in cells:
            cells[self.monitor] += "*" if self.update_best(row) else " "
        self.rows.append(cells)
        has_new_columns = not cells.keys() <= self._widths.keys()
        if has_new_columns:
            # The columns of this row come first, in its order. The time is always the last column.
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
        """Draw the bar. The dict meter has the arguments of tqdm.format_meter."""
        self.print(tqdm.format_meter(**meter, bar_format=LOG_FILE_BAR))

    def add_row(self, row: Mapping[str, Any]) -> None:
        self.print(self.table.add(row))

    def print(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """End the output of the run."""


class TerminalBar(tqdm):
    """The bar of a terminal, drawn without a thread, because loader workers are forked."""

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
    """Show the table and the bar as HTML below a notebook cell. A saved notebook keeps both."""

    is_log_file = False
    seconds_between_draws = SECONDS_BETWEEN_DRAWS

    def __init__(self, table: EpochTable) -> None:
        super().__init__(table)
        self._handle: Any = None
        self._bar = ""
        self._texts: list[str] = []

    def draw(self, meter: dict[str, Any]) -> None:
        self._bar = tqdm.format_meter(**meter, ncols=100)
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
        page = f'<pre style="white-space: pre">{html.escape(text)}</pre>'
        data = {"text/html": page, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def find_screen(table: EpochTable) -> Screen:
    """Return the screen of this process. A process forked by a notebook cannot draw in it."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    if getattr(shell, "kernel", None) is not None and multiprocessing.parent_process() is None:
        return NotebookScreen(table)
    return TerminalScreen(table) if sys.stderr.isatty() else Screen(table)
