"""Test that both processes end if one fails or gets a signal, and that the last checkpoint remains."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from modules import Classifier, make_loader, needs_fsdp2, sgd, shard_module
from processes import run_processes
from runs import with_files

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.checkpoint.distributed import SHARDS_KEY, verify_shards
from fabric_template.distributed import signals

LAST = Path("checkpoints/run/version_0/last.ckpt")


class Fails(Classifier):
    """A module that raises an error or a signal in the second process after the fourth step."""

    def __init__(self, event):
        super().__init__(sgd)
        self.event = event

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 4 and self.global_rank == 1:
            if isinstance(self.event, BaseException):
                raise self.event
            os.kill(os.getpid(), self.event)
        return super().training_step(batch, batch_idx)


# Map each name to (event, exit codes, text in the error of the second process, step of the checkpoint).
EVENTS = {
    "exception": (ValueError("mine"), (1, 1), "ValueError: mine", 4),
    "SIGKILL": (signal.SIGKILL, (1, -9), "", 4),
    "SIGTERM": (signal.SIGTERM, (143, 143), "", 5),
    "SIGUSR1": (signal.SIGUSR1, (138, 138), "", 5),
    "SIGINT": (signal.SIGINT, (130, 130), "", 5),
}


def train(rank, name, mode):
    torch.set_num_threads(1)
    signals.SECONDS_BETWEEN_CHECKS = 0
    warnings.simplefilter("ignore")
    strategy = DDPStrategy() if mode == "ddp" else ModelParallelStrategy(shard_module, 2, 1)
    loop = FabricLoop(**with_files(".", devices=2, max_epochs=2, seed=1, save_every_n_steps=2), strategy=strategy)
    loop.fit(Fails(EVENTS[name][0]), make_loader(40))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "ddp") for name in EVENTS),
        pytest.param("SIGKILL", "sharded", marks=needs_fsdp2),
        pytest.param("SIGTERM", "sharded", marks=[needs_fsdp2, pytest.mark.soak]),
    ],
)
def test_all_processes_end_if_one_process_fails(name, mode):
    _, expected, text, step = EVENTS[name]
    codes, errors = run_processes(train, name, mode, timeout=100)
    assert tuple(codes) == expected, errors
    assert text in errors[1]
    checkpoint = read_checkpoint(LAST)
    assert checkpoint["global_step"] == step
    if SHARDS_KEY in checkpoint:
        verify_shards(LAST, checkpoint[SHARDS_KEY])
