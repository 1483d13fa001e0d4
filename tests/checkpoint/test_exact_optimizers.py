"""Test that runs resume exactly with optimizers that copy weights or store NumPy arrays.

In a resumed run, configure_optimizers runs after the loop has loaded the weights of the checkpoint.
"""

import copy
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from modules import make_data, quiet
from runs import logs_of, same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop

LOOPS = [FabricLoop, MiniLoop]


class Stop(Exception):
    """An error that ends a run as a crash would."""


class StaysNear(torch.optim.SGD):
    """An optimizer that pulls the weights towards copies made at the start of the run."""

    def __init__(self, parameters, has_ids=False):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        weights = [p for group in self.param_groups for p in group["params"]]
        self.anchors = {"copies": [p.detach().clone() for p in weights]}
        if has_ids:
            self.names = {id(p): str(index) for index, p in enumerate(weights)}

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        pull(self.param_groups[0]["params"], self.anchors["copies"])
        return loss


def pull(weights, anchors):
    with torch.no_grad():
        for weight, anchor in zip(weights, anchors, strict=True):
            weight.lerp_(anchor, 0.1)


class Lit(pl.LightningModule):
    stops_at = None

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3))
        self.kept = []

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.stops_at:
            raise Stop
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class WithOptimizer(Lit):
    def configure_optimizers(self):
        return StaysNear(self.net.parameters())


class WithIds(Lit):
    def configure_optimizers(self):
        self.numbers = {id(p): index for index, p in enumerate(self.net.parameters())}
        return StaysNear(self.net.parameters(), has_ids=True)


class WithCopies(Lit):
    """A model whose configure_optimizers adds copies of the weights to a list that __init__ has created."""

    def configure_optimizers(self):
        self.kept += [p.detach().clone() for p in self.net.parameters()]
        return super().configure_optimizers()

    def on_train_batch_end(self, *args):
        pull(self.net.parameters(), self.kept)


class WithTeacher(Lit):
    def configure_optimizers(self):
        self.teachers = {"first": copy.deepcopy(self.net).requires_grad_(False)}
        return super().configure_optimizers()

    def on_train_batch_end(self, *args):
        pull(self.net.parameters(), self.teachers["first"].parameters())


class WithGroups(Lit):
    """A model that changes options of its optimizer through a reference to the parameter groups."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.groups = optimizer.param_groups
        return optimizer

    def on_train_batch_end(self, *args):
        self.groups[0]["lr"] *= 0.9
        self.groups[0]["weight_decay"] += 0.01


def train(loop_class, root, make, stops_at=None, is_given=False):
    torch.manual_seed(1)
    module = make()
    loaders = DataLoader(make_data(20), batch_size=4, shuffle=True), DataLoader(make_data(8), batch_size=4)
    module.stops_at = stops_at
    torch.manual_seed(5)
    if loop_class is pl.Trainer:
        pl.Trainer(**quiet(max_epochs=3, num_sanity_val_steps=0)).fit(module, *loaders)
        return dict(module.state_dict())
    loop = loop_class(accelerator="cpu", default_root_dir=root, max_epochs=3, log_every_n_steps=1)
    given = {"optimizer": (lambda model: StaysNear(model.net.parameters()))} if is_given else {}
    loop.fit(module, *loaders, resume="auto", **given)
    return dict(module.state_dict())


@pytest.mark.parametrize("loop_class", LOOPS)
@pytest.mark.parametrize("make", [WithOptimizer, WithCopies, WithTeacher, WithGroups, "function"])
def test_model_attributes_that_are_created_with_the_optimizer_are_restored(tmp_path, loop_class, make):
    is_given = make == "function"
    make = Lit if is_given else make
    expected = train(loop_class, tmp_path / "whole", make, is_given=is_given)
    for stops_at in (7, 10):
        with pytest.raises(Stop):
            train(loop_class, tmp_path / "cut", make, stops_at, is_given)
    assert same(train(loop_class, tmp_path / "cut", make, is_given=is_given), expected)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")
    if not is_given:
        assert same(train(pl.Trainer, tmp_path, make), expected)


def test_a_checkpoint_of_mini_loop_contains_the_parameter_groups_only_once(tmp_path):
    train(MiniLoop, tmp_path, WithGroups)
    checkpoint = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    parts = checkpoint["fabric_template"]["ranks"][0]["rng"]["parts"]
    assert "groups" not in parts.get("", {})


CROSSING = [(WithCopies, *LOOPS), (WithCopies, *LOOPS[::-1]), (WithOptimizer, MiniLoop, FabricLoop)]


@pytest.mark.parametrize(("make", "first", "second"), CROSSING)
def test_each_loop_restores_attributes_that_the_other_loop_created_with_the_optimizer(tmp_path, first, second, make):
    expected = train(second, tmp_path / "whole", make)
    with pytest.raises(Stop):
        train(first, tmp_path / "cut", make, stops_at=7)
    assert same(train(second, tmp_path / "cut", make), expected)


@pytest.mark.parametrize("loop_class", LOOPS)
def test_fit_does_not_warn_about_a_dict_of_parameter_ids_that_never_changes(tmp_path, loop_class):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(loop_class, tmp_path, WithIds)
    assert not [warning for warning in found if "neither saved nor restored" in str(warning.message)]


def test_mini_loop_refuses_modules_created_in_configure_optimizers(tmp_path):
    class Grows(Lit):
        def configure_optimizers(self):
            self.head = nn.Linear(6, 3, bias=False)
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"configure_optimizers: got the new weights \['head.weight'\], expected no"):
        train(MiniLoop, tmp_path, Grows)
    assert not list(tmp_path.rglob("*.ckpt"))
    train(FabricLoop, tmp_path, Grows)


class WithArrays(torch.optim.SGD):
    """An optimizer that keeps its momentum in NumPy arrays."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            first = {"array": np.zeros(tuple(parameter.shape)), "all": []}
            state["momentum"] = momentum = state.get("momentum", first)
            momentum["array"] = 0.9 * momentum["array"] + parameter.grad.numpy()
            momentum["all"] = [*momentum["all"][-2:], momentum["array"]]
            parameter -= 0.05 * torch.from_numpy(sum(momentum["all"])).float()
        return loss


class LitWithArrays(Lit):
    def configure_optimizers(self):
        return WithArrays(self.net.parameters(), lr=0.1)


def test_fabric_loop_restores_numpy_arrays_in_the_state_of_an_optimizer(tmp_path):
    expected = train(FabricLoop, tmp_path / "whole", LitWithArrays)
    with pytest.raises(Stop):
        train(FabricLoop, tmp_path / "cut", LitWithArrays, stops_at=7)
    assert same(train(FabricLoop, tmp_path / "cut", LitWithArrays), expected)
    assert same(train(pl.Trainer, tmp_path, LitWithArrays), expected)
    with pytest.raises(ValueError, match="checkpoint: got the NumPy value"):
        train(MiniLoop, tmp_path / "mini", LitWithArrays)
