"""Test that both loops are free of the faults of Lightning's build_your_own_trainer example.

The docstring of each test describes the fault.
"""

import ast
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from modules import Classifier, make_loader, quiet
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

import fabric_template
from fabric_template import FabricLoop, MiniLoop, TensorLoader

PACKAGE = Path(fabric_template.__file__).parent
both_loops = pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])


class Net(nn.Module):
    """A module that counts its steps and records the learning rate of each epoch."""

    def __init__(self, make_optimizer=None):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 1), nn.Dropout(0.5)
        self.make_optimizer = make_optimizer or sgd
        self.trained, self.validated, self.rates = 0, 0, []

    def training_step(self, batch, batch_idx):
        self.trained += 1
        return self.dropout(self.layer(batch[0])).square().mean()

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        returned = self.optimizer = self.make_optimizer(self)
        while isinstance(self.optimizer, dict | list | tuple):
            key = "optimizer" if isinstance(self.optimizer, dict) else 0
            self.optimizer = self.optimizer[key]
        return returned

    def on_train_epoch_start(self):
        self.rates.append(self.optimizer.param_groups[0]["lr"])


def batches(num=4, size=2):
    generator = torch.Generator().manual_seed(0)
    return TensorLoader(torch.randn(num * size, 4, generator=generator), batch_size=size)


def sgd(net, lr=0.1):
    return torch.optim.SGD(net.parameters(), lr=lr)


def halving(net):
    optimizer = sgd(net)
    return optimizer, StepLR(optimizer, 1, 0.5)


def linear(net, batch):
    """A loss whose gradient is the mean of the batch."""
    return net(batch[0]).mean()


def make_loop(loop_class=FabricLoop, **options):
    options = {"max_epochs": 1, **options}
    return loop_class(
        **(quiet(num_sanity_val_steps=0, **options) if loop_class is FabricLoop else {"accelerator": "cpu", **options})
    )


def saving_loop(loop_class=FabricLoop, root=".", **options):
    """Return a loop that writes log files and checkpoints."""
    options = {"accelerator": "cpu", "default_root_dir": str(root), "max_epochs": 2, **options}
    if loop_class is FabricLoop:
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
    return loop_class(**options)


def fit(model=None, train=None, val=None, loop_class=FabricLoop, given=None, **options):
    """Train a model and return (loop, model)."""
    model = Net() if model is None else model
    loop = make_loop(loop_class, **options)
    loop.fit(model, batches() if train is None else train, val, **(given or {}))
    return loop, model


FORMATS = {
    "dict": (lambda net: {"optimizer": sgd(net)}, [0.1] * 3),
    "list": (lambda net: [sgd(net)], [0.1] * 3),
    "pair": (halving, [0.1, 0.05, 0.025]),
    "lists": (lambda net: tuple([part] for part in halving(net)), [0.1, 0.05, 0.025]),
    "dict with scheduler": (
        lambda net: dict(zip(("optimizer", "lr_scheduler"), halving(net), strict=True)),
        [0.1, 0.05, 0.025],
    ),
}


@pytest.mark.parametrize("format_name", FORMATS)
@both_loops
def test_both_loops_accept_every_return_format_of_configure_optimizers(loop_class, format_name):
    """Lightning's build_your_own_trainer example fails with some formats, and ignores the scheduler in others."""
    make_optimizer, rates = FORMATS[format_name]
    loop, net = fit(Net(make_optimizer), max_epochs=3, loop_class=loop_class)
    assert (loop.global_step, net.rates) == (12, rates)


@both_loops
def test_accumulate_grad_batches_sets_the_number_of_batches_per_optimizer_step(loop_class):
    """In Lightning's build_your_own_trainer example, 24 batches give 1 optimizer step instead of 6."""
    loop, net = fit(train=batches(24), accumulate_grad_batches=4, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (6, 24)
    loop, net = fit(train=batches(24), accumulate_grad_batches=4, max_epochs=-1, max_steps=8, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (8, 32)


def weight_after(loop_class, accumulate, x, batch_size):
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    given = {"optimizer": sgd(net, lr=1.0), "training_step": linear}
    loader = TensorLoader(x[:, None], batch_size=batch_size)
    fit(net, loader, given=given, loop_class=loop_class, accumulate_grad_batches=accumulate)
    return net.weight.item()


@both_loops
def test_accumulated_gradients_are_averaged_and_cleared(loop_class):
    """Lightning's build_your_own_trainer example does not divide the loss, and keeps the last gradients for the next epoch."""
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert weight_after(loop_class, 4, x, 1) == weight_after(loop_class, 1, x, 4) == -3.0
    assert weight_after(loop_class, 2, torch.tensor([1.0, 3.0, 8.0]), 1) == -(1.0 + 3.0) / 2 - 8.0 / 2
    loop, _ = fit(train=batches(5), accumulate_grad_batches=2, max_epochs=2, loop_class=loop_class)
    assert loop.global_step == 6


@both_loops
def test_a_scheduler_with_a_monitor_gets_the_epoch_mean_of_the_monitored_metric(loop_class):
    """In Lightning's build_your_own_trainer example, the scheduler gets the value of the last batch."""
    seen = []

    class Recorder(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(float(metrics))

    class Ramp(Net):
        def validation_step(self, batch, batch_idx):
            return {"loss": torch.tensor(float(batch_idx))}

    def make_optimizer(net):
        optimizer = sgd(net)
        return {"optimizer": optimizer, "lr_scheduler": Recorder(optimizer), "monitor": "val_loss"}

    loop, _ = fit(Ramp(make_optimizer), val=batches(8), max_epochs=2, loop_class=loop_class)
    assert seen == [3.5, 3.5]
    assert loop.callback_metrics["val_loss"] == 3.5


@both_loops
def test_schedulers_take_no_step_if_max_steps_ends_the_epoch(loop_class):
    """In Lightning's build_your_own_trainer example, the scheduler also takes a step if max_steps ends the epoch."""
    loop, net = fit(Net(halving), max_epochs=-1, max_steps=6, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (6, 6)
    assert net.optimizer.param_groups[0]["lr"] == 0.05


@both_loops
def test_submodules_in_eval_mode_stay_in_eval_mode_after_validation(loop_class):
    """In Lightning's build_your_own_trainer example, validation switches submodules in eval mode back to training mode."""

    class ModeRecorder(Net):
        def training_step(self, batch, batch_idx):
            seen.append(("train", self.dropout.training, self.frozen.training))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(("val", self.dropout.training, self.frozen.training))
            return super().validation_step(batch, batch_idx)

    seen = []
    net = ModeRecorder()
    net.frozen = nn.BatchNorm1d(1).eval()
    fit(net, batches(1), batches(1), max_epochs=2, loop_class=loop_class)
    assert seen == [("train", True, False), ("val", False, False)] * 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@both_loops
def test_training_step_runs_in_the_given_precision(loop_class, precision):
    """In Lightning's build_your_own_trainer example, training_step runs in float32 on one device."""

    class Look(Net):
        def training_step(self, batch, batch_idx):
            seen.add(self.layer(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

    seen = set()
    fit(Look(), precision=precision, loop_class=loop_class)
    assert seen == {torch.bfloat16}


@both_loops
def test_a_second_fit_trains_for_max_epochs_again(loop_class):
    """In Lightning's build_your_own_trainer example, max_epochs=0 trains for one epoch, and so does a second fit."""
    loop, net = fit(max_epochs=0, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (0, 0)
    loop, net = fit(max_epochs=3, loop_class=loop_class)
    history = loop.fit(net, batches())
    assert (net.trained, loop.current_epoch, loop.global_step) == (24, 3, 12)
    assert list(history["epoch"]) == [0, 1, 2]


@both_loops
def test_resuming_a_run_that_reached_max_steps_takes_no_optimizer_step(loop_class, tmp_path):
    """In Lightning's build_your_own_trainer example, a run that is resumed at max_steps takes one more step."""
    options = {"max_epochs": -1, "max_steps": 6}
    saving_loop(loop_class, **options).fit(Net(), batches())
    trained = []

    class StepCounter(Net):
        def training_step(self, batch, batch_idx):
            trained.append(batch_idx)
            return super().training_step(batch, batch_idx)

    loop = saving_loop(loop_class, **options)
    loop.fit(StepCounter(), batches(), resume="last")
    assert (loop.global_step, trained) == (6, [])


@both_loops
def test_training_without_limits_stops_after_1000_epochs(loop_class):
    """In Lightning's build_your_own_trainer example, training without limits never ends."""

    class Stops(Net):
        def on_train_epoch_end(self):
            limits.append((loop.max_epochs, loop.max_steps))
            loop.should_stop = True

    limits = []
    loop = make_loop(loop_class, max_epochs=None)
    loop.fit(Stops(), batches())
    assert limits == [(1000, -1)]


class CountReads(TorchDispatchMode):
    """A dispatch mode that counts how often a tensor's value is read from its device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@both_loops
def test_logging_in_a_training_step_does_not_read_values_from_the_device(loop_class):
    """Lightning's build_your_own_trainer example reads each logged value from the device in each batch.

    A training step in that example can return only scalars.
    """

    class LoggingModule(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            logits = self.layer(batch[0])
            loss = logits.square().mean()
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return {"loss": loss, "logits": logits.detach(), "names": ["a", "b"]}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            counts.append(reads.count)

        def configure_optimizers(self):
            return sgd(self)

    counts = []
    with CountReads() as reads:
        fit(LoggingModule(), batches(12), gradient_clip_val=1.0, log_every_n_steps=50, loop_class=loop_class)
    assert counts == [counts[0]] * 12
    with CountReads() as reads:
        torch.zeros(1).item()
    assert reads.count == 1


class Rows(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        return (torch.ones(4) for _ in range(10))


@both_loops
def test_both_loops_accept_loaders_without_length(loop_class):
    """Lightning's build_your_own_trainer example calls len(loader), which fails for an iterable dataset."""

    class Unpacked(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step([batch], batch_idx)

    loop, net = fit(Unpacked(), DataLoader(Rows(), batch_size=2), max_epochs=2, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (10, 10)
    loop, net = fit(Unpacked(), (torch.ones(2, 4) for _ in range(5)), loop_class=loop_class)
    assert (loop.global_step, net.trained) == (5, 5)


@both_loops
def test_a_second_fit_does_not_call_the_hooks_of_the_first_module(loop_class):
    """Fabric keeps each LightningModule as a callback, and calls the hooks of all callbacks."""

    class Named(Classifier):
        def __init__(self, name):
            super().__init__()
            self.my_name = name

        def on_train_start(self):
            called.append(self.my_name)

    called = []
    fabric = Fabric(accelerator="cpu", devices=1)
    loop = make_loop(loop_class, fabric=fabric) if loop_class is MiniLoop else FabricLoop(fabric, max_epochs=1)
    for name in ("first", "second"):
        loop.fit(Named(name), make_loader(8), make_loader(8))
    assert called == ["first", "second"]
    assert fabric._callbacks == []


def test_mini_py_imports_neither_private_names_nor_trainer():
    """tests/contract/test_private_names.py checks the other files of the package."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / "mini.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    foreign = {name for name in found if name.startswith(("lightning", "torch", "pytorch_lightning"))}
    assert foreign
    assert [name for name in foreign if re.search(r"(^|\.)_[^_]", name) or "pytorch" in name] == []
