"""Implement the commands fit, validate, test, predict and verify."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli import program

if TYPE_CHECKING:
    from .. import FabricLoop

SUFFIXES = (".ckpt", ".pt", ".pth")  # of checkpoints


def fit_command(
    loop: FabricLoop, model: Any, data: Any, *, resume: str | None, load: str | None
) -> int:
    """Train, then print the results and the next commands."""
    try:
        loop.fit(model, data, resume=resume, load=load)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, KeyboardInterrupt) and str(stop):
            print(stop, file=sys.stderr)
        folder = run_folder(loop)
        if folder is not None and loop.fabric.is_global_zero and loop.checkpoint_path("last"):
            command = f"{program()} fit --run {folder} --resume last"
            print(f"\ninterrupted; continue with\n{command}", file=sys.stderr)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    if loop.fabric.is_global_zero:
        print()
        for name, lines in summarize(loop).items():
            for line in lines:
                print(f"{name:<12}{line}")
    return 0


def summarize(loop: FabricLoop) -> dict[str, list[str]]:
    """Return the results and files of a training, and the commands that use them."""
    summary = loop.ending()
    # Replace the Python call of the summary by a command.
    summary.pop("resume", None)
    folder = run_folder(loop)
    if folder is None:
        return summary
    # A failed picture must not make the command fail.
    with contextlib.suppress(Exception):
        from .plots import save_picture

        summary["picture"] = [str(save_picture([folder], Path(folder, "history.png")))]
    if loop.checkpoint_path("last"):
        longer = ""
        for name in ("max_epochs", "max_steps"):
            limit = getattr(loop.config, name)
            longer += "" if limit in (None, -1) else f" --{name} {2 * limit}"
        summary["resume"] = [f"{program()} fit --run {folder} --resume last{longer}"]
        best = "best" if loop.checkpoint_path("best") else "last"
        if loop.enable_validation:
            summary["validate"] = [f"{program()} validate --run {folder} --load {best}"]
    summary["plot"] = [f"{program()} plot {folder}"]
    return summary


def run_folder(loop: FabricLoop) -> str | None:
    """Return the run's log folder, quoted for a shell, or None if it has no config.yaml."""
    if loop.log_dir is None or not Path(loop.log_dir, "config.yaml").is_file():
        return None
    return shlex.quote(os.path.relpath(loop.log_dir))


def validate_command(loop: FabricLoop, model: Any, data: Any, *, load: str | None) -> int:
    warn_of_new_weights(loop, load)
    loop.validate(model, data, load=load)
    return 0


def test_command(loop: FabricLoop, model: Any, data: Any, *, load: str | None) -> int:
    warn_of_new_weights(loop, load)
    loop.test(model, data, load=load)
    return 0


def predict_command(
    loop: FabricLoop, model: Any, data: Any, *, load: str | None, out: str | None
) -> int:
    """Predict, and save or print the predictions."""
    if out is not None:
        if Path(out).suffix not in (".csv", ".pt"):
            raise ValueError(f"--out: got {out}, expected a file name in .csv or .pt.")
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    warn_of_new_weights(loop, load)
    batches = loop.predict(model, data, load=load) or []
    if loop.fabric.is_global_zero:
        print(f"predicted   {len(batches)} batches; the first: {str(batches[:1])[1:200]}")
        if out is not None:
            save_predictions(batches, Path(out))
            print(f"saved       {out}")
    return 0


def warn_of_new_weights(loop: FabricLoop, load: str | None) -> None:
    """Warn a user who gave no checkpoint that the weights are not trained."""
    if load is None and loop.fabric.is_global_zero:
        hint = "the weights are new; --load best takes those of the last fit"
        print(f"{program()}: {hint}", file=sys.stderr)


def save_predictions(batches: list[Any], out: Path) -> None:
    """Write a CSV file with a row per sample, or the list of batches if they form no table."""
    import torch

    if out.suffix == ".pt":
        torch.save(batches, out)
        return
    try:
        make_table(batches).to_csv(out, index=False)
    except (ValueError, TypeError) as error:
        torch.save(batches, f"{out}.pt")
        raise ValueError(f"--out: got {out}, but {error}. They are saved as {out}.pt.") from error


def make_table(batches: list[Any]) -> Any:
    """Return a DataFrame with a column per key, or several columns per key for vectors."""
    import pandas as pd
    import torch

    tables = []
    for batch in batches:
        named = batch if isinstance(batch, dict) else {"prediction": batch}
        if isinstance(batch, list | tuple):
            named = dict(enumerate(batch))
        columns: dict[str, Any] = {}
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                # NumPy does not support bfloat16.
                value = value.float() if value.dtype == torch.bfloat16 else value
                value = torch.atleast_1d(value).detach().cpu().numpy()
            if getattr(value, "ndim", 1) == 2:
                columns |= {f"{name}_{i}": value[:, i] for i in range(value.shape[1])}
            else:
                columns[str(name)] = value
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables)


def verify_command(path: str) -> int:
    """Read checkpoints from end to end and compare their checksums."""
    from ..checkpoint.checkpoint_io import verify_checkpoint
    from ..errors import DamagedCheckpointError

    files = [Path(path)]
    if files[0].is_dir():
        files = sorted(file for file in files[0].rglob("[!.]*") if file.suffix in SUFFIXES)
    if not files or not files[0].exists():
        raise ValueError(f"verify: got {path}, expected a folder with {', '.join(SUFFIXES)} files.")
    damaged = []
    for file in files:
        try:
            verify_checkpoint(file)
            print(f"whole       {file}")
        except DamagedCheckpointError as error:
            print(f"damaged     {error}")
            damaged.append(file)
    return int(bool(damaged))
