"""Random configurations, each trained by lightning.Trainer and by FabricLoop: the same bits, the same metrics.

    python soak/beside.py --count 100 --seed 0
    python soak/beside.py --seed 0 --first 57 --count 1            one alone
    python soak/beside.py --seed 0 --first 57 --count 1 --show     what it is made of

A configuration is drawn from its seed and number alone, of the pieces of drawn.py, and trained by both in a process of its own.
What is compared: weights, optimizers, schedulers, the three views of what was logged, what a logger was given, counters, the
files of a ModelCheckpoint, what a validation afterwards returns, and the random numbers that are drawn next.
"""

# ruff: noqa: E402

import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import search_path  # noqa: F401
import torch
from both import Notes
from configurations import draw, kinds_of, make_parser, parse_options
from drawn import make, val_loader_of
from lightning.fabric.utilities.seed import seed_everything
from runs import same
from victim import quiet

from fabric_template import FabricLoop

OURS = (
    "save_every_n_steps",
    "monitor",
    "save_top_k",
    "save_last",
    "seed",
)  # options that Trainer does not have
SHAPES = ("lightning", "gan", "manual")  # Trainer takes LightningModules only
EXCLUDED = [  # (why, which)
    ("loaders of our own kinds", lambda w: {"tensors", "list"} & set(kinds_of(w))),
    ("of several loaders Trainer asks those with a length how long the epoch is, and leaves out the end of a shorter one",
     lambda w: w["loader"] == "combined" and w["combined"][3] == "min_size" and {"function", "iterable"} & set(kinds_of(w))),
    ("from each reloaded loader without a length Trainer reads a batch that it drops, which draws random numbers",
     lambda w: "reload_dataloaders_every_n_epochs" in w["loop"] and {"function", "iterable", "own"} & set(kinds_of(w))),
    ("torch's fused SGD: its first step reads a bfloat16 momentum that nobody has set",
     lambda w: w["optimizer"] == "SGD_fused" and w["loop"].get("precision") == "bf16-true"),
]  # fmt: skip


def drawn(seed, number, workers=True):
    """A configuration that both can take; `workers`: whether loaders may have processes of their own."""
    chance, draws = random.Random(f"beside/{seed}/{number}"), 0
    while True:
        plan = draw(f"{seed}/{draws}", number, steady=True, whatever=True)
        draws += 1
        if plan["shape"] not in SHAPES or any(which(plan) for _, which in EXCLUDED):
            continue
        if not workers:
            plan |= {"workers": 0, "persistent": False}
        if plan["logs"] == "nothing" and plan["scheduler"] == "ReduceLROnPlateau":
            plan["scheduler"] = "StepLR"  # ours follows what steps return, Trainer nothing
        if plan["loader"] == "function":
            plan["loader"] = chance.choice(("function", "own", "items"))
        plan["callbacks"] = [
            name for name in plan["callbacks"] if name != "on_exception"
        ]  # a Checkpoint to Trainer
        plan.pop("ends")
        return plan


def side_of(kind, plan, root):
    """Train by one of the two, and return its results as plain values and tensors, or its error."""
    root.mkdir(parents=True)
    seed_everything(1, verbose=False)
    loop_words, model, fit_words = make(plan, root)
    if kind is pl.Trainer:
        loop_words = {name: value for name, value in loop_words.items() if name not in OURS}
        loop_words["enable_checkpointing"] = any(
            name.startswith("keeps") for name in plan["callbacks"]
        )
    else:
        loop_words.pop("seed", None)
    loop_words["logger"] = Notes() if plan["logger"] != "none" else False
    try:
        trainer = kind(**loop_words)
        trainer.fit(model, **fit_words)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "where": traceback.format_exc()[-1500:],
        }
    left = {
        "weights": dict(model.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "place": [trainer.current_epoch, trainer.global_step],
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "progress_bar_metrics": dict(trainer.progress_bar_metrics),
        "rows": trainer.logger.rows if trainer.logger else [],
        "random": [torch.rand(()).item(), random.random(), np.random.rand()],
        "files": {
            path.relative_to(root).as_posix(): dict(
                torch.load(path, weights_only=False)["state_dict"]
            )
            for path in sorted(root.rglob("*.ckpt"))
            if any(name.startswith("keeps") for name in plan["callbacks"])
        },
    }
    if plan["val"] != "none" and plan["logs"] != "nothing":  # Ours adds what the steps returned.
        left["validated"] = trainer.validate(model, val_loader_of(plan["val"]), verbose=False)
    return left


def plain(value):
    """A state in which functions are their names and tensors their dtypes and numbers, so that NaN is as NaN."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return getattr(value, "__qualname__", value)


def compare(plan, folder):
    """Train a configuration by both. Return the differences as text, None if both refuse it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        theirs, ours = (
            side_of(kind, plan, folder / kind.__name__) for kind in (pl.Trainer, FabricLoop)
        )
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.set_default_dtype(torch.float32)
        shutil.rmtree(folder, ignore_errors=True)
    if "error" in theirs and "error" in ours:
        return None
    if "error" in theirs or "error" in ours:
        return [
            f"only {'Trainer' if 'error' in theirs else 'FabricLoop'} raised {theirs.get('where', ours.get('where'))}"
        ]
    found = []
    for name in theirs.keys() | ours.keys():
        one, other = (plain(side.get(name)) for side in (theirs, ours))
        if name.endswith("_metrics"):
            one, other = (dict(sorted(view.items())) for view in (one, other))
        if not same(one, other):
            found.append(f"{name}: {_first_difference(one, other)}")
    return found


def _first_difference(one, other, path=""):
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        pairs = [(f"{path}.{key}", one[key], other[key]) for key in one]
    elif (
        isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other)
    ):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return f"{path}: {str(one)[:300]} by Trainer, {str(other)[:300]} here"
    return next((_first_difference(a, b, place) for place, a, b in pairs if not same(a, b)), path)


@dataclass
class Figures:
    """Counts and failures of a campaign."""

    seed: int
    configurations: int = 0
    refused: int = 0  # by both
    losses: list = field(default_factory=list)
    seconds: float = 0.0


def apart(plan, folder):
    """Compare a configuration in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reader)
            found = compare(plan, folder)
            with os.fdopen(writer, "w") as file:
                json.dump(found, file)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else ["its process ended without a result"]


def main():
    options = parse_options(make_parser(__doc__))
    quiet()
    figures, started = Figures(options.seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    torch.set_num_threads(1)
    for number in range(options.first, options.first + options.count):
        one = drawn(options.seed, number)
        if options.show:
            print(json.dumps(one))
            continue
        problems = apart(one, folder / str(number))
        figures.refused += problems is None
        if problems:
            figures.losses.append({"number": number, "problems": problems[:12], "options": one})
            print(f"{number}: {problems[:8]}", file=sys.stderr, flush=True)
        figures.configurations += 1
    shutil.rmtree(folder, ignore_errors=True)
    figures.seconds = time.monotonic() - started
    if not options.show:
        print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.losses))


if __name__ == "__main__":
    main()
