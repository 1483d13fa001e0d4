"""Save predictions as a table or as the list of batches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import AtomicCheckpointIO


def check_output(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is predicted."""
    if out.suffix not in (".csv", ".pt") or out.is_dir():
        raise ValueError(f"--out: got {out}, expected a file name in .csv or .pt.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        reason = error.strerror
        raise ValueError(f"--out: got {out}, where no file can be made ({reason}).") from error


def save_predictions(batches: list[Any], out: Path) -> None:
    """Write the predictions. Those that do not fit the format are saved beside it by torch.save.

    Args:
        batches: What predict_step returned, by batch.
        out: The file: .csv has a row per sample, .pt is the list.
    """
    if out.suffix == ".pt":
        AtomicCheckpointIO().save_checkpoint(batches, out)  # type: ignore[arg-type]
        return
    unfinished = out.with_name(f"{out.name}.tmp")
    try:
        save_table(join_batches(batches), unfinished)
        os.replace(unfinished, out)
    except (ValueError, OSError) as error:
        unfinished.unlink(missing_ok=True)
        instead = out.with_name(f"{out.name}.pt")
        AtomicCheckpointIO().save_checkpoint(batches, instead)  # type: ignore[arg-type]
        raise ValueError(f"--out: got {out}, but {error}. They are saved as {instead}.") from error


def join_batches(batches: list[Any]) -> dict[str, Any]:
    """Return an array for each key of the predictions, or one that is called prediction."""
    import numpy as np
    import torch

    parts: dict[str, list[Any]] = {}
    for batch in batches:
        named = batch if isinstance(batch, Mapping) else {"prediction": batch}
        if isinstance(batch, list | tuple):
            named = dict(enumerate(batch))
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                # NumPy has no bfloat16.
                value = value.float() if value.dtype == torch.bfloat16 else value
                value = value.detach().cpu().numpy()
            array = np.atleast_1d(np.asarray(value))
            if array.dtype.kind not in "biufcU":
                raise ValueError(f"{name} holds neither numbers nor text")
            parts.setdefault(str(name), []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def save_table(arrays: dict[str, Any], path: Path) -> None:
    """Write a row per sample: a column per key, or per class of a key."""
    import pandas

    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.ndim > 2:
            raise ValueError(f"{name} has shape {array.shape[1:]} per sample")
        if array.ndim == 1:
            columns[name] = array
        else:
            prefix = "" if name == "prediction" else f"{name}_"
            for index in range(array.shape[1]):
                columns[f"{prefix}{index}"] = array[:, index]
    pandas.DataFrame(columns).to_csv(path, index=False)
