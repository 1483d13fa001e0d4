"""Random configurations, each trained by lightning.Trainer and by FabricLoop: the same bits, the same metrics.

    python soak/beside.py --count 100 --seed 0
    python soak/beside.py --seed 0 --first 57 --count 1            one alone
    python soak/beside.py --seed 0 --first 57 --count 1 --show     what it is made of

A configuration is drawn from its seed and number alone, of the pieces of drawn.py, and trained by both in a process of its own.
What is compared: weights, optimizers, schedulers, the three views of what was logged, what a logger was given, counters, the
files of a ModelCheckpoint, what a validation afterwards returns, and the random numbers that are drawn next.
"""

# ruff: noqa: E402

import argparse
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
from configurations import draw, kinds_of
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
)  # words that Trainer does not have
SHAPES = ("lightning", "handed", "gan", "manual")  # Trainer takes LightningModules only
EXCLUDED = [  # (why, which)
    ("loaders of our own kinds", lambda w: {"tensors", "list"} & set(kinds_of(w))),
    ("with dataloader_iter Trainer clears the gradients by the index of the batch before: in the middle of a window",
     lambda w: w["shape"] == "handed" and ("accumulate_grad_batches" in w["loop"] or "accumulates" in w["callbacks"])),
    ("a step of LBFGS takes several batches from dataloader_iter: Trainer sees the epoch's end too late to step its schedulers",
     lambda w: w["shape"] == "handed" and w["optimizer"] == "LBFGS"),
    ("of several loaders Trainer asks those with a length how long the epoch is, and leaves out the end of a shorter one",
     lambda w: w["loader"] == "combined" and w["combined"][3] == "min_size" and {"function", "iterable"} & set(kinds_of(w))),
    ("torch's fused SGD: its first step reads a bfloat16 momentum that nobody has set",
     lambda w: w["optimizer"] == "SGD_fused" and w["loop"].get("precision") == "bf16-true"),
]  # fmt: skip


def drawn(seed, number, workers=True):
    """A configuration that both can take; `workers`: whether loaders may have processes of their own."""
    chance, draws = random.Random(f"beside/{seed}/{number}"), 0
    while True:
        words = draw(f"{seed}/{draws}", number, steady=True, whatever=True)
        draws += 1
        if words["shape"] not in SHAPES or any(which(words) for _, which in EXCLUDED):
            continue
        if not workers:
            words |= {"workers": 0, "persistent": False}
        if words["shape"] == "handed":  # whose batch sizes Trainer does not look for
            loop = {
                name: value
                for name, value in words["loop"].items()
                if name not in ("monitor", "save_top_k")
            }
            words |= {"logs": "nothing", "metric": None, "loop": loop}
            words["callbacks"] = [
                name for name in words["callbacks"] if not name.startswith(("stops", "keeps_best"))
            ]
            words["scheduler"] = (
                "StepLR" if words["scheduler"] == "ReduceLROnPlateau" else words["scheduler"]
            )
        if words["logs"] == "nothing" and words["scheduler"] == "ReduceLROnPlateau":
            words["scheduler"] = "StepLR"  # ours follows what steps return, Trainer nothing
        if words["loader"] == "function":
            words["loader"] = chance.choice(("function", "own", "items"))
        words["callbacks"] = [
            name for name in words["callbacks"] if name != "on_exception"
        ]  # a Checkpoint to Trainer
        words.pop("ends")
        return words


def side_of(kind, words, root):
    """What one of the two leaves, in plain values and tensors; an error is its text."""
    root.mkdir(parents=True)
    seed_everything(1, verbose=False)
    loop_words, model, fit_words = make(words, root)
    if kind is pl.Trainer:
        loop_words = {name: value for name, value in loop_words.items() if name not in OURS}
        loop_words["enable_checkpointing"] = any(
            name.startswith("keeps") for name in words["callbacks"]
        )
    else:
        loop_words.pop("seed", None)
    loop_words["logger"] = Notes() if words["logger"] != "none" else False
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
            if any(name.startswith("keeps") for name in words["callbacks"])
        },
    }
    if words["val"] != "none" and words["logs"] != "nothing":  # Ours adds what the steps returned.
        left["validated"] = trainer.validate(model, val_loader_of(words["val"]), verbose=False)
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


def compare(words, folder):
    """Train a configuration by both. Return the differences as text, None if both refuse it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        theirs, ours = (
            side_of(kind, words, folder / kind.__name__) for kind in (pl.Trainer, FabricLoop)
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
    """What a campaign did."""

    seed: int
    configurations: int = 0
    refused: int = 0  # by both
    losses: list = field(default_factory=list)
    seconds: float = 0.0


def apart(words, folder):
    """Compare a configuration in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reader)
            found = compare(words, folder)
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
    return json.loads(text) if text else ["its process ended without a word"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=30, help="how many configurations")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of all that is drawn; drawn itself and printed if not given",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print what the configurations are made of, and run nothing",
    )
    words = parser.parse_args()
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", file=sys.stderr)
    quiet()
    figures, started = Figures(seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    torch.set_num_threads(1)
    for number in range(words.first, words.first + words.count):
        one = drawn(seed, number)
        if words.show:
            print(json.dumps(one))
            continue
        problems = apart(one, folder / str(number))
        figures.refused += problems is None
        if problems:
            figures.losses.append({"number": number, "problems": problems[:12], "words": one})
            print(f"{number}: {problems[:8]}", file=sys.stderr, flush=True)
        figures.configurations += 1
    shutil.rmtree(folder, ignore_errors=True)
    figures.seconds = time.monotonic() - started
    if not words.show:
        print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.losses))


if __name__ == "__main__":
    main()
