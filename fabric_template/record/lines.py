"""Lines: the rows of metrics.csv as a table that grows by a line as each epoch ends, as text and as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

from ..core.history import is_better

LAST = ("time", "left")  # of the columns


class Lines:
    """The table of epochs: aligned, the names of its columns once and again where there are others, each new best marked.

    Example:
        >>> lines = Lines("val_loss")
        >>> for epoch, loss in enumerate((0.5, 0.4, 0.6)):
        ...     row = {"epoch": epoch, "val_loss": loss, "lr": 0.001, "time": 61.5}
        ...     for line in lines.add(row, 61.5 * (2 - epoch)):
        ...         print(line)
        epoch  val_loss        lr   time   left
            0   0.5000*     0.001   1:02   2:03
            1   0.4000*     0.001   1:02   1:02
            2   0.6000      0.001   1:02
    """

    def __init__(self, monitor: str | None = None, mode: str = "min") -> None:
        self.monitor, self.mode = monitor, mode
        self.rows: list[dict[str, str]] = []  # the text of each cell
        self._best: int | None = None  # of the rows,
        self._score: float | None = None  # and its value
        self._widths: dict[str, int] = {}
        self._columns: list[str] = []
        self._shown: list[str] = []  # the columns that were named last

    def judge(self, row: Mapping[str, Any]) -> bool:
        """Whether a row, also one of before a resume, is the best so far."""
        score = row.get(self.monitor or "")
        is_best = isinstance(score, int | float) and is_better(score, self._score, self.mode)
        if is_best:
            self._score = score
        return is_best

    def add(self, row: Mapping[str, Any], left: float | None = None, width: int | None = None) -> list[str]:
        """One more row; returns its lines, in a terminal so wide of as many columns as it holds."""
        cells = {name: cell(name, value) for name, value in row.items() if value is not None}
        if left is not None and left > 0:
            cells["left"] = cell("left", left)
        is_best = self.judge(row)
        if self.monitor in cells:
            cells[self.monitor] += "*" if is_best else " "
        self._best = len(self.rows) if is_best else self._best
        self.rows.append(cells)
        if not cells.keys() <= self._widths.keys():
            columns = [*cells, *(name for name in self._columns if name not in cells)]
            self._columns = sorted(columns, key=lambda name: LAST.index(name) + 1 if name in LAST else 0)
        for name, text in cells.items():
            least = 8 if name.startswith("lr") else 5
            self._widths[name] = max(self._widths.get(name, least), len(name), len(text))
        shown = self._columns if width is None else self._fitting(width - 1)
        lines = [] if shown == self._shown else [self._line({name: name for name in shown}, shown)]
        self._shown = shown
        return [*lines, self._line(cells, shown)]

    def text(self, most: int | None = None) -> str:
        """The whole table, or its last rows."""
        names = {name: name for name in self._columns}
        rows = self.rows if most is None else self.rows[-most:]
        return "\n".join(self._line(row, self._columns) for row in (names, *rows) if names)

    def html(self, most: int | None = None) -> str:
        """The same for a notebook, the best row in bold."""
        if not self.rows:
            return ""
        first = 0 if most is None else max(0, len(self.rows) - most)
        lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in self._columns) + "</tr>"]
        for index, row in enumerate(self.rows[first:], start=first):
            style = ' style="font-weight: bold"' if index == self._best else ""
            texts = (html.escape(row.get(name, "").rstrip("* ")) for name in self._columns)
            lines.append(f"<tr{style}>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>")
        return "<table>\n" + "\n".join(lines) + "\n</table>"

    def _fitting(self, width: int) -> list[str]:
        """The columns that stand in a line, those first that one looks at most."""
        first = ["epoch", self.monitor, "val_loss", "train_loss", *LAST]
        late = [name for name in self._columns if name == "step" or name.startswith("lr")]
        kept = {"epoch"}
        for name in sorted(self._columns, key=lambda n: first.index(n) if n in first else 99 + 99 * (n in late)):
            if sum(self._widths[other] + 2 for other in {*kept, name}) - 2 > width:
                break
            kept.add(name)
        return [name for name in self._columns if name in kept]

    def _line(self, cells: Mapping[str, str], columns: list[str]) -> str:
        return "  ".join(f"{cells.get(name, ''):>{self._widths[name]}}" for name in columns).rstrip()


def cell(name: str, value: Any) -> str:
    """A value as it stands in the table.

    Example:
        >>> cell("loss", 0.25), cell("loss", 2e-7), cell("lr", 3e-4), cell("loss", math.nan), cell("left", 3700.0)
        ('0.2500', '2.00e-07', '0.0003', 'nan', '1:01:40')
    """
    if isinstance(value, bool | int) or not isinstance(value, float):
        return " ".join(str(value).split())[:20]
    if not math.isfinite(value):
        return str(value)
    if name in LAST:
        return duration(value)
    if name == "lr" or name.startswith("lr_"):
        return f"{value:.3g}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """A length of time as one reads it.

    Example:
        >>> duration(0.34), duration(75.0), duration(90000.0)
        ('0.3 s', '1:15', '25:00:00')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
