"""SIGKILLs under torchrun's agent, which starts the ranks again: the run ends by itself, and is as if nothing had been.

    python tests/faults/elastic.py --kills 100                one worker of two, on one node
    python tests/faults/elastic.py --kills 30 --nodes 2       a whole node of --nnodes 1:2; another comes in its place, or not
    python tests/faults/elastic.py --sharded                  the same of a model in parts (FSDP2), saved in pieces
    python tests/faults/elastic.py --forked                   several times as many on a busy machine

The agent is torchrun's own (elastic_launch), forked from a process that has imported it; its workers are scripts, as under
torchrun, or, `--forked`, come from a process that has imported all they need, and no instant hits an import. Where a node is
lost the others go on in another number, with as large a batch of all together: then the rows have to come at the same steps,
each step has to have had the same samples, and all pieces have to be whole. Nodes are started as docs/scale.md says; but the
300 seconds for which torchrun waits, at the end, for a node that is gone are 20 here.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from subprocess import TimeoutExpired

from kills import fork, warm_up
from lightning.fabric.strategies import DDPStrategy
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from victim import Victim, difference, end_of, in_parts, quiet, train

from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.checkpoint.distributed import SHARDS_KEY, verify_shards

PATIENCE = 180.0  # seconds after its start, or the last kill, until a run that does not end counts as hanging
RESTARTS = 10
BARRIER = 20.0
TIMEOUT = timedelta(
    seconds=60
)  # of a group of several nodes: for so long one waits, as it begins, for a node that is gone
COMES_LATE = 3  # the exit code of a node that finds the run closed
KINDS = ("whole", "sharded")  # how the model lies on the ranks, and is saved


@dataclass
class Figures:
    """What a campaign found."""

    seed: int
    nodes: int
    ranks: int  # of a node
    kind: str
    forked: bool  # not scripts
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


class Node:
    """torchrun on one machine, and its workers."""

    def __init__(self, log, words, forked):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.parent = self.agent = Process(log, be_a_node, *words, ours if forked else None)
        if forked:
            self.parent = Process(log, fork_workers, theirs, ours, words)
        for end in (ours, theirs):
            end.close()
        self.pid, self.poll = self.agent.pid, self.agent.poll

    def workers(self):
        return self.parent.children()

    def kill(self):
        """All of it, at once."""
        kill([self.agent.pid] if self.poll() is None else [])
        self.parent.kill()
        self.agent.kill()


def fork_workers(asked, other, words):
    """Be where a node's workers come from: start one, or say how one has ended, until nobody asks any more."""
    other.close()
    while question := asked.recv(2**20):
        pid, environment = json.loads(question)
        if pid is None:
            answer = fork(be_a_worker, asked, environment, words)
        else:
            done, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        asked.send(json.dumps(answer).encode())


def be_a_worker(asked, environment, words):
    os.setsid()
    asked.close()
    os.environ.clear()
    os.environ.update(environment)
    root, _, nodes, _, kind = words
    work(root, nodes, kind)


class Forked:
    """What torchrun sees of such a worker: a Popen."""

    def __init__(self, asks, environment):
        self.asks, self.returncode, self.pid = asks, None, self._ask(asks, None, environment)

    @staticmethod
    def _ask(asks, *question):
        asks.send(json.dumps(question).encode())
        return json.loads(asks.recv(2**20))

    def poll(self):
        if self.returncode is None:
            self.returncode = self._ask(self.asks, self.pid, None)
        return self.returncode

    def wait(self, timeout):
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise TimeoutExpired("a worker", timeout)
            time.sleep(0.01)
        return self.returncode


def be_a_node(root, port, nodes, ranks, kind, asks):
    """Be torchrun on one machine."""
    if asks is not None:
        SubprocessHandler._popen = lambda self, args, environment: Forked(asks, environment)
    if nodes > 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        LocalElasticAgent.__init__ = partialmethod(LocalElasticAgent.__init__, exit_barrier_timeout=BARRIER)
    quick = {"is_host": False, "last_call_timeout": 1, "keep_alive_interval": 2, "keep_alive_max_attempt": 3}
    config = LaunchConfig(
        min_nodes=1, max_nodes=nodes, nproc_per_node=ranks, run_id="run", rdzv_backend="c10d", max_restarts=RESTARTS,
        rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs=quick, monitor_interval=0.05,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(__file__, "--work", root, "--nodes", str(nodes), "--kind", kind)
    except RendezvousClosedError:
        os._exit(COMES_LATE)


class Long(Victim):
    """Long enough for a node to come back; writes down what samples all ranks together have trained."""

    steps, epochs = 48, 12

    def training_step(self, batch):
        time.sleep(0.2)
        self.log("samples", batch[0].double().sum(), on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return super().training_step(batch)


def work(root, nodes, kind):
    """What each worker does: the same command, whoever started it, and how often."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    quiet()
    ranks, several = int(os.environ["WORLD_SIZE"]), nodes > 1
    of_group = {"timeout": TIMEOUT} if several else {}
    strategy = DDPStrategy(**of_group) if kind == "whole" else in_parts(ranks, **of_group)
    words = {"make": Long, "max_epochs": Long.epochs} if several else {}
    train(root, batch_size=8 // ranks, strategy=strategy, accumulate_grad_batches=1, save_every_n_steps=3, **words)


class Run:
    """A run on some nodes, begun anew in the folder."""

    def __init__(self, root, nodes, ranks, kind, forked, log):
        reads, writes = os.pipe()
        self.rendezvous = Process(log, hold_the_rendezvous, writes)
        port = int(os.read(reads, 100))
        os.close(reads)
        os.close(writes)
        self.words = log, (str(root), port, nodes, ranks, kind), forked
        self.ranks, self.began = ranks, time.monotonic()
        self.nodes = [Node(*self.words) for _ in range(nodes)]

    def is_over(self):
        late = time.monotonic() - self.began > PATIENCE
        return late or all([node.poll() is not None for node in self.nodes])

    def workers(self):
        return [pid for node in self.nodes for pid in node.workers()]

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


def instant(draw, seconds, figures):
    """A moment of an attempt; of scripts', most of which is imports, three of four behind them."""
    begin = 0 if figures.forked else draw.choice((0, 0.6, 0.6, 0.6))
    return draw.uniform(begin, 1) * seconds


def kill_workers(run, draw, seconds, figures):
    """One worker, of those that there are, once to three times."""
    killed = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        workers = run.wait_for_workers(killed)
        run.wait(instant(draw, seconds, figures))
        if not (workers := [pid for pid in run.workers() if pid in workers]):
            return
        run.hit([draw.choice(workers)])
        figures.kills += 1
        killed += workers


def kill_nodes(run, draw, seconds, figures):
    """A whole node; another one comes in its place, at once or behind the 6 seconds until it is missed, or does not."""
    run.wait_for_workers()
    run.wait(instant(draw, seconds, figures))
    if alive := [node for node in run.nodes if node.workers()]:
        node = draw.choice(alive)
        run.nodes.remove(node)
        run.hit([node.pid, *node.workers()])
        node.kill()
        figures.kills += 1
        if draw.random() < 0.7:
            run.wait(draw.uniform(0, 12))
            run.nodes.append(Node(*run.words))
            figures.came_back += 1


def promised(end, root):
    """What stays the same with another number of ranks: when rows come, and that each epoch has had every sample once.

    And that the files are whole: all of their pieces are read.
    """
    columns, *rows = (row.split(",") for row in end["logs/metrics.csv"])
    rows = [dict(zip(columns, row, strict=True)) for row in rows]
    epochs = [[row["epoch"], row["step"], round(float(row["samples"]), 6)] for row in rows]
    steps = [row.split(",")[:2] for row in end["logs/steps.csv"]]
    folder = max(Path(root, "checkpoints", "run").iterdir(), key=lambda path: int(path.name[8:]))
    files = {path: read_checkpoint(path) for path in folder.glob("*.ckpt")}
    sharded = {path: checkpoint[SHARDS_KEY] for path, checkpoint in files.items() if SHARDS_KEY in checkpoint}
    for path, index in sharded.items():
        verify_shards(path, index)
    has_unnamed = len(list(folder.glob("*.ckpt.step=*"))) > len(sharded)
    ends = files[folder / "last.ckpt"]["global_step"]
    return {"epochs": epochs, "steps": steps, "ends": ends, "unnamed": has_unnamed}


def problem_of(codes, whole, root, is_same):
    """What is wrong with a run that has ended, in words."""
    if 0 not in codes or any(code not in (0, COMES_LATE) for code in codes):
        return f"it ended with {codes}"
    try:
        end = end_of(root)
        return difference(whole, end if is_same else promised(end, root))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def campaign(kills, nodes, ranks, kind, forked, seed, most=float("inf")):
    """Rounds until so many kills have hit, or so many seconds are over; returns the figures."""
    figures, draw, began = Figures(seed, nodes, ranks, kind, forked), random.Random(seed), time.monotonic()
    home = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    log = home / "log"
    try:
        if forked:
            warm_up(home / "warm")
            in_parts()
        run = Run(home / "whole", nodes, ranks, kind, forked, log)
        run.wait_for_workers()
        first = time.monotonic()
        if any(codes := run.end()):
            raise RuntimeError(f"the undisturbed run ended with {codes}:\n{log.read_text()}")
        seconds, whole = time.monotonic() - first, end_of(home / "whole")
        if nodes > 1:
            whole = promised(whole, home / "whole")
        while figures.kills < kills and time.monotonic() - began < most:
            root = home / "run"
            run = Run(root, nodes, ranks, kind, forked, log)
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
    parser.add_argument(
        "--sharded", dest="kind", action="store_const", const="sharded", help="the model in parts (FSDP2)"
    )
    parser.add_argument("--forked", action="store_true", help="workers are forked, and import nothing")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.set_defaults(kind="whole")  # of three arguments
    parser.add_argument("--work", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.work:
        return work(words.work, words.nodes, words.kind)
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", file=sys.stderr)
    ranks = words.ranks or (2 if words.nodes == 1 else 1)
    figures = campaign(words.kills, words.nodes, ranks, words.kind, words.forked, seed, words.seconds)
    print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.losses))


if __name__ == "__main__":
    main()
