"""A training loss that is no number: said, overlooked, or the end of the run; what is good of its checkpoints."""

import warnings

import pytest
import torch
from runs import loud
from torch import nn

from fabric_template import FabricLoop, TensorLoader


def fit(root, bad, model=None, spoils=True, **words):
    """Five batches an epoch; the loss of the batches in `bad`, counted over the fit, is no number.

    If it `spoils` the weights, which it does as in life, all that come later are none, either.
    """
    torch.manual_seed(0)
    net = model or nn.Linear(4, 1)
    data = TensorLoader(torch.ones(20, 4), batch_size=4)
    loop = FabricLoop(**loud(root, max_epochs=3, **words))
    seen = []

    def training_step(net, batch):
        seen.append(len(seen))
        loss = net(batch[0]).pow(2).mean()
        if seen[-1] in bad:
            return loss * float("nan") if spoils else loss + float("inf")
        return loss

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    history = loop.fit(net, data, optimizer=optimizer, training_step=training_step)
    return loop, history, len(seen)


def step_of(loop):
    return torch.load(loop.checkpoint_path("last"), weights_only=True)["global_step"]


def test_one_is_enough(tmp_path):
    """It stops behind that batch, with the row of its epoch, and the file of the epoch before stays as it was."""
    path = tmp_path / "checkpoints/run/version_0/last.ckpt"
    said = (
        rf"^the loss is not finite \(NaN or inf\) since batch 7 \(on_nan=1\): training ends after step 8; the last good"
        rf" checkpoint is '{path}', after step 5$"
    )
    with pytest.warns(UserWarning, match=said):
        loop, history, batches = fit(tmp_path, {7}, on_nan=1)
    assert (batches, loop.global_step, history["step"].tolist()) == (8, 8, [5, 8])
    assert history["train_loss"].isna().tolist() == [False, True]
    assert step_of(loop) == 5
    assert loop.ending()["ended"] == ["the loss is not finite (NaN or inf) since batch 7 (on_nan=1)"]
    assert "the loss is not finite (NaN or inf) since batch 7 (on_nan=1)" in repr(loop)


def test_in_a_row(tmp_path):
    """Three of which each stands alone end nothing; nothing is saved between the first bad one and the end."""
    loop, _, batches = fit(tmp_path / "alone", {2, 7, 12}, spoils=False, on_nan=2)
    assert (batches, step_of(loop)) == (15, 15)
    with pytest.warns(UserWarning, match="since batch 6 .*training ends after step 9; .*after step 6$"):
        loop, _, batches = fit(tmp_path / "row", {6}, on_nan=3, save_every_n_steps=1)
    assert (batches, step_of(loop)) == (9, 6)


def test_from_the_first_batch_nothing_is_good(tmp_path):
    with pytest.warns(UserWarning, match="since batch 0 .*after step 1; no good checkpoint is kept$"):
        loop, _, _ = fit(tmp_path, {0}, on_nan=1, min_epochs=2)  # that is no reason to go on
    assert loop.checkpoint_path("last") is None


def test_resumed_it_goes_on_from_the_good_one(tmp_path):
    with pytest.warns(UserWarning, match="the last good checkpoint"):
        fit(tmp_path, {7}, on_nan=1)
    torch.manual_seed(0)
    net, data = nn.Linear(4, 1), TensorLoader(torch.ones(20, 4), batch_size=4)
    loop = FabricLoop(**loud(tmp_path, max_epochs=3, on_nan=1))
    step = lambda net, batch: net(batch[0]).pow(2).mean()  # noqa: E731
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    history = loop.fit(net, data, optimizer=optimizer, training_step=step, resume="last")
    assert history["step"].tolist() == [5, 10, 15]
    assert history["train_loss"].notna().all()


@pytest.mark.parametrize("on_nan", ["warn", "off"])
def test_it_is_said_or_not(tmp_path, on_nan):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop, _, batches = fit(tmp_path, {7}, on_nan=on_nan)
    texts = [str(warning.message) for warning in said if "not finite" in str(warning.message)]
    assert len(texts) == (on_nan == "warn")
    assert batches == 15
    assert loop.ending()["ended"] == ["max_epochs=3 is reached"]


@pytest.mark.filterwarnings("ignore:the loss is not finite")
def test_two_processes_stop_together(tmp_path, monkeypatch):
    """The loss of one is no number: both end behind the same batch."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    net = nn.Linear(4, 1)
    data = TensorLoader(torch.arange(80.0).reshape(20, 4), batch_size=2)

    def training_step(net, batch):
        bad = net.bias.device.type == "cpu" and torch.distributed.get_rank() == 1 and bool((batch[0] > 30).any())
        return net(batch[0]).mean() * (float("nan") if bad else 1.0)

    loop = FabricLoop(**loud(tmp_path, strategy="ddp_fork", devices=2, max_epochs=2, on_nan=1))
    loop.fit(net, data, optimizer=torch.optim.SGD(net.parameters(), lr=1e-4), training_step=training_step)
    assert 0 < loop.global_step < 10
    assert loop.ending()["ended"][0].endswith("(on_nan=1)")


@pytest.mark.parametrize("value", [0, -1, "stop", True, None, 1.5])
def test_refused(value):
    with pytest.raises((ValueError, TypeError), match='on_nan=.*expected "warn", "off" or an int >= 1'):
        FabricLoop(on_nan=value)
