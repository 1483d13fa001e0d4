"""Kill each loop at a random time, run the command again, and compare the result with an undisturbed run.

    python benchmarks/killed.py --runs 30 --example PATH/TO/pytorch-lightning/examples/fabric/build_your_own_trainer

How it is measured:

- Each contestant is one command that starts or resumes a run in the way that its documentation recommends. A forked process
  runs the command, SIGKILL ends it after a random amount of CPU time, and a second forked process runs it again.
- All contestants train a small model with dropout, Adam and shuffled data for 3 epochs of 8 batches, and write each batch's
  loss to a CSV file. Each command sets the seed first, so that a run that starts from scratch equals an undisturbed run.
- "same weights": the weights equal those of the contestant's own undisturbed run, bit for bit. "complete CSV": each batch of
  that run has a row with the same loss. In metrics.csv, which FabricLoop and MiniLoop write, each epoch must have
  the same row, except for the time. All CSV files of a contestant are combined. If a batch has two rows, the later row is used.
- "ended": the second command ended without an error.

The contestants:

- ours: FabricLoop with `resume="auto"` and `save_every_n_steps=3`.
- MiniLoop, each epoch: MiniLoop with `resume="auto"`. It saves at the end of each epoch, and writes only one row per epoch.
- Trainer, each epoch: `ckpt_path="last"`, CSVLogger, and ModelCheckpoint(save_last=True), which saves at the end of each epoch.
- Trainer, every 3 steps: the same with ModelCheckpoint(save_last=True, every_n_train_steps=3).
- Accelerate, each epoch, and every 3 steps: save_state, load_state with the newest checkpoint, skip_first_batches and the
  seedable sampler, as in Accelerate's documentation of checkpoints. The script writes and flushes each row of the CSV file itself.
- Lightning's example: the "build your own trainer" example for Fabric, from the folder given with --example, with
  fit(ckpt_path=folder). The example writes no CSV file. The example imports a name that Lightning 2.6 lacks, so a second
  contestant is the example with that name restored.
"""

import argparse
import contextlib
import csv
import importlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults")]

import torch
from kills import end, fork, length_of
from modules import make_data
from torch import nn
from torch.utils.data import DataLoader

EPOCHS, EVERY = 3, 3
OURS, MINI = "ours", "MiniLoop, each epoch"
TRAINER_EPOCH, TRAINER_STEPS = "Trainer, each epoch", "Trainer, every 3 steps"
ACCELERATE_EPOCH, ACCELERATE_STEPS = "Accelerate, each epoch", "Accelerate, every 3 steps"
EXAMPLE, EXAMPLE_FIXED = "Lightning's example", "the same, its import fixed"


def net():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def loader():
    return DataLoader(make_data(32), batch_size=4, shuffle=True)


def module(log=True):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if log:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), lr=0.02)

    return Module()


# The contestants: functions that start or resume a run in a folder and return the network.


def ours(root):
    from fabric_template import FabricLoop

    torch.manual_seed(1)
    model = module()
    loop = FabricLoop(accelerator="cpu", max_epochs=EPOCHS, log_every_n_steps=1, save_every_n_steps=EVERY,
                      default_root_dir=str(root), enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    loop.fit(model, loader(), resume="auto")
    return model.net


def mini(root):
    from fabric_template import MiniLoop

    torch.manual_seed(1)
    model = module()
    loop = MiniLoop(accelerator="cpu", max_epochs=EPOCHS, default_root_dir=root)
    loop.fit(model, loader(), resume="auto")
    return model.net


def trainer(root, **when):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    pl.seed_everything(1, verbose=False)
    model = module()
    saves = ModelCheckpoint(dirpath=root / "checkpoints", save_last=True, **when)
    loop = pl.Trainer(accelerator="cpu", max_epochs=EPOCHS, log_every_n_steps=1, callbacks=[saves],
                      logger=CSVLogger(root, flush_logs_every_n_steps=1), default_root_dir=root,
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    loop.fit(model, loader(), ckpt_path="last")
    return model.net


def trainer_steps(root):
    return trainer(root, every_n_train_steps=EVERY)


def accelerate(root, every=None):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(1)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    model = net()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.02), loader()
    )
    first_epoch, skipped, done = 0, 0, 0
    folders = sorted(root.glob("step_*"), key=os.path.getctime)
    if folders:
        accelerator.load_state(str(folders[-1]))
        done = int(folders[-1].name[5:])
        first_epoch, skipped = divmod(done, len(batches))
    root.mkdir(exist_ok=True)
    with open(root / "metrics.csv", "a", newline="") as file:
        rows = csv.writer(file)
        if file.tell() == 0:
            rows.writerow(["step", "loss"])
        for epoch in range(first_epoch, EPOCHS):
            model.train()
            batches.set_epoch(epoch)
            rest = batches
            if epoch == first_epoch and skipped:
                rest = accelerator.skip_first_batches(batches, skipped)
            for x, y in rest:
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                rows.writerow([done, loss.item()])
                file.flush()
                done += 1
                if every and done % every == 0:
                    accelerator.save_state(str(root / f"step_{done}"))
            if not every:
                accelerator.save_state(str(root / f"step_{done}"))
    return accelerator.unwrap_model(model)


def accelerate_steps(root):
    return accelerate(root, EVERY)


def example(root):
    found = importlib.import_module("trainer")
    torch.manual_seed(1)
    model = module(log=False)
    folder = str(root / "checkpoints")
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "checkpoint_dir": folder}
    found.MyCustomTrainer(**options).fit(model, loader(), None, ckpt_path=folder)
    return model.net


def example_fixed(root):
    import lightning as L

    L.fabric.utilities.types.LRScheduler = torch.optim.lr_scheduler.LRScheduler
    return example(root)


CONTESTANTS = {
    OURS: ours,
    MINI: mini,
    TRAINER_EPOCH: trainer,
    TRAINER_STEPS: trainer_steps,
    ACCELERATE_EPOCH: accelerate,
    ACCELERATE_STEPS: accelerate_steps,
    EXAMPLE: example,
    EXAMPLE_FIXED: example_fixed,
}


# Functions that kill contestants at random times, resume their runs and compare the results


def command(name, root, log):
    """Train, and write the final weights next to the contestant's files."""
    with open(log, "ab") as arguments:
        os.dup2(arguments.fileno(), 1)
        os.dup2(arguments.fileno(), 2)
    trained = CONTESTANTS[name](root)
    torch.save(trained.state_dict(), root / "final.pt")


def weights_of(root):
    path = root / "final.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def losses_of(root):
    """Return {step: loss} from all CSV files in a folder. If a step has two rows, use the later row.

    Rows with a learning rate, such as those of FabricLoop's metrics.csv, are returned with all columns except the times.
    """
    losses = {}
    paths = [*root.rglob("metrics.csv"), *root.rglob("steps.csv")]
    for path in sorted(paths, key=lambda path: path.parent.name):
        with open(path, newline="") as file, contextlib.suppress(csv.Error):
            for row in csv.DictReader(file):
                loss = row.get("loss") or row.get("loss_step")
                if row.get("lr"):
                    cells = {n: cell for n, cell in row.items() if n not in ("time", "waiting")}
                    losses["epoch", row["epoch"]] = cells
                elif loss:
                    losses[row["step"]] = loss
    return losses


def same(one, other):
    return other is not None and all(torch.equal(one[name], other[name]) for name in one)


def warm_up(name, folder):
    """Run a contestant once in this process, so that forked processes have already imported its modules."""
    from tqdm import tqdm

    # Prevent tqdm from starting a monitor thread, because a forked process would wait forever for this thread's locks.
    tqdm.monitor_interval = 0
    # Replace tqdm's lock, which forked processes would share and a killed process would never release.
    tqdm.set_lock(threading.RLock())
    CONTESTANTS[name](folder / "warm")
    if name in (ACCELERATE_EPOCH, ACCELERATE_STEPS):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    if threading.active_count() > 1:
        raise RuntimeError(
            "the contestant has started threads, whose locks could block a forked process forever"
        )


def compete(name, runs, draw, folder):
    """Kill and resume several runs. Write the numbers of successes, or an error, to a JSON file."""
    log, result = folder / "log", folder / "result.json"
    try:
        with open(log, "ab") as arguments:
            sys.stdout.flush()
            os.dup2(arguments.fileno(), 1)
            os.dup2(arguments.fileno(), 2)
        warm_up(name, folder)
    except Exception as error:
        return result.write_text(json.dumps(f"{type(error).__name__}: {error}"))
    _, seconds = length_of([fork(command, name, folder / "whole", log)])
    weights, losses = weights_of(folder / "whole"), losses_of(folder / "whole")
    killed = ended = equal = complete = 0
    while killed < runs:
        root = folder / "run"
        (code,) = end([fork(command, name, root, log)], after=draw.uniform(0, seconds))
        # With exit code 0, the command ended before it could be killed, so the attempt does not count.
        if code != 0:
            killed += 1
            (code,) = end([fork(command, name, root, log)])
            ended += code == 0
            equal += code == 0 and same(weights, weights_of(root))
            complete += code == 0 and bool(losses) and losses_of(root) == losses
        shutil.rmtree(root, ignore_errors=True)
    return result.write_text(json.dumps([ended, equal, complete if losses else None]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30, help="killed runs of each contestant (30)")
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the moments of the kills (0)"
    )
    parser.add_argument(
        "--example", type=Path, help="the folder build_your_own_trainer of Lightning's examples"
    )
    parser.add_argument(
        "--only", action="append", choices=CONTESTANTS, help="run only this one; may be repeated"
    )
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = arguments.only or list(CONTESTANTS)
    needed = ["lightning.pytorch", "lightning.pytorch.loggers", "pandas"]
    needed += ["fabric_template.loop", "fabric_template.mini"]
    if {ACCELERATE_EPOCH, ACCELERATE_STEPS} & set(names):
        needed.append("accelerate")
    for name in needed:
        # Import each package once before forking, so that forked processes need not import it.
        importlib.import_module(name)
    if arguments.example:
        sys.path.insert(0, str(arguments.example.resolve()))
    print("| contestant | killed | ended | same weights | complete CSV |\n|---|---|---|---|---|")
    for name in names:
        if "example" in CONTESTANTS[name].__name__ and not arguments.example:
            print(f"| {name} | | not run: give --example | | |")
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            pid = fork(compete, name, arguments.runs, random.Random(arguments.seed), folder)
            os.waitpid(pid, 0)
            found = json.loads((folder / "result.json").read_text())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(found, str):
            print(f"| {name} | | cannot be run: `{found}` | | |", flush=True)
            continue
        ended, equal, complete = found
        complete = "writes none" if complete is None else complete
        print(f"| {name} | {arguments.runs} | {ended} | {equal} | {complete} |", flush=True)


if __name__ == "__main__":
    main()
