"""Let system calls of a run fail with a preloaded C library, which also affects C++ code.

    python soak/syscalls.py --faults 100 --seed 1

soak/faults.c counts each open, read, write, stat, fsync, rename and similar call in the run's folder, and lets one or two of
these calls fail. The call returns an error before, in the middle of or after its work, or SIGKILL ends the process. The run is
new, or resumes a killed run with an intact or a damaged last.ckpt. The run must end without an error, or with a one-line error.
No saved checkpoint may be lost, and no intact file may be renamed. If the same command runs again, it must end like a run
without failures.

The script needs Linux and a C compiler (cc or gcc), without which it exits with 77.
"""

import argparse
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import search_path  # noqa: F401

SOAK = Path(__file__).parent
# preload() sets this environment variable in the process that has preloaded the library of failing system calls.
READY = "FABRIC_TEMPLATE_FAULTS"

HOW = {"error": 1, "done": 2, "half": 3, "SIGKILL": 4}
CODES = ("EIO", "EIO", "ENOSPC", "EMFILE", "ENOMEM", "EACCES", "EDQUOT", "ESTALE")
# Exit with this code if the test cannot run here. Test harnesses such as automake's read 77 as "not run".
SKIPPED = 77


def preload():
    """Run this script again with the compiled library preloaded, and return its exit code."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        print("skipped: no C compiler (cc, gcc or clang) on a Linux here", file=sys.stderr)
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "faults.so")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOAK / "faults.c", "-ldl"],
            check=True,
            stdout=sys.stderr,
        )
        options = {"LD_PRELOAD": str(library), READY: str(library), "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *sys.argv], env={**os.environ, **options}).returncode


def campaign(count, seed):
    """Train with random failing calls until ``count`` calls have failed. Return the results."""
    from kills import end, fork, warm_up
    from reads import contents, prepare
    from victim import BEST, difference, end_of, train, without_names

    from fabric_template.checkpoint.checkpoint_io import (
        AtomicCheckpointIO,
        CheckpointError,
        read_checkpoint,
    )

    # Load the library that preload() has preloaded, to call its functions.
    library = ctypes.CDLL(os.environ[READY])
    library.faults_disarm.restype, library.faults_hit.restype = ctypes.c_long, ctypes.c_char_p
    long, number = ctypes.c_long, ctypes.c_int
    library.faults_arm.argtypes = ctypes.c_char_p, long, long, number, number
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    workspace = Path(tempfile.mkdtemp(dir=memory)).resolve()
    root, report = workspace / "run", workspace / "report"
    draw, started = random.Random(seed), time.monotonic()
    figures = {"seed": seed, "faults": 0, "calls": {}, "losses": []}
    figures |= {"hits": Counter(), "ends": Counter()}

    def run_with_faults(faults):
        """Train with faults in this process. Write the saved step and the run's outcome to the report."""
        save = AtomicCheckpointIO.save_checkpoint

        def save_and_record(self, checkpoint, path, storage_options=None):
            save(self, checkpoint, path, storage_options)
            if Path(path).name == "last.ckpt":
                result["saved"] = checkpoint["global_step"]

        AtomicCheckpointIO.save_checkpoint = save_and_record
        result = {"saved": 0, "end": "well"}
        library.faults_arm(str(root).encode(), *faults)
        try:
            train(root)
        except Exception as error:
            if isinstance(error, ValueError) and "\n" not in str(error):
                result |= {"end": "a line", "options": str(error)}
            else:
                text = "".join(traceback.format_exception(error))
                result |= {"end": "a traceback", "options": text}
        result["calls"], result["hit"] = library.faults_disarm(), library.faults_hit().decode()
        report.write_text(json.dumps(result))

    def run(previous, faults):
        shutil.rmtree(root, ignore_errors=True)
        report.unlink(missing_ok=True)
        if previous is not None:
            shutil.copytree(previous, root)
        (exit_code,) = end([fork(run_with_faults, faults)])
        result = {"saved": 0, "end": "SIGKILL", "hit": "SIGKILL"}
        if report.exists():
            result = json.loads(report.read_text())
        if exit_code not in (0, -signal.SIGKILL):
            result = {**result, "end": f"exit code {exit_code}"}
        return result

    def steps(good):
        """Return the step of each intact last.ckpt."""
        for path in good.rglob("last.ckpt") if good is not None else ():
            try:
                yield read_checkpoint(path)["global_step"]
            except CheckpointError:
                continue

    def problem_of(previous, result, whole):
        damaged = set()
        if previous is not None and "damaged" in previous.name:
            damaged = {path.read_bytes() for path in previous.rglob("last.ckpt")}
        if result["end"] not in ("well", "a line", "SIGKILL"):
            return result.get("options", result["end"])
        files = contents(root)
        renamed = {name: data for name, data in files.items() if ".damaged" in name}
        if wrong := [name for name, data in renamed.items() if data not in damaged]:
            return f"intact but renamed: {wrong}"
        if previous is not None and (wrong := [name for name in files if ".before" in name]):
            return f"started from scratch: {wrong}"
        at_least = max([result["saved"], *steps(previous)])
        if at_least > max(steps(root), default=0):
            return f"step {at_least} was saved, but step {max(steps(root), default=0)} is left"
        if result["end"] == "a line" and previous is not None and files == contents(previous):
            # The run refused to start with a one-line error and changed no file, so nothing is lost.
            return None
        train(root)
        # Do not compare the best checkpoint after an error, because a run continues if it cannot write this file.
        without = () if result["end"] == "SIGKILL" else BEST
        return difference(without_names(whole, without), without_names(end_of(root), without))

    try:
        warm_up(workspace / "warm")
        states = {}
        for previous in (None, *prepare(workspace)):
            name = "new" if previous is None else previous.name
            result = run(previous, (0, 0, 0, 0))
            if result["end"] != "well":
                raise RuntimeError(f"the undisturbed run ended with {result}")
            states[name] = previous, result["calls"], end_of(root)
            figures["calls"][name] = result["calls"]
        while figures["faults"] < count:
            name = draw.choices(list(states), (3, 5, 2))[0]
            previous, calls, whole = states[name]
            first = draw.randint(1, calls)
            second = first + draw.randint(1, 30) if draw.random() < 0.3 else 0
            kind, code = draw.choices(list(HOW), (5, 3, 2, 1))[0], draw.choice(CODES)
            result = run(previous, (first, second, HOW[kind], getattr(errno, code)))
            if not result["hit"]:
                continue
            figures["faults"] += 1 + result["hit"].count(";")
            figures["hits"].update(f"{kind} {one.split()[0]}" for one in result["hit"].split("; "))
            figures["ends"][result["end"]] += 1
            try:
                problem = problem_of(previous, result, whole)
            except Exception as error:
                problem = "".join(traceback.format_exception(error))
            if problem:
                loss = {"files": name, "calls": [first, second], "line": result.get("options")}
                loss |= {"fault": f"{kind} {code}: {result['hit']}", "problem": problem}
                figures["losses"].append(loss)
                print(json.dumps(loss), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return {**figures, "seconds": time.monotonic() - started}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--faults", type=int, default=1000, help="the number of calls that fail (1000)"
    )
    parser.add_argument(
        "--seed", type=int, help="decides which calls fail; drawn and printed if not given"
    )
    options = parser.parse_args()
    if READY not in os.environ:
        sys.exit(preload())
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}", file=sys.stderr)
    figures = campaign(options.faults, seed)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
