"""Kill a run at random times, resume it until it ends, and compare its files with those of an unkilled run.

    python tests/faults/kills.py --kills 30 --ranks 1 --seed 0

Runs start quickly, because they are forked from a process that has imported everything and has no threads. Each
round kills and resumes a run up to three times, and then lets the run finish. With `--ranks 2`, a run has two processes.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from victim import difference, end_of, quiet, sharded_strategy, train

# A run that has not ended after this number of seconds counts as hanging.
PATIENCE = 600.0


@dataclass
class Figures:
    """The results of all rounds."""

    seed: int
    ranks: int
    rounds: int = 0
    kills: int = 0
    # The number of kills that interrupted a write, so that a temporary file was left.
    left_temporary_files: int = 0
    # The number of kills before the first checkpoint, after which the run started from scratch.
    started_again: int = 0
    seconds: float = 0.0
    losses: list = field(default_factory=list)


def warm_up(root):
    """Train once, so that forked processes need no imports. Fail if a thread is still running."""
    quiet()
    train(root)
    gc.collect()
    # Prevent garbage collection in a forked process from copying the memory pages of the current objects.
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("training has started threads: a fork of this process could wait for their locks forever")


def fork(work, *args):
    """Run the work in a forked child and return its process id. A failing child prints its error and exits with code 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def strategy_options(kind):
    """Return the strategy option, which is "ddp" unless `kind` is "sharded"."""
    return {"strategy": sharded_strategy() if kind == "sharded" else "ddp"}


def start(root, ranks, log, kind=""):
    """Fork one process per rank. Each runs the same command and writes its output to the log."""
    # This import works only after importing victim, which adds tests/support to sys.path.
    from ports import free_port

    port = free_port()

    def rank(number):
        with open(log, "ab") as options:
            os.dup2(options.fileno(), 1)
            os.dup2(options.fileno(), 2)
        # Let a rank that hangs print its stack before it is killed.
        faulthandler.dump_traceback_later(PATIENCE - 10)
        if ranks == 1:
            return train(root)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(number)}
        return train(root, devices=ranks, accumulate_grad_batches=1, save_every_n_steps=3, **strategy_options(kind))

    return [fork(rank, number) for number in range(ranks)]


def cpu_seconds(pid):
    """Return the CPU time of a process in seconds.

    On a busy machine, CPU time shows the progress of a process better than a clock.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
        # On Linux, this number identifies the CPU clock of the process with this pid.
    except OSError:
        return 0.0


def end(pids, after=None, skew=0.0):
    """Wait until all processes have ended.

    If `after` is given, kill the processes once the first one has used this number of CPU seconds.
    Kill each process `skew` seconds after the previous one. Return the exit codes. A process that
    does not end within PATIENCE is killed, and its code is "hang".
    """
    codes, start_time, hit = dict.fromkeys(pids), time.monotonic(), None
    while any(code is None for code in codes.values()):
        now = time.monotonic()
        if hit is None and after is not None and (cpu_seconds(pids[0]) >= after or codes[pids[0]] is not None):
            hit = now
        for number, pid in enumerate(pids):
            if codes[pid] is not None:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            hangs = now - start_time >= PATIENCE
            if not done and (hangs or (hit is not None and now >= hit + skew * number)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0)
            if done:
                codes[pid] = "hang" if hangs else os.waitstatus_to_exitcode(status)
        time.sleep(0.0002 if after is not None else 0.005)
    return list(codes.values())


def length_of(pids):
    """Wait until a run has ended. Return (exit codes, approximate CPU seconds of each process)."""
    before = os.times()
    codes, after = end(pids), os.times()
    had = after.children_user + after.children_system - before.children_user - before.children_system
    return codes, had / len(pids)


def campaign(kills, ranks, seed, report=lambda figures: None, kind=""):
    """Run rounds until the run has been killed `kills` times. Return the results."""
    figures, draw, start_time = Figures(seed, ranks), random.Random(seed), time.monotonic()
    workspace = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    log = workspace / "log"
    try:
        warm_up(workspace / "warm")
        # Import FSDP once before forking, so that the forked processes need not import it.
        if kind:
            sharded_strategy()
        codes, seconds = length_of(start(workspace / "whole", ranks, log, kind))
        if any(codes):
            raise RuntimeError(f"the undisturbed run ended with {codes}:\n{log.read_text()}")
        whole = end_of(workspace / "whole")
        while figures.kills < kills:
            root = workspace / "run"
            instants = [_one_round(figures, root, ranks, log, draw, seconds, kind)]
            codes = end(start(root, ranks, log, kind))
            figures.rounds += 1
            problem = f"the last run ended with {codes}" if any(codes) else _difference(whole, root)
            if problem:
                figures.losses.append({"round": figures.rounds, "instants": instants, "problem": problem})
                kept = Path(tempfile.mkdtemp(prefix="loss-"))
                shutil.copytree(root, kept / "run")
                shutil.copy(log, kept / "log")
                figures.losses[-1]["kept"] = str(kept)
            shutil.rmtree(root, ignore_errors=True)
            log.unlink(missing_ok=True)
            report(figures)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    figures.seconds = time.monotonic() - start_time
    return figures


def _one_round(figures, root, ranks, log, draw, seconds, kind):
    """Kill the run, and sometimes its resumed runs. Return the times of the kills."""
    instants = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        instants.append(draw.uniform(0, seconds))
        codes = end(start(root, ranks, log, kind), instants[-1], skew=draw.uniform(0, 0.01))
        if -signal.SIGKILL not in codes:
            # The run ended before it was killed, so this round has no further kill.
            break
        figures.kills += 1
        figures.left_temporary_files += any(root.rglob("*.tmp"))
        figures.started_again += not any(root.rglob("last.ckpt"))
    return instants


def _difference(whole, root):
    try:
        return difference(whole, end_of(root))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="number of times to kill a running process")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes; several communicate through gloo")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed for the kill times; drawn and printed if not given"
    )
    parser.add_argument(
        "--sharded", action="store_true", help="shard the model and its checkpoint over two ranks (FSDP2)"
    )
    options = parser.parse_args()
    kind = "sharded" if options.sharded else ""
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", file=sys.stderr)
    figures = campaign(options.kills, 2 if kind else options.ranks, seed, kind=kind)
    print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.losses))


if __name__ == "__main__":
    main()
