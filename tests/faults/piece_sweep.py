"""Each operation of each of two ranks in a save in pieces fails once: the old checkpoint or the new one is whole.

    python tests/faults/piece_sweep.py --kinds ENOSPC EIO EACCES short

One training of two ranks (gloo), at the end of which ``last.ckpt`` is saved again and again, with other weights each time: all
of them are one number, so that a mixture of two saves is seen at once. First the ranks
wait for their pieces, then threads write these.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from kills import end, fork
from layer import KINDS, Fault
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import make_loader
from ports import free_port
from victim import WORDS, Victim, in_parts, quiet

from fabric_template import FabricLoop
from fabric_template.files.keeper import Keeper
from fabric_template.files.reading import read_checkpoint
from fabric_template.files.shards import check_file, whole

warnings.simplefilter("ignore")


def content(path):
    """The number that all weights and moments in a file are; more than one: a mixture."""
    checkpoint = whole(read_checkpoint(path), path)
    tensors = list(checkpoint["state_dict"].values())
    for state in checkpoint["optimizer_states"][0]["state"].values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    return sorted({value for tensor in tensors for value in tensor.flatten().tolist()})


class Sweep(Callback):
    """Saves with one operation failing, on one rank, until one of these is beyond the last."""

    def __init__(self, root, kinds, every):
        self.root, self.kinds, self.every = root, kinds, every
        self.figures = {"faults": {}, "operations": {}, "kept_old": 0, "made_new": 0, "losses": []}
        self.number = 0

    def on_train_end(self, trainer, pl_module):
        self.trainer, self.run = trainer, trainer._run
        behind = self.run.keeper
        for way, keeper in (("", Keeper(behind.folder, self.run.config)), (", meanwhile", behind)):
            self.keeper = keeper
            self.save()
            for kind in self.kinds:
                for rank in range(2):
                    n = 1
                    while self.harmed(rank, n, kind):
                        n += self.every
                    self.figures["operations"][f"rank {rank}{way}"] = n - self.every
        if trainer.is_global_zero:
            (self.root / "figures").write_text(json.dumps(self.figures))

    def save(self):
        """Save other weights; whether it went well."""
        self.number += 1
        with torch.no_grad():
            for parameter in self.run.trained.net.parameters():
                parameter.to_local().fill_(self.number)
                for name in ("exp_avg", "exp_avg_sq"):
                    self.run.optimizing.optimizers[0].state[parameter][name].to_local().fill_(self.number)
        self.keeper.write_last(self.run)
        self.keeper.settle(self.run)
        return self.keeper.complaint() is None

    def harmed(self, rank, n, kind):
        """Save with the n-th operation of this rank failing; False: there are no more."""
        before, is_hit = self.number, [False]
        if self.trainer.global_rank == rank:
            with Fault(self.root, n, kind) as fault:
                went_well = self.save()
            is_hit = [fault.hit is not None]
            where = fault.hit and f"{fault.hit[0]} {os.path.basename(fault.hit[1])}"
        else:
            went_well, where = self.save(), None
        torch.distributed.broadcast_object_list(is_hit, src=rank)
        if self.trainer.is_global_zero:
            self.judge(before, went_well, {"rank": rank, "n": n, "kind": kind, "operation": where})
        torch.distributed.barrier()
        if not self.save() and self.trainer.is_global_zero:  # the next one must go well
            self.figures["losses"].append({"rank": rank, "n": n, "kind": kind, "problem": "the next save failed"})
        self.figures["faults"][kind] = self.figures["faults"].get(kind, 0) + is_hit[0]
        return is_hit[0]

    def judge(self, before, went_well, place):
        """What lies there: the new one where the save went well, else the old or the new one, whole."""
        (path,) = self.root.rglob("last.ckpt")
        try:
            check_file(path)
            found = content(path)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        allowed = [[self.number]] if went_well else [[self.number], [before]]
        self.figures["made_new" if found == [self.number] else "kept_old"] += 1
        if found not in allowed:
            self.figures["losses"].append({**place, "problem": f"{found} after {before}, {went_well}"})


def rank_of(root, number, port, kinds, every):
    """One rank."""
    quiet()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(number)}
    words = {**WORDS, "max_epochs": 1, "monitor": None, "save_every_n_steps": None, "accumulate_grad_batches": 1}
    loop = FabricLoop(
        default_root_dir=str(root),
        strategy=in_parts(),
        devices=2,
        plugins=AsyncCheckpointIO(),
        callbacks=Sweep(root, kinds, every),
        **words,
    )
    loop.fit(Victim(), make_loader(16))


def sweep(kinds, every=1):
    """The figures of all."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    began = time.monotonic()
    port = free_port()
    try:
        codes = end([fork(rank_of, root, number, port, kinds, every) for number in range(2)])
        if codes != [0, 0]:
            raise RuntimeError(f"the ranks ended with {codes}")
        return json.loads((root / "figures").read_text()) | {"seconds": round(time.monotonic() - began, 1)}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", default=[kind for kind in KINDS if kind != "SIGKILL"], choices=list(KINDS)
    )
    parser.add_argument("--every", type=int, default=1, help="only every so many operations")
    words = parser.parse_args()
    figures = sweep(words.kinds, words.every)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
