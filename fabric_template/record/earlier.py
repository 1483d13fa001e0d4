"""Earlier: the rows of the epochs before a resume; they lie in the run's CSV, and not in each of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..core.config import is_name
from ..core.run import Run
from .loggers import CSV, count_of
from .parsing import read_table, value_of
from .tables import cell_of, writing


def bring_back(run: Run, ours: Mapping[str, Any]) -> None:
    """Give the run the rows before its resume, on all ranks; cut logs of ours back to where the checkpoint was saved."""
    rows: list[dict[str, Any]] | None = None
    if run.fabric.is_global_zero:
        history, rows = ours["history"], _in_checkpoint(ours["history"])
        last = rows[-1:] if rows is not None else [history["last"]]
        new = []
        for logger, position in zip_longest(run.home.loggers, ours["logs"]):
            if not hasattr(type(logger), "rewind"):
                continue
            if logger.position():
                place = (position or {}).get(CSV)
                cells = _cells(Path(logger.log_dir, CSV), place) if place else []
                is_whole = place and cells and len(cells) == count_of(place)
                if position is None or (is_whole and last and not _agree(cells[-1], last[0], ("epoch", "step"))):
                    logger.set_aside()  # of another run
                elif rows is None and place and count_of(place) >= history["rows"]:
                    rows = _values(cells[count_of(place) - history["rows"] :], history["names"])
            if logger.position():
                logger.rewind(position)
            else:
                new.append(logger)
        if rows is None:
            rows = _elsewhere(run, ours)
        for logger in new:  # a new place: it begins with the rows of the old one
            for row in rows:
                logger.log_epoch(row)
    run.history.rows = run.fabric.broadcast(rows or [])
    run.origin.pending = {**ours, **run.log.rows_state()}  # for a checkpoint that is saved before the first batch


def _in_checkpoint(history: Any) -> list[dict[str, Any]] | None:
    """The rows that came with the checkpoint; None: they lie in a CSV."""
    if not isinstance(history, Mapping):  # an older file of ours has a dict for each
        return [dict(row) for row in history]
    if history["rows"] and "lines" not in history:
        return None
    rows = [json.loads(line) for line in history.get("lines", "").splitlines()]
    names = history["names"]
    return [{name: value for name, value in zip(names, row, strict=False) if value is not None} for row in rows]


def _elsewhere(run: Run, ours: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows, from the CSV of the run that the checkpoint is of; that one is known by its last row, time included."""
    history = ours["history"]
    places = [position[CSV] for position in ours["logs"] if position and CSV in position]
    for path in _other_homes(run, history["home"]) if places else ():
        if path.is_file():
            cells = _cells(path, places[0])
            if len(cells) == count_of(places[0]) and _agree(cells[-1], history["last"], history["last"]):
                return _values(cells[-history["rows"] :], history["names"])
    run.said.warn(
        f"resume: '{run.origin.resume_path}' is not with the logs of its run, which hold the history of the"
        f" {history['rows']} epochs before: history and logs begin after them; put that run's metrics.csv beside the file to"
        " have them"
    )
    return []


def _other_homes(run: Run, home: list[Any]) -> Iterator[Path]:
    """Where that run's metrics.csv may be: by the file's own folder, and by the name and version that it had."""
    if run.origin.resume_path is None:
        return
    folder = Path(run.origin.resume_path).resolve().parent
    if folder.parent.parent.name == "checkpoints":
        yield Path(folder.parents[2], "logs", folder.parent.name, folder.name, CSV)
    yield from (folder / CSV, folder.parent / CSV)
    roots = [Path(logger.root_dir) for logger in run.home.loggers if hasattr(type(logger), "rewind")]
    name, version = home if len(home) == 2 else ("", "")
    folder_of_version = version if isinstance(version, str) else f"version_{version}"
    if is_name(name) and is_name(folder_of_version):
        for root in (*roots, Path(run.config.default_root_dir or ".", "logs")):
            yield root / name / folder_of_version / CSV


def _cells(path: Path, place: Mapping[str, Any]) -> list[dict[str, str]]:
    """A file's rows as the checkpoint was saved, those included that waited for the disk."""
    with writing(str(path)):
        return [*read_table(path)[1][: place["rows"]], *place.get("waiting", ())]


def _agree(cells: Mapping[str, str], row: Mapping[str, Any], names: Any) -> bool:
    return all(cells.get(cell_of(name), "") == cell_of(row.get(name)) for name in names)


def _values(rows: list[dict[str, str]], names: list[str]) -> list[dict[str, Any]]:
    return [{name: value_of(cell) for name in names if (cell := row.get(cell_of(name), ""))} for row in rows]
