"""Test that on_nan makes a loss that is not finite stop training, cause a warning, or have no effect."""

import warnings

import pytest
import torch
from modules import Classifier, make_loader
from runs import with_files
from torch import nn

from fabric_template import FabricLoop, TensorLoader


def fit(root, bad, spoils=True, resume=None, **options):
    """Train for 5 batches in each of 3 epochs. Return (loop, history, number of batches).

    Args:
        bad: Indices of the batches whose loss is not finite, counted over the whole fit.
        spoils: Whether such a loss makes the weights NaN, as a NaN loss does.
    """
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 1), []
    loop = FabricLoop(**with_files(root, max_epochs=3, **options))

    def training_step(net, batch):
        seen.append(len(seen))
        loss = net(batch[0]).pow(2).mean()
        if seen[-1] not in bad:
            return loss
        return loss * float("nan") if spoils else loss + float("inf")

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = TensorLoader(torch.ones(20, 4), batch_size=4)
    history = loop.fit(net, loader, optimizer=optimizer, training_step=training_step, resume=resume)
    return loop, history, len(seen)


def saved_step(loop):
    return torch.load(loop.checkpoint_path("last"), weights_only=True)["global_step"]


@pytest.mark.parametrize(
    ("options", "stops_at", "saved_at"),
    [
        ({}, 10, 5),
        ({"log_every_n_steps": 4}, 8, 5),
        ({"log_every_n_steps": 1}, 7, 5),
        ({"save_every_n_steps": 3}, 9, 6),
        ({"save_every_n_steps": 1, "min_epochs": 3}, 7, 6),
        ({"logger": False, "log_every_n_steps": 0}, 10, 5),
        ({"max_steps": 14, "log_every_n_steps": 2}, 8, 5),
        ({"monitor": "train_loss", "save_top_k": 2}, 10, 5),
        ({"accumulate_grad_batches": 2}, 6, 3),
    ],
    ids=str,
)
def test_training_stops_at_a_nan_loss_and_keeps_the_last_checkpoint(tmp_path, options, stops_at, saved_at):
    """Training stops at the first step that logs the loss or saves a checkpoint. The run can resume."""
    reason = f"the loss is not finite (NaN or inf) at step {stops_at} (on_nan='stop')"
    with pytest.warns(UserWarning, match="^on_nan: the loss is not finite"):
        loop, history, _ = fit(tmp_path, {6}, on_nan="stop", **options)
    assert (loop.global_step, saved_step(loop)) == (stops_at, saved_at)
    assert loop.ending()["ended"] == [reason]
    assert reason in repr(loop)
    assert not torch.isfinite(torch.tensor(history["train_loss"].tolist()[-1]))
    whole, rows, _ = fit(tmp_path / "whole", {}, **options)
    resumed, again, _ = fit(tmp_path, {}, on_nan="stop", resume="last", **options)
    assert resumed.global_step == whole.global_step
    # Compare only the last rows, because a resumed run without a CSV file returns only its own rows.
    assert again["train_loss"].tolist() == rows["train_loss"].tolist()[-len(again) :]
    assert len(again) == len(rows) or "logger" in options


@pytest.mark.parametrize(("every", "stops_at"), [(50, 10), (1, 7)])
def test_a_single_infinite_loss_ends_training_if_on_nan_is_stop(tmp_path, every, stops_at):
    """After the infinite loss, the weights and losses are finite, but the epoch mean is infinite."""
    options = {"log_every_n_steps": every, "on_nan": "stop"}
    with pytest.warns(UserWarning, match="^on_nan: the loss is not finite"):
        loop, _, _ = fit(tmp_path, {6}, spoils=False, **options)
    assert (loop.global_step, saved_step(loop)) == (stops_at, 5)


def test_no_checkpoint_is_saved_if_a_nan_loss_stops_the_run_before_the_first_checkpoint(tmp_path):
    with pytest.warns(UserWarning, match="at step 5 "):
        loop, _, _ = fit(tmp_path, {0}, on_nan="stop", min_epochs=2)
    assert loop.checkpoint_path("last") is None


def test_on_nan_stop_does_not_end_a_run_with_finite_losses(tmp_path):
    loop, _, batches = fit(tmp_path, {}, on_nan="stop", save_every_n_steps=1)
    assert (batches, saved_step(loop)) == (15, 15)


@pytest.mark.parametrize("manual", [False, True])
def test_a_lightning_module_with_a_nan_loss_stops_training_if_on_nan_is_stop(tmp_path, manual):
    class Diverges(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss = loss * float("nan") if self.current_epoch else loss
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    loop = FabricLoop(**with_files(tmp_path, max_epochs=4, on_nan="stop"))
    with pytest.warns(UserWarning, match="^on_nan: the loss is not finite"):
        loop.fit(Diverges(), make_loader())
    assert (loop.global_step, saved_step(loop)) == (20, 10)


@pytest.mark.parametrize("on_nan", ["warn", "off"])
def test_fit_warns_only_once_about_nan_losses_if_on_nan_is_warn(tmp_path, on_nan):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop, _, batches = fit(tmp_path, {7}, on_nan=on_nan)
    texts = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    assert len(texts) == (on_nan == "warn")
    assert batches == 15
    assert loop.ending()["ended"] == ["max_epochs=3 is reached"]


@pytest.mark.filterwarnings("ignore:on_nan")
def test_an_infinite_loss_in_one_process_ends_both_processes_if_on_nan_is_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    net = nn.Linear(4, 1)
    loader = TensorLoader(torch.arange(80.0).reshape(20, 4), batch_size=2)

    def training_step(net, batch):
        is_bad = torch.distributed.get_rank() == 1 and bool((batch[0] > 30).any())
        return net(batch[0]).mean() + (float("inf") if is_bad else 1.0)

    options = {"strategy": "ddp_fork", "devices": 2, "on_nan": "stop", "log_every_n_steps": 1}
    loop = FabricLoop(**with_files(tmp_path, max_epochs=2, **options))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    loop.fit(net, loader, optimizer=optimizer, training_step=training_step)
    assert 0 < loop.global_step < 5
    assert loop.ending()["ended"][0].endswith("(on_nan='stop')")
