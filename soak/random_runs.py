"""Draw random programs, and compare FabricLoop and MiniLoop with an oracle: Trainer, or a loop written by hand.

    python soak/random_runs.py --count 100 --seed 0             one process
    python soak/random_runs.py --count 20 --seed 0 --ranks 2    two processes with DDP
    python soak/random_runs.py --count 50 --seed 0 --killed     killed by an event, then resumed by a fresh model
    python soak/random_runs.py --seed 0 --first 57 --count 1 --show     print the script of number 57
    python soak/random_runs.py --only net=lora --only batch=graph       only programs with these shapes

A program is drawn from its seed and number. Either it ends with the results of its oracle, or it is refused by name
before the first batch. Everything else is a difference. A program with a difference is written as a script, which
`python SCRIPT` runs again. The last line is a JSON object with the figures.
"""

import argparse
import gc
import json
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import program_pieces as pieces
import search_path  # noqa: F401
import torch
from program_runs import LOOPS, Run, differences
from tqdm import tqdm
from victim import quiet

ORDERS = {**pieces.SAMPLERS, **pieces.BATCH_SAMPLERS}

# ---- Drawing a description


def draw(seed, number, ranks=1, killed=False, only=()):
    """Draw the description of a program: the name of a shape for each dimension.

    Args:
        seed: The seed of all programs.
        number: The number of this program.
        ranks: The number of processes.
        killed: Draw an event that ends the first run.
        only: Pairs (dimension, shape) that the description must have.
    """
    generator = random.Random(f"{seed}/{number}/{ranks}/{killed}")
    while True:
        description = draw_once(generator, ranks, killed)
        description["number"] = number
        is_wanted = all(has_shape(description, *pair) for pair in only)
        if is_wanted and is_possible(description):
            return description


def has_shape(description, dimension, shape):
    value = description.get(dimension)
    return shape in value if isinstance(value, list | dict) else str(value) == shape


def draw_once(generator, ranks, killed):
    def choose(names, odds=1.0, default=None):
        return generator.choice(list(names)) if generator.random() < odds else default

    style = choose(
        ["functions", "module", "object", "object_list", "object_dict"], 0.6, "lightning"
    )
    loader = choose(pieces.LOADERS, 0.4, "dataloader")
    is_stream = loader == "dataloader" and generator.random() < 0.15
    data = choose(pieces.STREAMS if is_stream else pieces.DATASETS)
    net = "sparse_embedding" if generator.random() < 0.03 else choose(pieces.NETS)
    optimizer = choose(pieces.OPTIMIZERS, 0.8, "SGD")
    description = {
        "style": style,
        "net": net,
        "loader": loader,
        "data": data,
        "sampler": "none" if is_stream else choose(ORDERS),
        "batch": choose(pieces.BATCHES, 0.5, "default"),
        "workers": choose([2], 0.1, 0),
        "persistent": choose([True], 0.5, False),
        "drop_last": choose([True], 0.2, False),
        "val": choose(pieces.VAL_LOADERS, 0.8, "one"),
        "optimizer": "SparseAdam" if net == "sparse_embedding" else optimizer,
        "scheduler": choose(pieces.SCHEDULERS, 0.6, "none"),
        "interval": choose(["step", "epoch"]),
        "frequency": choose([1, 1, 2, 3]),
        "returned": choose(pieces.RETURNED),
        "log": choose(pieces.LOGS) if style == "lightning" else "nothing",
        "hyperparameters": choose(pieces.HYPERPARAMETERS, 0.4 * (style == "lightning"), "none"),
        "callbacks": [],
        "ranks": ranks,
    }
    if loader in pieces.OWN_LOADERS:
        names = ("data", "sampler", "batch", "workers", "persistent", "drop_last")
        description |= {name: SIMPLEST[name] for name in names}
    if style == "lightning":
        description["callbacks"] = [name for name in pieces.CALLBACKS if generator.random() < 0.05]
    description["options"] = draw_options(generator, description)
    description["event"] = draw_event(generator, ranks) if killed else None
    return description


def draw_options(generator, description):
    options = {
        "max_epochs": generator.choice([2, 3]),
        "log_every_n_steps": generator.choice([1, 1, 3]),
    }
    rare = {
        "accumulate_grad_batches": [2, 3],
        "gradient_clip_val": [0.1, 1.0],
        "gradient_clip_algorithm": ["value"],
        "limit_train_batches": [4, 0.5],
        "precision": ["64-true", "bf16-true", "bf16-mixed"],
        "monitor": ["val_loss", "train_loss"],
        "max_steps": [5, 9],
        "validate_every_n_steps": [3],
        "save_every_n_steps": [1, 2, 3],
    }
    for name, values in rare.items():
        if generator.random() < 0.12:
            options[name] = generator.choice(values)
    return options


def draw_event(generator, ranks):
    kind = generator.choice(["SIGKILL"] * 4 + ["SIGTERM", "SIGINT", "error", "disk_full"])
    points = {"disk_full": ["disk"], "SIGKILL": ["backward", "step", "batch", "disk", "disk"]}
    return {
        "kind": kind,
        "at": generator.choice(points.get(kind, ["backward", "step", "batch"])),
        "part": round(generator.random(), 4),
        "rank": generator.randrange(ranks),
    }


def is_lightning(description):
    return description["style"] == "lightning"


# Programs that make no sense: (reason, condition).
INVALID = [
    ("a loader of its own takes no other data, sampler and batch",
     lambda d: d["loader"] in pieces.OWN_LOADERS
     and (d["data"], d["sampler"], d["batch"], d["workers"], d["drop_last"])
     != ("tensors", "in_order", "default", 0, False)),
    ("persistent workers need workers", lambda d: d["persistent"] and not d["workers"]),
    ("SparseAdam and sparse gradients need each other",
     lambda d: (d["optimizer"] == "SparseAdam") != (d["net"] == "sparse_embedding")),
    ("torch does not clip sparse gradients",
     lambda d: d["net"] == "sparse_embedding" and "gradient_clip_val" in d["options"]),
    ("a batch sampler has its own batch size",
     lambda d: d["sampler"] in pieces.BATCH_SAMPLERS and d["drop_last"]),
    ("a clip algorithm needs a clip value",
     lambda d: "gradient_clip_algorithm" in d["options"] and "gradient_clip_val" not in d["options"]),
    ("a plateau scheduler needs a metric",
     lambda d: d["scheduler"] == "ReduceLROnPlateau" and (d["val"] == "none" or d["interval"] == "step")),
    ("val_loss needs a validation",
     lambda d: d["options"].get("monitor") == "val_loss" and d["val"] == "none"),
    ("several validation loaders have several losses",
     lambda d: d["val"] == "two" and (not is_lightning(d) or "monitor" in d["options"]
                                      or d["scheduler"] == "ReduceLROnPlateau")),
    ("train_loss of a LightningModule needs a log",
     lambda d: d["options"].get("monitor") == "train_loss" and d["log"] in ("nothing", "step")),
    ("a fraction needs a length",
     lambda d: d["options"].get("limit_train_batches") == 0.5
     and (d["data"] in pieces.STREAMS or d["loader"] == "own_iterable")),
    ("Lightning refuses to accumulate twice",
     lambda d: "accumulation" in d["callbacks"] and "accumulate_grad_batches" in d["options"]),
    ("callbacks that average weights exclude each other",
     lambda d: len({"swa", "ema", "averages"} & set(d["callbacks"])) > 1),
    ("rates need a scheduler and a logger", lambda d: "rates" in d["callbacks"]),
    ("a ModelCheckpoint excludes the own options",
     lambda d: {"model_checkpoint", "best_checkpoint"} & set(d["callbacks"])
     and {"monitor", "save_every_n_steps"} & set(d["options"])),
    ("Trainer has no validate_every_n_steps",
     lambda d: is_lightning(d) and "validate_every_n_steps" in d["options"]),
]  # fmt: skip

# Programs in which torch or Lightning is inexact: (reason, condition).
EXCLUDED = [
    ("torch's fused SGD: its first step reads a bfloat16 momentum that nobody has set",
     lambda d: d["optimizer"] == "SGD_fused" and d["options"].get("precision") == "bf16-true"),
]  # fmt: skip


# ---- Assembling a script


def assemble(description):
    """Return the source code of a program."""
    d = description
    samples = 26 if d["ranks"] == 1 else 28
    # The steps log val_loss. If there is no validation, callbacks follow train_loss.
    monitor = "val_loss" if d["val"] != "none" else "train_loss"
    sampler_code, sampler = {"none": ("", "")}.get(d["sampler"]) or ORDERS[d["sampler"]]
    is_own_loader = d["loader"] in pieces.OWN_LOADERS
    is_several = d["loader"] in pieces.SEVERAL_LOADERS
    parts = [
        pieces.fill(pieces.HEADER, samples=samples),
        "" if is_own_loader else {**pieces.DATASETS, **pieces.STREAMS}[d["data"]],
        pieces.BATCHES[d["batch"]],
        sampler_code,
        pieces.fill(pieces.LOADERS[d["loader"]], arguments=loader_arguments(d, sampler)),
        pieces.VAL_LOADERS[d["val"]],
        pieces.LOSS_OF_SEVERAL if is_several else pieces.LOSS,
        pieces.EVAL_LOSS if d["val"] != "none" else "",
        pieces.NETS[d["net"]],
        pieces.OPTIMIZER_CLASSES.get(d["optimizer"], ""),
        make_optimizer(d),
        *(pieces.CALLBACK_CLASSES.get(name, "") for name in d["callbacks"]),
        without_unused_steps(d, pieces.STYLES[d["style"]]),
    ]
    values = {
        "log": pieces.LOGS[d["log"]],
        "returned": pieces.RETURNED[d["returned"]],
        "validation": "" if d["val"] == "none" else ", validation_step=validation_step",
        "val": "None" if d["val"] == "none" else "make_val()",
        "hyperparameters": pieces.HYPERPARAMETERS.get(d["hyperparameters"], ""),
        "callbacks": ", ".join(pieces.CALLBACKS[name] for name in d["callbacks"]),
        "options": ", ".join(f"{name}={value!r}" for name, value in d["options"].items()),
        "monitor": monitor,
        "collate": "" if d["batch"] == "default" else ", collate_fn=collate",
    }
    source = join_source([pieces.fill(part, **values) for part in parts])
    if d["batch"] == "default":
        source = re.sub(r"get_xy\((batch|part)\)", r"\1", source)
    return source


def without_unused_steps(d, code):
    """Remove the lines of a style that have no effect in this program."""
    if d["val"] == "none":
        code = re.sub(r"( *)def validation_step.*\n(?:\1    .*\n)*", "", code)
    if d["hyperparameters"] == "none":
        code = code.replace(", **hparams", "").replace("        self.save_hyperparameters()\n", "")
    if d["log"] == "nothing":
        code = code.replace("        $log\n", "")
    return code if d["callbacks"] else code.replace(" callbacks=[$callbacks],\n               ", "")


def loader_arguments(d, sampler):
    arguments = [sampler] if sampler and sampler != "shuffle=False" else []
    if not sampler.startswith("batch_sampler"):
        arguments.append("batch_size=batch_size")
        if d["drop_last"]:
            arguments.append("drop_last=True")
    if d["batch"] != "default":
        arguments.append("collate_fn=collate")
    if d["workers"]:
        arguments.append(f"num_workers={d['workers']}, persistent_workers={d['persistent']}")
    return ", ".join(arguments)


def make_optimizer(d):
    scheduler = pieces.SCHEDULERS[d["scheduler"]]
    result = "return optimizer"
    if scheduler is not None:
        config = f'"scheduler": {scheduler}, "interval": "{d["interval"]}", "frequency": {d["frequency"]}'
        if d["scheduler"] == "ReduceLROnPlateau":
            config += ', "monitor": "val_loss"'
        result = (
            f'config = {{{config}}}\n    return {{"optimizer": optimizer, "lr_scheduler": config}}'
        )
    optimizer = pieces.OPTIMIZERS[d["optimizer"]]
    return pieces.fill(pieces.MAKE_OPTIMIZER, optimizer=optimizer, result=result)


def join_source(parts):
    """Join pieces. Imports move to the top, and names that nothing uses are dropped."""
    lines = [line for part in parts for line in part.splitlines() if line.strip()]
    imports = dict.fromkeys(line for line in lines if re.match(r"(from|import) ", line))
    body = [line for line in lines if line not in imports]
    text = "\n".join(body)
    kept = [line for line in imports if any(is_used(name, text) for name in imported_names(line))]
    return "\n".join([*kept, *body]) + "\n"


def imported_names(line):
    names = line.split(" import ")[1] if line.startswith("from") else line.removeprefix("import ")
    return [name.split(" as ")[-1].strip() for name in names.split(",")]


def is_used(name, text):
    return re.search(rf"\b{name}\b", text) is not None


def script_of(description, source):
    """Return a program as a script that compares its runs."""
    event = description["event"]
    call = f"check(__file__, ranks={description['ranks']}, event={event!r})"
    return (
        f'"""Number {description["number"]}: {", ".join(shapes_of(description))}."""\n{source}'
        f'if __name__ == "__main__":\n    from random_runs import check\n    {call}\n'
    )


# ---- Reducing a program

SIMPLEST = {
    "workers": 0, "persistent": False, "callbacks": [], "hyperparameters": "none", "log": "nothing",
    "returned": "loss", "frequency": 1, "interval": "epoch", "scheduler": "none", "optimizer": "SGD",
    "batch": "default", "drop_last": False, "loader": "dataloader", "data": "tensors", "sampler": "in_order",
    "val": "none", "net": "linear", "style": "functions", "ranks": 1,
}  # fmt: skip
# Options that each program has.
FREE = ("max_epochs", "log_every_n_steps")


def reduce_program(description, is_same):
    """Return a description with fewer shapes, for which is_same is still True."""
    changes = [(name, SIMPLEST[name]) for name in SIMPLEST if description[name] != SIMPLEST[name]]
    changes += [("callbacks", name) for name in description["callbacks"][1:]]
    changes += [("options", name) for name in description["options"] if name != "max_epochs"]
    return apply_changes(description, [c for c in changes if c[0] != "ranks"], is_same)


def apply_changes(description, changes, is_same):
    """Apply all changes, or else try each half of them."""
    if not changes:
        return description
    changed = dict(description)
    for dimension, shape in changes:
        if dimension == "options":
            options = changed["options"].items()
            shape = {name: value for name, value in options if name != shape}
        elif dimension == "callbacks" and shape:
            shape = [name for name in changed["callbacks"] if name != shape]
        changed[dimension] = shape
    if is_possible(changed) and is_same(changed):
        return changed
    if len(changes) == 1:
        return description
    half = len(changes) // 2
    description = apply_changes(description, changes[:half], is_same)
    return apply_changes(description, changes[half:], is_same)


def is_possible(description):
    return not any(is_in(description) for _, is_in in (*INVALID, *EXCLUDED))


# ---- Checking a program


class Outcome:
    """The differences of one program, and the loops that refuse it."""

    def __init__(self):
        self.differences, self.refusals, self.compared = [], {}, []
        self.is_invalid = False

    def add(self, kind, details):
        details = list(details)
        if details:
            self.differences.append((kind, details[:6]))


def check_source(source, folder, is_lightning, ranks=1, event=None):
    """Run a program by its oracle and by both loops. Return the outcome."""
    outcome = Outcome()
    shutil.rmtree(folder, ignore_errors=True)
    oracle_name = "Trainer" if is_lightning else "HandLoop"
    oracle = (
        Run(source, oracle_name, folder / oracle_name, ranks=ranks).run() if not event else None
    )
    ends = {}
    for loop in ("FabricLoop", "MiniLoop"):
        end = Run(source, loop, folder / loop, ranks=ranks).run()
        if end.get("is_by_name"):
            outcome.refusals[loop] = end["error"]
        elif "error" in end and oracle is not None and "error" in oracle:
            outcome.is_invalid = True
        elif "weights" not in end:
            outcome.add(
                f"{loop} failed",
                [end.get("error", str(end["codes"])), end.get("where", end.get("log"))],
            )
        else:
            ends[loop] = end
    if oracle is not None:
        compare_with_oracle(outcome, oracle_name, oracle, ends)
    if event is None and len(ends) == 2:
        outcome.add("MiniLoop differs from FabricLoop", compare_loops(ends))
        outcome.compared.append("both loops")
    if event is not None:
        for loop, end in ends.items():
            check_event(outcome, source, loop, folder, end, event, ranks)
    return outcome


def compare_with_oracle(outcome, name, oracle, ends):
    if "weights" not in oracle:
        if ends:
            problem = oracle.get("error", str(oracle["codes"]))
            outcome.add(f"only {name} failed", [problem, oracle.get("where", oracle.get("log"))])
        outcome.is_invalid = True
        return
    for loop, end in ends.items():
        found = []
        for part in ("weights", "optimizers", "schedulers", "counters", "attributes", "buffers"):
            found += differences(oracle[part], end[part], part)
        if name == "Trainer" and loop == "FabricLoop":
            found += differences(oracle["metrics"], end["metrics"], "metrics", is_subset=True)
            found += differences(oracle["random"], end["random"], "random")
        if name == "HandLoop":
            found += differences(oracle["rows"], end["rows"], "rows", 1e-4, is_subset=True)
        outcome.add(f"{loop} differs from {name}", found)
        outcome.compared.append(f"{loop} and {name}")


def compare_loops(ends):
    """Yield the differences between FabricLoop and MiniLoop."""
    first, second = ends["FabricLoop"], ends["MiniLoop"]
    for part in (
        "weights",
        "optimizers",
        "schedulers",
        "counters",
        "rows",
        "attributes",
        "buffers",
    ):
        yield from differences(first[part], second[part], part)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
    files = [
        {
            name: {key: part for key, part in content.items() if key in names}
            if name.endswith("ckpt")
            else content
            for name, content in end["files"].items()
        }
        for end in (first, second)
    ]
    yield from differences(*files, "files")


def check_event(outcome, source, loop, folder, whole, event, ranks):
    """End a run by an event, resume it by a fresh model, and compare it with the whole run."""
    visits = whole["counts"].get(event["at"], 0)
    if not visits:
        return
    event = {**event, "n": 1 + int(event["part"] * visits)}
    root = folder / f"{loop}_{event['kind']}"
    Run(source, loop, root, ranks=ranks, event=event).run()
    is_saved = any(root.rglob("*.ckpt"))
    # A resumed run takes no random number from its own seed.
    end = Run(source, loop, root, seed=99 if is_saved else 1, resume="auto", ranks=ranks).run()
    outcome.compared.append(f"{loop} after {event['kind']}")
    if "weights" not in end:
        if not end.get("is_by_name"):
            problem = end.get("error", str(end["codes"]))
            outcome.add(
                f"{loop} resumed after {event['kind']} failed",
                [problem, end.get("where", end.get("log"))],
            )
        else:
            outcome.refusals[f"{loop} resumed"] = end["error"]
        return
    found = []
    for part in ("weights", "optimizers", "schedulers", "counters", "metrics", "rows", "attributes",
                 "buffers", "modes", "random", "files"):  # fmt: skip
        found += differences(whole[part], end[part], part)
    outcome.add(f"{loop} resumed after {event['kind']} at {event['at']}", found)


def check(path, ranks=1, event=None):
    """Check a script, and print what differs. Scripts of random programs call this."""
    source = Path(path).read_text().split("\nif __name__ ==")[0] + "\n"
    folder = Path(tempfile.mkdtemp())
    quiet()
    outcome = check_source(source, folder, "pl.LightningModule" in source, ranks, event)
    for loop, message in outcome.refusals.items():
        print(f"{loop} refuses: {message}")
    for kind, details in outcome.differences:
        print(f"{kind}:", *details, sep="\n    ")
    print(f"the files are in {folder}")
    sys.exit(bool(outcome.differences))


# ---- Many programs


class Report:
    """The figures of many programs."""

    def __init__(self):
        self.programs = self.invalid = 0
        self.drawn = defaultdict(Counter)
        self.compared, self.refused = Counter(), defaultdict(Counter)
        self.differences = []

    def add(self, description, outcome, script_path, shapes):
        self.programs += 1
        self.invalid += outcome.is_invalid
        for dimension, shape in description.items():
            if dimension == "options":
                self.drawn[dimension].update(shape.keys())
            elif dimension == "event" and shape:
                self.drawn[dimension][f"{shape['kind']} at {shape['at']}"] += 1
            elif isinstance(shape, list):
                self.drawn[dimension].update(shape)
            elif dimension != "number":
                self.drawn[dimension][str(shape)] += 1
        self.compared.update(outcome.compared)
        for loop, message in outcome.refusals.items():
            self.refused[loop][re.sub(r"\d+", "N", message)[:200]] += 1
        for kind, details in outcome.differences:
            self.differences.append(
                {
                    "number": description["number"],
                    "kind": kind,
                    "details": [first_line([line]) for line in details],
                    "script": script_path,
                    "shapes": shapes,
                }
            )

    def text(self):
        lines = [f"{self.programs} programs, {self.invalid} refused by the oracle, too"]
        lines.append("compared: " + count_text(self.compared))
        for dimension, counts in self.drawn.items():
            lines.append(f"{dimension}: {count_text(counts)}")
        for loop, messages in self.refused.items():
            lines.append(f"{loop} refused {sum(messages.values())}:")
            lines += [f"  {count} x {message}" for message, count in messages.most_common()]
        for item in self.differences:
            cause = first_line(item["details"])
            lines.append(f"number {item['number']}: {item['kind']}: {cause}")
            lines.append(f"    {', '.join(item['shapes'])} ({item['script']})")
        return "\n".join(lines)


def first_line(details):
    return str(details[0]).splitlines()[0][:160]


def count_text(counts):
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def run_numbers(numbers, options, folder, pipe):
    """Check the programs with these numbers, and write (description, outcome, script path) to a pipe."""
    warm_up(folder / "warm")
    # The causes found, each with the shapes of its reduced program.
    causes = []
    for number in numbers:
        description = draw(options.seed, number, options.ranks, options.killed, options.only)
        source = assemble(description)
        script_path = None
        outcome = check_source(
            source, folder / "runs", is_lightning(description), options.ranks, description["event"]
        )
        reduced = description
        if outcome.differences:
            cause = cause_of(outcome)
            shapes = set(shapes_of(description))
            is_known = any(cause == other and known <= shapes for other, known in causes)
            if options.reduce and not is_known:
                reduced = reduce_program(
                    description, partial(has_difference, cause, folder / "runs")
                )
                causes.append((cause, set(shapes_of(reduced))))
            script_path = options.scripts / f"run_{options.seed}_{number}.py"
            script_path.write_text(script_of(reduced, assemble(reduced)))
        pickle.dump((description, outcome, str(script_path), shapes_of(reduced)), pipe)
        pipe.flush()
        shutil.rmtree(folder / "runs", ignore_errors=True)


def cause_of(outcome):
    """Return the kind of the first difference, and the part that differs."""
    kind, details = outcome.differences[0]
    return kind, re.split(r"[/:\d]", first_line(details))[0]


def has_difference(cause, folder, description):
    """Return whether a program differs for this cause."""
    outcome = check_source(
        assemble(description),
        folder,
        is_lightning(description),
        description["ranks"],
        description["event"],
    )
    return bool(outcome.differences) and cause_of(outcome) == cause


def shapes_of(description):
    """Return the shapes that are not the simplest ones."""
    shapes = []
    for dimension, shape in description.items():
        if dimension == "options":
            shapes += [f"{name}={value!r}" for name, value in shape.items() if name not in FREE]
        elif dimension == "callbacks":
            shapes += [f"callback={name}" for name in shape]
        elif dimension not in ("event", "number") and shape != SIMPLEST.get(dimension):
            shapes.append(f"{dimension}={shape}")
    return shapes


def warm_up(folder):
    """Run each loop once in this process, so that forked processes have everything imported."""
    quiet()
    torch.set_num_threads(1)
    # tqdm would start a thread that watches its bars.
    tqdm.monitor_interval = 0
    for style, loops in {"functions": LOOPS, "lightning": ("FabricLoop", "Trainer")}.items():
        description = {**SIMPLEST, "style": style, "options": {"max_epochs": 1}, "val": "one"}
        for loop in loops:
            if (style, loop) != ("functions", "Trainer"):
                Run(assemble(description), loop, folder / style / loop).run_here()
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a run has started threads, whose locks a fork would wait for")


def campaign(options):
    """Check all programs in several processes. Return the report."""
    report, folder = (
        Report(),
        Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)),
    )
    numbers = range(options.first, options.first + options.count)
    pipes, pids = [], []
    for job in range(options.jobs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                with os.fdopen(writer, "wb") as pipe:
                    run_numbers(numbers[job :: options.jobs], options, folder / str(job), pipe)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        pipes.append(os.fdopen(reader, "rb"))
        pids.append(pid)
    try:
        read_results(pipes, report, options)
    finally:
        for pid in pids:
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)
    return report


def read_results(pipes, report, options):
    selector = DefaultSelector()
    for pipe in pipes:
        selector.register(pipe, EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            try:
                result = pickle.load(key.fileobj)
            except EOFError:
                selector.unregister(key.fileobj)
                continue
            report.add(*result)
            description, outcome = result[:2]
            for kind, details in outcome.differences:
                print(
                    f"number {description['number']}: {kind}: {first_line(details)}",
                    file=sys.stderr,
                    flush=True,
                )


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="the number of programs (50)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program (0)")
    parser.add_argument("--seed", type=int, help="the seed of all programs; drawn if not given")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run, through gloo (1)")
    parser.add_argument(
        "--killed", action="store_true", help="end each run by an event, and resume it"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="DIMENSION=SHAPE", help="may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=2, help="programs that run side by side (2)")
    parser.add_argument(
        "--scripts",
        type=Path,
        default=Path(tempfile.gettempdir(), "random_runs"),
        help="the folder of the scripts",
    )
    parser.add_argument(
        "--no-reduce",
        dest="reduce",
        action="store_false",
        help="do not simplify programs that differ",
    )
    parser.add_argument("--show", action="store_true", help="print the scripts, run nothing")
    options = parser.parse_args(arguments)
    options.only = [tuple(pair.split("=", 1)) for pair in options.only]
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
        print(f"seed {options.seed}", file=sys.stderr)
    return options


def main():
    options = parse_options()
    if options.show:
        for number in range(options.first, options.first + options.count):
            description = draw(options.seed, number, options.ranks, options.killed, options.only)
            print(script_of(description, assemble(description)))
        return
    options.scripts.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report = campaign(options)
    print(report.text())
    seconds = time.monotonic() - started
    figures = {
        "seed": options.seed, "ranks": options.ranks, "killed": options.killed, "programs": report.programs,
        "invalid": report.invalid, "refused": {loop: sum(m.values()) for loop, m in report.refused.items()},
        "losses": report.differences, "seconds": seconds,
    }  # fmt: skip
    print(json.dumps(figures))
    sys.exit(bool(report.differences))


if __name__ == "__main__":
    main()
