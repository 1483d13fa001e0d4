"""Test loops with default options in a process group that already exists."""

import os
import sys

import pytest
import torch
from modules import Classifier, make_loader, quiet
from ports import free_port
from processes import run_processes
from runs import fit, logs_of, same
from torch import distributed

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.errors import ConfigurationError


def join(rank, port):
    """Initialize the process group without environment variables."""
    store = distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)


def set_variables(rank, port):
    """Set the environment variables that job systems set for torch.distributed."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **address}


def join_by_variables(rank, port):
    """Initialize the process group from environment variables, as Ray Train does in a SLURM job."""
    set_variables(rank, port)
    os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "ray", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    distributed.init_process_group("gloo")


def set_variables_of_open_mpi(rank, port):
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ranks = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
    os.environ |= {**sizes, **ranks, "PMIX_NAMESPACE": f"prterun-test-{port}@1"}


def set_variables_of_mpich(rank, port):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"PMI_RANK": str(rank), "PMI_SIZE": "2", **address}


STARTS = [join, set_variables, join_by_variables, set_variables_of_open_mpi, set_variables_of_mpich]


def train(rank, start, port, calls=1):
    start(rank, port)
    for _ in range(calls):
        loop, module, _ = fit("run", lambda: Classifier(sync_dist=True), make_loader, max_epochs=2)
    print("size", loop.world_size, "rank", loop.global_rank, loop.local_rank, loop.node_rank, file=sys.stderr)
    torch.save(module.state_dict(), f"rank{rank}.pt")
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize("start", STARTS)
def test_a_loop_with_default_options_joins_an_existing_process_group(start):
    codes, errors = run_processes(train, start, free_port(), is_launched=False)
    assert codes == [0, 0], errors
    assert [f"size 2 rank {rank} {rank} 0" in errors[rank] for rank in range(2)] == [True, True]
    fit("expected", lambda: Classifier(sync_dist=True), make_loader, max_epochs=2, strategy="ddp_fork", devices=2)
    expected = read_checkpoint("expected/checkpoints/run/version_0/last.ckpt")["state_dict"]
    for rank in range(2):
        assert same(dict(torch.load(f"rank{rank}.pt")), dict(expected))
    assert logs_of("run") == logs_of("expected")


def train_twice(rank, start, port):
    start(rank, port)
    fit("first", Classifier, make_loader, max_epochs=1, devices=2, strategy="ddp")
    loop, *_ = fit("second", Classifier, make_loader, max_epochs=1)
    print("size", loop.world_size, file=sys.stderr)
    results = FabricLoop(**quiet(devices=1)).validate(loop.lightning_module, make_loader(8), verbose=False)
    print("alone", len(results), file=sys.stderr)
    try:
        fit("third", Classifier, make_loader, max_epochs=1, devices=1)
    except ConfigurationError as error:
        print(error, file=sys.stderr)


def start_nothing(rank, port):
    """Do nothing, because a launcher has already set the variables."""


@pytest.mark.parametrize("start", [start_nothing, set_variables])
def test_a_second_loop_uses_the_process_group_of_the_first_loop(start):
    """An evaluation may run in one process. Training separately in each process is refused."""
    is_launched = start is start_nothing
    codes, errors = run_processes(train_twice, start, free_port(), is_launched=is_launched)
    assert codes == [0, 0], errors
    for error in errors:
        assert "size 2\nalone 1\n" in error
        assert "got 1 and 1, but 2 processes were started on each of 1 machines. Leave out devices" in error


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "MASTER_ADDR, MASTER_PORT: got no address for a group of 4 processes"),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "MASTER_ADDR, MASTER_PORT: got no address",
        ),
        ({"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE: got 2 for a group of 5"),
    ],
    ids=str,
)
def test_invalid_environment_variables_for_a_process_group_are_refused(variables, message, monkeypatch, tmp_path):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        FabricLoop(**quiet())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"PMI_RANK": "0"},
    ],
    ids=str,
)
def test_fabric_loop_ignores_launcher_variables_if_some_of_them_are_missing(variables, monkeypatch):
    """For example, Lightning's launcher sets WORLD_SIZE and LOCAL_RANK but not RANK."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert FabricLoop(**quiet()).world_size == 1


def make_loop_of_rank_5(rank):
    os.environ |= {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    loop = FabricLoop(**quiet())
    assert (loop.world_size, loop.num_devices, loop.num_nodes) == (8, 4, 2)
    assert (loop.global_rank, loop.local_rank, loop.node_rank) == (5, 1, 1)


def test_a_loop_joins_a_process_group_of_several_machines():
    codes, errors = run_processes(make_loop_of_rank_5, ranks=1, is_launched=False)
    assert codes == [0], errors
