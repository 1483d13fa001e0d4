"""Test that epoch means equal Trainer's, even if a run resumes in the middle of the epoch."""

import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import Classifier, make_loader, run_loop, run_trainer
from parameters import leave
from runs import fit, same, with_files
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from fabric_template import FabricLoop, MiniLoop

NAMES = ("one", "two", "three")


class ManyWays(Classifier):
    """A module that logs each name up to twice per batch, with several dtypes and batch sizes, and changes logged tensors."""

    def on_train_start(self):
        self.random, self.running = random.Random(7), torch.zeros(())
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        draw = self.random.random
        for name in NAMES:
            for _ in range(int(draw() * 3)):
                value = loss.detach() * draw()
                value = value.double() if draw() < 0.2 else value
                size = None if draw() < 0.6 else int(1 + draw() * 9)
                self.log(name, value, on_step=True, on_epoch=True, batch_size=size)
        self.running += loss.detach()
        self.log("running", self.running, on_step=True, on_epoch=True)
        self.running *= 0.5
        with torch.inference_mode():
            self.log("inferred", loss.detach() * 2, on_step=True, on_epoch=True)
        if batch_idx % 3 == 1:
            self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})
        return loss


@pytest.mark.parametrize(
    ("batch_size", "precision"), [(4, "32-true"), (3, "32-true"), (3, "64-true"), (4, "bf16-mixed")]
)
def test_epoch_means_are_the_same_as_with_trainer(batch_size, precision):
    options = {"max_epochs": 3, "precision": precision, "num_sanity_val_steps": 0}
    loaders = lambda: make_loader(38, batch_size=batch_size)  # noqa: E731
    (trainer, theirs), (loop, ours) = (run(ManyWays, loaders, **options) for run in (run_trainer, run_loop))
    assert len(ours.seen) == len(theirs.seen) > 5
    for mine, wanted in zip([*ours.seen, loop.callback_metrics], [*theirs.seen, trainer.callback_metrics], strict=True):
        other = {name: (mine[name], value) for name, value in wanted.items() if not same(mine[name], value)}
        assert not other
        assert set(mine) == set(wanted)


class Reads(Classifier):
    """A module that reads a logged value in the middle of an epoch, and changes the returned tensor in place."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx == 4:
            self.trainer.callback_metrics["loss_step"].mul_(100)
        return loss


def test_changing_a_tensor_of_callback_metrics_does_not_change_the_epoch_mean(tmp_path):
    """A run that resumes in the middle of the epoch gives the same mean."""
    make_train = lambda: make_loader(40, batch_size=4)  # noqa: E731
    _, _, whole = fit(tmp_path / "whole", Reads, make_train, max_epochs=2)
    fit(tmp_path / "cut", Reads, make_train, max_steps=7, max_epochs=2, save_every_n_steps=3)
    _, _, resumed = fit(tmp_path / "cut", Reads, make_train, resume="auto", max_epochs=2)
    assert whole["loss"].tolist() == whole["train_loss"].tolist()
    assert resumed["loss"].tolist() == whole["loss"].tolist()


def fit_means(kind, log):
    """Train for one epoch of three batches. The loss of a batch is its index. Return the row of metrics.csv."""
    batches = DataLoader(TensorDataset(torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0])), batch_size=2)
    net = nn.Linear(1, 1)
    options = with_files(max_epochs=1)
    if kind is MiniLoop:
        del options["enable_progress_bar"], options["enable_model_summary"]
    loop = kind(**options)

    def step(net, batch):
        log(loop, batch[0][0])
        return net(batch[0][:, None]).mean() * 0 + batch[0][0]

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return loop.fit(net, batches, optimizer=optimizer, training_step=step).iloc[0]


@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_a_batch_logged_with_batch_size_zero_does_not_change_the_epoch_means(kind):
    def log(loop, index):
        loop.log("tokens", index, on_epoch=True, batch_size=0 if index == 1 else 1)

    row = fit_means(kind, log)
    assert (row["tokens"], row["train_loss"]) == (1.0, 1.0)
    assert fit_means(kind, lambda *_: None)["train_loss"] == pytest.approx(0.8)


@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_the_epoch_mean_of_the_loss_uses_the_batch_size_passed_to_log(kind):
    metric = MeanMetric()

    def log(loop, index):
        metric(index)
        loop.log("metric", metric, on_epoch=True, batch_size=3 if index == 2 else 1)

    assert fit_means(kind, log)["train_loss"] == pytest.approx((1 + 3 * 2) / 5)


SIZES = {
    "NumPy integer": np.int64,
    "NumPy float": lambda size: np.float64(size) / 3,
    "float": lambda size: size / 3,
    "bool": lambda size: size > 2,
    "tensor": torch.tensor,
    "tensor with a dimension": lambda size: torch.tensor([size / 3]),
    "tensor with a gradient": lambda size: torch.tensor(size / 3, requires_grad=True),
}


class Sized(Classifier):
    """A module that logs its loss with a different batch_size in each batch, and changes tensor sizes in place."""

    make_size = staticmethod(int)

    def log_with_size(self, name, loss, batch_idx):
        size = self.make_size(1 + batch_idx)
        self.log(name, loss, on_step=False, on_epoch=True, batch_size=size)
        if isinstance(size, torch.Tensor) and not size.requires_grad:
            size *= 7
        return loss

    def training_step(self, batch, batch_idx):
        return self.log_with_size("sized", super().training_step(batch, batch_idx), batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return self.log_with_size("val_sized", nn.functional.cross_entropy(self(x), y), batch_idx)


@pytest.mark.parametrize("name", leave(SIZES, "NumPy integer", "float", "tensor with a gradient"))
def test_log_accepts_every_batch_size_that_trainer_accepts(tmp_path, monkeypatch, name):
    """Metrics equal Trainer's. In both loops, a run that resumes mid-epoch gives the same metrics."""
    monkeypatch.setattr(Sized, "make_size", staticmethod(SIZES[name]))
    make_train = lambda: make_loader(38, batch_size=4)  # noqa: E731
    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    trainer, _ = run_trainer(Sized, make_train, make_val=make_train, **options)
    loop, _ = run_loop(Sized, make_train, make_val=make_train, **options)
    for key in ("sized", "val_sized"):
        assert same(loop.callback_metrics[key], trainer.callback_metrics[key].squeeze())
    for kind in (FabricLoop, MiniLoop):
        whole = fit_sized(kind, tmp_path / kind.__name__ / "whole")
        fit_sized(kind, tmp_path / kind.__name__ / "cut", max_steps=13)
        resumed = fit_sized(kind, tmp_path / kind.__name__ / "cut", resume="last")
        columns = ["sized", "val_sized", "train_loss"]
        assert resumed[columns].to_csv() == whole[columns].to_csv()


def fit_sized(kind, root, resume=None, **options):
    torch.manual_seed(1)
    options = with_files(max_epochs=2, validate_every_n_steps=5, default_root_dir=str(root), **options)
    if kind is MiniLoop:
        del options["enable_progress_bar"], options["enable_model_summary"]
    loop = kind(**options)
    return loop.fit(Sized(), make_loader(38, batch_size=4), make_loader(8, batch_size=4), resume=resume)


@pytest.mark.parametrize("size", ["4", [4], np.array([4]), torch.ones(2), 4j])
@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_log_refuses_a_batch_size_that_is_not_a_single_number(kind, size):
    with pytest.raises(ValueError, match="batch_size.*expected one number"):
        fit_means(kind, lambda loop, index: loop.log("x", index, batch_size=size))


@pytest.mark.parametrize("name", ["", " score", "score\t", "a\0b", "\ud800", 3, None, ("a", "b"), b"score"])
@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_log_refuses_a_name_that_a_csv_file_cannot_contain(kind, name):
    for options in ({"on_epoch": True}, {"on_step": True}):
        with pytest.raises(ValueError, match=r"log: got the name .*, expected a non-empty string .* trailing spaces"):
            fit_means(kind, lambda loop, index: loop.log(name, index, **options))  # noqa: B023
    with pytest.raises(ValueError, match=r"log: got the name .*, expected a non-empty string .* trailing spaces"):
        fit_means(kind, lambda loop, index: loop.log_dict({name: index}))


def test_log_dict_in_a_hand_written_loop_refuses_a_name_that_a_csv_file_cannot_contain(tmp_path):
    with pytest.raises(ValueError, match=r"log: got the name ' loss', expected a non-empty string"):
        FabricLoop(**with_files(tmp_path)).log_dict({"epoch": 0, " loss": 1.0})


@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_log_raises_an_error_if_on_step_and_on_epoch_are_both_false(kind):
    with pytest.raises((ValueError, MisconfigurationException), match=r"on_step=False.*on_epoch=False"):
        fit_means(kind, lambda loop, index: loop.log("x", index, on_step=False))
