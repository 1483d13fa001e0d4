"""SIGKILLs under torchrun's agent, which starts the ranks again: the run ends by itself, and is as if nothing had been.

    python tests/faults/elastic.py --kills 100                one worker of two, on one node
    python tests/faults/elastic.py --kills 30 --nodes 2       a whole node of --nnodes 1:2; another comes in its place, or not

The agent is torchrun's own (elastic_launch), forked from a process that has imported it; its workers are scripts, as under
torchrun. Where a node is lost the others go on in another number: then the rows are compared, not their numbers. Nodes are
started as docs/scale.md says; but the 300 seconds for which torchrun waits, at the end, for a node that is gone are 20 here.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partialmethod
from pathlib import Path

from kills import fork
from lightning.fabric.strategies import DDPStrategy
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from victim import Victim, difference, end_of, quiet, train

PATIENCE = 180.0  # seconds after its start, or the last kill, until a run that does not end counts as hanging
RESTARTS = 10
BARRIER = 20.0
TIMEOUT = timedelta(
    seconds=60
)  # of a group of several nodes: for so long one waits, as it begins, for a node that is gone
COMES_LATE = 3  # the exit code of a node that finds the run closed


@dataclass
class Figures:
    """What a campaign found."""

    seed: int
    nodes: int
    ranks: int  # of a node
    rounds: int = 0
    kills: int = 0
    hangs: int = 0
    came_back: int = 0  # nodes that came in the place of a killed one
    came_late: int = 0  # of them, after the others had ended
    seconds: float = 0.0
    losses: list = field(default_factory=list)


class Process:
    """A forked process that leads a session; its words go to the log, and where it stands when it hangs."""

    def __init__(self, log, work, *args):
        self.code, self.pid = None, fork(self._lead, log, work, *args)

    @staticmethod
    def _lead(log, work, *args):
        os.setsid()
        with open(log, "ab") as words:
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        work(*args)

    def poll(self):
        """Its exit code; None while it lives."""
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if done else None
        return self.code

    def children(self):
        """The workers of a node, if it lives."""
        if self.poll() is None:
            with contextlib.suppress(OSError):
                return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def kill(self):
        """It and its children, at once; forked loader workers would end with their parents."""
        if self.poll() is None:
            kill([self.pid, *self.children()])
            while self.poll() is None:
                time.sleep(0.001)


def kill(pids, number=signal.SIGKILL):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def hold_the_rendezvous(pipe):
    """Be the machine that all nodes know, and that is not lost."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    signal.pause()


def be_a_node(root, port, nodes, ranks):
    """Be torchrun on one machine."""
    if nodes > 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        LocalElasticAgent.__init__ = partialmethod(LocalElasticAgent.__init__, exit_barrier_timeout=BARRIER)
    quick = {"is_host": False, "last_call_timeout": 1, "keep_alive_interval": 2, "keep_alive_max_attempt": 3}
    config = LaunchConfig(
        min_nodes=1, max_nodes=nodes, nproc_per_node=ranks, run_id="run", rdzv_backend="c10d", max_restarts=RESTARTS,
        rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs=quick, monitor_interval=0.05,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(__file__, "--work", root, "--nodes", str(nodes))
    except RendezvousClosedError:
        os._exit(COMES_LATE)


def work(root, nodes):
    """What each worker does: the same command, whoever started it, and how often."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    quiet()
    Victim.steps = 12 * nodes  # one node alone has as many batches, each a step
    strategy = "ddp" if nodes == 1 else DDPStrategy(timeout=TIMEOUT)
    train(root, strategy=strategy, accumulate_grad_batches=1, save_every_n_steps=3)


class Run:
    """A run on some nodes, begun anew in the folder."""

    def __init__(self, root, nodes, ranks, log):
        reads, writes = os.pipe()
        self.rendezvous = Process(log, hold_the_rendezvous, writes)
        port = int(os.read(reads, 100))
        os.close(reads)
        os.close(writes)
        self.words = log, be_a_node, str(root), port, nodes, ranks
        self.ranks, self.began = ranks, time.monotonic()
        self.nodes = [Process(*self.words) for _ in range(nodes)]

    def is_over(self):
        late = time.monotonic() - self.began > PATIENCE
        return late or all([node.poll() is not None for node in self.nodes])

    def workers(self):
        return [pid for node in self.nodes for pid in node.children()]

    def wait(self, seconds):
        """Wait so long, or until it is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_over():
            time.sleep(0.002)

    def wait_for_workers(self, other_than=()):
        """Those that there are once each node has all of them; none: it is over."""
        while not self.is_over():
            found = [pid for pid in self.workers() if pid not in other_than]
            if len(found) == self.ranks * len(self.nodes):
                return found
            time.sleep(0.002)
        return []

    def hit(self, pids):
        """Kill these; what is left has all its time again."""
        kill(pids)
        self.began = time.monotonic()

    def end(self):
        """Wait for its end; returns the exit codes, "hang" for one that had to be killed."""
        self.wait(PATIENCE)
        codes = ["hang" if node.poll() is None else node.poll() for node in self.nodes]
        if "hang" in codes:
            kill([*self.workers(), *(node.pid for node in self.nodes if node.poll() is None)], signal.SIGUSR2)
            time.sleep(1)  # they write into the log where they stand
        for process in (*self.nodes, self.rendezvous):
            process.kill()
        return codes


def instant(draw, seconds):
    """A moment of an attempt, most of which is imports: three of four behind them."""
    return draw.uniform(draw.choice((0, 0.6, 0.6, 0.6)), 1) * seconds


def kill_workers(run, draw, seconds, figures):
    """One worker, of those that there are, once to three times."""
    killed = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        workers = run.wait_for_workers(killed)
        run.wait(instant(draw, seconds))
        if not (workers := [pid for pid in run.workers() if pid in workers]):
            return
        run.hit([draw.choice(workers)])
        figures.kills += 1
        killed += workers


def kill_nodes(run, draw, seconds, figures):
    """A whole node; another one comes in its place, at once or behind the 6 seconds until it is missed, or does not."""
    run.wait_for_workers()
    run.wait(instant(draw, seconds))
    if alive := [node for node in run.nodes if node.children()]:
        node = draw.choice(alive)
        run.nodes.remove(node)
        run.hit([node.pid, *node.children()])
        node.kill()
        figures.kills += 1
        if draw.random() < 0.7:
            run.wait(draw.uniform(0, 12))
            run.nodes.append(Process(*run.words))
            figures.came_back += 1


def problem_of(codes, whole, root, is_same):
    """What is wrong with a run that has ended, in words."""
    if 0 not in codes or any(code not in (0, COMES_LATE) for code in codes):
        return f"it ended with {codes}"
    try:
        end = end_of(root)
        epochs = [[row.split(",")[0] for row in part["logs/metrics.csv"]] for part in (whole, end)]
        if not is_same:
            return None if epochs[0] == epochs[1] else f"epochs {epochs[1]} instead of {epochs[0]}"
        return difference(whole, end)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def campaign(kills, nodes, ranks, seed, most=float("inf")):
    """Rounds until so many kills have hit, or so many seconds are over; returns the figures."""
    figures, draw, began = Figures(seed, nodes, ranks), random.Random(seed), time.monotonic()
    home = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    log = home / "log"
    try:
        run = Run(home / "whole", nodes, ranks, log)
        run.wait_for_workers()
        first = time.monotonic()
        if any(codes := run.end()):
            raise RuntimeError(f"the undisturbed run ended with {codes}:\n{log.read_text()}")
        seconds, whole = time.monotonic() - first, end_of(home / "whole")
        while figures.kills < kills and time.monotonic() - began < most:
            root = home / "run"
            run = Run(root, nodes, ranks, log)
            (kill_workers if nodes == 1 else kill_nodes)(run, draw, seconds, figures)
            codes = run.end()
            figures.rounds += 1
            figures.hangs += "hang" in codes
            figures.came_late += codes.count(COMES_LATE)
            if problem := problem_of(codes, whole, root, is_same=nodes == 1):
                kept = Path(tempfile.mkdtemp(prefix="loss-"))
                for left in (root, log):
                    if left.exists():
                        shutil.move(left, kept)
                figures.losses.append({"round": figures.rounds, "problem": problem, "kept": str(kept)})
            print(
                f"{figures.kills} kills, {figures.rounds} runs, {len(figures.losses)} lost", file=sys.stderr, flush=True
            )
            shutil.rmtree(root, ignore_errors=True)
            log.unlink(missing_ok=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    figures.seconds = time.monotonic() - began
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="how many SIGKILLs must have hit a living run")
    parser.add_argument(
        "--nodes", type=int, default=1, help="more than one: whole nodes are killed, of --nnodes 1:NODES"
    )
    parser.add_argument(
        "--ranks", type=int, default=None, help="workers of a node (2; 1 where there are several nodes)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the instants; drawn and printed if not given")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other run after so many")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.work:
        return work(words.work, words.nodes)
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", file=sys.stderr)
    figures = campaign(words.kills, words.nodes, words.ranks or (2 if words.nodes == 1 else 1), seed, words.seconds)
    print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.losses))


if __name__ == "__main__":
    main()
