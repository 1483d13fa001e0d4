"""A rank of a model in parts fails, in each way: all end, with that rank's error, and the state is saved where it is exact.

Two ranks (gloo, FSDP2) come by themselves, as under torchrun; each writes what it says, and it is read here. As a script
(`python tests/distributed/test_failing_ranks.py`) all rows, sharded and with DDP: prints what was found.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # the tests' modules, the package

import pytest
import torch
from externally import externally
from fabric_template.files.shards import check_file
from fabric_template.process import signals
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from modules import Classifier, make_data, sgd
from runs import loud
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint

LAST = Path("checkpoints/run/version_0/last.ckpt")
WIDE = 4096  # hidden units: a piece is some 100 KB
MODES = ("sharded", "ddp")
HUNG = 10.0  # seconds of the group's timeout in a row that hangs
AT_ONCE = 60.0  # seconds, on a busy machine


# ---- what each rank does


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


class Fails(Classifier):
    """Something happens behind the fourth step."""

    def __init__(self, what):
        super().__init__(sgd, hidden=WIDE)
        self.what = what

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 4 and self.what is not None:
            Path(f"at{self.global_rank}").write_text(str(time.time()))
            self.what(self.global_rank)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def on_rank_one(what, *args):
    return lambda rank: what(*args) if rank == 1 else None


def on_both(what, *args):
    return lambda rank: what(*args)


def fail(error):
    raise error


def send(number):
    os.kill(os.getpid(), number)


def hang():
    """Until the other has ended: then a launcher ends this one."""
    while not Path("ended0").exists():
        time.sleep(0.05)
    os._exit(9)


def fill_the_disk():
    """From now on no file of this process gets larger than its words."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Shared(IterableDataset):
    """Of which each rank has a part of its own, by its rank."""

    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return iter(make_data(self.num))


def unsplit():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_data(40))

    return DataLoader(Stream(), batch_size=4)


def make(num):
    return DataLoader(make_data(num), batch_size=4)


def own(num):
    """With a sampler of its own, which the loop leaves alone."""
    data = make_data(num)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def stream(num):
    return DataLoader(Shared(num), batch_size=4)


@dataclass
class Row:
    """What happens, and what comes of it."""

    what: object = None
    train: object = lambda rank: make(40)
    val: object = lambda rank: make(18)
    verb: str = "fit"
    codes: tuple = (0, 0)
    says: tuple = ("", "")  # what stands in the words of each rank
    saved: tuple = (20,)  # steps: one of them
    timeout: float | None = None
    modes: tuple = MODES


GONE, ENDED = "another rank is gone without a word", "training has come to its end, but not everything is on disk"
LENGTHS = "loaders of different length (rank 0 has 4, rank 1 has 6 batches): those with more would wait"
SHARDED = MODES[:1]
TABLE = {
    "exception": Row(on_rank_one(fail, ValueError("mine")), codes=(1, 1), says=(GONE, "ValueError: mine"), saved=(4,)),
    "memory": Row(
        on_rank_one(fail, torch.OutOfMemoryError("none left")), codes=(1, 1), says=(GONE, "OutOfMemoryError: none left"),
        saved=(4,),
    ),
    "SIGKILL": Row(on_rank_one(send, signal.SIGKILL), codes=(1, -9), says=(GONE, ""), saved=(4,)),
    "hang": Row(on_rank_one(hang), codes=(1, 9), says=("Timed out waiting 10000ms", ""), saved=(4,), timeout=HUNG),
    "SIGTERM to one": Row(on_rank_one(send, signal.SIGTERM), codes=(143, 143), says=("after step 5", ""), saved=(5,)),
    "SIGTERM to all": Row(on_both(send, signal.SIGTERM), codes=(143, 143), says=("after step 5", ""), saved=(5,)),
    "SIGUSR1 to one": Row(on_rank_one(send, signal.SIGUSR1), codes=(138, 138), says=("after step 5", ""), saved=(5,)),
    "SIGUSR1 to all": Row(on_both(send, signal.SIGUSR1), codes=(138, 138), says=("after step 5", ""), saved=(5,)),
    "full disk": Row(
        on_rank_one(fill_the_disk), codes=(1, 1), says=(ENDED, "rank 1: File too large; the old file is unchanged"),
        saved=(4,), modes=SHARDED,
    ),
    "longer to train": Row(train=lambda rank: own(16 + 8 * rank), codes=(1, 1), says=(f"train {LENGTHS}",) * 2, saved=(None,)),
    "longer to validate": Row(
        val=lambda rank: own(16 + 8 * rank), codes=(1, 1), says=(f"val {LENGTHS}",) * 2, saved=(None,), modes=SHARDED
    ),
    "longer, by itself": Row(
        val=lambda rank: own(16 + 8 * rank), verb="validate", codes=(1, 1), says=(f"val {LENGTHS}",) * 2, saved=(None,),
        modes=SHARDED,
    ),
    "not split": Row(
        train=lambda rank: unsplit(), says=("each of the 2 processes gets every sample of the train loader", "")
    ),
    "stream": Row(
        train=lambda rank: stream(40 + 8 * rank), val=lambda rank: stream(16 + 8 * rank),
        says=("", "rank 1 has more batches in its train loader than another rank: what is left of them is not used"),
    ),
    "empty": Row(train=lambda rank: make(1), val=lambda rank: make(1), saved=(2,)),
    "empty to validate": Row(val=lambda rank: make(1), verb="validate", saved=(None,)),
    "empty to predict": Row(val=lambda rank: make(1), verb="predict", saved=(None,)),
    "odd to predict": Row(val=lambda rank: make(9), verb="predict", saved=(None,)),
}  # fmt: skip
IN_THE_SUITE = [
    ("exception", "ddp"), ("SIGKILL", "sharded"), ("SIGUSR1 to one", "sharded"), ("full disk", "sharded"),
    ("longer, by itself", "sharded"), ("stream", "sharded"), ("odd to predict", "sharded"),
]  # fmt: skip


def work(rank, name, mode):
    """One rank's script."""
    row = TABLE[name]
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)  # which pytest keeps for itself
    signals.AGREE_EVERY = 0
    of_group = {"timeout": timedelta(seconds=row.timeout)} if row.timeout else {}
    strategy = DDPStrategy(**of_group) if mode == "ddp" else ModelParallelStrategy(shard, 2, 1, **of_group)
    loop = FabricLoop(
        **loud(".", devices=2, max_epochs=2, seed=1, save_every_n_steps=2), strategy=strategy,
    )  # fmt: skip
    try:
        if row.verb == "fit":
            loop.fit(Fails(row.what), row.train(rank), row.val(rank))
        else:
            getattr(loop, row.verb)(Fails(row.what), row.val(rank))
    finally:
        Path(f"ended{rank}").touch()


# ---- what comes of it


def problems(name, mode):
    """What is other than the row says, and the seconds from the failure to the end of both; in the folder at hand."""
    row = TABLE[name]
    codes, said = externally(work, name, mode)
    seconds = max((time.time() - float(path.read_text()) for path in Path().glob("at*")), default=0.0)
    step = None
    if LAST.exists():
        check_file(LAST)  # its pieces are there, and whole
        step = read_checkpoint(LAST)["global_step"]
    wrong = [f"codes {codes}"] * (codes != list(row.codes))
    wrong += [f"step {step} is saved"] * (step not in row.saved)
    wrong += [f"rank {rank}: {said[rank][-2000:]}" for rank in range(2) if row.says[rank] not in said[rank]]
    return wrong, seconds


@pytest.mark.parametrize(("name", "mode"), IN_THE_SUITE)
def test_all_ranks_end(name, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert problems(name, mode)[0] == []


def main():
    found, losses = {}, []
    for name, row in TABLE.items():
        for mode in row.modes:
            folder = tempfile.mkdtemp()
            os.chdir(folder)
            wrong, seconds = problems(name, mode)
            if seconds > AT_ONCE + (row.timeout or 0):
                wrong.append(f"{seconds:.1f} s until all had ended")
            found[f"{name}, {mode}"] = round(seconds, 1)
            print(f"{name}, {mode}: {seconds:.1f} s", *wrong, sep="\n    ", file=sys.stderr, flush=True)
            losses += [[name, mode, *wrong]] * bool(wrong)
            os.chdir("/")
            shutil.rmtree(folder)
    print(json.dumps({"seconds": found, "losses": losses}))
    sys.exit(bool(losses))


if __name__ == "__main__":
    main()
