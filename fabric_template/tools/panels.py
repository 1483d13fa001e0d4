"""Panels: what was logged, sorted for a picture: the runs, their columns, and which quantity stands where."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .columns import KINDS, NOT_METRICS, Column
from .journal import read_journal
from .words import words_of

if TYPE_CHECKING:
    import pandas as pd

MOST_NAMED, BEST_NAMED = 12, 5  # so many runs have a colour each; of more, the best have one


@dataclass
class Drawn:
    """One line of the legend: a run, or several that differ in their seed alone."""

    label: str
    frames: list[pd.DataFrame]
    folders: list[Path] = field(default_factory=list)  # where each was read, as far as that is known
    is_named: bool = True  # of many runs the best only


# ---- the runs


def find_runs(logs: Any, x: str = "epoch", seeds: bool = True) -> list[Drawn]:
    """Each run with its label; a run that is alone needs none."""
    import pandas as pd

    if isinstance(logs, Mapping):
        found = []
        for label, value in logs.items():
            for one in find_runs(value, x, seeds):
                one.label = f"{label}/{one.label}" if one.label else str(label)
                found.append(one)
        return found
    if isinstance(logs, list | tuple):
        drawn = [one for value in logs for one in _of_one(value, x)]
    elif isinstance(logs, str | os.PathLike | pd.DataFrame):
        drawn = _of_one(logs, x)
        drawn = _joined(drawn) if seeds else drawn
    else:
        raise TypeError(
            f"plot_logs takes a path, a DataFrame, or a list or dict of these, not {type(logs).__name__}; "
            "plot_logs('logs') draws all runs, plot_logs(loop.fit(...)) the one that just ended"
        )
    if len(drawn) == 1:
        drawn[0].label = ""
    labels = [one.label for one in drawn]
    for number, one in enumerate(drawn if len(drawn) > 1 else []):
        one.label = one.label if one.label and labels.count(one.label) == 1 else f"run {number}"
    return drawn


def _of_one(logs: Any, x: str) -> list[Drawn]:
    """The runs of one path or frame."""
    import pandas as pd

    from ..record.read_back import read_logs

    if isinstance(logs, str | os.PathLike):
        frame, root = read_logs(logs), Path(logs)
    elif isinstance(logs, pd.DataFrame):
        frame, root = logs, Path(logs.attrs.get("root", os.devnull))
    else:
        return find_runs(logs, x)
    if not {"name", "version"} <= set(frame.columns):
        return [Drawn("", [frame])]
    drawn = []
    for (name, version), rows in frame.groupby(["name", "version"], sort=False):
        below = version if isinstance(version, str) else f"version_{version}"
        homes = [root.parent, root, root / str(name) / below, root.parent / str(name) / below]
        folder = next((home for home in homes if home.name == below and home.is_dir()), None)
        if x == "step" and folder is not None and frame is not logs:
            rows = _by_step(rows, folder)
        drawn.append(Drawn(f"{name}/{below}", [rows], [folder] if folder else []))
    return drawn


def _by_step(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """The rows of the epochs, and those of the steps between them: ours in steps.csv, Lightning's in the same file."""
    import pandas as pd

    from ..record.read_back import read_logs

    if (folder / "steps.csv").is_file():
        more = read_logs(folder, steps=True)
    elif any(column.endswith("_step") for column in rows) and (folder / "metrics.csv").is_file():
        rows, more = rows.iloc[:0], pd.read_csv(folder / "metrics.csv", on_bad_lines="skip")
    else:
        return rows
    parts = [part.dropna(axis=1, how="all") for part in (rows, more) if len(part)]
    return pd.concat(parts, ignore_index=True).sort_values("step", kind="stable") if parts else rows


def _joined(drawn: list[Drawn]) -> list[Drawn]:
    """Runs of one name that differ in their seed alone, together; called by what is other in those beside them."""
    groups: dict[Any, Drawn] = {}
    words_by_group: dict[Any, dict[str, Any]] = {}
    for number, one in enumerate(drawn):
        name = one.label.rpartition("/")[0]
        words = words_of(one.folders[0]) if one.folders else {}
        words = {word: value for word, value in words.items() if word not in ("seed", "name", "version", "resume")}
        key = (name, repr(sorted(words.items())) if words else number)
        group = groups.setdefault(key, Drawn(one.label, []))
        words_by_group[key] = words
        group.frames += one.frames
        group.folders += one.folders
    for (name, rest), group in groups.items():
        if len(group.frames) > 1:
            beside = [words for key, words in words_by_group.items() if key[0] == name]
            mine = words_by_group[name, rest]
            other = [word for word in mine if any(words.get(word) != mine[word] for words in beside)]
            said = ", ".join(f"{word.rpartition('.')[2]}={mine[word]}" for word in other)
            label = name if len(beside) == 1 else f"{name} {said}" if 0 < len(said) < 40 else group.label
            group.label = f"{label}, mean of {len(group.frames)}" if len(groups) > 1 else ""
    return list(groups.values())


# ---- the columns


def choose(drawn: list[Drawn], x: str, wanted: Sequence[str] | None) -> list[Column]:
    """The columns to draw: those asked for by name or quantity; otherwise losses and accuracies, or what there is."""
    from pandas.api.types import is_numeric_dtype

    frames = [frame for one in drawn for frame in one.frames]
    names = list(dict.fromkeys(str(column) for frame in frames for column in frame.columns))
    numeric = {name for name in names if any(name in frame and is_numeric_dtype(frame[name]) for frame in frames)}
    listed = ", ".join(names) or "none"
    if x not in names:
        raise ValueError(f"plot_logs: there is no column x={x!r}; the columns are {listed}: x='step', for example")
    known = [Column.of(name) for name in names if name in numeric]
    metrics = [column for column in known if column.name not in NOT_METRICS]
    if wanted is None:
        found = [column for column in metrics if column.kind in ("loss", "accuracy")] or [
            column for column in metrics if column.kind != "learning rate"
        ]
        if not found:
            raise ValueError(
                f"plot_logs: there is no metric to draw; the columns are {listed}: choose some with metrics=[...]"
            )
        return _of_epochs_or_steps(found, x)
    chosen: list[Column] = []
    missing = []
    for name in wanted:
        same = [column for column in known if column.name == name] or _of_epochs_or_steps(
            [column for column in metrics if name in (column.quantity, column.kind)], x
        )
        chosen += same
        missing += [] if same else [str(name)]
    if missing:
        raise ValueError(f"plot_logs: no numbers to draw for {', '.join(missing)}; the columns are {listed}")
    return list(dict.fromkeys(chosen))


def _of_epochs_or_steps(columns: list[Column], x: str) -> list[Column]:
    """Where there are both, the mean over the epoch; the steps where these are asked for."""
    names = {column.name for column in columns}
    return [
        column
        for column in columns
        if x == "step" or (mean := column.name.replace("_step", "_epoch")) == column.name or mean not in names
    ]


def sort_into_panels(columns: list[Column], several_runs: bool) -> dict[str, list[Column]]:
    """Title -> columns: losses, accuracies, the others as they come, the learning rate.

    Where colours tell runs apart, each quantity has a panel of its own.
    """
    panels: dict[str, list[Column]] = {}
    for column in columns:
        of_kind = {other.quantity for other in columns if other.kind == column.kind}
        title = column.quantity if several_runs and len(of_kind) > 1 else column.kind
        panels.setdefault(title, []).append(column)
    ranks = list(KINDS)
    order: Callable[[str], float] = lambda title: (  # noqa: E731
        {0: 0.0, 1: 1.0, 2: 9.0}[ranks.index(panels[title][0].kind)] if panels[title][0].kind in ranks else 2.0
    )
    return {title: panels[title] for title in sorted(panels, key=order)}


# ---- what is told of a line


def places_of(frame: pd.DataFrame, x: str) -> pd.Series:
    """Where each row stands along the horizontal axis."""
    if x == "time":
        return frame[x].fillna(0).cumsum()  # a row has the seconds of its epoch
    if x == "epoch":
        return frame[x].bfill().ffill()  # Lightning's LearningRateMonitor logs rows without one
    return frame[x]


def best_of(frames: list[pd.DataFrame], column: Column) -> float:
    """The best value, lower always better; infinite where there is none."""
    values = [value for frame in frames if column.name in frame for value in frame[column.name].dropna()]
    signed = [value if column.low_is_good else -value for value in values]
    return min(signed, default=float("inf"))


def judge_of(columns: list[Column]) -> Column:
    """By what runs are compared: what is validated, losses first."""
    return next((column for column in columns if column.split == "val"), columns[0])


def name_the_best(drawn: list[Drawn], columns: list[Column]) -> None:
    """Of more runs than can be told apart the best keep their names."""
    if len(drawn) <= MOST_NAMED:
        return
    judge = judge_of(columns)
    for place, one in enumerate(sorted(drawn, key=lambda one: best_of(one.frames, judge))):
        one.is_named = place < BEST_NAMED


def nan_begins(frame: pd.DataFrame, column: Column) -> int | None:
    """The row from which a metric is no number; None: it is one to the end, or was not measured there.

    An empty cell looks the same: so it counts from where the next value was due, and, for what is not measured in each
    epoch, where training has gone the same way.
    """
    values = frame[column.name]
    finite = [i for i, ok in enumerate(values.abs() < float("inf")) if ok]
    if not len(values) or (finite and finite[-1] == len(values) - 1):
        return None
    if not finite:
        begins, due = 0, 0
    else:
        due = max((after - before for before, after in zip([-1, *finite], finite, strict=False)), default=1)
        begins = finite[-1] + due
    if begins >= len(values):
        return None
    if column.split == "train" or values.iloc[begins:].isin([float("inf"), float("-inf")]).any():
        return begins
    trained = [name for name in frame if Column.of(str(name)).split == "train"]
    also = any(not abs(value) < float("inf") for name in trained for value in frame[name].iloc[-1:])
    return begins if also or (finite and len(values) - begins > due) else None


def resume_points(one: Drawn, x: str) -> list[float]:
    """Where runs went on after an interruption: behind the last epoch that was over then."""
    found = []
    for folder, frame in zip(one.folders, one.frames, strict=False):
        for step, _ in read_journal(folder).resumed if {"step", x} <= set(frame.columns) else ():
            before = places_of(frame, x)[frame["step"] <= step]
            found += [before.iloc[-1] + 0.5 * (x == "epoch")] if len(before) else []
    return found
