"""Predictions: what predict returned, as the file that a name says: a table, arrays, or the list itself."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import UsageError

AS_THEY_ARE = ("", ".pt", ".pth", ".ckpt")
ONLY = "prediction"  # the name of what has none


def try_out(out: Path) -> None:
    """Prove that the predictions can be saved there, before hours are spent on them."""
    if out.suffix.lower() not in (*AS_THEY_ARE, ".csv", ".npz"):
        raise UsageError(f"--out {out}: expected a name that ends in .csv (a table), .npz (arrays) or .pt (torch.save)")
    try:
        if out.exists() and not out.is_file():
            raise UsageError(f"--out {out}: this is no regular file; give the path of a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent) as file:  # without a name: a kill leaves nothing behind
            file.write(b"\n")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}; give another file") from error


def save(results: list[Any], out: Path, of_many: bool) -> None:
    """Write the predictions, whole or not at all; in another format beside, rather than lose them.

    Args:
        results: a list by batch; of many loaders, a list of these.
        out: the file.
        of_many: whether there is more than one loader.

    Raises:
        UsageError: They do not fit into the format. All of them are saved as torch.save writes them, then.
    """
    from ..files.disk import replace_file
    from ..files.storage import AtomicCheckpointIO

    kind = out.suffix.lower()
    if kind in AS_THEY_ARE:
        AtomicCheckpointIO().save_checkpoint(results, out)  # type: ignore[arg-type]
        return
    try:
        content = (to_csv if kind == ".csv" else to_npz)(results if of_many else [results])
    except ValueError as error:
        instead = out.with_name(f"{out.name}.pt")
        AtomicCheckpointIO().save_checkpoint(results, instead)  # type: ignore[arg-type]
        raise UsageError(f"--out {out}: {error}; they are saved as {instead}") from error
    try:
        replace_file(out, content)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}; give another file") from error


def to_csv(loaders: list[list[Any]]) -> bytes:
    """One row per sample: a column per class, by its index, or per key; of several loaders, first which.

    Example:
        >>> import torch
        >>> print(to_csv([[torch.tensor([[0.5, 1.0]]), torch.tensor([[0.25, 3.0]])]]).decode(), end="")
        0,1
        0.5,1.0
        0.25,3.0
    """
    import csv

    from ..record.tables import cell_of

    tables = []
    for loader, batches in enumerate(loaders):
        columns: dict[str, list[str]] = {}
        for name, array in _arrays(batches).items():
            if array.ndim > 2:
                raise ValueError(
                    f"{name} has shape {array.shape[1:]} for each sample, a cell holds one number: .npz or .pt do"
                )
            # the shortest text that reads back as the same number, in its own precision
            cells = (
                array.astype(str).tolist() if array.dtype.kind != "U" else [cell_of(text) for text in array.tolist()]
            )
            if array.ndim == 1:
                columns[name] = cells
            else:
                prefix = "" if name == ONLY else f"{name}_"
                columns |= {f"{prefix}{i}": [row[i] for row in cells] for i in range(array.shape[1])}
        lengths = {name: len(cells) for name, cells in columns.items()}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"its parts have different numbers of samples, {lengths}: .npz or .pt hold them")
        rows = zip(*columns.values(), strict=True)
        is_one_of_many = len(loaders) > 1
        head = [*(["dataloader"] if is_one_of_many else []), *columns]
        tables.append((head, [[str(loader), *row] if is_one_of_many else list(row) for row in rows]))
    if len({tuple(head) for head, _ in tables}) > 1:
        raise ValueError("the loaders' predictions have different columns: .npz or .pt hold them")
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([tables[0][0], *(row for _, rows in tables for row in rows)] if tables else [])
    return text.getvalue().encode("utf-8", "surrogateescape")


def to_npz(loaders: list[list[Any]]) -> bytes:
    """An array per key, all batches in one; of several loaders with the loader's number before it."""
    import numpy as np

    arrays = {
        f"dataloader_{i}/{name}" if len(loaders) > 1 else name: array
        for i, batches in enumerate(loaders)
        for name, array in _arrays(batches).items()
    }
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _arrays(batches: Iterable[Any]) -> dict[str, Any]:
    """All batches of a loader together, an array per key (or place, or alone)."""
    import numpy as np

    parts: dict[str, list[Any]] = {}
    for batch in batches:
        named = batch if isinstance(batch, Mapping) else {ONLY: batch}
        if isinstance(batch, list | tuple) and any(getattr(value, "ndim", 0) for value in batch):
            named = dict(enumerate(batch))
        for name, value in named.items():
            parts.setdefault(str(name), []).append(_array(str(name), value))
    try:
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}
    except ValueError as error:
        raise ValueError(f"its batches do not go into one array ({error}): .pt holds them") from error


def _array(name: str, value: Any) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind not in "biufcU":
        raise ValueError(f"{name} holds {type(value).__name__}s that are no numbers and no text: .pt holds them")
    return array
