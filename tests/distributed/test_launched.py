"""Ranks that somebody else has started: their number is the launcher's, and it may start them again."""

import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from externally import externally
from fabric_template.process.attempt import own_address
from modules import Classifier, by_step, make_loader, quiet
from runs import fit, logs_of, same, val_loader
from torch.distributed import TCPStore

from fabric_template import FabricLoop
from fabric_template.errors import ConfigurationError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "RANK": "0",
            "LOCAL_RANK": "0", "GROUP_RANK": "0"}  # fmt: skip
SLURM = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train",
         "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # fmt: skip


@pytest.fixture(params=["torchrun", "SLURM"])
def who(request, monkeypatch):
    for name, value in (TORCHRUN if request.param == "torchrun" else SLURM).items():
        monkeypatch.setenv(name, value)
    return request.param


def test_auto_takes_the_launchers_numbers(who):
    loop = FabricLoop(**quiet())
    assert (loop.world_size, loop.num_devices, loop.num_nodes) == (4, 2, 2)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            {"devices": 4, "strategy": "ddp"},
            "devices=4, num_nodes=1, but {} has started 2 processes on each of 2 machines: ",
        ),
        (
            {"devices": 2, "num_nodes": 3},
            "devices=2, num_nodes=3, but {} has started 2 processes on each of 2 machines: ",
        ),
        (
            {"devices": 1},
            "devices=1, num_nodes=1, but {} has started 2 processes on each of 2 machines: leave both out",
        ),
        (
            {"devices": 2, "strategy": "ddp_fork"},
            "{} has started 2 processes on each of 2 machines, and this strategy would",
        ),
    ],
    ids=str,
)
def test_other_numbers_are_refused_before_anything_is_written(who, words, refusal, tmp_path, monkeypatch):
    """A loop on one device may evaluate on rank zero; in a fit each rank would train by itself."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        FabricLoop(accelerator="cpu", **words).fit(Classifier(), make_loader(8))
    assert str(error.value).startswith(refusal.format(who))
    assert list(tmp_path.iterdir()) == []


def test_where_rank_zero_says_that_it_is():
    """By the name that all know where that is its own machine; else its address on the way there, which others can call."""
    assert [own_address(name) for name in ("127.0.0.1", "localhost", "there is no such machine")] == [
        "127.0.0.1", "localhost", "there is no such machine",
    ]  # fmt: skip
    if (own := own_address("198.51.100.1")) != "198.51.100.1":  # else there is no way out of this machine
        with socket.create_server((own, 0)) as here:
            assert own_address(own) == own == here.getsockname()[0]


class Killed(Classifier):
    """Once, in the middle of the second epoch, on rank one."""

    kills = True

    def on_train_batch_start(self, batch, batch_idx):
        if self.kills and self.global_step == 7 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank, root, kills, **words):
    Killed.kills = kills
    words = {"val": val_loader, "monitor": "val_loss", "save_every_n_steps": 3, "max_epochs": 2, **words}
    fit(root, lambda: Killed(by_step, sync_dist=True), lambda: make_loader(40), resume="auto", **words)


def hold(pipe):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def agent():
    """torchrun's store, which knows of the ranks that are gone; its port."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(there,))
    process.start()
    yield here.recv()
    here.send("over")
    process.join()


def test_ranks_that_are_started_again_meet_anew(tmp_path, monkeypatch, agent):
    """One is killed, torchrun ends the other and starts both: the same run as forked ones that nobody has killed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    codes, errors = externally(train, "killed", True, agent=agent)
    assert codes == [1, -signal.SIGKILL]
    assert "in epoch 1, at batch 2, after step 7; another rank is gone without a word: killed, perhaps" in errors[0]
    assert "resume='last' goes on after step 6" in errors[0]
    assert externally(train, "killed", False, agent=agent)[0] == [0, 0]
    train(None, "whole", False, strategy="ddp_fork", devices=2)
    assert logs_of("killed") == logs_of("whole")
    last = [torch.load(f"{each}/checkpoints/run/version_0/last.ckpt") for each in ("killed", "whole")]
    assert same(*[[state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")] for state in last])
    assert sorted(path.name for path in Path("killed/logs/run").iterdir()) == ["version_0"]
