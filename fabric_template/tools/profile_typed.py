"""The verb profile as it is typed: what a fit would be given, and a few words beside it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..files.disk import replace_file
from .errors import UsageError
from .listing import to_json
from .options import Options, read_options, reason_in
from .typed import program

OWN = ("steps", "out", "trace", "json", "no_tries")
SWITCHES = ("json", "no_tries")
HELP = """usage: {program} profile [--option value ...]

{description}

  --steps N             How many batches are timed (50), behind five that warm up.
  --out FILE            A picture of it.
  --trace DIR           A trace of three steps more, for chrome://tracing, ui.perfetto.dev or TensorBoard.
  --json                For programs: all that is known.
  --no_tries            Do not try out what is advised (a few steps each).

and all words of fit: --model, --data, --run, --config, --precision, ...; {program} fit --help lists them. Without --model:
the digits. The model is trained on a copy, no logs and no checkpoints are left.
"""


def run_profile(argv: list[str], description: str) -> str | None:
    """Do what was typed; returns what is printed."""
    if {"-h", "--help"} & {*argv}:
        return HELP.format(program=program(), description=description[0].upper() + description[1:] + ".").rstrip()
    own, rest = _split(argv)
    steps = _steps(own["steps"])
    options = read_options("profile", rest, program(), description)
    if options is None:
        return None
    out = None if own["out"] is None else _picture(Path(own["out"]))
    found = _profile(options, steps, own)
    if out is not None:
        content = io.BytesIO()
        found.plot().savefig(content, dpi=150, format=out.suffix[1:])
        replace_file(out, content.getvalue())
    if own["json"]:
        return to_json(found.as_dict())
    return f"{found}{f'{chr(10)}picture     {out}' if out is not None else ''}"


def _profile(options: Options, steps: int, own: dict[str, Any]) -> Any:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from ..loop import FabricLoop
    from .profiling import profile

    try:
        loop = FabricLoop(**{**options.make_words(), "profiler": None})
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        # Fabric's own checks of what was typed, and Lightning's; no code of a user's model has run
        raise UsageError(reason_in(str(error))) from error
    parts = options.make_parts()
    return profile(loop, parts["model"], parts.get("data"), steps=steps, trace=own["trace"], tries=not own["no_tries"])


def _split(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What is this verb's own, and what fit knows."""
    own: dict[str, Any] = dict.fromkeys(OWN)
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        word, equals, value = token.removeprefix("--").replace("-", "_").partition("=")
        if not token.startswith("--") or word not in OWN:
            rest.append(token)
            continue
        value = token.partition("=")[2]
        if word in SWITCHES:
            if equals:
                raise UsageError(f"{token}: expected --{word} alone")
            own[word] = True
            continue
        if not equals and (not tokens or tokens[0].startswith("--")):
            raise UsageError(f"--{word} has no value: expected --{word} VALUE")
        own[word] = value if equals else tokens.pop(0)
    return own, rest


def _steps(given: str | None) -> int:
    if given is None:
        return 50
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"--steps={given}: expected how many steps are timed, 1 or more")
    return int(given)


def _picture(out: Path) -> Path:
    """The file, if it can be written: asked before anything is trained."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if out.suffix[1:] not in known:
        raise UsageError(f"--out {out}: expected a picture, such as profile.png; known are {', '.join(sorted(known))}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder '{out.parent}'")
    return out
