"""Random configurations, each ended once by a kill, an exception or a signal, then resumed: as if nothing had been.

    python soak/configurations.py --count 100 --seed 0
    python soak/configurations.py --seed 0 --first 57 --count 1 --show     what number 57 is made of
    python soak/configurations.py --seed 0 --first 57 --count 1 --keep     runs it alone, and keeps its folders

A configuration is drawn from its seed and number alone. It is trained undisturbed, then ended at a point of its run and started
again with the same command, each time in a process forked from one that has imported everything. What is compared: weights,
optimizers, schedulers, metrics, history, each file of the run. What is not: see IGNORED and EXCLUDED.
"""

import argparse
import contextlib
import csv
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import search_path  # noqa: F401
import torch
from drawn import (
    CALLBACKS,
    DICTS,
    HOOKS,
    LOADERS,
    METRICS,
    OPTIMIZERS,
    POINTS,
    SCHEDULERS,
    Planned,
    make,
)
from kills import cpu_seconds
from layer import Fault
from lightning.fabric.utilities.seed import seed_everything
from ports import free_port
from victim import quiet

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint

PATIENCE = 600.0  # seconds until a run that does not end counts as hanging; at nice 19 beside others, 60 are soon over

# ---- what is not compared, and what is not drawn

IGNORED = {
    "time": "a column and a field that depend on the clock",
    "seconds": "how long the run has taken",
    "eval_seconds": "how long its evaluations have taken",
    "samples_per_second": "the speed of a run by steps",
    "time_elapsed": "of Lightning's Timer",
    "seeds": "of samplers that share without shuffling; the batches show the others",
    "workers": "what worker processes have noted: None, or the state that it stands for",
    "elapsed": "the time that max_time counts over restarts",
    "gradients": "in manual optimization also of optimizers that have stepped; the weights show the others",
    "differentiable": "torch adds it where an optimizer loads a state, and so to groups that are added later",
    "last_model_path": "of Lightning's ModelCheckpoint, ended between the best file and the last",
}
ASIDE = (
    ".lock",
    ".before",  # rows of a run that was killed before it saved
)
# ModelCheckpoint does not save which files it saved last, and saves them again after a kill.
AGAIN = re.compile(r"last|.*-v\d+\.ckpt")
LEFT = "checkpoints/run/last.ckpt"  # with save_last=False what a run that was ended has written of its last steps stays
EXCLUDED = [  # (why, which)
    (
        "StochasticWeightAveraging exchanges schedulers in a hook that a resume in the middle of an epoch does not call",
        lambda w: "swa" in w["callbacks"],
    ),
    (
        "a loader that brings its own state brings none of its workers' random numbers",
        lambda w: "stateful" in kinds_of(w) and w["workers"] and w["noise"],
    ),
    (
        "the random numbers of an iterable dataset in persistent_workers, which a warning names on resume",
        lambda w: "iterable" in kinds_of(w) and w["persistent"] and w["noise"],
    ),
    (
        "torchdata's persistent workers draw the order of a pass twice when they start, and once later",
        lambda w: w["ranks"] > 1 and "stateful" in kinds_of(w) and w["persistent"],
    ),
    (
        "a signal in the last step of max_steps: the resumed run has no step left, and reads no batch ahead",
        lambda w: (
            "max_steps" in w["loop"]
            and {"iterable", "function"} & set(kinds_of(w))
            and {"SIGTERM", "SIGINT"} & {end["kind"] for end in w["ends"]}
        ),
    ),
    (
        "SparseAdam refuses a module that has nothing sparse",
        lambda w: w["optimizer"] == "SparseAdam" and "sparse" not in w["parts"],
    ),
    (
        "torch's fused SGD: its first step reads a bfloat16 momentum that nobody has set, resumed or not",
        lambda w: w["optimizer"] == "SGD_fused" and w["loop"].get("precision") == "bf16-true",
    ),
    (
        "torch's fused SGD: it looks for the momentum of a parameter that had no gradient in the step before",
        lambda w: w["optimizer"] == "SGD_fused" and "freezes" in w["parts"],
    ),
    (
        "thawed layers on two ranks: DDP does not know what was frozen when it was made, and each rank trains its own",
        lambda w: (
            w["ranks"] > 1
            and ({"backbone", "unfreezes"} & set(w["callbacks"]) or "freezes" in w["parts"])
        ),
    ),
    (
        "batch samplers of one's own on two ranks: Lightning asks for torch's BatchSampler there",
        lambda w: w["ranks"] > 1 and "lazy" in kinds_of(w),
    ),
    (
        "a batch sampler that draws each batch while workers load ahead mixes its draws with those of the steps",
        lambda w: (
            "lazy" in kinds_of(w)
            and w["workers"]
            and not w["drops"]
            and (
                {"dropout", "libraries"} & set(w["parts"])
                or w["metric"] == "BootStrapper"
                or "val_check_interval" in w["loop"]
            )
        ),
    ),
    (
        "OnExceptionCheckpoint saves in a folder of its own, so the resumed run starts a new version",
        lambda w: "on_exception" in w["callbacks"],
    ),
    (
        "ModelCheckpoint does not save the step that it saved last, and saves it again where a batch has no step",
        lambda w: (
            "keeps" in w["callbacks"]
            and (
                w["shape"] == "manual"
                or "accumulate_grad_batches" in w["loop"]
                or "accumulates" in w["callbacks"]
                or "skips" in w["parts"]
            )
        ),
    ),
]


def kinds_of(plan):
    """The kinds of loaders of a configuration."""
    return plan["combined"][:2] if plan["loader"] == "combined" else [plan["loader"]]


def all_values(value):
    """Return every value in a plan."""
    if isinstance(value, dict | list):
        return {
            word
            for part in (value.values() if isinstance(value, dict) else value)
            for word in all_values(part)
        }
    return {str(value)}


def draw(seed, number, ranks=1, steady=False, only=(), whatever=False):
    """Draw the plan of a configuration: plain values by name.

    Args:
        seed: of all of them.
        number: of this one.
        ranks: processes of a run.
        steady: whether it is ended at a counted point, not at an instant of a clock.
        only: values that must be in it.
        whatever: whether what is excluded is drawn, too.
    """
    chance = random.Random(f"{seed}/{number}/{ranks}")
    while True:
        plan = _draw(chance, number, ranks, steady)
        if set(only) <= all_values(plan) and (
            whatever or not any(which(plan) for _, which in EXCLUDED)
        ):
            return plan


def _draw(chance, number, ranks, steady):
    def some(names, odds):
        return [name for name in names if chance.random() < odds]

    shape = chance.choice(("lightning",) * 5 + ("module", "object", "functions", "gan", "manual"))
    loader = chance.choice(LOADERS)
    is_lightning = shape in ("lightning", "gan", "manual")
    parts = some(("dropout", "batchnorm", "libraries"), 0.3)
    parts += some(("reduced", "hparams"), 0.15)
    if shape == "lightning":
        parts += some(("skips", "freezes", "toggles"), 0.08)
    optimizer = chance.choice(list(OPTIMIZERS))
    if optimizer == "SparseAdam":
        parts = ["sparse"]
    scheduler = "none" if shape in ("gan", "manual") else chance.choice(list(SCHEDULERS))
    logs = (
        "nothing"
        if shape == "functions"
        else chance.choice(("nothing", "step", "epoch", "both", "both"))
    )
    val = chance.choice(("none", "one", "one", "shuffled") + ("two",) * (shape != "functions"))
    metric = (
        chance.choice(list(METRICS))
        if logs != "nothing" and shape != "functions" and chance.random() < 0.5
        else None
    )
    measured = chance.choice(("object", "value", "end"))
    if metric in DICTS and metric != "MetricCollection" and measured == "object":
        measured = "value"
    followed = "val_loss" if val != "none" else "train_loss"
    callbacks = some([name for name in CALLBACKS if is_lightning], 0.08)
    loop = {
        "max_epochs": chance.choice((2, 3, 4)),
        "num_sanity_val_steps": chance.choice((0, 0, 2)),
        "save_every_n_steps": chance.choice((None, 1, 1, 2, 3)),
    }
    maybe = {
        "accumulate_grad_batches": (2, 3, 4), "gradient_clip_val": (0.1, 1.0), "limit_train_batches": (4, 0.5),
        "limit_val_batches": (1, 0.5), "val_check_interval": (2, 0.5, 3), "check_val_every_n_epoch": (2,),
        "precision": ("64-true", "bf16-true", "bf16-mixed"), "monitor": (followed,), "max_steps": (7, 13),
        "log_every_n_steps": (2, 5), "reload_dataloaders_every_n_epochs": (1, 2), "seed": (3,), "save_top_k": (2, -1, 0),
        "min_epochs": (2,), "overfit_batches": (3,), "save_last": (False,), "deterministic": (True,),
        "gradient_clip_algorithm": ("value",), "inference_mode": (False,), "detect_anomaly": (True,),
    }  # fmt: skip
    rare = {
        "overfit_batches": 0.03,
        "save_last": 0.03,
        "deterministic": 0.05,
        "detect_anomaly": 0.03,
    }
    loop |= {
        name: chance.choice(values)
        for name, values in maybe.items()
        if chance.random() < rare.get(name, 0.2)
    }
    if chance.random() < 0.08:
        loop |= {"val_check_interval": 4, "check_val_every_n_epoch": None}
    plan = {
        "number": number, "shape": shape, "parts": parts, "optimizer": optimizer, "scheduler": scheduler,
        "interval": chance.choice(("step", "epoch")), "frequency": chance.choice((1, 1, 2, 3)), "followed": followed,
        "logs": logs, "returns": chance.choice(("tensor", "dict")), "metric": metric, "measured": measured,
        "loader": loader, "noise": chance.random() < 0.4,
        "workers": chance.choice((0, 0, 0, 1, 2)), "persistent": chance.random() < 0.5, 
        "drops": chance.random() < 0.3, "val": val, "given": chance.choice(("loaders", "loaders", "datamodule")),
        "combined": [*chance.sample([kind for kind in LOADERS if kind not in ("list", "combined")], 2),
                     chance.choice(("dict", "list")),
                     chance.choice(("min_size", "max_size", "max_size_cycle"))],
        "callbacks": callbacks, "logger": chance.choice(("ours",) * 7 + ("none", "lightning_csv", "tensorboard")),
        "ranks": ranks, "loop": loop,
    }  # fmt: skip
    _fit_together(plan)
    plan["listens"] = chance.random() < 0.6
    plan["ends"] = [_draw_end(chance, plan, steady) for _ in range(chance.choice((1, 1, 1, 2)))]
    return plan


def _draw_end(chance, plan, steady):
    """Draw how a run is ended. `part` is how far through the visits of that point the undisturbed run makes."""
    kind = chance.choice(
        ("kill", "kill", "kill", "exception", "exception", "SIGTERM", "SIGINT", "KeyboardInterrupt")
    )
    points = ["training_step", "load"] + (["validation_step"] if plan["val"] != "none" else [])
    points += (
        [*HOOKS, "on_train_batch_start", "on_train_batch_end", "on_train_batch_end"]
        if plan["listens"]
        else []
    )
    at = chance.choice(points)
    if kind == "kill":
        at = chance.choice((at, at, "disk") if steady else (at, "disk", "instant"))
        if at == "disk" and plan["logger"] not in ("ours", "none"):  # which write by other doors
            at = "training_step"
    return {
        "kind": kind,
        "at": at,
        "part": round(chance.random(), 4),
        "rank": chance.randrange(plan["ranks"]),
    }


def _fit_together(plan):
    """Leave out what the loop or Lightning refuses together."""
    loop, callbacks, shape = plan["loop"], plan["callbacks"], plan["shape"]

    def without(*names):
        for name in names:
            if name in callbacks:
                callbacks.remove(name)

    for one, *others in (
        ("swa", "ema", "averages", "backbone", "unfreezes"), ("ema", "averages"), ("backbone", "unfreezes"),
        ("keeps", "keeps_best"), ("stops", "stops_in_training"),
    ):  # fmt: skip
        if one in callbacks:
            without(*others)
    if shape in ("gan", "manual"):
        without("accumulates", "swa", "backbone", "unfreezes", "ema", "averages")
        for name in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
            loop.pop(name, None)
    if plan["optimizer"] == "LBFGS":
        if shape in ("gan", "manual"):
            plan["optimizer"] = "Adam"
        without("unfreezes", "backbone")
    if plan["optimizer"] in ("Muon", "SparseAdam", "AdamW_groups"):
        without("unfreezes", "backbone", "swa")
    if plan["optimizer"] == "SparseAdam":  # torch clips no sparse gradients
        loop.pop("gradient_clip_val", None)
    if (
        "backbone" in callbacks or "unfreezes" in callbacks
    ):  # torch's schedulers take no new parameter groups
        plan["scheduler"] = "none"
    if "backbone" in callbacks or "unfreezes" in callbacks or "accumulates" in callbacks:
        loop.pop("accumulate_grad_batches", None)
        plan["parts"] = [
            part for part in plan["parts"] if part not in ("freezes", "toggles", "sparse")
        ]
    if plan["logger"] == "none":
        without("rates")
    if plan["scheduler"] == "none" and shape != "gan":
        without("rates")
    if plan["logs"] == "nothing":  # Lightning's callbacks see what is logged, not what is returned
        without("stops", "stops_in_training", "keeps_best")
    if loop.get("gradient_clip_algorithm") and "gradient_clip_val" not in loop:
        del loop["gradient_clip_algorithm"]
    if "keeps" in callbacks or "keeps_best" in callbacks:
        for name in ("monitor", "save_top_k", "save_last", "save_every_n_steps"):
            loop.pop(name, None)
    if plan["optimizer"] == "LBFGS":
        plan["parts"] = [part for part in plan["parts"] if part != "skips"]
    # Lightning refuses to clip these
    if plan["optimizer"].endswith("_fused") and loop.get("precision") == "bf16-mixed":
        for name in ("gradient_clip_val", "gradient_clip_algorithm"):
            loop.pop(name, None)
    followed_in_training = plan["logs"] in ("epoch", "both") or plan["val"] != "none"
    followed_in_training |= (
        plan["logs"] == "nothing" and shape != "gan"
    )  # whose step returns nothing
    if not followed_in_training or (plan["val"] == "two" and plan["logs"] == "nothing"):
        loop.pop("monitor", None)
        without("stops", "stops_in_training", "keeps_best")
        if plan["scheduler"] == "ReduceLROnPlateau":
            plan["scheduler"] = "StepLR"
    # Lightning refuses a skipped batch there; torch to clip none
    if plan["ranks"] > 1 or "gradient_clip_algorithm" in loop:
        plan["parts"] = [part for part in plan["parts"] if part != "skips"]
    if "monitor" not in loop:
        loop.pop("save_top_k", None)
    if {"iterable", "function"} & set(kinds_of(plan)):  # without a length there is no half of it
        loop |= {
            name: 3
            for name in ("limit_train_batches", "val_check_interval")
            if loop.get(name) == 0.5
        }
    if plan["loader"] == "function":
        loop["limit_train_batches"] = 4
    if plan["ranks"] > 1 and plan["val"] == "two" and loop.get("limit_val_batches") == 0.5:
        loop["limit_val_batches"] = 1  # half of a rank's single batch is none
    if (
        "iterable" in kinds_of(plan)
        and "limit_train_batches" not in loop
        and "batchnorm" in plan["parts"]
    ):
        without("swa")  # which wants a length for the epoch that renews BatchNorm
    if plan["loader"] in ("tensors", "function", "list"):
        plan["workers"] = 0
    if not plan["workers"]:
        plan["persistent"] = False


# ---- one run, in a process of its own

CODES = {  # how a run may end that was ended so, 0 if it came too late; a signal before training ends it at once
    "kill": (-signal.SIGKILL,),
    "exception": (3,),
    "SIGTERM": (128 + signal.SIGTERM, -signal.SIGTERM),
    "SIGINT": (128 + signal.SIGINT,),
    "KeyboardInterrupt": (128 + signal.SIGINT,),
}


def start(root, plan, log, end=None, counts=None):
    """Fork a process for each rank, each typing the same command; returns their process ids."""
    port = str(free_port()) if plan["ranks"] > 1 else None
    pids = []
    for rank in range(plan["ranks"]):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _child(
                root,
                plan,
                log,
                end if end is None or end["rank"] == rank else None,
                counts,
                rank,
                port,
            )
        pids.append(pid)
    return pids


def _child(root, plan, log, end, counts, rank, port):
    code = 1
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.setpgid(0, 0)  # its workers are found by that
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # ignored in a shell's background, also by runs
        POINTS.__init__()
        POINTS.end = end
        if port is not None:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank)}
        layer = Fault(root, end["n"], "SIGKILL") if end and end["at"] == "disk" else None
        with layer or contextlib.nullcontext():
            train(root, plan, rank)
        if counts is not None and rank == 0:
            Path(counts).write_text(
                json.dumps({**POINTS.counts, "disk": layer.count if layer else 0})
            )
        code = 0
    except Planned:
        code = 3
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def train(root, plan, rank=0):
    """The command that is typed again; at its end it notes what is in memory."""
    seed_everything(
        99 if saved_in(root) else 1, verbose=False
    )  # A resumed run takes nothing from its own seed.
    ranks = {}
    if plan["ranks"] > 1:
        unused = plan["shape"] in ("gan", "manual") or {"freezes", "toggles", "sparse"} & set(
            plan["parts"]
        )
        unused = unused or {"backbone", "unfreezes"} & set(plan["callbacks"])
        ranks = {
            "strategy": "ddp_find_unused_parameters_true" if unused else "ddp",
            "devices": plan["ranks"],
        }
    loop_words, model, fit_words = make(plan, root, **ranks)
    loop = FabricLoop(**loop_words)
    history = loop.fit(model, **fit_words, resume="auto")
    net = getattr(model, "net", model) if plan["shape"] in ("object", "functions") else model
    nets = (
        net.net if isinstance(getattr(net, "net", None), torch.nn.Module) else net
    )  # without the metrics
    end = {
        "weights": net.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in loop.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in loop.lr_scheduler_configs],
        "metrics": dict(loop.callback_metrics),
        "history": history.to_dict("list"),
        "counters": [loop.current_epoch, loop.global_step],
        "flags": [p.requires_grad for p in nets.parameters()]
        + [m.training for m in nets.modules()],
    }
    if rank == 0:
        Path(root).mkdir(exist_ok=True)  # where a run writes nothing
        torch.save(end, Path(root, "end.pt"))


def saved_in(root):
    """Return whether there is a file from which a run continues by itself."""
    return any(path.parent.name != "aside" for path in Path(root).rglob("*.ckpt"))


def wait(pids, end=None, after=None):
    """Wait for all ranks; one that ended otherwise than well takes the others with it. Returns their exit codes."""
    codes, start_time, hit = dict.fromkeys(pids), time.monotonic(), None
    while None in codes.values():
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if (
            after is not None
            and hit is None
            and codes[pids[0]] is None
            and cpu_seconds(pids[0]) >= after
        ):
            hit = now
        if (
            hit is None
            and end is not None
            and end["kind"] in ("kill", "exception", "KeyboardInterrupt")
        ):
            hit = now if any(codes.values()) else None
        late = now - start_time >= PATIENCE
        if hit is not None or late:
            for pid in [pid for pid, code in codes.items() if code is None]:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                codes[pid] = "hang" if late else os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    return list(codes.values())


def clear(pids):
    """End the workers that a killed run has left."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# ---- what is left of a run, and where two ends differ


def end_of(root):
    """{what: content} of a finished run: what was in memory, and each file of its newest version."""
    found = torch.load(Path(root, "end.pt"), weights_only=False)
    newest = {}
    for folder in sorted(Path(root).rglob("version_*"), key=lambda path: int(path.name[8:])):
        newest[folder.parent] = folder
    paths = [
        path
        for folder in newest.values()
        if folder.parts[-3] in ("logs", "checkpoints")
        for path in folder.rglob("*")
    ]
    for path in sorted(
        path for path in [*paths, *Path(root).glob("checkpoints/*.ckpt")] if path.is_file()
    ):
        name = str(path.relative_to(root))
        of_callback = path.parent.name == "checkpoints"
        if not any(word in path.name for word in ASIDE) and not (
            of_callback and AGAIN.match(path.name)
        ):
            found[re.sub(r"version_\d+/", "", name)] = _content(path)
    return _plain(found, str(root))


def batches_in(checkpoint):
    """Return the number of batches that a checkpoint covers; -1 without a checkpoint."""
    return (
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        if checkpoint
        else -1
    )


def _content(path):
    if path.suffix == ".ckpt":
        return read_checkpoint(path)
    if path.suffix == ".csv":
        columns, *rows = csv.reader(io.StringIO(path.read_text(), newline=""))
        return [dict(zip(columns, row, strict=True)) for row in rows]
    text = path.read_text()
    return (
        text.partition("\nabout:")[0] if path.name == "config.yaml" else text
    )  # The rest of the line is the command and its folder.


def _plain(value, root):
    if isinstance(value, dict):
        if "lines" in value and "names" in value:  # rows as text, their times among them
            rows = [
                dict(zip(value["names"], json.loads(line), strict=False))
                for line in value["lines"].splitlines()
            ]
            value = {**value, "lines": rows}
        return {
            _plain(key, root): _plain(part, root)
            for key, part in value.items()
            if key not in IGNORED
        }
    if isinstance(value, list | tuple):
        return [_plain(part, root) for part in value]
    return (
        re.sub(r"version_\d+", "version_N", value.replace(root, "ROOT"))
        if isinstance(value, str)
        else value
    )


def differences(expected, found, where=""):
    """Describe every difference of two ends."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if lacking := [str(key) for key in expected if key not in found]:
            yield f"{where}: lacks {lacking[:3]}"
        if more := [str(key) for key in found if key not in expected]:
            yield f"{where}: more {more[:3]}"
        if list(expected) != list(found) and not lacking and not more:
            yield f"{where}: in another order"
        for key in expected:
            if key in found:
                yield from differences(expected[key], found[key], f"{where}/{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{where}: {len(found)} items instead of {len(expected)}"
        for i, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f"{where}/{i}")
    elif isinstance(expected, torch.Tensor) or isinstance(found, torch.Tensor):
        expected, found = (
            one.to_dense() if isinstance(one, torch.Tensor) else one for one in (expected, found)
        )
        kinds = [
            (type(one), getattr(one, "dtype", None), getattr(one, "shape", None))
            for one in (expected, found)
        ]
        if kinds[0] != kinds[1]:
            yield f"{where}: {kinds[1]} instead of {kinds[0]}"
        elif not torch.equal(expected.nan_to_num(7.5), found.nan_to_num(7.5)):
            yield f"{where}: another tensor"
    elif type(expected) is not type(found) or not (
        expected == found or (expected != expected and found != found)
    ):
        yield f"{where}: {str(found)[:60]!r} instead of {str(expected)[:60]!r}"


# ---- many


@dataclass
class Figures:
    """The results of a campaign."""

    seed: int
    ranks: int
    configurations: int = 0
    ends: dict = field(
        default_factory=dict
    )  # how often a run was ended in each way, while it lived
    resumed: int = 0  # from a checkpoint; the others had saved nothing, or were over
    refused: list = field(default_factory=list)  # configurations that do not even run undisturbed
    seconds: float = 0.0
    losses: list = field(default_factory=list)


def one(plan, folder, figures):
    """Run a configuration undisturbed and ended; returns what is wrong, a list of lines."""
    for name in ("whole", "run"):
        shutil.rmtree(folder / name, ignore_errors=True)
    log, counts = folder / "log", folder / "counts"
    log.unlink(missing_ok=True)
    before = os.times()
    count_disk = (
        {"kind": None, "at": "disk", "n": 0, "rank": 0}
        if any(e["at"] == "disk" for e in plan["ends"])
        else None
    )
    codes = wait(start(folder / "whole", plan, log, count_disk, counts))
    after = os.times()
    if any(codes):
        figures.refused.append(
            {"number": plan["number"], "codes": codes, "plan": plan, "output": last_lines(log)}
        )
        return [f"refused undisturbed, {codes}: {last_lines(log)}"]
    counted = json.loads(counts.read_text())
    seconds = (
        after.children_user + after.children_system - before.children_user - before.children_system
    ) / len(codes)
    all_pids = []
    for end in plan["ends"]:
        log.unlink(missing_ok=True)
        visits = counted.get(end["at"], 8 if end["at"] == "load" else 0)
        end = {**end, "n": 1 + int(end["part"] * visits)}
        pids = start(folder / "run", plan, log, end)
        all_pids += pids
        codes = wait(pids, end, end["part"] * seconds if end["at"] == "instant" else None)
        # of several ranks, one that has lost another ends with an error, or is killed in its turn
        expected = (*CODES[end["kind"]], 0, *([-signal.SIGKILL, 1] if len(pids) > 1 else []))
        if end["kind"] == "KeyboardInterrupt" and end["at"] == "load" and plan["workers"]:
            expected = (*expected, 1)  # torch reports that a worker is gone.
        if any(code not in expected for code in codes):
            return [f"{end} ended it with {codes}: {last_lines(log)}"]
        figures.ends[end["kind"]] = figures.ends.get(end["kind"], 0) + any(codes)
        if not any(codes):
            if end["at"] == "load" and plan["workers"]:
                return []  # in a batch that a worker loaded ahead and nobody asked for: what it drew then is lost
            break
    log.unlink(missing_ok=True)
    figures.resumed += any(codes) and saved_in(folder / "run")
    pids = start(folder / "run", plan, log)
    codes = wait(pids)
    clear([*all_pids, *pids])
    if any(codes):
        return [f"the resumed run ended with {codes}: {last_lines(log)}"]
    try:
        whole, found = end_of(folder / "whole"), end_of(folder / "run")
        if {"ema", "averages"} & set(plan["callbacks"]):
            # Only a run that trains puts the averages into the module. The files have both weights.
            found["weights"] = whole["weights"]
        if plan["loop"].get("save_last") is False and batches_in(found.get(LEFT)) > batches_in(
            whole.get(LEFT)
        ):
            found.pop(LEFT)
            whole.pop(LEFT, None)
        return list(differences(whole, found))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def last_lines(log):
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return "\n".join(lines[-12:])


def campaign(seed, first, count, ranks=1, keep=False, report=lambda plan, problems: None, **drawn):
    """Run a number of configurations, drawn with these arguments of `draw`; return the figures."""
    figures, started = Figures(seed, ranks), time.monotonic()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        quiet()
        plain = {
            "workers": 0,
            "shape": "lightning",
            "loader": "shuffled",
            "logger": "ours",
            "callbacks": [],
        }
        train(folder / "warm", {**draw(0, 0), **plain, "parts": [], "loop": {"max_epochs": 1}})
        gc.collect()
        gc.freeze()
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(
                "training has started threads: a fork of this process could wait for their locks for ever"
            )
        for number in range(first, first + count):
            plan = draw(seed, number, ranks, **drawn)
            problems = one(plan, folder, figures)
            figures.configurations += 1
            if problems:
                figures.losses.append({"number": number, "problems": problems[:12], "plan": plan})
            report(plan, problems)
    finally:
        if keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    figures.seconds = time.monotonic() - started
    return figures


def make_parser(description):
    """Return a parser with the options of every campaign."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--count", type=int, default=30, help="how many configurations")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seed", type=int, help="of all configurations; drawn if not given")
    parser.add_argument("--show", action="store_true", help="print the configurations only")
    return parser


def parse_options(parser):
    """Parse the command line, draw a seed if none is given, and print it."""
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    print(f"seed {options.seed}", file=sys.stderr)
    return options


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run, through gloo")
    parser.add_argument(
        "--only", action="append", default=[], help="a value that must be in each; may be repeated"
    )
    parser.add_argument("--whatever", action="store_true", help="draw what is excluded, too")
    parser.add_argument("--steady", action="store_true", help="end runs at counted points only")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the last one")
    options = parse_options(parser)
    given = {"steady": options.steady, "only": options.only, "whatever": options.whatever}
    if options.show:
        for number in range(options.first, options.first + options.count):
            print(json.dumps(draw(options.seed, number, options.ranks, **given)))
        return

    def report(drawn, problems):
        if problems:
            print(f"{drawn['number']}: {problems[:8]}", file=sys.stderr, flush=True)

    figures = campaign(
        options.seed, options.first, options.count, options.ranks, options.keep, report, **given
    )
    print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.losses or figures.refused))


if __name__ == "__main__":
    main()
