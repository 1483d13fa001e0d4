"""Draw random programs, and compare FabricLoop and MiniLoop with an oracle, which is Trainer or a hand-written loop.

    python soak/random_runs.py --count 100 --seed 0             one process
    python soak/random_runs.py --count 20 --seed 0 --ranks 2    two processes with DDP
    python soak/random_runs.py --count 50 --seed 0 --killed     an event ends each run, and a fresh model resumes it
    python soak/random_runs.py --seed 0 --first 57 --count 1 --show     print the script of number 57
    python soak/random_runs.py --only net=lora --only batch=graph       only programs with these pieces

The seed and the number of a program determine its code. A loop must end with the oracle's results, or refuse the program before
the first batch with an error that names the reason. Everything else is a difference. A program with a difference is written to
a script, and `python SCRIPT` runs it again. The last line of the output is a JSON object with the figures.
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
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import search_path  # noqa: F401
import torch
from kills import fork
from program_runs import LOOPS, MINI_OPTIONS, NEUTRAL_OPTIONS, Run, differences
from random_programs import (
    SIMPLEST,
    assemble,
    draw,
    is_lightning,
    reduce_program,
    script_of,
    shapes_of,
)
from tqdm import tqdm
from victim import quiet

# ---- Functions that run one program with several loops and compare the results

ENDS = ("weights", "buffers", "attributes", "optimizers", "schedulers", "counters")
# The results of a resumed run that must equal those of an uninterrupted run.
ALL_ENDS = (*ENDS, "metrics", "rows", "modes", "random", "files")
OWN_LOOPS = ("FabricLoop", "MiniLoop")
OTHER = {"FabricLoop": "MiniLoop", "MiniLoop": "FabricLoop"}


class Outcome:
    """The differences of a program, and the loops that refuse it."""

    def __init__(self):
        self.differences, self.refusals, self.compared = [], {}, []
        self.is_invalid = False

    def add(self, kind, details):
        details = list(details)
        if details:
            self.differences.append((kind, details[:6]))

    def add_failure(self, kind, end):
        problem = end.get("error", f"exit codes {end['codes']}")
        self.differences.append((kind, [problem, end.get("where", end.get("log"))]))


class Check:
    """Compare FabricLoop and MiniLoop with an oracle, or an interrupted and resumed run with an uninterrupted one."""

    def __init__(self, source, folder, is_lightning, ranks=1, event=None, loops=OWN_LOOPS):
        self.source, self.folder, self.ranks, self.event = source, Path(folder), ranks, event
        self.loops = loops
        self.oracle = "Trainer" if is_lightning else "HandLoop"
        self.outcome, self.ends = Outcome(), {}
        shutil.rmtree(folder, ignore_errors=True)

    def run(self, loop, name=None, **options):
        root = self.folder / (name or loop)
        return Run(self.source, loop, root, ranks=self.ranks, **options).run()

    def check(self):
        kind = self.event["kind"] if self.event else None
        needs_oracle = kind in (None, "to_Trainer")
        oracle = self.run(self.oracle) if needs_oracle else None
        is_logged = kind is None and self.oracle == "Trainer"
        for loop in self.loops:
            self.add_end(loop, self.run(loop, changes={"is_logged": is_logged}), oracle)
        if oracle is not None:
            self.compare_with_oracle(oracle)
        for loop, end in self.ends.items():
            self.outcome.add(f"{loop} keeps a different best file", best_differences(end))
            if end.get("is_in_sync") is False:
                self.outcome.add(f"{loop}: the processes have different weights", ["weights"])
            if kind is not None:
                self.check_event(loop, end, oracle)
        if kind is None and len(self.ends) == 2:
            self.outcome.add("MiniLoop differs from FabricLoop", loop_differences(self.ends))
            self.outcome.compared.append("both loops")
        return self.outcome

    def add_end(self, loop, end, oracle):
        """Store a run's results, or the error with which the program was refused or failed."""
        if "error" in end and not end["is_by_name"] and oracle is None:
            oracle = self.run(self.oracle)
        if "weights" in end:
            self.ends[loop] = end
        elif end.get("is_by_name"):
            self.outcome.refusals[loop] = end["error"]
        elif "MisconfigurationException" in end.get("error", ""):
            # A MisconfigurationException shows that Trainer refuses the program, too, so the program is invalid.
            self.outcome.is_invalid = True
        elif "error" in end and oracle is not None and "error" in oracle:
            self.outcome.is_invalid = True
        else:
            self.outcome.add_failure(f"{loop} failed", end)

    def compare_with_oracle(self, oracle):
        if "weights" not in oracle:
            self.outcome.is_invalid = True
            if "MisconfigurationException" in oracle.get("error", ""):
                self.outcome.refusals[self.oracle] = oracle["error"]
            elif self.ends:
                self.outcome.add_failure(f"only {self.oracle} failed", oracle)
            return
        for loop, end in self.ends.items():
            found = part_differences(ENDS, oracle, end)
            if self.oracle == "Trainer" and loop == "FabricLoop":
                found += differences(oracle["metrics"], end["metrics"], "metrics", is_subset=True)
                names = ["logged", "validated", "random"] if self.event is None else ["random"]
                found += part_differences(names, oracle, end)
            # Skip the rows if the loops have written different numbers of rows. A step-based run writes one per validation.
            if self.oracle == "HandLoop" and len(oracle["rows"]) == len(end["rows"]):
                found += differences(oracle["rows"], end["rows"], "rows", 1e-4, is_subset=True)
            self.outcome.add(f"{loop} differs from {self.oracle}", found)
            self.outcome.compared.append(f"{loop} and {self.oracle}")

    # Methods that end a run with an event and finish it in another run

    def check_event(self, loop, whole, oracle):
        """Compare an interrupted run with an uninterrupted one."""
        kind = self.event["kind"]
        name = f"{loop}_{kind}"
        finish = getattr(self, f"finish_{kind}", self.finish_interrupted)
        result = finish(loop, name, whole, oracle)
        if result is None:
            return
        expected, end, parts = result
        where = f" at {self.event['at']}" if finish == self.finish_interrupted else ""
        what = f"{loop} after {kind}{where}"
        if self.crosses(loop):
            what += f", continued by {OTHER[loop]}"
        if "weights" in end:
            found = part_differences(parts, expected, end)
            found = [line for line in found if not is_allowed_after_resume(line, end)]
            self.outcome.add(what, found)
            self.outcome.compared.append(f"{loop} after {kind}")
        elif end.get("is_by_name") and (self.crosses(loop) or "Trainer" in kind):
            self.outcome.refusals[f"{loop} after {kind}"] = end["error"]
        else:
            self.outcome.add_failure(f"{what}: failed", end)

    def finish_interrupted(self, loop, name, whole, oracle):
        """End a run at a point, once or twice, and resume it with a fresh model."""
        visits = whole["counts"].get(self.event["at"], 0)
        if not visits:
            return None
        numbers = [1 + int(self.event["part"] * visits)]
        if self.event["is_repeated"]:
            numbers.append(1 + int(self.event["part"] * (visits - numbers[0])))
        for n in numbers:
            event, seed = {**self.event, "n": n}, self.seed_of(name)
            end = self.run(loop, name, event=event, resume="auto", seed=seed)
            is_of_first = self.event["kind"] == "error" and self.event["rank"] == 0
            if is_of_first and "error" in end and not end["is_planned"]:
                self.outcome.add_failure(f"{loop} raised a different error from the program", end)
            if "hang" in end["codes"]:
                self.outcome.add_failure(f"{loop} hangs after {self.event['kind']}", end)
        return whole, *self.resume(loop, name)

    def crosses(self, loop):
        """Return whether the other loop resumes the run, which requires that it accepts the program."""
        return self.event["crosses"] and OTHER[loop] in self.ends

    def seed_of(self, name):
        """Return the seed of a resumed run. If there is a checkpoint, return a new seed to test that the RNG is restored."""
        return 99 if any((self.folder / name).rglob("*.ckpt")) else 1

    def resume(self, loop, name, **options):
        """Resume a run with a fresh model. Return the run's results, and the names of the results to compare."""
        finisher = OTHER[loop] if self.crosses(loop) else loop
        end = self.run(finisher, name, seed=self.seed_of(name), resume="auto", **options)
        return end, ALL_ENDS if finisher == loop else ENDS

    def fewer_epochs(self):
        return {"max_epochs": build_options(self.source)["max_epochs"] - 1}

    def finish_more_epochs(self, loop, name, whole, oracle):
        self.run(loop, name, options=self.fewer_epochs())
        return whole, *self.resume(loop, name)

    def finish_new_monitor(self, loop, name, whole, oracle):
        """Monitor a different metric in the resumed run, whose best.ckpt must be from the last epoch."""
        first = self.run(loop, name, options={**self.fewer_epochs(), "monitor": "train_loss"})
        end, parts = self.resume(loop, name, options={"monitor": "val_loss"})
        if "files" in end:
            best = end["files"].get("checkpoints/run/best.ckpt", {}).get("global_step")
            if best is None or best <= first["counters"][1]:
                self.outcome.add(f"{loop} keeps a file of the old monitor", [f"step {best}"])
        return whole, end, [part for part in parts if part != "files"]

    def finish_other_batch_size(self, loop, name, whole, oracle):
        changes = {"batch_size": 6, "from_epoch": self.fewer_epochs()["max_epochs"]}
        expected = self.run("HandLoop", f"{name}_by_hand", changes=changes)
        self.run(loop, name, options=self.fewer_epochs())
        end, _ = self.resume(loop, name, changes={"batch_size": 6})
        return expected, end, ENDS

    def finish_to_Trainer(self, loop, name, whole, oracle):
        self.run(loop, name, options=self.fewer_epochs())
        paths = list((self.folder / name).rglob("last.ckpt"))
        if not paths or "weights" not in oracle:
            return None
        return oracle, self.run("Trainer", f"{name}_2", resume=str(paths[0]), seed=99), ENDS

    def finish_from_Trainer(self, loop, name, whole, oracle):
        end = self.run("Trainer", name, options=self.fewer_epochs(), changes={"save": True})
        if "weights" not in end:
            return None
        path = self.folder / name / "saved.ckpt"
        return whole, self.run(loop, f"{name}_2", resume=str(path), seed=99), ENDS


def is_allowed_after_resume(line, end):
    """Return whether a resumed run's files may have this difference."""
    last = "logs/run/checkpoints/last.ckpt"
    is_without_last = end["options"].get("save_last") is False
    if line.startswith("files/checkpoints/run/last.ckpt") and is_without_last:
        # Even with save_last=False, an interrupted run saves last.ckpt, and the resumed run does not remove this file.
        return True
    if line.startswith(f"files/{last}"):
        # ModelCheckpoint's last.ckpt may differ, because a resumed
        # run saves it at its end unless it has already saved it.
        return end["files"].get(last, {}).get("global_step") == end["counters"][1]
    if line.endswith("/differentiable: more"):
        # When an optimizer loads a state, torch adds the default
        # "differentiable" to it, so later groups also have this key.
        return True
    if line.endswith("/callbacks/callbacks.VisitsHooks: more"):
        # The callback VisitsHooks counts hooks. Only runs that an event ends have it.
        return True
    state = r"(plain_state|model)/attributes/\(.*\)|flags/(requires_grad|training)/.*"
    if re.search(rf"/({state}): more$", line):
        # A resumed run also saves an attribute or flag that has changed and then returned to its first value.
        return True
    if line == "schedulers: 0 items instead of 1":
        # StochasticWeightAveraging replaces the scheduler during an
        # epoch, but this resumed run had no epoch left to train.
        return True
    # A resumed run may have one more file, because ModelCheckpoint keeps the file from which the run was resumed.
    return re.fullmatch(r"files/logs/run/checkpoints/.*\.ckpt: more", line) is not None


def check_description(description, folder, loops=OWN_LOOPS):
    source, ranks, event = assemble(description), description["ranks"], description["event"]
    return Check(source, folder, is_lightning(description), ranks, event, loops).check()


def build_options(source):
    """Return the loop's options from a program's source code, without building its model."""
    text = source[source.rindex("options=dict(") :]
    return eval(text[len("options=") : text.index("\n")].removesuffix(")"))


def part_differences(parts, expected, found):
    """List the differences between the given parts of two runs' results."""
    return [line for part in parts for line in differences(expected[part], found[part], part)]


def loop_differences(ends):
    first, second = ends["FabricLoop"], ends["MiniLoop"]
    names = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")

    def shared_files(end):
        files = {}
        for name, content in end["files"].items():
            if name.endswith("ckpt"):
                content = {key: part for key, part in content.items() if key in names}
            files[name] = content
        return files

    found = part_differences((*ENDS, "rows"), first, second)
    return found + list(differences(shared_files(first), shared_files(second), "files"))


def best_differences(end):
    """Compare best.ckpt with the row that has the best monitored value."""
    best = end["files"].get("checkpoints/run/best.ckpt")
    monitor, rows, options = end["options"].get("monitor"), end["rows"], end["options"]
    is_by_steps = "validate_every_n_steps" in options or "max_steps" in options
    # Some rows do not show the monitored value. An epoch-based run writes one row even after several validations.
    # A step-based run monitors the epoch mean of train_loss, but its rows contain the mean since the previous row.
    has_other_values = "val_check_interval" in options or (is_by_steps and monitor == "train_loss")
    if best is None or has_other_values or not all(monitor in row for row in rows):
        return []
    # Leave out rows in which the monitored value is NaN, because an epoch without a validation has no score.
    scores = {row["step"]: row[monitor] for row in rows if row[monitor] == row[monitor]}
    expected = min(scores, key=scores.get)
    found = best["global_step"]
    return [] if found == expected else [f"step {found} instead of {expected}"]


def check(path, ranks=1, event=None):
    """Check a script, and print the differences. Scripts of random programs call this function."""
    source = Path(path).read_text().split("\nif __name__ ==")[0] + "\n"
    folder = Path(tempfile.mkdtemp())
    quiet()
    outcome = Check(source, folder, "pl.LightningModule" in source, ranks, event).check()
    for loop, message in outcome.refusals.items():
        print(f"{loop} refuses: {message}")
    for kind, details in outcome.differences:
        print(f"{kind}:", *details, sep="\n    ")
    print(f"the files are in {folder}")
    sys.exit(bool(outcome.differences))


# ---- Functions that check many random programs and report the results


class Report:
    """Counts and differences of all checked programs."""

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
            found = {"number": description["number"], "kind": kind, "script": script_path}
            found |= {"details": [first_line([line]) for line in details], "shapes": shapes}
            self.differences.append(found)

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
    return (str(details[0]).splitlines() or [""])[0][:160]


def count_text(counts):
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def draw_program(options, number):
    """Draw a description. With --for-mini, leave out options and callbacks that MiniLoop lacks."""
    description = draw(options.seed, number, options.ranks, options.killed, options.only)
    if not options.for_mini:
        return description
    known = {*MINI_OPTIONS, *NEUTRAL_OPTIONS}
    kept = {name: value for name, value in description["options"].items() if name in known}
    # Turn off the sanity check of the other loops, because MiniLoop has none.
    return {**description, "callbacks": [], "options": {**kept, "num_sanity_val_steps": 0}}


def run_numbers(numbers, options, folder, reader, writer):
    """Check the programs with these numbers, and write each result to a pipe."""
    os.close(reader)
    pipe = os.fdopen(writer, "wb")
    warm_up(folder / "warm")
    # Remember (cause, pieces of the reduced program), so that only one program is reduced for each cause.
    causes = []
    for number in numbers:
        description = draw_program(options, number)
        outcome = check_description(description, folder / "runs", options.loops)
        # Sort FabricLoop's differences first, because the script contains the program reduced for the first difference.
        outcome.differences.sort(key=lambda item: "FabricLoop" not in item[0].split()[0])
        reduced, script_path = description, None
        if outcome.differences:
            if options.reduce:
                reduced = reduce_new_causes(description, outcome, causes, folder / "runs")
            script_path = options.scripts / f"run_{options.seed}_{number}.py"
            script_path.write_text(script_of(reduced, assemble(reduced)))
        pickle.dump((description, outcome, str(script_path), shapes_of(reduced)), pipe)
        pipe.flush()
        shutil.rmtree(folder / "runs", ignore_errors=True)


def reduce_new_causes(description, outcome, causes, folder):
    """Reduce a program for each unknown cause. Return the first reduced description."""
    reduced = None
    for cause in dict.fromkeys(map(cause_of, outcome.differences)):
        shapes = set(shapes_of(description))
        if not any(cause == other and known <= shapes for other, known in causes):
            found = reduce_program(description, partial(has_difference, cause, folder))
            causes.append((cause, set(shapes_of(found))))
            reduced = reduced or found
    return reduced or description


def cause_of(difference):
    """Return the kind of a difference, and the result that differs, such as "weights"."""
    kind, details = difference
    return kind, re.split(r"[/:\d]", first_line(details))[0]


def has_difference(cause, folder, description):
    """Return whether a program has a difference with this cause."""
    loops = [loop for loop in OWN_LOOPS if loop in cause[0]]
    if description["event"] and description["event"]["crosses"]:
        loops = OWN_LOOPS
    outcome = check_description(description, folder, loops or OWN_LOOPS)
    return cause in map(cause_of, outcome.differences)


def warm_up(folder):
    """Run each loop once in this process, so that forked processes have already imported everything."""
    quiet()
    torch.set_num_threads(1)
    # Prevent tqdm from starting a thread that watches its bars, because a process with threads must not fork.
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
    report = Report()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    numbers = range(options.first, options.first + options.count)
    pipes, pids = [], []
    for job in range(options.jobs):
        reader, writer = os.pipe()
        own_numbers, own_folder = numbers[job :: options.jobs], folder / str(job)
        pids.append(fork(run_numbers, own_numbers, options, own_folder, reader, writer))
        os.close(writer)
        pipes.append(os.fdopen(reader, "rb"))
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
                text = f"number {description['number']}: {kind}: {first_line(details)}"
                print(text, file=sys.stderr, flush=True)


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
        "--loops",
        nargs="+",
        choices=OWN_LOOPS,
        default=OWN_LOOPS,
        help="the loops to compare (both)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="DIMENSION=SHAPE",
        help="draw only such programs; may be repeated",
    )
    parser.add_argument(
        "--for-mini", action="store_true", help="leave out options and callbacks MiniLoop lacks"
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
            description = draw_program(options, number)
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
