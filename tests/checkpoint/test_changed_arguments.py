"""Test runs that are resumed with another scheduler, or with other arguments of the optimizer."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from modules import make_loader, sgd
from parameters import halve, once
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
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
    halve(BOTH, [exponential_by_step, one_cycle, plateau, lambda o: CosineAnnealingLR(o, 5)], BOTH),
)
def test_resuming_with_a_different_scheduler_class_or_interval_raises_an_error(tmp_path, kind, other, writer):
    fit(writer, tmp_path, 2, exponential)
    match = "resume: got .*LR.* as a scheduler, expected ExponentialLR with interval='epoch'"
    with warnings.catch_warnings():
        # OneCycleLR also changes the arguments of the optimizer.
        warnings.filterwarnings("ignore", "resume: got SGD")
        with pytest.raises(ValueError, match=match):
            fit(kind, tmp_path, 4, other, resume="last")
    # The failed attempt has not changed the run.
    assert fit(kind, tmp_path, 3, exponential, resume="last")[-1] == 0.025


def by_two_epochs(optimizer):
    return {"scheduler": exponential(optimizer), "frequency": 2}


def chained(optimizer, *others):
    return ChainedScheduler([ConstantLR(optimizer), *[make(optimizer) for make in others or [exponential]]])


OTHER_PARTS = {
    "part": (sequential, lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2)], [1])),
    "inner part": (
        lambda o: chained(o, sequential),
        lambda o: chained(o, lambda o: SequentialLR(o, [StepLR(o, 2), exponential(o)], [1])),
    ),
    "number of parts": (chained, lambda o: chained(o, exponential, exponential)),
    "frequency": (exponential, by_two_epochs),
}


@pytest.mark.parametrize(("kind", "name", "writer"), halve(BOTH, OTHER_PARTS, BOTH))
def test_resuming_with_other_parts_or_another_frequency_of_a_scheduler_raises_an_error(tmp_path, kind, name, writer):
    first, second = OTHER_PARTS[name]
    fit(writer, tmp_path, 2, first)
    with pytest.raises(ValueError, match="resume: got .* as a scheduler, expected .*LR.* as in the saved run"):
        fit(kind, tmp_path, 4, second, resume="last")
    fit(kind, tmp_path, 3, first, resume="last")


@pytest.mark.parametrize(("kind", "writer"), halve(BOTH, BOTH))
def test_resume_warns_about_changed_arguments_of_the_parts_of_a_scheduler(tmp_path, kind, writer):
    def slower(optimizer):
        return SequentialLR(optimizer, [ConstantLR(optimizer, 0.1), ExponentialLR(optimizer, 0.5)], [2])

    rates = fit(writer, tmp_path / "whole", 4, sequential)
    fit(writer, tmp_path, 2, sequential)
    match = r"got SequentialLR with schedulers=.*'factor': 0.1.*saved: .*, milestones=\[2\] \(saved: \[1\]\)"
    with pytest.warns(UserWarning, match=match):
        assert fit(kind, tmp_path, 4, slower, resume="last") == rates


@both_loops
@pytest.mark.parametrize("frequency", [0, None, "2", float("nan"), float("inf")])
def test_an_invalid_frequency_is_refused(tmp_path, kind, frequency):
    with pytest.raises(ValueError, match="frequency: got|frequency >= 1"):
        fit(kind, tmp_path, 2, lambda optimizer: {"scheduler": exponential(optimizer), "frequency": frequency})


@both_loops
def test_a_name_instead_of_a_scheduler_is_refused(tmp_path, kind):
    with pytest.raises(TypeError, match="scheduler: got ('cosine'|a str), expected a scheduler"):
        fit(kind, tmp_path, 1, lambda optimizer: "cosine")


@both_loops
def test_resuming_with_fewer_parameter_groups_is_refused(tmp_path, kind):
    def in_groups(net):
        return torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=0.1)

    fit(kind, tmp_path, 1, make_optimizer=in_groups)
    with pytest.raises(
        ValueError, match=r"got .*optimizer.*\[1, 1\].* load= to start a new run|got \[2\] as the number"
    ):
        fit(kind, tmp_path, 2, resume="last")


@both_loops
def test_fabric_loop_warns_about_an_added_scheduler_but_mini_loop_refuses_to_resume(tmp_path, kind):
    fit(kind, tmp_path, 1)
    if kind == "MiniLoop":
        with pytest.raises(ValueError, match="got 1 as the number of schedulers, expected 0"):
            fit(kind, tmp_path, 2, exponential, resume="last")
    else:
        with pytest.warns(UserWarning, match="the states of 0 lr_schedulers, but this run has 1"):
            fit(kind, tmp_path, 2, exponential, resume="last")


@both_loops
@pytest.mark.parametrize("writer", BOTH)
def test_resume_warns_about_changed_optimizer_arguments_and_keeps_the_saved_values(tmp_path, kind, writer):
    def faster(net):
        return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)

    def two_steps(optimizer):
        return StepLR(optimizer, 2, gamma=0.5)

    fit(writer, tmp_path, 2, two_steps)
    match = r"resume: got SGD with lr=0.5 \(saved: 0.1\), weight_decay=0.1 \(saved: 0"
    with pytest.warns(UserWarning, match=match):
        assert fit(kind, tmp_path, 3, two_steps, faster, resume="last") == [0.1, 0.1, 0.05]
    match = r"resume: got StepLR with step_size=1 \(saved: 2\).*on_train_start"
    with pytest.warns(UserWarning, match=match):
        rates = fit(kind, tmp_path, 4, lambda o: StepLR(o, 1, gamma=0.5), faster, resume="last")
    assert rates[-1] == 0.05


@both_loops
def test_resume_does_not_warn_about_a_learning_rate_changed_by_a_hook(tmp_path, kind):
    def fit_with_hook(epochs, **arguments):
        torch.manual_seed(1)
        net = nn.Linear(8, 3)
        optimizer = sgd(net)
        net.on_train_epoch_end = lambda: optimizer.param_groups[0].update(lr=0.01)
        quiet = {"enable_progress_bar": False} if kind == "FabricLoop" else {}
        loop = BOTH[kind](max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        loop.fit(net, make_loader(), optimizer=optimizer, training_step=loss_of, **arguments)
        return optimizer.param_groups[0]["lr"]

    fit_with_hook(1)
    assert fit_with_hook(2, resume="last") == 0.01


def reducing(optimizer):
    return {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), "monitor": "train_loss"}


def cyclic(optimizer):
    return {"scheduler": CyclicLR(optimizer, 0.01, 0.1, step_size_up=5), "interval": "step"}


@pytest.mark.parametrize(
    ("kind", "make_scheduler"), once(BOTH, [None, reducing, cyclic, one_cycle, lambda o: StepLR(o, 2)])
)
def test_resume_does_not_warn_if_a_hook_or_scheduler_changed_optimizer_arguments(tmp_path, kind, make_scheduler):
    """Schedulers and hooks change arguments, such as the learning rate, and a later fit resumes with them."""

    def make_parts():
        torch.manual_seed(1)
        net = nn.Linear(8, 3)
        optimizer = sgd(net)
        scheduler = None if make_scheduler is None else make_scheduler(optimizer)

        def change():
            optimizer.param_groups[0].update(weight_decay=0.01)
            if isinstance(scheduler, StepLR):
                scheduler.step_size = 1

        net.on_train_epoch_end = change
        return net, optimizer, scheduler

    def fit_parts(epochs, net, optimizer, scheduler, resume="last"):
        quiet = {"enable_progress_bar": False} if kind == "FabricLoop" else {}
        loop = BOTH[kind](max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "training_step": loss_of}
        loop.fit(net, make_loader(), resume=resume, **parts)

    used = make_parts()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "resume: got")
        fit_parts(1, *used, resume=None)
        for epochs, parts in ((2, used), (3, used), (4, make_parts()), (5, used)):
            fit_parts(epochs, *parts)
    used[1].param_groups[0]["weight_decay"] = 0.5
    with pytest.warns(UserWarning, match=r"resume: got SGD with weight_decay=0.5 \(saved: 0"):
        fit_parts(6, *used)


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
