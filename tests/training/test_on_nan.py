"""Test the option on_nan. A loss that is not finite stops the training, warns, or is ignored."""

import warnings

import pytest
import torch
from runs import loud
from torch import nn

from fabric_template import FabricLoop, TensorLoader


def fit(root, bad, spoils=True, **options):
    """Train on 5 batches an epoch. Returns (loop, history, number of batches).

    Args:
        bad: The batches, counted over the fit, whose loss is not finite.
        spoils: Whether such a loss makes the weights NaN, as it does in practice.
    """
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 1), []
    loop = FabricLoop(**loud(root, max_epochs=3, **{key: options.pop(key) for key in [*options] if key != "resume"}))

    def training_step(net, batch):
        seen.append(len(seen))
        loss = net(batch[0]).pow(2).mean()
        if seen[-1] not in bad:
            return loss
        return loss * float("nan") if spoils else loss + float("inf")

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = TensorLoader(torch.ones(20, 4), batch_size=4)
    history = loop.fit(net, loader, optimizer=optimizer, training_step=training_step, **options)
    return loop, history, len(seen)


def saved_step(loop):
    return torch.load(loop.checkpoint_path("last"), weights_only=True)["global_step"]


def test_one_batch_and_resume(tmp_path):
    """The epoch has its row, and the checkpoint of the epoch before stays. A resume continues there."""
    reason = "the loss is not finite (NaN or inf) since batch 7 (on_nan=1)"
    with pytest.warns(UserWarning, match=r"^on_nan: the loss is not finite"):
        loop, history, batches = fit(tmp_path, {7}, on_nan=1)
    assert (batches, loop.global_step, history["step"].tolist()) == (8, 8, [5, 8])
    assert history["train_loss"].isna().tolist() == [False, True]
    assert saved_step(loop) == 5
    assert loop.ending()["ended"] == [reason]
    assert reason in repr(loop)
    _, history, _ = fit(tmp_path, {}, on_nan=1, resume="last")
    assert history["step"].tolist() == [5, 10, 15]
    assert history["train_loss"].notna().all()


def test_several_batches_in_a_row(tmp_path):
    loop, _, batches = fit(tmp_path / "alone", {2, 7, 12}, spoils=False, on_nan=2)
    assert (batches, saved_step(loop)) == (15, 15)
    with pytest.warns(UserWarning, match="since batch 6 "):
        loop, _, batches = fit(tmp_path / "row", {6}, on_nan=3, save_every_n_steps=1)
    assert (batches, saved_step(loop)) == (9, 6)


def test_first_batch(tmp_path):
    with pytest.warns(UserWarning, match="since batch 0 "):
        loop, _, _ = fit(tmp_path, {0}, on_nan=1, min_epochs=2)
    assert loop.checkpoint_path("last") is None


@pytest.mark.parametrize("on_nan", ["warn", "off"])
def test_warning(tmp_path, on_nan):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop, _, batches = fit(tmp_path, {7}, on_nan=on_nan)
    texts = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    assert len(texts) == (on_nan == "warn")
    assert batches == 15
    assert loop.ending()["ended"] == ["max_epochs=3 is reached"]


@pytest.mark.filterwarnings("ignore:on_nan")
def test_two_processes_stop_together(tmp_path, monkeypatch):
    """The loss of one process is not finite."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    net = nn.Linear(4, 1)
    loader = TensorLoader(torch.arange(80.0).reshape(20, 4), batch_size=2)

    def training_step(net, batch):
        is_bad = torch.distributed.get_rank() == 1 and bool((batch[0] > 30).any())
        return net(batch[0]).mean() * (float("nan") if is_bad else 1.0)

    loop = FabricLoop(**loud(tmp_path, strategy="ddp_fork", devices=2, max_epochs=2, on_nan=1))
    loop.fit(net, loader, optimizer=torch.optim.SGD(net.parameters(), lr=1e-4), training_step=training_step)
    assert 0 < loop.global_step < 10
    assert loop.ending()["ended"][0].endswith("(on_nan=1)")
