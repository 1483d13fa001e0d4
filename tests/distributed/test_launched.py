"""Test processes that torchrun or SLURM has started, and that torchrun restarts."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from modules import Classifier, by_step, make_loader, quiet
from processes import run_processes
from runs import fit, logs_of, same, val_loader
from torch.distributed import TCPStore

from fabric_template import FabricLoop
from fabric_template.errors import ConfigurationError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "RANK": "0",
            "LOCAL_RANK": "0", "GROUP_RANK": "0"}  # fmt: skip
SLURM = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train",
         "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # fmt: skip


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM], ids=["torchrun", "SLURM"])
def test_the_loop_takes_the_number_of_processes_from_the_launcher(variables, tmp_path, monkeypatch):
    """If devices= contradicts the launcher, the loop raises an error before it writes a file."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    loop = FabricLoop(**quiet())
    assert (loop.world_size, loop.num_devices, loop.num_nodes) == (4, 2, 2)
    for arguments in ({"devices": 4, "strategy": "ddp"}, {"devices": 1}, {"devices": 2, "strategy": "ddp_fork"}):
        with pytest.raises(
            ConfigurationError, match="2 processes were started on each of 2 machines. Leave out devices"
        ):
            FabricLoop(accelerator="cpu", **arguments).fit(Classifier(), make_loader(8))
    assert list(tmp_path.iterdir()) == []


class Killed(Classifier):
    """A module that kills one process in the middle of the second epoch."""

    kills = True

    def on_train_batch_start(self, batch, batch_idx):
        if self.kills and self.global_step == 7 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank, root, kills, **options):
    Killed.kills = kills
    options = {"val": val_loader, "monitor": "val_loss", "save_every_n_steps": 3, "max_epochs": 2, **options}
    fit(root, lambda: Killed(by_step, sync_dist=True), lambda: make_loader(40), resume="auto", **options)


def hold(pipe):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def agent():
    """Return the port of a rendezvous store that outlives the processes, like torchrun's store."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(there,))
    process.start()
    yield here.recv()
    here.send("over")
    process.join()


def test_a_run_that_torchrun_restarts_matches_an_uninterrupted_run(agent):
    """After a SIGKILL, torchrun restarts both processes."""
    codes, errors = run_processes(train, "killed", True, agent=agent)
    assert codes == [1, -signal.SIGKILL]
    assert "Connection closed by peer" in errors[0] or "reset by peer" in errors[0]
    assert run_processes(train, "killed", False, agent=agent)[0] == [0, 0]
    train(None, "whole", False, strategy="ddp_fork", devices=2)
    assert logs_of("killed") == logs_of("whole")
    last = [
        torch.load(f"{each}/checkpoints/run/version_0/last.ckpt", weights_only=True) for each in ("killed", "whole")
    ]
    assert same(*[[state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")] for state in last])
    assert sorted(path.name for path in Path("killed/logs/run").iterdir()) == ["version_0"]
