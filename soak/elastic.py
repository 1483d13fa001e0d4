"""Kill workers under torchrun, which restarts them. Each run must end with the same results as an undisturbed run.

python soak/elastic.py --kills 100
python soak/elastic.py --sharded       a sharded model (FSDP2)
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import search_path  # noqa: F401
from victim import difference, end_of, quiet, sharded_strategy, train

# A run counts as hanging if it has not ended this many seconds after the last SIGKILL.
PATIENCE = 180.0
TORCHRUN = "-m torch.distributed.run --nnodes=1 --max-restarts=10 --monitor-interval=0.05 --rdzv-backend=c10d"


def work(root, kind):
    """Train as one worker of torchrun. After each restart, torchrun runs the same command."""
    quiet()
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = sharded_strategy(ranks) if kind == "sharded" else "ddp"
    options = {"accumulate_grad_batches": 1, "save_every_n_steps": 3}
    train(root, batch_size=8 // ranks, strategy=strategy, **options)


class Run:
    """A torchrun process on this machine, and its workers."""

    def __init__(self, root, ranks, kind, log):
        command = [sys.executable, *TORCHRUN.split(), f"--nproc-per-node={ranks}"]
        command += ["--rdzv-endpoint=127.0.0.1:0", __file__, "--work", str(root), "--kind", kind]
        self.ranks, self.started = ranks, time.monotonic()
        with log.open("ab") as file:
            self.agent = subprocess.Popen(command, stdout=file, stderr=file)

    def is_over(self):
        return self.agent.poll() is not None or time.monotonic() - self.started > PATIENCE

    def workers(self):
        path = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if self.agent.poll() is None else []

    def wait_for_workers(self, killed=()):
        """Wait until torchrun has started all workers. Return the workers' ids, or [] if the run has ended."""
        while not self.is_over():
            found = [pid for pid in self.workers() if pid not in killed]
            if len(found) == self.ranks:
                return found
            time.sleep(0.002)
        return []

    def wait(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_over():
            time.sleep(0.002)

    def end(self):
        """Wait for torchrun to end, and return its exit code, or "hang" if it had to be killed."""
        self.wait(PATIENCE)
        if self.agent.poll() is not None:
            return self.agent.returncode
        for pid in [self.agent.pid, *self.workers()]:
            os.kill(pid, signal.SIGKILL)
        self.agent.wait()
        return "hang"


def kill_workers(run, draw, seconds):
    """Kill a worker, and up to two more after restarts. Return the number of kills."""
    killed, kills = [], 0
    for _ in range(draw.choice((1, 1, 2, 3))):
        workers = run.wait_for_workers(killed)
        # A run spends most of its time on imports, so three of four kills wait until training has
        # probably started.
        run.wait(draw.uniform(draw.choice((0, 0.6, 0.6, 0.6)), 1) * seconds)
        alive = [pid for pid in run.workers() if pid in workers]
        if not alive:
            break
        os.kill(draw.choice(alive), signal.SIGKILL)
        run.started = time.monotonic()
        kills += 1
        killed += workers
    return kills


def problem_of(code, whole, root):
    """Describe the problem of a run that has ended, or return None."""
    if code != 0:
        return f"it ended with {code}"
    try:
        return difference(whole, end_of(root))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def campaign(kills, ranks, kind, seed, most):
    """Repeat runs until `kills` workers were killed or `most` seconds have passed. Return the results."""
    figures = {"seed": seed, "ranks": ranks, "kind": kind, "losses": []}
    figures |= {"rounds": 0, "kills": 0, "hangs": 0}
    draw, started = random.Random(seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    root, log = folder / "run", folder / "log"
    try:
        run = Run(folder / "whole", ranks, kind, log)
        run.wait_for_workers()
        first = time.monotonic()
        code = run.end()
        if code != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}:\n{log.read_text()}")
        seconds, whole = time.monotonic() - first, end_of(folder / "whole")
        while figures["kills"] < kills and time.monotonic() - started < most:
            run = Run(root, ranks, kind, log)
            hits = kill_workers(run, draw, seconds)
            figures["kills"] += hits
            if not hits:
                # The run ended before a kill, for example because the
                # machine is less busy now. Kill earlier in the next runs.
                seconds *= 0.8
            code = run.end()
            figures["rounds"] += 1
            figures["hangs"] += code == "hang"
            problem = problem_of(code, whole, root)
            if problem:
                kept = Path(tempfile.mkdtemp(prefix="loss-"))
                for path in (root, log):
                    if path.exists():
                        shutil.move(path, kept)
                loss = {"round": figures["rounds"], "problem": problem, "kept": str(kept)}
                figures["losses"].append(loss)
            progress = f"{figures['kills']} kills, {figures['rounds']} runs"
            print(f"{progress}, {len(figures['losses'])} lost", file=sys.stderr, flush=True)
            shutil.rmtree(root, ignore_errors=True)
            log.unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures["seconds"] = time.monotonic() - started
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="the number of workers to kill (10)")
    parser.add_argument("--ranks", type=int, default=2, help="the number of workers (2)")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="the seed of the kills; drawn and printed if not given",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no new run after this time"
    )
    parser.add_argument(
        "--sharded", dest="kind", action="store_const", const="sharded", default="whole"
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.kind)
    print(f"seed {options.seed}", file=sys.stderr)
    figures = campaign(options.kills, options.ranks, options.kind, options.seed, options.seconds)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
