"""One altered field in a valid checkpoint: a clear line, or a run that ends; nothing else is touched.

    python tests/faults/fields.py --fields 2000 --seed 1

Runs of several kinds leave valid files. One field of one file is made something else (another type, sign or size, a path, a
formula, a tensor of another dtype, shape or stride, a key taken away), the file is written by torch.save as a valid one, and
resumed in a forked child. `probe` raises `Broken` unless that ended in one line of ours or in a run that ended, quickly and in
little memory, and unless all other files are what they were.
"""

import argparse
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # the tests' modules, the package

import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier, by_epoch, by_step, make_data, make_loader
from runs import Plain, fit, val_loader
from torch.utils.data import DataLoader, IterableDataset

from fabric_template.files.reading import read_checkpoint
from fabric_template.files.schema import check_resumable

SLOW = 20.0  # seconds of its own time that reading and checking a file may take
PATIENCE = 600.0  # seconds until a run counts as one that hangs
SLACK = 64 << 20  # bytes beyond twice the file that a resume may take
VERSION = "checkpoints/run/version_0"


class Broken(AssertionError):
    """A resume did what no file may make it do."""


# ---- the runs


class Measured(Classifier):
    """Keeps a torchmetrics object and logs it."""

    def __init__(self):
        super().__init__(by_epoch)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Drawing(torch.utils.data.Dataset):
    """Draws from generators of its own."""

    def __init__(self):
        import numpy

        self.data, self.numpy, self.python = make_data(), numpy.random.default_rng(1), random.Random(1)
        self.old, self.philox = numpy.random.RandomState(1), numpy.random.Generator(numpy.random.Philox(1))
        self.torch = torch.Generator().manual_seed(1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        noise = self.numpy.random() + self.python.random() + self.old.rand() + self.philox.random()
        return x + 0.01 * noise + 0.01 * torch.rand(8, generator=self.torch), y


class Endless(IterableDataset):
    """Has no length and no end."""

    def __iter__(self):
        while True:
            yield from make_data()


class Both(Classifier):
    """Takes a batch of each of two loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


def two_loaders():
    return CombinedLoader({"a": make_loader(40), "b": make_loader(12)}, "max_size_cycle")


def callbacks():
    return [EarlyStopping("val_loss", patience=5), ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)]


KINDS = {  # words for fit; those that only the first run has; those that only the resumed one has
    "middle": ({"make_module": lambda: Classifier(by_step), "save_top_k": 2}, {"max_steps": 25}),
    "end": ({"make_module": lambda: Classifier(by_epoch), "save_top_k": 2}, {"max_epochs": 3}),
    "measured": ({"make_module": Measured}, {"max_steps": 25, "log_every_n_steps": 1}),
    "plain": ({"make_module": Plain}, {"max_steps": 25}),
    "drawing": ({"train": lambda: DataLoader(Drawing(), 4, shuffle=True)}, {"max_steps": 25}),
    "workers": ({"train": lambda: make_loader(num_workers=2)}, {"max_steps": 25}),
    "endless": ({"train": lambda: DataLoader(Endless(), 4), "limit_train_batches": 10}, {"max_steps": 25}),
    "both": ({"make_module": Both, "train": two_loaders}, {"max_steps": 25}),
    "callbacks": ({"make_callbacks": callbacks}, {"max_epochs": 3}),
}


def run(kind, root, resume=None):
    """The kind's run, or what is left of it after a resume: one epoch more; returns its end."""
    words, first = KINDS[kind]
    words = {"save_top_k": 1, "monitor": "val_loss", **words, **({"max_epochs": 4} if resume else first)}
    if (make := words.pop("make_callbacks", None)) is not None:
        words["callbacks"] = make()
    if kind == "callbacks":
        del words["monitor"], words["save_top_k"]
    _, module, _ = fit(root, val=val_loader, resume=resume, **words)
    return module


def last_of(kind, root):
    if kind == "callbacks":
        return next(Path(root).rglob("last.ckpt"))
    return Path(root, VERSION, "last.ckpt")


def warm_up(root):
    """Import what a run imports, without a backward: after one, a forked process cannot make another."""

    class Still(Classifier):
        def backward(self, loss):
            for parameter in self.parameters():
                parameter.grad = torch.zeros_like(parameter)

    for optimizers in (by_step, by_epoch):
        fit(root, lambda optimizers=optimizers: Still(optimizers), val=val_loader, max_epochs=1)


def in_child(function, *arguments):
    """(what a function returns, its exit status, seconds) in a forked process."""
    began = time.monotonic()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            os.close(reading)
            with open(os.devnull, "w") as quiet:
                os.dup2(quiet.fileno(), 1)
                os.dup2(quiet.fileno(), 2)
            answer = json.dumps(function(*arguments)).encode()
            with open(writing, "wb") as pipe:
                pipe.write(answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    answer = None
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return json.loads(answer) if answer else None, status, time.monotonic() - began


def prepare(folder):
    """A run of each kind, made in children; returns the kinds' folders."""
    warm_up(folder / "warm")
    for kind in KINDS:
        _, status, _ = in_child(lambda kind: run(kind, folder / kind) and None, kind)
        if status:
            raise Broken(f"{kind}: the run itself fails with {status}")
    return {kind: folder / kind for kind in KINDS}


# ---- what is altered


def choose(content, draw):
    """A way down to a field: ([keys], its value)."""
    way, value = [], content
    while isinstance(value, dict | list | tuple) and value and (not way or draw.random() > 0.12):
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        way, value = [*way, key], value[key]
    return way, value


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def others(value, outside, draw):
    """What a field may be made, by name."""
    strange = {
        "None": None, "True": True, "minus": -1, "zero": 0, "huge": 2**62, "beyond": 10**30, "float": -0.5, "nan": float("nan"),
        "inf": float("inf"), "empty text": "", "text": "x", "formula": "=1+1", "lines": "a\nb", "path": "../../../secret.ckpt",
        "absolute": str(outside), "empty list": [], "empty dict": {}, "thrice": [value, value, value], "wrapped": {"a": value},
        "deep": nest(2000), "bytes": b"x", "long": "y" * 100_000, "million": 10**6,
        "no elements": torch.zeros(0), "vector": torch.arange(3.0), "expanded": torch.zeros(1).expand(10**9),
        "tensor": torch.tensor(0.5), "meta": torch.zeros(2, device="meta"),
    }  # fmt: skip
    near = {}
    if isinstance(value, int | float) and not isinstance(value, bool):
        near = {"more": value + 1, "less": value - 1, "negative": -value - 1, "far more": value * 1000 + 7}
    elif isinstance(value, str):
        near = {
            "line more": value + "\n",
            "up": f"../{value}",
            "away": f"{outside.parent}/{value}",
            "other": value + "x",
        }
    elif isinstance(value, torch.Tensor):
        near = {
            "double": value.to(torch.float64), "long": value.to(torch.int64), "complex": value.to(torch.complex64),
            "flat": torch.cat([value.flatten(), value.flatten()]), "short": value.flatten()[1:], "negative": -value.float(),
            "stride": torch.zeros((), dtype=value.dtype).expand(value.shape), "nan": value.float() * float("nan"),
            "rows": torch.stack([value, value], -1)[..., 0], "large": torch.zeros(1, dtype=value.dtype).expand(10**8),
            "sparse": value.float().to_sparse() if value.dim() else value.float(), "zeros": torch.zeros_like(value),
        }  # fmt: skip
    elif isinstance(value, dict) and value:
        key = draw.choice(list(value))
        near = {
            "without": {k: v for k, v in value.items() if k != key},
            "renamed": {("../x" if k == key else k): v for k, v in value.items()},
            "away": {(str(outside) if k == key else k): v for k, v in value.items()},
            "with": {**value, "x": 1, "epoch=9-x.ckpt": -1e9}, "integers": dict(enumerate(value.values())),
        }  # fmt: skip
    elif isinstance(value, list | tuple) and value:
        near = {"shorter": value[:-1], "longer": [*value, *value], "reversed": list(reversed(value))}
    return [*strange.items(), *near.items(), *near.items(), *near.items()]


def alter(content, outside, draw):
    """One field of it is something else; returns (what was done in words, the new content)."""
    content = copy.deepcopy(content)
    way, value = choose(content, draw)
    place = content
    for key in way[:-1]:
        place = place[key]
    how, new = draw.choice([*others(value, outside, draw), ("taken away", None)])
    if isinstance(place, tuple):
        return alter(content, outside, draw)
    if how == "taken away":
        del place[way[-1]]
    else:
        place[way[-1]] = new
    return f"{how} at {way}", content


# ---- what came of it


def contents(root):
    """Every file under a folder and a digest of it."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in sorted(Path(root).rglob("*")) if path.is_file() and path.name != ".lock"
    }  # fmt: skip


def resume(kind, root, path):
    """In a child: read, check and go on; returns what came of it."""
    warnings.simplefilter("ignore")
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"outcome": "ended", "line": "", "raised": ""}
    began = time.thread_time()
    try:
        check_resumable(read_checkpoint(path), path)
    except ValueError:
        pass
    except Exception:
        return {**found, "outcome": "raised", "raised": traceback.format_exc()}
    finally:
        found["checked"] = time.thread_time() - began
    try:
        run(kind, root, path)
    except Exception as error:
        is_ours = isinstance(error, ValueError | TypeError) and type(error).__module__.startswith("fabric_template")
        is_line = is_ours and len(str(error).splitlines()) == 1 and len(str(error)) < 1500
        found["outcome"] = "refused" if is_line else "raised"
        found["line"], found["raised"] = f"{type(error).__name__}: {error}", traceback.format_exc()
    found["memory"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


def probe(kind, made, folder, draw):
    """Alter a field of the kind's file and resume it; returns (what was done, "ended" or "refused", seconds, the line)."""
    shutil.rmtree(folder, ignore_errors=True)
    root = folder / "in" / "run"
    shutil.copytree(made, root)
    outside = folder / "secret.ckpt"
    for path in (outside, folder / "in" / "x", root / "checkpoints/x", root / "notes.ckpt", root / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of somebody else")
    path = last_of(kind, root)
    path.with_name("epoch=8-notes.ckpt").write_text("of somebody else")
    done, content = alter(torch.load(path, weights_only=True), outside, draw)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)  # to write what is deep; it is read without
    torch.save(content, path)
    sys.setrecursionlimit(limit)
    before = contents(folder)
    own = set(contents(made))
    found, status, seconds = in_child(resume, kind, root, path)
    what = f"{kind}, {done[:300]}"
    if found is None:
        raise Broken(f"{what}: {'it hangs' if seconds > PATIENCE else f'the process died with {status}'}")
    if found["outcome"] == "raised":
        raise Broken(f"{what}: {found['line'][:300]}\n{found['raised'][-3000:]}")
    after = contents(folder)
    changed = {name for name in before if after.get(name) != before[name]}
    strange = {name for name in changed if name.removeprefix("in/run/") not in own}
    if found["outcome"] == "refused":
        strange |= {name for name in changed if name.endswith(".ckpt")}
    made_new = {name for name in after.keys() - before.keys() if found["outcome"] == "ended"}
    strange |= {name for name in made_new if not name.startswith(("in/run/checkpoints/run/", "in/run/logs/run/"))}
    if strange:
        raise Broken(f"{what}: {found['outcome']}, and {sorted(strange)} are not what they were")
    if found["checked"] > SLOW:
        raise Broken(f"{what}: reading and checking took {found['checked']:.1f} s")
    if found["memory"] > 2 * path.stat().st_size + SLACK:
        raise Broken(f"{what}: {found['outcome']} with {found['memory'] >> 20} MiB more")
    return what, found["outcome"], found["checked"], found["line"]


def campaign(number, seed, verbose=False):
    """So many altered fields; figures and what broke."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    here = Path.cwd()
    os.chdir(folder)
    figures = {"fields": 0, "seed": seed, "outcomes": Counter(), "slowest": 0.0, "losses": []}
    try:
        made, began = prepare(folder), time.monotonic()
        for index in range(number):
            kind = list(KINDS)[index % len(KINDS)]
            figures["fields"] += 1
            try:
                what, outcome, seconds, line = probe(
                    kind, made[kind], folder / "probe", random.Random(f"{seed}-{index}")
                )
                figures["outcomes"][outcome] += 1
                figures["slowest"] = max(figures["slowest"], seconds)
                if verbose:
                    print(f"{index}: {what}: {outcome}: {line}", file=sys.stderr, flush=True)
            except Broken as error:
                figures["losses"].append(f"{index}: {str(error).splitlines()[0]}")
                print(f"{index}: {error}", file=sys.stderr, flush=True)
        figures["seconds"] = time.monotonic() - began
    finally:
        os.chdir(here)
        shutil.rmtree(folder)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fields", type=int, default=2000, help="how many altered fields (2000)")
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed if not given")
    parser.add_argument("--verbose", action="store_true")
    words = parser.parse_args()
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}", file=sys.stderr)
    print(json.dumps(campaign(words.fields, seed, words.verbose)))


if __name__ == "__main__":
    main()
