"""The commands fit, validate, test, predict and verify."""

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
    loop: FabricLoop,
    model: Any,
    data: Any,
    *,
    resume: str | None = None,
    load: str | None = None,
) -> int:
    """Train, then print what came out and what to type next.

    Args:
        loop: The loop.
        model: The model.
        data: The object with the loaders.
        resume: Continue exactly from "last", "best", "auto" (last, if there is one) or a path.
        load: Start with the weights of "last", "best" or a path.
    """
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
    """Return the end of a training: results, files and the commands that use them."""
    summary = loop.ending()
    # The command line resumes with a command, not with a call.
    summary.pop("resume", None)
    folder = run_folder(loop)
    if folder is None:
        return summary
    if draw_history(folder):
        summary["picture"] = [f"{folder}/history.png"]
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
    """Return the folder of the run's config.yaml for a shell. None if the CSV logger is off."""
    if loop.log_dir is None or not Path(loop.log_dir, "config.yaml").is_file():
        return None
    return shlex.quote(os.path.relpath(loop.log_dir))


def draw_history(folder: str) -> bool:
    """Draw the run's logs into its folder. A picture that fails may not spoil a training."""
    with contextlib.suppress(Exception):
        import matplotlib

        from .plots import save_picture

        matplotlib.use("Agg")
        save_picture([folder], Path(folder, "history.png"))
        return True
    return False


def validate_command(loop: FabricLoop, model: Any, data: Any, *, load: str | None = None) -> int:
    """Validate and print what was logged.

    Args:
        loop: The loop.
        model: The model.
        data: The object with the loaders.
        load: Take the weights of "last", "best" or a path.
    """
    warn_of_new_weights(loop, load)
    loop.validate(model, data, load=load)
    return 0


def test_command(
    loop: FabricLoop,
    model: Any,
    data: Any,
    *,
    load: str | None = None,  # noqa: PT028
) -> int:
    """Test and print what was logged.

    Args:
        loop: The loop.
        model: The model.
        data: The object with the loaders.
        load: Take the weights of "last", "best" or a path.
    """
    warn_of_new_weights(loop, load)
    loop.test(model, data, load=load)
    return 0


def predict_command(
    loop: FabricLoop,
    model: Any,
    data: Any,
    *,
    load: str | None = None,
    out: str | None = None,
) -> int:
    """Predict and save what predict_step returned.

    Args:
        loop: The loop.
        model: The model.
        data: The object with the loaders.
        load: Take the weights of "last", "best" or a path.
        out: The file: .csv (a row per sample) or .pt (a list by batch).
    """
    from .predictions import check_output, save_predictions

    if out is not None:
        check_output(Path(out))
    warn_of_new_weights(loop, load)
    batches = loop.predict(model, data, load=load) or []
    if loop.fabric.is_global_zero:
        print(f"predicted   {len(batches)} batches; the first: {str(batches[:1])[1:200]}")
        if out is not None:
            save_predictions(batches, Path(out))
            print(f"saved       {out}")
    return 0


def warn_of_new_weights(loop: FabricLoop, load: str | None) -> None:
    """Tell a user who gave no checkpoint that the weights are not trained."""
    if load is None and loop.fabric.is_global_zero:
        hint = "the weights are new; --load best takes those of the last fit"
        print(f"{program()}: {hint}", file=sys.stderr)


def verify_command(path: str) -> int:
    """Read checkpoints from end to end and compare their checksums.

    Args:
        path: A checkpoint, or a folder of them. The exit code is 1 if one is damaged.
    """
    from ..checkpoint.checkpoint_io import verify_checkpoint
    from ..errors import DamagedCheckpointError

    files = [Path(path)]
    if files[0].is_dir():
        files = sorted(file for file in files[0].rglob("[!.]*") if file.suffix in SUFFIXES)
    if not files:
        raise ValueError(f"verify: got {path}, expected a folder with {', '.join(SUFFIXES)} files.")
    code = 0
    for file in files:
        try:
            verify_checkpoint(file)
        except DamagedCheckpointError as error:
            print(f"damaged     {error}")
            code = 1
        except OSError as error:
            print(f"not read    {file}: {error.strerror}")
            code = code or 2
        else:
            print(f"whole       {file}")
    return code
