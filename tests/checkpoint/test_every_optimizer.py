"""Test exact resume with every torch optimizer, every torch scheduler and every precision.

The classes are read from torch, so that new classes are tested automatically.
"""

import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from modules import HAS_PLAIN_SWALR
from runs import same, with_files
from torch import nn
from torch.optim import lr_scheduler

from fabric_template import FabricLoop, TensorLoader
from fabric_template.errors import CheckpointError

PRECISIONS = ["64-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]


def classes_of(module, base):
    found = vars(module).items()
    return [
        kind
        for name, kind in found
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not name.startswith("_")
    ]


OPTIMIZERS = classes_of(torch.optim, torch.optim.Optimizer)
SCHEDULERS = classes_of(lr_scheduler, lr_scheduler.LRScheduler) + [torch.optim.swa_utils.SWALR]


def make_scheduler(kind, optimizer):
    options = {
        "ConstantLR": {"total_iters": 4},
        "CosineAnnealingLR": {"T_max": 5},
        "CosineAnnealingWarmRestarts": {"T_0": 2},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
        "ExponentialLR": {"gamma": 0.7},
        "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
        "MultiStepLR": {"milestones": [2, 4, 4]},
        "MultiplicativeLR": {"lr_lambda": lambda step: 0.7},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
        "PolynomialLR": {"total_iters": 9, "power": 1.7},
        "ReduceLROnPlateau": {"patience": 0, "threshold": 10.0},
        "StepLR": {"step_size": 1, "gamma": 0.7},
        "SWALR": {"swa_lr": 0.01, "anneal_epochs": 5},
    }
    if kind is lr_scheduler.ChainedScheduler:
        parts = [make_scheduler(part, optimizer) for part in (lr_scheduler.StepLR, lr_scheduler.CosineAnnealingLR)]
        return kind(parts, optimizer)
    if kind is lr_scheduler.SequentialLR:
        names = (lr_scheduler.ExponentialLR, lr_scheduler.LinearLR, lr_scheduler.CosineAnnealingWarmRestarts)
        return kind(optimizer, [make_scheduler(part, optimizer) for part in names], milestones=[2, 5])
    return kind(optimizer, **options.get(kind.__name__, {}))


class Tiny(nn.Module):
    """A network with only two-dimensional weights, because Muon accepts no others."""

    def __init__(self, optimizer, scheduler, options):
        super().__init__()
        self.optimizer, self.scheduler, self.arguments = optimizer, scheduler, options
        self.embedding = nn.Embedding(6, 4, sparse=optimizer is torch.optim.SparseAdam)
        self.out = nn.Linear(4, 3, bias=False)

    def training_step(self, batch):
        found = self.embedding(batch[0])
        if self.embedding.sparse:
            return (found**2).sum(1).mean()
        return nn.functional.cross_entropy(self.out(found), batch[1])

    def configure_optimizers(self):
        parameters = (self.embedding if self.embedding.sparse else self).parameters()
        optimizer = self.optimizer(parameters, lr=0.05, **self.arguments)
        scheduler = make_scheduler(self.scheduler, optimizer)
        interval = "epoch" if self.scheduler is lr_scheduler.ReduceLROnPlateau else "step"
        options = {"scheduler": scheduler, "interval": interval, "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": options}


class Saves:
    """A callback that saves a checkpoint in the middle of the second epoch."""

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == 4:
            trainer.save_checkpoint("middle.ckpt")


def end_of(optimizer, scheduler, precision, resume=None):
    """Return the weights and the optimizer and scheduler states after two epochs of three batches."""
    torch.manual_seed(1)
    options, labels = torch.arange(12) * 5 % 6, torch.arange(12) % 3
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugins = [MixedPrecision(precision, device="cpu", scaler=scaler)] if precision == "16-mixed" else []
    loop = FabricLoop(
        accelerator="cpu", max_epochs=2, logger=False, save_last=False, enable_progress_bar=False, plugins=plugins,
        enable_model_summary=False, callbacks=[] if resume else [Saves()], precision=None if plugins else precision,
    )  # fmt: skip
    # Use a larger eps in float16, because Adam's default of 1e-8 rounds to zero.
    net = Tiny(optimizer, scheduler, {"eps": 1e-3} if precision == "16-true" else {})
    loop.fit(net, TensorLoader(options, labels, batch_size=4, shuffle=True), resume=resume)
    scheduler = loop.lr_scheduler_configs[0].scheduler
    return {
        "weights": net.state_dict(),
        "optimizer": loop.optimizers[0].state_dict(),
        "scheduler": scheduler.state_dict(),
    }


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize(
    ("precision", "optimizer", "scheduler"),
    [("32-true", kind, lr_scheduler.StepLR) for kind in OPTIMIZERS]
    + [("32-true", torch.optim.Adam, kind) for kind in SCHEDULERS]
    + [(precision, torch.optim.Adam, lr_scheduler.StepLR) for precision in PRECISIONS],
    ids=lambda kind: getattr(kind, "__name__", kind),
)
def test_runs_resume_exactly_with_each_optimizer_scheduler_and_precision(precision, optimizer, scheduler):
    if scheduler is torch.optim.swa_utils.SWALR and not HAS_PLAIN_SWALR:
        with pytest.raises(CheckpointError, match="lr_schedulers/0/anneal_func"):
            end_of(optimizer, scheduler, precision)
        assert not Path("middle.ckpt").exists()
        return
    whole = end_of(optimizer, scheduler, precision)
    resumed = end_of(optimizer, scheduler, precision, resume="middle.ckpt")
    assert {part: same(whole[part], resumed[part]) for part in whole} == dict.fromkeys(whole, True)


OWN_FORMATS = [{"momenta": [1.0]}, {}, None, [1.0], {"state": [1.0]}, {"state": {"net.weight": 1.0}}]
OWN_FORMATS += [{"state": {0: {"momentum": 1.0}, 7: {"momentum": 1.0}}}, {"state": {}, "param_groups": {"lr": 0.1}}]


def own_optimizer(saved):
    """Return an optimizer class whose state_dict returns `saved`."""

    class OwnFormat(torch.optim.SGD):
        loaded = []

        def state_dict(self):
            return saved

        def load_state_dict(self, state):
            self.loaded.append(state)

    return OwnFormat


class Layer(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.net = kind, nn.Linear(2, 1)

    def training_step(self, batch):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return None if self.kind is None else self.kind(self.parameters(), lr=0.01)


def fit_layer(kind, epochs, resume=None):
    loop = FabricLoop(**with_files(max_epochs=epochs))
    loop.fit(Layer(kind), TensorLoader(torch.ones(4, 2), batch_size=2), resume=resume)
    return loop


@pytest.mark.parametrize("saved", OWN_FORMATS, ids=str)
def test_fabric_loop_resumes_an_optimizer_with_a_custom_state_format(saved):
    kind = own_optimizer(saved)
    fit_layer(kind, 1)
    fit_layer(kind, 2, resume="last")
    assert kind.loaded == [saved]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_run_without_an_optimizer_resumes():
    fit_layer(None, 1)
    assert fit_layer(None, 2, resume="last").current_epoch == 2
