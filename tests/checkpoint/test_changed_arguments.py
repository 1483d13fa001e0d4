"""Test runs that are resumed with a different scheduler or with fewer parameter groups."""

import pytest
import torch
from lightning.pytorch import LightningModule
from modules import make_loader, sgd
from parameters import halve
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from fabric_template import FabricLoop, MiniLoop

BOTH = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}
both_loops = pytest.mark.parametrize("kind", BOTH)


def loss_of(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def fit(kind, folder, epochs, make_scheduler=None, make_optimizer=sgd, **arguments):
    torch.manual_seed(1)
    net = nn.Linear(8, 3)
    optimizer = make_optimizer(net)
    quiet = {"enable_progress_bar": False} if kind == "FabricLoop" else {}
    loop = BOTH[kind](max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet)
    if make_scheduler is not None:
        arguments["scheduler"] = make_scheduler(optimizer)
    history = loop.fit(net, make_loader(), optimizer=optimizer, training_step=loss_of, **arguments)
    return history["lr"].tolist()


def exponential(optimizer):
    return ExponentialLR(optimizer, 0.5)


def exponential_by_step(optimizer):
    return {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}


def exponential_by_two(optimizer):
    return {"scheduler": ExponentialLR(optimizer, 0.5), "frequency": 2}


def one_cycle(optimizer):
    return {"scheduler": OneCycleLR(optimizer, 0.2, total_steps=60), "interval": "step"}


def plateau(optimizer):
    return {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "train_loss"}


def sequential(optimizer):
    return SequentialLR(optimizer, [ConstantLR(optimizer), exponential(optimizer)], [1])


UNCHANGED = [exponential, exponential_by_step, one_cycle, plateau, sequential]
UNCHANGED += [
    lambda optimizer: MultiStepLR(optimizer, [1, 3]),
    lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.5**epoch),
]


@pytest.mark.parametrize(("kind", "make_scheduler", "writer"), halve(BOTH, UNCHANGED, BOTH))
def test_resume_does_not_warn_about_an_unchanged_scheduler(tmp_path, kind, make_scheduler, writer):
    whole = fit(kind, tmp_path / "whole", 4, make_scheduler)
    fit(writer, tmp_path / "parts", 2, make_scheduler)
    assert fit(kind, tmp_path / "parts", 4, make_scheduler, resume="last") == whole


@pytest.mark.parametrize(
    ("kind", "other", "writer"),
    halve(BOTH, [exponential_by_step, exponential_by_two, plateau, lambda o: CosineAnnealingLR(o, 5)], BOTH),
)
def test_resuming_with_a_different_scheduler_class_or_interval_raises_an_error(tmp_path, kind, other, writer):
    fit(writer, tmp_path, 2, exponential)
    match = r"class, interval and frequency .* changed from .*'ExponentialLR', 'epoch', 1\].* to .*LR"
    with pytest.raises(ValueError, match=match):
        fit(kind, tmp_path, 4, other, resume="last")
    # The refused call to fit must not change the saved run, so the run can still resume with its own scheduler.
    assert fit(kind, tmp_path, 3, exponential, resume="last")[-1] == 0.025


@both_loops
@pytest.mark.parametrize("frequency", [0, None, "2", float("nan"), float("inf")])
def test_an_invalid_scheduler_frequency_is_refused(tmp_path, kind, frequency):
    with pytest.raises(ValueError, match="frequency: got|frequency >= 1"):
        fit(kind, tmp_path, 2, lambda optimizer: {"scheduler": exponential(optimizer), "frequency": frequency})


@both_loops
def test_a_string_in_place_of_a_scheduler_is_refused(tmp_path, kind):
    with pytest.raises(TypeError, match="scheduler: got ('cosine'|a str), expected a scheduler"):
        fit(kind, tmp_path, 1, lambda optimizer: "cosine")


@both_loops
def test_resuming_with_fewer_parameter_groups_is_refused(tmp_path, kind):
    def in_groups(net):
        return torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=0.1)

    fit(kind, tmp_path, 1, make_optimizer=in_groups)
    with pytest.raises(
        ValueError, match=r"parameter groups.* load= to start a new run|the number of parameters .* to \[2\]"
    ):
        fit(kind, tmp_path, 2, resume="last")


@both_loops
def test_fabric_loop_warns_and_mini_loop_refuses_to_resume_if_a_scheduler_was_added(tmp_path, kind):
    fit(kind, tmp_path, 1)
    if kind == "MiniLoop":
        with pytest.raises(
            ValueError, match=r"class, interval and frequency .* to \[\['ExponentialLR', 'epoch', 1\]\]"
        ):
            fit(kind, tmp_path, 2, exponential, resume="last")
    else:
        with pytest.warns(UserWarning, match="the states of 0 lr_schedulers, but this run has 1"):
            fit(kind, tmp_path, 2, exponential, resume="last")


def test_on_load_checkpoint_can_drop_the_saved_state_of_a_scheduler(tmp_path):
    class Module(LightningModule):
        def __init__(self, kind):
            super().__init__()
            self.net, self.kind = nn.Linear(8, 3), kind

        def training_step(self, batch):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            optimizer = sgd(self)
            return [optimizer], [self.kind(optimizer)]

        def on_load_checkpoint(self, checkpoint):
            checkpoint["lr_schedulers"] = []

    def run(make_scheduler, epochs, **arguments):
        options = {"enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": tmp_path}
        FabricLoop(max_epochs=epochs, **options).fit(Module(make_scheduler), make_loader(), **arguments)

    run(exponential, 1)
    run(lambda optimizer: CosineAnnealingLR(optimizer, 5), 2, resume="last")
