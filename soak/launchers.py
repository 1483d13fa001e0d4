"""Check that a script gives the same results under each launcher, and that torchrun ends properly after a signal.

    python soak/launchers.py                 the table of launchers, strategies and methods, and the signals
    python soak/launchers.py --only signals  only the signals

The launchers are `python` (which starts the other rank as a script), spawned and forked ranks, `fabric run`, torchrun, and
two processes with SLURM's variables. The strategies are DDP on two processes, FSDP2 on two processes, and a single process.
The results are weights, optimizer states, rows, metrics and predictions. A cell of the table names the methods whose results
are not bit-identical to those under torchrun. A single spawned rank is compared with a single forked rank, because both use
DDP. `resume` continues a run from the middle of an epoch, and is also compared with `fit`. FSDP2 is also compared with DDP.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import search_path  # noqa: F401
import torch
from modules import Classifier, by_epoch
from ports import free_port
from runs import fit, val_loader
from torch.utils.data import DataLoader, TensorDataset
from victim import difference, quiet, sharded_strategy

LAUNCHERS = ("torchrun", "python", "spawn", "fork", "fabric run", "SLURM")
STRATEGIES = ("ddp", "fsdp", "single")
FORKED = ("spawn", "fork")
CALLS = ("fit", "accumulate", "clip", "validate", "predict", "resume")
PATIENCE = 300.0
BIN = Path(sys.executable).parent
# The signals that torchrun passes on to its workers: SIGUSR1, and the default of --signals-to-handle.
CAUGHT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
STEPS = 200


class Module(Classifier):
    """A classifier with Adam, a scheduler and predictions."""

    def __init__(self):
        super().__init__(by_epoch)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


# ---- The training program that each launched process runs


def where(launcher, strategy):
    """Return the loop's options for a launcher and a strategy."""
    if strategy == "fsdp":
        return {"strategy": sharded_strategy(), "devices": 2}
    options = {"devices": 1 if strategy == "single" else 2}
    if launcher in FORKED:
        options["strategy"] = f"ddp_{launcher}"
    elif strategy == "ddp":
        options["strategy"] = "ddp"
    return options


def whole(value):
    """Replace sharded tensors in nested values with full tensors. All ranks must do this together."""
    if isinstance(value, dict):
        return {name: whole(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [whole(part) for part in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def work(launcher, strategy, folder):
    """Call fit in several ways, and validate and predict. Rank 0 writes the results to a file."""
    quiet()
    found = {}

    def train(name, **options):
        options |= {"monitor": "val_loss", **where(launcher, strategy)}
        loop, module, _ = fit(folder / name, Module, val=val_loader, **options)
        results = {"weights": whole(module.state_dict())}
        moments = whole([one.state_dict()["state"] for one in loop.optimizers])
        # Return no optimizer states if the ranks are forked or
        # spawned, because the calling process then has no optimizers.
        if launcher not in FORKED:
            results["moments"] = moments
        table = folder / name / "logs/run/version_0/metrics.csv"
        if not table.exists():
            return loop, module, None
        rows = csv.DictReader(table.open())
        clocks = ("time", "waiting", "samples_per_second")
        results["rows"] = [{k: v for k, v in row.items() if k not in clocks} for row in rows]
        return loop, module, results

    loop, module, found["fit"] = train("fit", max_epochs=2)
    found["validate"] = loop.validate(module, val_loader(), verbose=False)
    found["predict"] = loop.predict(module, val_loader())
    found["accumulate"] = train("accumulate", max_epochs=2, accumulate_grad_batches=3)[2]
    found["clip"] = train("clip", max_epochs=2, gradient_clip_val=0.1)[2]
    train("resume", max_steps=7)
    found["resume"] = train("resume", max_epochs=2, seed=9, resume="last")[2]
    if loop.is_global_zero:
        torch.save(found, folder / "found")


class Slow(Module):
    """A slow module that creates a file when training has started, so that a signal can be sent."""

    def on_train_batch_start(self, batch, batch_idx):
        Path(f"trains{self.global_rank}").touch()
        time.sleep(0.02)


def work_slowly():
    """Train for many steps with DDP, so that a signal arrives between two steps."""
    quiet()
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randint(0, 3, (STEPS * 4,)))
    options = {"max_epochs": 1, "strategy": "ddp", "resume": "auto"}
    loop, *_ = fit(".", Slow, lambda: DataLoader(data, batch_size=2), **options)
    Path(f"ended{loop.global_rank}").write_text(str(loop.global_step))


# ---- Functions that start the program with each launcher and compare the results


def slurm(rank, ranks, port):
    """Return the environment variables of one SLURM task."""
    return {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(ranks), "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_NNODES": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def commands(launcher, ranks, script):
    """Return a command and environment variables for each process to start."""
    if launcher == "SLURM":
        port = free_port()
        return [([sys.executable, *script], slurm(rank, ranks, port)) for rank in range(ranks)]
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", ranks]
    fabric_run = [BIN / "fabric", "run", "--accelerator", "cpu", "--devices", ranks]
    before = {"torchrun": torchrun, "fabric run": fabric_run}.get(launcher, [sys.executable])
    return [([*before, *script], {})]


def start(command, more, folder):
    with open(folder / "log", "ab") as log:
        options = {"stdout": log, "stderr": log, "cwd": folder, "start_new_session": True}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        return subprocess.Popen([str(word) for word in command], env=env, **options)


def wait(processes, patience=PATIENCE):
    """Return the exit codes of the processes. Kill each process that hangs, and return "hang" as its code."""
    until, codes = time.monotonic() + patience, []
    for process in processes:
        try:
            codes.append(process.wait(max(until - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            codes.append("hang")
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return codes


def run(launcher, strategy, folder):
    """Start the program with a launcher, and return the program's results or an error message."""
    folder.mkdir(parents=True)
    script = [__file__, "--work", launcher, strategy, folder]
    ranks = 1 if strategy == "single" else 2
    processes = [start(*command, folder) for command in commands(launcher, ranks, script)]
    codes = wait(processes)
    if any(codes) or not (folder / "found").exists():
        return f"it ended with {codes}: {(folder / 'log').read_text()[-500:]}"
    return torch.load(folder / "found", weights_only=False)


def compare_results(found, expected):
    """Return the differences between two results, keyed by method."""
    problems = {}
    for method in CALLS:
        one, other = found[method], expected[method]
        if isinstance(one, dict):
            names = [name for name in one if name in other]
            one, other = ({name: part[name] for name in names} for part in (one, other))
        if problem := difference(other, one):
            problems[method] = problem
    if problem := difference(found["fit"], found["resume"]):
        problems["resume, beside fit"] = problem
    return problems


def run_table(folder):
    """Run every launcher with every strategy. Return (cells, losses, differences between FSDP2 and DDP)."""
    cells, losses, all_found = {}, [], {}
    for strategy in STRATEGIES:
        for launcher in LAUNCHERS:
            # Fabric cannot fork or spawn the ranks of FSDP.
            if strategy == "fsdp" and launcher in FORKED:
                cells[f"{launcher}, {strategy}"] = "Fabric has no such"
                continue
            found = run(launcher, strategy, folder / f"{launcher}-{strategy}".replace(" ", "-"))
            # A spawned or forked single process uses DDP, which draws different random numbers than a run without DDP.
            is_of_one = strategy == "single" and launcher in FORKED
            expected = all_found.setdefault("ddp of one" if is_of_one else strategy, found)
            is_failed = isinstance(found, str)
            problems = {"all": found} if is_failed else compare_results(found, expected)
            cell = f"{launcher}, {strategy}"
            cells[cell] = problems or "the same"
            losses += [f"{cell}, {method}: {problem}" for method, problem in problems.items()]
            print(launcher, strategy, problems or "the same", file=sys.stderr, flush=True)
    furthest = {}
    for method in ("fit", "accumulate", "clip", "resume"):
        one, other = (all_found[strategy][method]["weights"] for strategy in ("ddp", "fsdp"))
        furthest[method] = max(float((one[name] - other[name]).abs().max()) for name in one)
    losses += [
        f"FSDP2's {method} is {far} from DDP's" for method, far in furthest.items() if far > 1e-6
    ]
    return cells, losses, furthest


# ---- Functions that send signals to torchrun and its workers

# Map each case to (receiver, signal, --max-restarts, whether torchrun handles SIGUSR1, whether the run is a SLURM job).
SIGNALS = {
    "SIGTERM to torchrun": ("agent", signal.SIGTERM, 3, False, False),
    "SIGTERM to one worker": ("one", signal.SIGTERM, 0, False, False),
    "SIGTERM to all processes": ("all", signal.SIGTERM, 3, False, False),
    "SIGUSR1 to torchrun": ("agent", signal.SIGUSR1, 3, True, False),
    "SIGUSR1 to the workers": ("workers", signal.SIGUSR1, 0, False, False),
    "SIGUSR1 to all processes, in SLURM": ("all", signal.SIGUSR1, 3, True, True),
    "SIGUSR1 to the workers, with restarts": ("workers", signal.SIGUSR1, 3, False, False),
}


def send_signal(name, folder):
    """Send a signal during training. Return the seconds until the end, and an error message or ""."""
    to, number, restarts, is_passed, in_slurm = SIGNALS[name]
    folder.mkdir(parents=True)
    more = slurm(0, 1, free_port()) if in_slurm else {}
    passing = ["--signals-to-handle", CAUGHT] if is_passed else []
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    torchrun = [BIN / "torchrun", "--nproc-per-node", 2, "--max-restarts", restarts, *rendezvous]
    agent = start([*torchrun, *passing, __file__, "--slowly"], more, folder)
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("trains*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    workers = [int(pid) for pid in children.split()]
    targets = {"agent": [agent.pid], "one": workers[-1:], "workers": workers}
    targets["all"] = [*workers, agent.pid]
    started = time.monotonic()
    for pid in targets[to]:
        os.kill(pid, number)
    (code,) = wait([agent])
    seconds, continues = time.monotonic() - started, to == "workers" and restarts
    wrong = [f"torchrun ended with {code}"] * (code != (0 if continues else 1))
    wrong += [f"worker {pid} lives" for pid in workers if Path(f"/proc/{pid}").exists()]
    ended = sorted(path.read_text() for path in folder.glob("ended*"))
    wrong += [f"ended: {ended}"] * (ended != [str(STEPS)] * 2 * bool(continues))
    last, output = folder / "checkpoints/run/version_0/last.ckpt", (folder / "log").read_text()
    step = torch.load(last)["global_step"] if last.exists() else None
    stops = f"{signal.Signals(number).name}: training stops in epoch 0, after step "
    printed = output.partition(stops)[2].partition(".")[0]
    wrong += [f"saved at {step}, printed {printed!r}"] * (
        not printed or (step is None or str(step) != printed) * (not continues)
    )
    return seconds, "; ".join(wrong)


def run_signals(folder):
    cells, losses = {}, []
    for name in SIGNALS:
        seconds, wrong = send_signal(name, folder / name.replace(" ", "-").replace(",", ""))
        cells[name] = wrong or f"saved, {seconds:.1f} s"
        losses += [f"{name}: {wrong}"] * bool(wrong)
        print(name, cells[name], file=sys.stderr, flush=True)
    return cells, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("table", "signals"), help="run only this part")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--slowly", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.slowly:
        return work_slowly()
    if options.work:
        launcher, strategy, folder = options.work
        return work(launcher, strategy, Path(folder))
    folder, figures = Path(tempfile.mkdtemp()), {"losses": []}
    if options.only != "signals":
        figures["table"], losses, figures["furthest"] = run_table(folder)
        figures["losses"] += losses
    if options.only != "table":
        figures["signals"], losses = run_signals(folder)
        figures["losses"] += losses
    if not figures["losses"]:
        shutil.rmtree(folder)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
