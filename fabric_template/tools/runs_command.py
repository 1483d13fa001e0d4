"""Implement the ``runs`` command, which lists, compares and ranks runs, or writes an HTML page."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from ..metric_names import is_metric, parse_metric
from .runs import Run, check_metric, differing_options, find_best, find_runs, read_run
from .runs_page import write_page

HEADER = ("run", "state", "epochs", "metric", "best", "epoch", "trained", "changed")


def runs_command(
    paths: Sequence[str] = (),
    *,
    metric: str | None = None,
    mode: str | None = None,
    html: str | None = None,
) -> int:
    """List runs, compare two runs (`runs diff RUN RUN`), or find the best run (`runs best`)."""
    action, *folders = paths if paths and paths[0] in ("diff", "best") else ["list", *paths]
    if len(folders) != 2 if action == "diff" else len(folders) > 1:
        expected = "one folder, such as logs/digits"
        if action == "diff":
            expected = "two runs, such as digits/version_0 and digits/version_1"
        raise ValueError(f"runs: got {' '.join(paths)}, expected {expected}.")
    if mode not in (None, "min", "max"):
        raise ValueError(f'--mode: got {mode}, expected "min" or "max".')
    if html is not None and (action != "list" or Path(html).is_dir()):
        problem = "which is a folder" if action == "list" else f"together with {action}"
        example = "Write `fabric-template runs --html runs.html`."
        raise ValueError(f"--html: got {html}, {problem}. {example}")
    if action == "diff":
        print(format_table(diff_runs(*map(find_run, folders))))
        return 0
    folder = folders[0] if folders else "logs"
    runs = find_runs(folder, metric, mode)
    if not runs and action == "best":
        raise ValueError(f"runs: got {folder}, expected a folder with runs, such as logs.")
    check_metric("--metric", metric, runs)
    if action == "best":
        print_best(runs)
    elif html is not None:
        write_page(runs, metric, Path(html), folder)
    else:
        print(wrap_table([HEADER, *map(to_cells, runs)]))
    return 0


def find_run(name: str) -> Run:
    """Find a run by its folder, its CSV file or its name, such as digits/version_0."""
    for folder in (Path(name), Path("logs", name)):
        if Path(folder, "metrics.csv").is_file():
            run = read_run(folder.absolute(), Path("logs").absolute())
            return run | find_best(run)
    for file in (Path(name), Path(f"{name}.csv"), Path("logs", f"{name}.csv")):
        if file.is_file():
            return find_runs(file)[0]
    raise ValueError(f"runs: got {name}, expected a run, such as digits/version_0.")


def to_cells(run: Run) -> tuple[str, ...]:
    best = (run["metric"] or "", "", "")
    if run["best"] is not None:
        epoch = "" if run["best_epoch"] is None else str(run["best_epoch"])
        best = (run["metric"], f"{run['best']:.5g}", epoch)
    # Another tool's log may have no epochs or durations. Leave these cells empty.
    is_unknown = bool(run["rows"])
    epochs = "" if is_unknown and not run["epochs"] else str(run["epochs"])
    seconds = round(run["seconds"])
    trained = "" if is_unknown and not run["seconds"] else str(timedelta(seconds=seconds))
    changed = ", ".join(f"{option}={value}" for option, value in run.get("changed", {}).items())
    return run["label"], run["state"], epochs, *best, trained, changed


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns, and with "?" for unprintable characters."""
    cells = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def wrap_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with the last column wrapped to fit the terminal."""
    if not (sys.stdout.isatty() or "COLUMNS" in os.environ):
        return format_table(rows)
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    width = max(24, shutil.get_terminal_size().columns - sum(widths[:-1]))
    lines: list[Sequence[str]] = []
    for row in rows:
        wrapped = textwrap.wrap(row[-1], width, break_long_words=False, break_on_hyphens=False)
        lines += [(*row[:-1], wrapped[0] if wrapped else "")]
        lines += [(*[""] * len(row[:-1]), text) for text in wrapped[1:]]
    return format_table(lines)


def diff_runs(a: Run, b: Run) -> list[tuple[str, ...]]:
    first, second = to_cells(a), to_cells(b)
    table: list[tuple[str, ...]] = [("", first[0], second[0])]
    for option in differing_options([a, b]):
        values = [run["options"].get(option) for run in (a, b)]
        table.append((option, *("" if value is None else str(value) for value in values)))
    records = [describe_record(run) for run in (a, b)]
    for name in dict.fromkeys([*records[0], *records[1]]):
        texts = [record.get(name, "") for record in records]
        if texts[0] != texts[1]:
            table.append((name, *texts))
    table += [(HEADER[i], first[i], second[i]) for i in (1, 2, 6)]
    for metric in dict.fromkeys([*a["rows"], *b["rows"]]):
        if not is_metric(metric) or parse_metric(metric).kind == "learning rate":
            continue
        cells = [to_cells(run | find_best(run, metric)) for run in (a, b)]
        bests = [f"{c[4]} in epoch {c[5]}" if c[4] else "" for c in cells]
        if any(bests):
            table.append((f"best {metric}", *bests))
    return table


def describe_record(run: Run) -> dict[str, str]:
    """Return a run's command, commit, package versions, device and model size as strings."""
    texts = {}
    for part in ("command", "git", "versions", "device", "processes", "model"):
        value = run["about"].get(part)
        entries = value if isinstance(value, dict) else {"": value}
        for name, entry in entries.items():
            if entry is not None and name != "class":
                texts[f"{part} {name}".strip()] = str(entry)
    return texts


def print_best(runs: Sequence[Run]) -> None:
    """Print the best run, its best epoch, and its checkpoints from that epoch."""
    found = [run for run in runs if run["best"] is not None]
    metrics = sorted({run["metric"] for run in found or runs if run["metric"] is not None})
    if len(metrics) != 1:
        problem = "the runs have several metrics" if metrics else "the runs have no metric"
        advice = f"Write one of {', '.join(metrics)}." if metrics else "Log a metric."
        raise ValueError(f"--metric: not given, and {problem}. {advice}")
    modes = {run["mode"] for run in found}
    if len(modes) != 1:
        problem = f"the name {metrics[0]} does not show whether smaller or larger values are better"
        if modes:
            problem = f"the runs have different modes for {metrics[0]}"
        raise ValueError(f"--mode: not given, and {problem}. Write --mode min or --mode max.")
    choose = min if modes == {"min"} else max
    best = choose(found, key=lambda run: run["best"])
    epoch = "" if best["best_epoch"] is None else f" in epoch {best['best_epoch']}"
    print(f"best        {best['metric']} {best['best']:.6g}{epoch}")
    is_own_folder = best["file"].name == "metrics.csv"
    print(f"run         {best['folder'] if is_own_folder else best['file']}")
    # Checkpoints next to another tool's CSV file may belong to other runs, so do not list them.
    paths = find_checkpoints(best) if is_own_folder else []
    for path in paths:
        print(f"checkpoint  {path}")
    if not paths:
        print("checkpoint  none from this epoch")


def find_checkpoints(run: Run) -> list[Path]:
    """Return the checkpoints that a run saved when its metric was best."""
    # If a run is in logs/digits/version_0, its checkpoints are in checkpoints/digits/version_0.
    folder = Path("/checkpoints/".join(run["folder"].rsplit("/logs/", 1)))
    found = []
    for path in sorted(folder.rglob("*.ckpt")):
        # Import torch only if a checkpoint exists, because the import takes seconds.
        from ..checkpoint.reader import read_archive
        from ..errors import CheckpointError

        try:
            checkpoint = read_archive(path)
            epoch, step = checkpoint.get("epoch"), checkpoint.get("global_step")
        except (CheckpointError, OSError, ValueError):
            continue
        # Trainer counts steps from 0 in CSV files, but from 1 in checkpoints.
        is_same_step = run["best_step"] is None or step in (run["best_step"], run["best_step"] + 1)
        if epoch == run["best_epoch"] and is_same_step:
            found.append(path)
    return found
