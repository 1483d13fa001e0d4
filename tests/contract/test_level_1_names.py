"""Test what loop.setup returns, and how a hand-written loop logs."""

from pathlib import Path

import pytest
import torch
from modules import quiet
from torch import nn

from fabric_template import FabricLoop


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_setup_keeps_the_parameter_objects_and_their_names(precision):
    bare = make_net()
    loop = FabricLoop(**quiet(precision=precision))
    net, optimizer = loop.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    assert [id(p) for p in net.parameters()] == [id(p) for p in bare.parameters()]
    assert list(net.state_dict()) == list(bare.state_dict())
    # In float32 on one device, there is nothing to wrap.
    if precision == "32-true":
        assert net is bare
        assert type(optimizer) is torch.optim.SGD
    else:
        assert net.module is bare
    with loop.no_backward_sync(net):
        loop.backward(net(torch.ones(3, 4)).sum())
    net.eval()
    assert not bare[1].training
    net.train()
    loop.backward(net(torch.ones(3, 4)).sum())
    optimizer.step()


def test_fit_accepts_the_objects_that_setup_returned():
    """fit does not wrap the model again, so the weights equal those of a run without setup()."""

    def fitted(through_setup):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loop = FabricLoop(**quiet(precision="bf16-mixed", max_epochs=1))
        given = loop.setup(net, optimizer) if through_setup else (net, optimizer)
        step = lambda net, batch: net(batch).float().square().mean()  # noqa: E731
        loop.fit(given[0], [torch.ones(3, 4), torch.zeros(3, 4)], optimizer=given[1], training_step=step)
        return net.state_dict(), loop

    (ours, loop), (plain, _) = fitted(True), fitted(False)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert type(loop.optimizers[0]) is torch.optim.SGD


def log_alone(fabric, loop):
    rank = loop.fabric.global_rank
    loop.print("once")
    loop.log_dict({"epoch": 0, "own": rank, "all": rank})
    loop.log_dict({"epoch": 1, "own": rank, "all": 1 + rank}, sync_dist=True)


def test_a_hand_written_loop_on_two_processes_logs_each_row_once(monkeypatch, capfd):
    """The processes write one row, which contains their means if sync_dist is set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loop = FabricLoop(**quiet(logger=True, name="ranks", devices=2, strategy="ddp_fork"))
    loop.fabric.launch(log_alone, loop)
    assert capfd.readouterr().out == "once\n"
    assert Path("logs/ranks/version_0/metrics.csv").read_text() == "epoch,own,all\n0,0,0\n1,0.5,1.5\n"
