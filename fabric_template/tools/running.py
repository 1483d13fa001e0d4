"""Running: fit, validate, test and predict from the command line, and what is printed when they end."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .options import Options, read_options, reason_in
from .plots import save_picture
from .predictions import save, try_out
from .typed import again, program, shown

if TYPE_CHECKING:
    from ..loop import FabricLoop

OF_A_RUN = (
    "run",
    "model",
    "data",
    "config",
    "name",
    "version",
    "default_root_dir",
    "accelerator",
    "devices",
    "precision",
)


def run_verb(verb: str, argv: list[str], description: str) -> None:
    """Do what was typed: fit, validate, test or predict."""
    options = read_options(verb, argv, program(), description)
    if options is None:
        return
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from ..loop import FabricLoop

    recipe = options.recipe(f"{program()} {shlex.join([verb, *argv])}")
    try:
        loop = FabricLoop(**options.make_words())
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        # Fabric's own checks of what was typed, and Lightning's; no code of a user's model has run
        raise UsageError(reason_in(str(error))) from error
    loop.recipe = recipe
    parts = options.make_parts()
    {"fit": _fit}.get(verb, _evaluate)(verb, options, loop, parts["model"], parts.get("data"))


def _fit(verb: str, options: Options, loop: FabricLoop, model: Any, data: Any) -> None:
    typed = {k: v for k, v in options.typed.items() if k not in ("resume", "load")}
    try:
        loop.fit(model, data, resume=options.settings.resume, load=options.settings.load)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, KeyboardInterrupt) and str(stop):
            print(stop, file=sys.stderr)
        if loop.fabric.is_global_zero and loop.checkpoint_path("last") is not None:
            print(f"\ninterrupted; go on with\n{again('fit', {'resume': 'last', **typed})}", file=sys.stderr)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    if loop.fabric.is_global_zero:
        from ..record.ending import as_lines

        print(f"\n{as_lines(_ending(loop, typed))}")


def _ending(loop: FabricLoop, typed: dict[str, Any]) -> dict[str, list[str]]:
    """What came out, where it is, and what to type next."""
    config, told = loop.config, loop.ending()
    folder, last = Path(told["log"][0]).parent if "log" in told else None, loop.checkpoint_path("last")
    if folder is not None:
        with suppress(ValueError):  # no metrics to draw
            told["picture"] = [shown(save_picture([str(folder)], folder / "history.png"))]
    told.pop("go on", None)  # a script's
    if last is not None:
        limits = {"max_epochs": config.max_epochs, "max_steps": config.max_steps}
        more = {k: str(2 * v) for k, v in limits.items() if v not in (None, -1)}
        told["go on"] = [again("fit", {"resume": "last", **typed, **more})]
    if last is not None and loop.enable_validation:
        same = {word: value for word, value in typed.items() if word.partition(".")[0] in OF_A_RUN}
        told["validate"] = [again("validate", {"load": "last" if config.monitor is None else "best", **same})]
    if folder is not None:
        told["plot"] = [f"{program()} plot {shlex.quote(shown(folder))}"]
    return told


def _evaluate(verb: str, options: Options, loop: FabricLoop, model: Any, data: Any) -> None:
    load, is_first = options.settings.load, loop.fabric.is_global_zero
    if (out := getattr(options.settings, "out", None)) is not None and is_first:
        try_out(Path(out))
    if load is None and is_first:
        print(f"{program()}: the weights are new ones; --load best takes those of the last fit", file=sys.stderr)
    results = getattr(loop, verb)(model, data, load=load)
    if verb != "predict" or not is_first:
        return
    print(f"predicted   {len(results)} batches; the first: {' '.join(str(results[:1])[1:-1].split())[:200]}")
    if out is not None:
        save(results, Path(out), of_many=len(loop.num_predict_batches) > 1)
        print(f"saved       {out}")
