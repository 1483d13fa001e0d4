"""Test exact resume with objects that have state outside of state_dict(), in both loops."""

import csv
import os
import random
import shutil
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from interpreter import fork_command
from killed_model import SAVES, KilledError, Model
from lightning.fabric import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import make_data
from parameters import halve, once
from runs import TIMES
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torchmetrics import MeanMetric, RunningMean, SumMetric

import fabric_template
from fabric_template import FabricLoop, MiniLoop
from fabric_template.errors import CheckpointError


class NoisySGD(torch.optim.SGD):
    """SGD with noise from its own generator. The noise becomes smaller with each step."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.generator, self.steps = torch.Generator().manual_seed(3), 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            noise = torch.randn(parameter.shape, generator=self.generator)
            parameter.add_(noise, alpha=0.01 / self.steps)
        return loss


class Noisy(Model):
    def configure_optimizers(self):
        return NoisySGD(self.parameters(), 0.1)


class StepsItself(Model):
    """A model that calls step on a scheduler that configure_optimizers does not return."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = LambdaLR(optimizer, lambda step: 0.8**step)
        return optimizer

    def on_train_batch_end(self, *args):
        self.schedule.step()


class Average:
    """An average of weights that has a state_dict but is not a module."""

    def __init__(self, net):
        self.mean = {name: value.clone() for name, value in net.state_dict().items()}

    def update(self, net):
        for name, value in net.state_dict().items():
            self.mean[name].lerp_(value, 0.1)

    def state_dict(self):
        return dict(self.mean)

    def load_state_dict(self, state):
        self.mean = dict(state)


class Averaged(Model):
    """A model whose loss keeps its weights near their average."""

    def __init__(self):
        super().__init__()
        self.average = Average(self.net)

    def training_step(self, batch, batch_idx):
        pairs = [(p, self.average.mean[name]) for name, p in self.net.named_parameters()]
        return super().training_step(batch, batch_idx) + sum(((p - q) ** 2).sum() for p, q in pairs)

    def on_train_batch_end(self, *args):
        self.average.update(self.net)


class View(Model):
    """A model that changes a buffer through an attribute that is a view of the buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scales", torch.ones(2))
        self.first = self.scales[0]

    def training_step(self, batch, batch_idx):
        self.first.add_(0.1)
        return super().training_step(batch, batch_idx) * self.scales[0]


class ExtraState(Model):
    """A model that saves a tensor as extra state, and ignores it in load_state_dict()."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        pass

    def training_step(self, batch, batch_idx):
        self.seen += 0.1
        return super().training_step(batch, batch_idx) * (1 + self.seen.item())


class Views(Model):
    """A model that changes tensors and arrays in place and reads them through expanded or read-only views."""

    def __init__(self):
        super().__init__()
        self.scale, self.array = torch.ones(1), np.ones(1)
        self.expanded, self.read_only = self.scale.expand(2), np.broadcast_to(self.array, (2,))
        with torch.inference_mode():
            self.inference = torch.ones(2)

    def training_step(self, batch, batch_idx):
        self.scale += 0.1
        self.array += 0.1
        with torch.inference_mode():
            self.inference[:1].mul_(1.1)
        scale = self.expanded[1] * float(self.read_only[1]) * float(self.inference.sum())
        return super().training_step(batch, batch_idx) * scale


class Stages(Model):
    """A model that assigns constants to attributes, and never changes the constants in place."""

    zero = torch.zeros(2)

    def __init__(self):
        super().__init__()
        type(self).zero = torch.zeros(2)
        self.stages = [[0.5, 1.0], [1.5, 2.0], [2.5]]
        self.stage, self.best = self.stages[0], self.zero
        self.noises = {"low": np.full(2, 0.5), "high": np.full(2, 1.5)}
        self.table = torch.arange(1.0, 13.0).reshape(6, 2)
        self.noise, self.pool, self.row = self.noises["low"], Meter(), self.table[0]
        self.pool.history = self.stages[2]

    def on_train_epoch_start(self):
        self.stage = self.stages[self.current_epoch]
        self.noise = self.noises["high" if self.current_epoch % 2 else "low"]

    def training_step(self, batch, batch_idx):
        self.best, self.zero = self.best + 0.1, self.zero + 0.2
        self.row = self.table[self.global_step % 6]
        self.pool.history = [*self.pool.history, float(batch[0].mean())]
        scale = sum(self.stage) + self.noise[0] + float(self.best[0] + self.zero[1])
        scale += sum(self.pool.history) + float(type(self).zero.sum()) + float(self.row[1])
        return super().training_step(batch, batch_idx) * float(scale)


class Late(Model):
    """A model with attributes that on_train_start assigns. Only a list is changed in place."""

    zero = torch.zeros(1)

    def __init__(self):
        super().__init__()
        type(self).zero, self.total, self.history = torch.zeros(1), None, None

    def on_train_start(self):
        self.total, self.history = self.zero, [1.0]
        self.find_last = partial(self.history.__getitem__, -1)

    def training_step(self, batch, batch_idx):
        self.total = self.total + 0.1
        self.history.append(self.history[-1] + 0.1)
        return super().training_step(batch, batch_idx) * float(self.total + self.zero) * self.find_last()


class Handed(Model):
    """A model that gives a new list to the sampler in each epoch, and changes the list in place."""

    def __init__(self, sampler):
        super().__init__()
        self.weights = self.first = sampler.weights
        self.replace = partial(setattr, sampler, "weights")

    def on_train_epoch_end(self):
        self.weights = [1.0 + weight for weight in self.first]
        self.replace(self.weights)

    def training_step(self, batch, batch_idx):
        self.weights[int(batch[1][0])] += 1.0
        return super().training_step(batch, batch_idx)


class Running(Model):
    """A model that scales its loss with a torchmetrics object whose states share their default value."""

    def __init__(self):
        super().__init__()
        self.running = RunningMean(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.running.update(loss.detach())
        return loss * self.running.compute()

    def on_train_epoch_end(self):
        self.running.reset()


class Orders:
    """A sampler that chooses one of several orders in each epoch."""

    def __init__(self):
        self.orders = [list(range(16)), list(range(15, -1, -1)), [5 * i % 16 for i in range(16)]]
        self.order = self.orders[0]

    def __len__(self):
        return 16

    def set_epoch(self, epoch):
        self.order = self.orders[epoch]

    def __iter__(self):
        return iter(list(self.order))


class Grown(Model):
    """A model that assigns a new tensor to one of two datasets that share a tensor."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def on_train_epoch_start(self):
        self.first.scale = self.first.scale * 1.5

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.first.scale * self.second.scale


class Weighted:
    """A sampler that draws in proportion to weights, which the model changes."""

    def __init__(self, weights):
        self.weights = weights

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        weights = torch.as_tensor(self.weights)
        return iter(torch.multinomial(weights, len(self), replacement=True).tolist())


class Weights(Model):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def training_step(self, batch, batch_idx):
        label = int(batch[1][0])
        self.weights[label] = self.weights[label] + 1.0
        return super().training_step(batch, batch_idx)


class Jitter:
    """A random transform whose strength a hook changes."""

    def __init__(self):
        self.generator, self.strength = np.random.default_rng(3), 0.1

    def __call__(self, x):
        return x + self.strength * float(self.generator.standard_normal())


class Points(Dataset):
    """A dataset that applies a random transform to the points of another dataset."""

    def __init__(self, points):
        self.points, self.transforms = points, [Jitter()]

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        x, y = self.points[index]
        return self.transforms[0](x), y


class Stronger(Model):
    """A model that makes a transform of the dataset stronger after each batch."""

    def __init__(self, jitter):
        super().__init__()
        self.jitters = [jitter]

    def on_train_batch_end(self, *args):
        self.jitters[0].strength += 0.1


class Mining(Model):
    """A model that changes the weights of a WeightedRandomSampler after each epoch."""

    def __init__(self, sampler):
        super().__init__()
        self.samplers = [sampler]

    def on_train_epoch_end(self):
        weights = self.samplers[0].weights
        self.samplers[0].weights = weights * 2 + self.net[0].weight.detach().abs().sum()
        weights[3] += 1


class WarmUp(Model):
    """A model that deletes an attribute and a buffer after its warm-up, and sets another attribute to None."""

    def __init__(self):
        super().__init__()
        self.factor = self.weight = 0.5
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x):
        logits = super().forward(x) * getattr(self, "factor", 1.0)
        logits = logits * (self.weight or 1.0)
        return logits + self.shift if hasattr(self, "shift") else logits

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            del self.factor
            del self.shift
            self.weight = None


class Worn(Dataset):
    """A dataset that changes its large table in place each time an item is read."""

    def __init__(self, table):
        self.table, self.labels = table, make_data(16).tensors[1]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.table[index] *= 1.5
        return torch.as_tensor(self.table[index][:8]).clone(), self.labels[index]


def worn(make_table):
    return lambda: (Model(), DataLoader(Worn(make_table()), 4, shuffle=True))


def make_arrays():
    """Return a dict of 1,500 arrays. MiniLoop detects changes in such a large dict with checksums."""
    arrays = {number: np.full(8, number / 900, dtype="f4") for number in range(1_500)}
    return {**arrays, "unused": torch.zeros(20_000)}


class Pool:
    """A list of earlier values, like the image pool of a CycleGAN. swap() returns one of them at random."""

    def __init__(self, size):
        self.size, self.values, self.rng = size, [], random.Random(3)

    def swap(self, value):
        self.values.append(value)
        return self.values.pop(self.rng.randrange(self.size)) if self.size < len(self.values) else 0


@dataclass
class Schedule:
    beta: float = 0.0
    seen: deque = field(default_factory=lambda: deque(maxlen=3))


class Meter:
    total = 0.0

    def add(self, value):
        self.total += value
        return self.total


class HasHelpers(Model):
    """A model whose loss depends on objects of several classes that no state_dict contains."""

    def __init__(self):
        super().__init__()
        self.pools = {"a": Pool(3)}
        self.schedule, self.settings = Schedule(), SimpleNamespace(scale=1.0)
        self.meters = {"loss": Meter()}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.schedule.beta += 0.1
        self.schedule.seen.append(float(batch[0].mean()))
        self.settings.scale *= 0.9
        old = self.pools["a"].swap(loss.detach()) + self.meters["loss"].add(loss.item())
        return loss * (self.schedule.beta + sum(self.schedule.seen) + self.settings.scale) + old * loss


class Pipeline(list):
    """A list of objects. Checkpoints contain the states of these objects, but not the list."""


class Registry(dict):
    """A dict of objects."""


class HasSubclasses(Model):
    def __init__(self):
        super().__init__()
        self.pools, self.meters = Pipeline([Pool(2), Pool(3)]), Registry(loss=Meter())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        old = sum(pool.swap(loss.detach()) for pool in self.pools)
        return loss + 0.1 * old * loss + self.meters["loss"].add(loss.item()) * loss


class Recent(Dataset):
    """A dataset that moves each index to the end of a large OrderedDict when the index is read."""

    def __init__(self):
        self.cache = OrderedDict((index, index / 15_000) for index in range(15_000))
        self.points = make_data(16)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.cache.move_to_end(index)
        x, y = self.points[index]
        return x + self.cache[next(iter(self.cache))] + next(reversed(self.cache)) / 16, y


class ChangesModes(Model):
    """A model that changes torch's default dtype after the first epoch."""

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            torch.set_default_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] + torch.rand(1).float(), batch[1]), batch_idx)


class HasMeters(Model):
    def __init__(self):
        super().__init__()
        self.meters, self.settings = {"scale": Meter()}, SimpleNamespace(scale=1.0)

    def training_step(self, batch, batch_idx):
        self.settings.scale *= 0.9
        self.meters["scale"].add(self.settings.scale)
        return super().training_step(batch, batch_idx) * self.meters["scale"].total


class SlowWeights:
    """An object that averages weights in copies of a network, and has a parameter and an optimizer."""

    def __init__(self, net):
        self.weights, self.copies = list(net.parameters()), list(deepcopy(net).parameters())
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.Adam([self.scale], lr=0.1)
        self.teacher, self.others = deepcopy(net).requires_grad_(False), [deepcopy(net)]

    @torch.no_grad()
    def distance(self):
        self.scale.grad = torch.ones(2)
        self.optimizer.step()
        networks = (self.copies, self.teacher.parameters(), self.others[0].parameters())
        for number, parameters in enumerate(networks):
            for slow, weight in zip(parameters, self.weights, strict=True):
                slow.lerp_(weight, 0.1 + 0.1 * number)
        return self.scale.sum()


class HasHiddenModules(Model):
    """A model that keeps averaged weights in modules that are not registered as submodules."""

    def __init__(self):
        super().__init__()
        self.slow = SlowWeights(self.net)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.slow.distance()
        outputs = [net(batch[0]) for net in (self.slow.teacher, *self.slow.others)]
        return loss + sum((self.net(batch[0]) - output).pow(2).mean() for output in outputs)


def make_layers():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(3))
    layers[0].register_buffer("level", torch.ones(1), persistent=False)
    layers.scale = 1.0
    return layers


class ChangesLayers(Model):
    """A model that changes modules that are not registered as submodules."""

    def __init__(self):
        super().__init__()
        self.layers, self.named = [make_layers()], {"teacher": make_layers()}
        self.owner, self.steps = SimpleNamespace(layers=make_layers()), 0
        object.__setattr__(self, "hidden", make_layers())

    def training_step(self, batch, batch_idx):
        loss, self.steps = super().training_step(batch, batch_idx), self.steps + 1
        for layers in (*self.layers, self.named["teacher"], self.owner.layers, self.hidden):
            layers[1].p *= 0.9
            layers[0].level += 0.1
            layers.scale *= 0.8
            layers[2].train(self.steps != 2)
            layers[0].weight.requires_grad_(self.steps % 2 == 0)
            loss = loss + layers(batch[0]).var() * layers[0].level * layers.scale
            loss = loss * (layers.scale + layers[0].weight.requires_grad + layers[1].p + layers[0].level)
        return loss


class AddsBuffers(Model):
    """A model that registers buffers with persistent=False during training."""

    def __init__(self):
        super().__init__()
        self.layers = [make_layers()]

    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 0:
            self.register_buffer("level", torch.ones(1), persistent=False)
            self.net[0].register_buffer("count", torch.zeros(1, dtype=torch.long), persistent=False)
            self.layers[0][1].register_buffer("level", torch.ones(2), persistent=False)

    def training_step(self, batch, batch_idx):
        for buffer in (self.level, self.net[0].count, self.layers[0][1].level):
            buffer += 1
        scale = sum(float(module.level.sum()) for module in (self, self.layers[0][1]))
        names = {name for module in (self, self.layers[0]) for name, _ in module.named_buffers()}
        return super().training_step(batch, batch_idx) * (scale + self.net[0].count) / 10 * len(names)


class ChangesDtypes(Model):
    """A model that assigns tensors of other dtypes to its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.net[0].register_buffer("count", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total = self.total.double() + loss.detach() / 3
        self.hidden = self.hidden.double() + self.total
        self.net[0].count = self.net[0].count.long() + 1
        return loss * (self.total + self.hidden + self.net[0].count / 3).float()


class WarmsUp(Model):
    """A model that freezes and changes its modules in on_train_start, and undoes these changes later."""

    def __init__(self):
        super().__init__()
        self.extra, self.scale, self.layers = torch.nn.Dropout(0.1), 1.0, [make_layers()]

    def on_train_start(self):
        self.late, self.extra, self.scale, self.warm = torch.nn.Dropout(0.5), torch.nn.Dropout(0.4), 2.0, True
        self.net[0].weight.requires_grad_(False)
        self.layers[0][0].weight.requires_grad_(False)
        for layer in (self.net[1], self.late):
            layer.eval()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.late.p *= 0.9
        if batch_idx == 1 and hasattr(self, "warm"):
            self.scale, self.extra.p = 1.0, 0.1
            del self.warm
            self.net[0].weight.requires_grad_(True)
            self.layers[0][0].weight.requires_grad_(True)
            for layer in (self.net[1], self.late):
                layer.train()

    def training_step(self, batch, batch_idx):
        loss = super().training_step((self.extra(self.late(batch[0])), batch[1]), batch_idx) * self.scale
        loss = loss + self.layers[0](batch[0]).var()
        return loss * (1 + hasattr(self, "warm") + self.layers[0][0].weight.requires_grad)


class KeepsMetrics(Model):
    """A model that scales its loss by torchmetrics objects that are not registered as submodules."""

    def __init__(self):
        super().__init__()
        self.means, self.owner = [MeanMetric()], SimpleNamespace(sums={0: SumMetric()})
        self.found, self.layers = {7: MeanMetric()}, OrderedDict(last=torch.nn.BatchNorm1d(3))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for metric in (*self.means, self.owner.sums[0], self.found[7]):
            metric.update(loss.detach())
            loss = loss * (1 + 0.1 * metric.compute().sigmoid())
        self.layers["last"](self.net(batch[0]))
        return loss * (1 + self.layers["last"].running_mean.sum().sigmoid())


class Phase(Enum):
    WARM_UP = 1.0
    MAIN = 0.1


class Statistics(NamedTuple):
    mean: float
    phases: list


class HasPhases(Model):
    """A model whose attributes are an Enum and a list of named tuples."""

    def __init__(self):
        super().__init__()
        self.phase, self.statistics = Phase.WARM_UP, []

    def training_step(self, batch, batch_idx):
        self.statistics.append(Statistics(float(batch[0].mean()), [self.phase]))
        self.phase = Phase.MAIN if len(self.statistics) > 1 else Phase.WARM_UP
        scale = sum(item.mean + item.phases[0].value for item in self.statistics)
        return super().training_step(batch, batch_idx) * scale * self.phase.value


class Rotates(Model):
    """A model that scales its loss with a complex number."""

    def __init__(self):
        super().__init__()
        self.phase = 1 + 0j

    def training_step(self, batch, batch_idx):
        self.phase *= 1 + 0.3j
        return super().training_step(batch, batch_idx) * abs(self.phase)


class Groups:
    """A sampler whose attributes contain the objects that draw the order."""

    def __init__(self):
        self.ranges = [[*range(i, i + 4)] for i in range(0, 16, 4)]
        self.pools = [Pool(1), Pool(2)]

    def __len__(self):
        return 16

    def set_epoch(self, epoch):
        random.shuffle(self.ranges)

    def __iter__(self):
        self.pools[0].rng.shuffle(self.ranges)
        first = self.pools[1].rng.randrange(16)
        yield from [(first + i) % 16 for group in self.ranges for i in group]


def grouped():
    return Model(), DataLoader(make_data(16), 4, sampler=Groups())


def scaled(samples, meter, pool):
    x, y = default_collate(samples)
    return x * (1 + 0.01 * meter.add(1)) + pool.rng.random(), y


def collated():
    collate = partial(scaled, meter=Meter(), pool=Pool(3))
    return Model(), DataLoader(make_data(16), 4, shuffle=True, collate_fn=collate)


def transformed():
    data = Points(Points(make_data(16)))
    return Stronger(data.points.transforms[0]), DataLoader(data, 4, shuffle=True)


def mining():
    sampler = WeightedRandomSampler(torch.arange(1.0, 17.0), 16)
    return Mining(sampler), DataLoader(make_data(16), 4, sampler=sampler)


def shuffled(make):
    return lambda: (make(), DataLoader(make_data(16), 4, shuffle=True))


def shared(make_weights):
    def make():
        weights = make_weights()
        return Weights(weights), DataLoader(make_data(16), 4, sampler=Weighted(weights))

    return make


def handed():
    sampler = Weighted([1.0] * 16)
    return Handed(sampler), DataLoader(make_data(16), 4, sampler=sampler)


def ordered():
    return Model(), DataLoader(make_data(16), 4, sampler=Orders())


class Reader:
    def __init__(self):
        self.place = SimpleNamespace(position=0, seen=[])

    def read(self):
        self.place.position += 1
        self.place.seen.append(self.place.position % 3)
        return default_collate(list(make_data(4))), sum(self.place.seen) / 100


class OwnLoader:
    """A loader that is not a DataLoader and whose objects change in each batch."""

    def __init__(self):
        self.reader = Reader()

    def __len__(self):
        return 4

    def __iter__(self):
        for _ in range(4):
            (x, y), shift = self.reader.read()
            yield x + shift, y


def own_loader():
    return Model(), OwnLoader()


def grown():
    first, second = Points(make_data(16)), Points(make_data(8))
    first.scale = second.scale = torch.ones(1)
    return Grown(first, second), DataLoader(first, 4, shuffle=True)


CASES = {
    "optimizer": shuffled(Noisy),
    "scheduler": shuffled(StepsItself),
    "object": shuffled(Averaged),
    "view of a buffer": shuffled(View),
    "tensor in the extra state": shuffled(ExtraState),
    "views that cannot be changed in place": shuffled(Views),
    "constants": shuffled(Stages),
    "objects assigned in on_train_start": shuffled(Late),
    "new list of a sampler": handed,
    "running metric": shuffled(Running),
    "orders of a sampler": ordered,
    "objects of a custom loader": own_loader,
    "tensor shared by two datasets": grown,
    "objects of a dataset": transformed,
    "sampler from torch": mining,
    "deleted attributes": shuffled(WarmUp),
    "large tensor of a dataset": worn(lambda: torch.linspace(-1, 1, 16_000).reshape(16, 1000)),
    "large array of a dataset": worn(lambda: np.linspace(-1, 1, 16_000, dtype="f4").reshape(16, 1000)),
    "shared tensor": shared(lambda: torch.ones(16)),
    "shared list": shared(lambda: [1.0] * 16),
    "objects of a model": shuffled(HasHelpers),
    "unregistered modules": shuffled(HasHiddenModules),
    "changed unregistered modules": shuffled(ChangesLayers),
    "changes in on_train_start": shuffled(WarmsUp),
    "buffers registered during training": shuffled(AddsBuffers),
    "unregistered torchmetrics objects": shuffled(KeepsMetrics),
    "enums and named tuples": shuffled(HasPhases),
    "complex number": shuffled(Rotates),
    "objects in subclasses of list and dict": shuffled(HasSubclasses),
    "order of a large OrderedDict": lambda: (Model(), DataLoader(Recent(), 4, shuffle=True)),
    "objects of a sampler": grouped,
    "objects of a collate function": collated,
    "large dict of arrays in a dataset": worn(make_arrays),
}


def train(kind, root, make, kill_at=None, resume=None, **options):
    """Train, and return the weights and the rows of metrics.csv."""
    seed_everything(1, verbose=False)
    model, loader = make()
    model.kill_at = kill_at
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {**(quiet if kind is FabricLoop else {}), SAVES[kind]: 2, "max_epochs": 3, **options}
    loop = kind(default_root_dir=str(root), accelerator="cpu", **options)
    loop.fit(model, loader, DataLoader(make_data(8), 4), resume=resume)
    text = next((root / "logs").rglob("metrics.csv")).read_text()
    rows = [{n: v for n, v in row.items() if n not in TIMES} for row in csv.DictReader(text.split())]
    return {name: value.tolist() for name, value in model.state_dict().items()}, rows


def assert_resumes(kind, root, make):
    """Stop a run after 7 and after 9 batches, and compare the resumed runs with an uninterrupted run."""
    whole = train(kind, root / "whole", make)
    for batches in (7, 9):
        with pytest.raises(KilledError):
            train(kind, root / str(batches), make, kill_at=batches)
        assert train(kind, root / str(batches), make, resume="last") == whole


@pytest.mark.filterwarnings("ignore:resume. 2 batches of OwnLoader are read again")
@pytest.mark.parametrize(("name", "kind", "batches"), once(CASES, SAVES, [2, 8, 5, 11]))
def test_a_run_with_objects_of_user_defined_classes_resumes_exactly(tmp_path, name, kind, batches):
    whole = train(kind, tmp_path / "whole", CASES[name])
    with pytest.raises(KilledError):
        train(kind, tmp_path / "cut", CASES[name], kill_at=batches)
    assert train(kind, tmp_path / "cut", CASES[name], resume="last") == whole


@pytest.mark.parametrize("kind", SAVES)
def test_the_default_dtype_is_restored_even_if_the_float32_matmul_precision_cannot_be_read(tmp_path, kind, monkeypatch):
    def fails():
        raise RuntimeError("The precision was set with torch.backends.fp32_precision")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", fails)
    try:
        whole = train(kind, tmp_path / "whole", shuffled(ChangesModes))
        torch.set_default_dtype(torch.float32)
        with pytest.raises(KilledError):
            train(kind, tmp_path / "cut", shuffled(ChangesModes), kill_at=9)
        torch.set_default_dtype(torch.float32)
        assert train(kind, tmp_path / "cut", shuffled(ChangesModes), resume="last") == whole
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", SAVES)
def test_a_resumed_run_restores_the_dtypes_of_buffers(tmp_path, kind):
    assert_resumes(kind, tmp_path, shuffled(ChangesDtypes))


@pytest.mark.parametrize("name", ["constants", "views that cannot be changed in place", "running metric"])
@pytest.mark.parametrize("kinds", ["FF", "MM", "FM", "MF"])
def test_a_resumed_run_can_be_resumed_again_by_either_loop(tmp_path, kinds, name):
    first, second = [{"F": FabricLoop, "M": MiniLoop}[kind] for kind in kinds]
    options = {"validate_every_n_steps": 2}
    whole, _ = train(first, tmp_path / "whole", CASES[name], **options)
    for kind, resume in ((first, None), (second, "last")):
        with pytest.raises(KilledError):
            train(kind, tmp_path / "cut", CASES[name], kill_at=4, resume=resume, **options)
    assert train(first, tmp_path / "cut", CASES[name], resume="last", **options)[0] == whole


@pytest.mark.parametrize("name", ["constants", "orders of a sampler", "new list of a sampler"])
@pytest.mark.parametrize("kind", SAVES)
def test_resuming_with_the_model_and_loader_of_an_earlier_fit_does_not_change_their_constants(tmp_path, kind, name):
    whole = train(kind, tmp_path / "whole", CASES[name])
    objects = cache(CASES[name])
    with pytest.raises(KilledError):
        train(kind, tmp_path / "cut", objects, kill_at=9)
    assert train(kind, tmp_path / "cut", objects, resume="last") == whole


class Curve(LambdaLR):
    """A scheduler whose state contains an object that a resumed run refuses to unpickle."""

    def __init__(self, optimizer):
        self.generator = torch.Generator()
        super().__init__(optimizer, lambda step: 1.0)


class Curved(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [Curve(optimizer)]


@pytest.mark.parametrize("kind", SAVES)
def test_fit_refuses_a_scheduler_state_that_torch_load_cannot_read(tmp_path, kind):
    with pytest.raises(ValueError, match="got .*Generator"):
        train(kind, tmp_path, shuffled(Curved))
    assert not list(tmp_path.rglob("*.ckpt"))


class Unsigned(Model):
    """A model that replaces a torch.uint16 tensor, which is an attribute or a buffer, after each batch."""

    def __init__(self, is_buffer):
        super().__init__()
        self.bits = torch.nn.Buffer(make_bits(0)) if is_buffer else make_bits(0)

    def on_train_batch_end(self, *args):
        self.bits = make_bits(self.global_step)
        self.add(int(self.bits[0]))


def make_bits(value):
    return torch.full((2,), value, dtype=torch.int32).to(torch.uint16)


@pytest.mark.parametrize(("kind", "is_buffer"), halve(SAVES, [False, True]))
def test_tensors_of_unsigned_integers_are_restored(tmp_path, kind, is_buffer):
    make = shuffled(partial(Unsigned, is_buffer))
    whole = train(kind, tmp_path / "whole", make)
    with pytest.raises(KilledError):
        train(kind, tmp_path / "parts", make, kill_at=6)
    assert train(kind, tmp_path / "parts", make, resume="last") == whole


class Note:
    """An object that a resumed run refuses to unpickle."""


class NotingSGD(torch.optim.SGD):
    """An optimizer that puts an object into its state in the first step."""

    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["note"] = Note()
        return super().step(closure)


class ModelWithNotingSGD(Model):
    def configure_optimizers(self):
        return NotingSGD(self.parameters(), 0.1)


def test_mini_loop_refuses_custom_objects_in_the_optimizer_state(tmp_path):
    """FabricLoop can read custom objects with weights_only=False. MiniLoop has no such option."""
    with pytest.warns(UserWarning, match="got an instance of .*Note in the part 'optimizer_states"):
        train(FabricLoop, tmp_path / "loop", shuffled(ModelWithNotingSGD))
    with pytest.raises(
        ValueError, match="checkpoint: got a value of 'optimizer_states' that a checkpoint cannot contain .*Note"
    ):
        train(MiniLoop, tmp_path / "mini", shuffled(ModelWithNotingSGD))


class ModelWithOptimizer(Model):
    def __init__(self, kind, **options):
        super().__init__()
        self.make_optimizers = lambda module: kind(module.parameters(), lr=0.01, **options)


@pytest.mark.parametrize("kind", SAVES)
def test_resume_warns_about_a_different_optimizer_class(tmp_path, kind):
    # Save with NAdam and resume with RAdam. NAdam has all options of RAdam, so loading its state raises no error.
    with pytest.raises(KilledError):
        train(kind, tmp_path, shuffled(lambda: ModelWithOptimizer(torch.optim.NAdam)), kill_at=6)
    with pytest.warns(UserWarning, match=r"optimizers was \['NAdam'\] and is now \['RAdam'\]"):
        train(kind, tmp_path, shuffled(lambda: ModelWithOptimizer(torch.optim.RAdam)), resume="last")


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.filterwarnings("ignore:resume. optimizers was")
def test_resume_refuses_an_optimizer_class_that_needs_other_state(tmp_path, kind, other):
    with pytest.raises(KilledError):
        train(kind, tmp_path, shuffled(lambda: ModelWithOptimizer(torch.optim.Adam)), kill_at=6)
    text = rf"(state does not fit {other.__name__}|which {other.__name__} needs)"
    with pytest.raises(ValueError, match=text):
        train(kind, tmp_path, shuffled(lambda: ModelWithOptimizer(other)), resume="last")


class WithSecondOptimizer(Model):
    """A module that keeps another optimizer in an attribute, as for a learned loss weight."""

    def __init__(self, kind):
        super().__init__()
        self.weights = [torch.zeros(2, requires_grad=True)]
        self.second = kind(self.weights, lr=0.1)

    def on_train_batch_end(self, *_):
        self.weights[0].grad = torch.ones(2)
        self.second.step()


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize(("first", "other"), [("Adam", "SGD"), ("Adagrad", "Adam"), ("RMSprop", "NAdam")])
def test_a_resume_reports_another_class_of_an_optimizer_in_an_attribute(tmp_path, kind, first, other):
    first, other = (getattr(torch.optim, name) for name in (first, other))
    with pytest.raises(KilledError):
        train(kind, tmp_path, shuffled(lambda: WithSecondOptimizer(first)), kill_at=6)
    is_mini = kind is MiniLoop
    expected = pytest.raises(ValueError, match="does not fit") if is_mini else pytest.warns(UserWarning, match="second")
    with expected:
        train(kind, tmp_path, shuffled(lambda: WithSecondOptimizer(other)), resume="last")


class OptimizerReplacement(Model):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]


def test_a_run_cannot_resume_if_a_hook_replaced_the_optimizer(tmp_path):
    """FabricLoop trains with the new optimizer but refuses to resume the run."""
    with pytest.raises(ValueError, match="optimizer: a hook changed the parameters"):
        train(MiniLoop, tmp_path / "mini", shuffled(OptimizerReplacement))
    with pytest.raises(KilledError):
        train(FabricLoop, tmp_path / "loop", shuffled(OptimizerReplacement), kill_at=7)
    with pytest.raises(CheckpointError, match="the saved optimizer has no dampening, momentum, which SGD needs"):
        train(FabricLoop, tmp_path / "loop", shuffled(OptimizerReplacement), resume="last")


class ReadsAnotherLoader(Model):
    """A model that reads unlabelled samples from a second loader, like FixMatch."""

    def __init__(self):
        super().__init__()
        self.unlabelled = DataLoader(make_data(12), 4, shuffle=True)
        self.iterator = iter(self.unlabelled)

    def training_step(self, batch, batch_idx):
        if (other := next(self.iterator, None)) is None:
            self.iterator = iter(self.unlabelled)
            other = next(self.iterator)
        return super().training_step(batch, batch_idx) + self.net(other[0]).square().mean()


@pytest.mark.parametrize("kind", SAVES)
def test_fit_warns_about_an_iterator_in_an_attribute_of_the_model(tmp_path, kind):
    with pytest.warns(UserWarning, match="checkpoint.*iterator.*(not saved|neither saved).*loaders"):
        train(kind, tmp_path, shuffled(ReadsAnotherLoader))


class RandomStream(torch.utils.data.IterableDataset):
    """A dataset that draws samples from its own generator."""

    def __init__(self):
        self.generator, self.drawn = np.random.default_rng(3), 0

    def __iter__(self):
        for _ in range(16):
            self.drawn += 1
            x = torch.from_numpy(self.generator.normal(size=8)).float()
            yield x * self.drawn, int(x[0] > 0)


def streamed():
    model, stream = Model(), RandomStream()
    model.stream = stream
    return model, DataLoader(stream, 4)


@pytest.mark.filterwarnings("ignore:resume. .* batches of DataLoader are read again")
@pytest.mark.parametrize("kind", SAVES)
def test_a_run_whose_model_refers_to_the_training_stream_resumes_exactly(tmp_path, kind):
    assert_resumes(kind, tmp_path, streamed)


class KeepsFastState(torch.optim.SGD):
    """An optimizer whose state_dict has no key "state"."""

    def state_dict(self):
        state = super().state_dict()
        return {"fast_state": state["state"], "param_groups": state["param_groups"]}

    def load_state_dict(self, state_dict):
        super().load_state_dict({"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]})


class HasFastState(Model):
    def configure_optimizers(self):
        return KeepsFastState(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("kind", SAVES)
def test_a_run_whose_optimizer_saves_its_state_under_another_key_resumes_exactly(tmp_path, kind):
    assert_resumes(kind, tmp_path, shuffled(HasFastState))


class LayerReplacement(Model):
    """A model that replaces a layer in the second epoch. The optimizer does not train the new layer."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0] = torch.nn.Linear(8, 16)


def test_if_a_hook_replaces_a_layer_mini_loop_stops_training_and_fabric_loop_refuses_to_resume(tmp_path):
    with pytest.raises(ValueError, match="optimizer: a hook changed the parameters"):
        train(MiniLoop, tmp_path / "mini", shuffled(LayerReplacement))
    with pytest.raises(KilledError):
        train(FabricLoop, tmp_path / "loop", shuffled(LayerReplacement), kill_at=10)
    with pytest.raises(CheckpointError, match="parameter 0 of the optimizer is .*, but was 'optimizer"):
        train(FabricLoop, tmp_path / "loop", shuffled(LayerReplacement), resume="last")


def with_removal(remove):
    class Removes(Model):
        def configure_optimizers(self):
            groups = [{"params": list(self.net[index].parameters())} for index in (0, 3)]
            return torch.optim.AdamW(groups, lr=0.1)

        def on_train_epoch_start(self):
            if self.trainer.current_epoch == 1:
                remove(self.trainer.optimizers[0].param_groups)

    return shuffled(Removes)


REMOVALS = {
    "parameter": lambda groups: groups[1]["params"].pop(0),
    "group": lambda groups: groups.pop(0),
    "parameters": lambda groups: groups[0].update(params=[]),
}


@pytest.mark.parametrize("name", REMOVALS)
def test_mini_loop_refuses_a_hook_that_removes_a_trained_parameter_from_the_optimizer(tmp_path, name):
    with pytest.raises(ValueError, match="optimizer: a hook changed the parameters"):
        train(MiniLoop, tmp_path, with_removal(REMOVALS[name]))


def test_mini_loop_refuses_a_hook_that_adds_a_parameter_to_the_model(tmp_path):
    class Grows(Model):
        def on_train_epoch_start(self):
            self.grown = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="optimizer: a hook changed the parameters"):
        train(MiniLoop, tmp_path, shuffled(Grows))


class HasStrings(torch.nn.Module):
    """A network that depends on arrays of strings and dates, which change in each step."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        self.names = np.zeros(4, "S4")
        self.days = np.zeros(2, "datetime64[D]")

    def forward(self, x):
        if self.training:
            self.names[np.count_nonzero(self.names) % 4] = b"seen"
            self.days += np.timedelta64(1, "D")
        scale = np.count_nonzero(self.names) + int(self.days[0].astype(int))
        return self.net(x) * (1 + 0.01 * scale)


@pytest.mark.parametrize("reader", SAVES)
@pytest.mark.parametrize("writer", SAVES)
def test_numpy_arrays_of_strings_and_dates_are_restored(tmp_path, writer, reader):
    def fit(kind, name, epochs, resume=None):
        torch.manual_seed(1)
        net = HasStrings()
        step = lambda net, batch: torch.nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
        loop = kind(max_epochs=epochs, name=name, default_root_dir=tmp_path, accelerator="cpu")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loop.fit(net, DataLoader(make_data(12), 4), optimizer=optimizer, training_step=step, resume=resume)
        return net

    whole = fit(FabricLoop, "whole", 2)
    fit(writer, "parts", 1)
    found = fit(reader, "parts", 2, "last")
    assert torch.equal(found.net.weight, whole.net.weight)
    assert np.array_equal(found.names, whole.names)
    assert np.array_equal(found.days, whole.days)


class ChangesLate(Model):
    """A model that changes modules and attributes that on_train_start creates."""

    def on_train_start(self):
        self.late, self.scale = torch.nn.Dropout(0.5), 1.0

    def training_step(self, batch, batch_idx):
        self.late.p, self.scale = self.late.p * 0.9, self.scale * 0.9
        return super().training_step((self.late(batch[0]), batch[1]), batch_idx) * self.scale


CROSSING = [HasHiddenModules, ChangesLayers, KeepsMetrics, AddsBuffers, ChangesLate, HasMeters, WarmUp]


@pytest.mark.parametrize("writer", SAVES)
@pytest.mark.parametrize("make", CROSSING)
def test_each_loop_restores_custom_objects_saved_by_the_other_loop(tmp_path, writer, make):
    def fit(kind, name, epochs, resume=None):
        torch.manual_seed(1)
        model = make()
        loop = kind(max_epochs=epochs, name=name, default_root_dir=tmp_path, accelerator="cpu")
        loop.fit(model, DataLoader(make_data(16), 4), resume=resume)
        return model.state_dict()

    whole = fit(writer, "whole", 4)
    fit(writer, "parts", 2)
    reader = MiniLoop if writer is FabricLoop else FabricLoop
    fit(reader, "parts", 3, resume="last")
    resumed = fit(reader, "parts", 4, resume="last")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


class HasQueue(Model):
    """A model with a queue of losses, which is often empty, and with an empty buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.empty(0))
        self.queue, self.indices = torch.ones(3), [torch.zeros(1, dtype=torch.long)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + self.queue.sum() + len(self.indices[0]))
        self.queue = torch.cat([self.queue, loss.detach()[None]]) if batch_idx % 2 == 0 else torch.empty(0)
        self.indices = [torch.arange(len(self.queue))]
        return loss


@pytest.mark.parametrize("kind", SAVES)
def test_a_run_whose_model_has_an_empty_tensor_and_an_empty_buffer_resumes_exactly(tmp_path, kind):
    expected = train(kind, tmp_path / "whole", shuffled(HasQueue))
    with pytest.raises(KilledError):
        train(kind, tmp_path / "parts", shuffled(HasQueue), kill_at=5)
    assert train(kind, tmp_path / "parts", shuffled(HasQueue), resume="last") == expected


class HasKeyedMeters(Model):
    """A model with a defaultdict. The dict creates an object when a new key is first read."""

    def __init__(self):
        super().__init__()
        self.meters = defaultdict(Meter)

    def training_step(self, batch, batch_idx):
        key = self.keys[batch_idx % len(self.keys)]
        return super().training_step(batch, batch_idx) * self.meters[key].add(0.1 + batch_idx)


@pytest.mark.parametrize(("kind", "keys"), once(SAVES, [[(0, 1)], [0.5], [None], [SlowWeights]]))
def test_resume_warns_about_dict_keys_that_are_neither_strings_nor_integers(tmp_path, kind, keys):
    make = shuffled(type("Keyed", (HasKeyedMeters,), {"keys": keys}))
    with pytest.raises(KilledError):
        train(kind, tmp_path, make, kill_at=5)
    with pytest.warns(UserWarning, match=r"(created .*meters|meters.* created it).* during training"):
        train(kind, tmp_path, make, resume="last")


class CreatesMeter(Model):
    """A model that creates an object in its first batch instead of in __init__."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "meter"):
            self.meter = Meter()
        return super().training_step(batch, batch_idx) * self.meter.add(1)


@pytest.mark.parametrize("kind", SAVES)
def test_resume_warns_about_a_user_defined_object_created_during_training(tmp_path, kind):
    with pytest.raises(KilledError):
        train(kind, tmp_path, shuffled(CreatesMeter), kill_at=5)
    with pytest.warns(UserWarning, match=r"(created .*meter|meter.* created it).* during training"):
        train(kind, tmp_path, shuffled(CreatesMeter), resume="last")


INSTALLED = """
import numpy as np


class Connection:
    def __init__(self, generator):
        self.socket, self.generator = 3, generator


class Noise:
    def __init__(self, seed):
        self.R = np.random.RandomState(seed)

    def __call__(self, x):
        return x + float(self.R.normal())


class Pipeline:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Rotated:
    def __init__(self):
        self.first = 0

    def __len__(self):
        return 16

    def __iter__(self):
        self.first += 5
        return iter([(self.first + i) % 16 for i in range(16)])
"""


class ModelWithConnection(Model):
    """A model with an object whose class is defined in an installed package."""

    def __init__(self, make):
        super().__init__()
        self.connection = make(torch.Generator().manual_seed(2))
        self.seen = []

    def on_train_batch_start(self, *args):
        self.seen.append(self.connection.socket)
        self.connection.socket += 1

    def training_step(self, batch, batch_idx):
        noise = torch.rand((), generator=self.connection.generator)
        return super().training_step(batch, batch_idx) * (1 + noise)


@pytest.mark.parametrize("kind", SAVES)
def test_resuming_restores_a_sampler_whose_class_is_defined_in_an_installed_package(tmp_path, monkeypatch, kind):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "rotations.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(package))
    rotations = pytest.importorskip("rotations")

    def make():
        return Model(), DataLoader(make_data(16), 4, sampler=rotations.Rotated())

    assert_resumes(kind, tmp_path, make)


class Transformed(Dataset):
    def __init__(self, transform):
        self.data, self.transform = make_data(16), transform

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x, y = self.data[index]
        return self.transform(x), y


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAVES)
def test_resuming_restores_nested_random_transforms_of_an_installed_package(tmp_path, monkeypatch, kind, workers):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "pipelines.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(package))
    pipelines = pytest.importorskip("pipelines")

    def make():
        inner = pipelines.Pipeline(pipelines.Noise(2), pipelines.Pipeline(pipelines.Noise(3)))
        transform = pipelines.Pipeline(pipelines.Noise(1), pipelines.Pipeline(inner))
        return Model(), DataLoader(Transformed(transform), 4, shuffle=True, num_workers=workers)

    assert_resumes(kind, tmp_path, make)


class Tagged(torch.Tensor):
    """A subclass of Tensor, like those of MONAI. Operations on Tagged tensors return Tagged tensors."""


class LogsTagged(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        assert type(loss) is Tagged
        self.log("tagged", loss, on_step=True, on_epoch=True)
        return loss


class AveragesTagged(LogsTagged):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        return loss


def collate_tagged(samples):
    x, y = default_collate(samples)
    return x.as_subclass(Tagged), y


@pytest.mark.parametrize(
    ("kind", "make_model"),
    [(FabricLoop, LogsTagged), (FabricLoop, AveragesTagged), (MiniLoop, LogsTagged)],
)
def test_a_run_that_logs_subclasses_of_tensor_resumes_exactly(tmp_path, kind, make_model):
    def make():
        return make_model(), DataLoader(make_data(16), 4, shuffle=True, collate_fn=collate_tagged)

    assert_resumes(kind, tmp_path, make)


class ReversedNoise(Dataset):
    """A dataset that reads another dataset in a changing order, and adds noise from its own generator."""

    def __init__(self):
        self.data, self.shift, self.generator = make_data(16), 0, np.random.default_rng(3)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.shift += 1
        x, y = self.data[(index + self.shift) % 16]
        return x + torch.from_numpy(self.generator.normal(size=8)).float(), y


class Prefetcher:
    """A user-defined loader that wraps a DataLoader."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        yield from self.loader


def wrapped():
    samples = RandomSampler(range(16), generator=torch.Generator().manual_seed(4))
    return Model(), Prefetcher(DataLoader(ReversedNoise(), batch_sampler=BatchSampler(samples, 4, drop_last=True)))


@pytest.mark.filterwarnings("ignore:resume. .* batches of Prefetcher are read again")
@pytest.mark.parametrize("kind", SAVES)
def test_resuming_restores_the_dataset_and_the_sampler_of_a_dataloader_in_a_user_defined_loader(tmp_path, kind):
    assert_resumes(kind, tmp_path, wrapped)


class Follower(torch.nn.Linear):
    """A layer that replaces an attribute in each step."""

    def __init__(self):
        super().__init__(8, 3)
        self.hidden = torch.zeros(3)

    def forward(self, x):
        out = super().forward(x) + 0.5 * self.hidden
        self.hidden = out.detach().mean(0)
        return out


class Follows(Model):
    def __init__(self):
        super().__init__()
        self.net = Follower()

    def training_step(self, batch, batch_idx):
        return sum(super(Follows, self).training_step(part, batch_idx) for part in batch)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:Trying to infer the .batch_size")
def test_a_run_with_two_loaders_resumes_exactly_if_each_step_replaces_a_model_attribute(tmp_path):
    def fit(name, epochs, resume=None):
        torch.manual_seed(1)
        model, saves = Follows(), ModelCheckpoint(save_last=True, every_n_train_steps=3)
        loop = FabricLoop(max_epochs=epochs, name=name, default_root_dir=tmp_path, callbacks=[saves], accelerator="cpu")
        loaders = [DataLoader(make_data(28), 4), DataLoader(make_data(10), 4, shuffle=True)]
        loop.fit(model, loaders, resume=resume)
        return model.state_dict()

    whole = fit("whole", 3)
    fit("parts", 2)
    resumed = fit("parts", 3, resume="last")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


@pytest.mark.parametrize("kind", SAVES)
def test_resuming_restores_the_generator_but_not_the_socket_of_a_connection_object(tmp_path, monkeypatch, kind):
    """A new process opens a new socket, so resuming must not restore the saved socket number."""
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "connections.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(package))
    connections = pytest.importorskip("connections")
    models = []

    def make():
        models.append(ModelWithConnection(connections.Connection))
        return models[-1], DataLoader(make_data(16), 4, shuffle=True)

    weights, _ = train(kind, tmp_path / "whole", make)
    with pytest.raises(KilledError):
        train(kind, tmp_path / "killed", make, kill_at=6)
    resumed, _ = train(kind, tmp_path / "killed", make, resume="last")
    assert resumed == weights
    assert models[-1].connection.socket == 3 + 6
    assert models[-1].seen == [*range(3, 9), *range(3, 9)]


NETWORK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Pool:
    def __init__(self):
        self.seen = 0


class Drawn:
    def __init__(self):
        self.position = 0


class Stream(IterableDataset):
    def __init__(self, drawn):
        self.drawn = drawn

    def __iter__(self):
        for _ in range(8):
            self.drawn.position += 1
            yield torch.full((4,), float(self.drawn.position))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.pool = nn.Linear(4, 1), Pool()

    def training_step(self, batch):
        self.pool.seen += 1
        return (self.layer(batch) * self.pool.seen).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def train(loop_class, name, epochs, resume=None):
    torch.manual_seed(1)
    net = Net()
    loop = loop_class(max_epochs=epochs, name=name, accelerator="cpu")
    loop.fit(net, DataLoader(Stream(Drawn()), 2), resume=resume)
    return net.layer.weight.tolist()
"""
COMPARE = """
from project.fabric_template import FabricLoop
from project.network import train

whole = train(FabricLoop, "whole", 2)
train(FabricLoop, "parts", 1)
assert train(FabricLoop, "parts", 2, resume="last") == whole
"""


def test_a_copied_fabric_template_package_restores_objects_of_user_defined_classes(tmp_path):
    """If fabric_template is copied into a user's package, that package's other modules are still user code."""
    source = Path(fabric_template.__file__).parent
    project = tmp_path / "project"
    shutil.copytree(source, project / "fabric_template", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "network.py").write_text(NETWORK)
    (tmp_path / "compare.py").write_text(COMPARE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = fork_command([sys.executable, "compare.py"])
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class ScriptedModel(Model):
    """A model with a scripted module, which keeps its buffers in a C++ object."""

    def __init__(self):
        super().__init__()
        self.counted = torch.jit.script(Counted())

    def forward(self, x):
        return super().forward(self.counted(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", SAVES)
def test_a_run_with_a_torchscript_module_resumes_exactly(tmp_path, kind):
    whole = train(kind, tmp_path / "whole", shuffled(ScriptedModel))
    with pytest.raises(KilledError):
        train(kind, tmp_path / "killed", shuffled(ScriptedModel), kill_at=6)
    assert train(kind, tmp_path / "killed", shuffled(ScriptedModel), resume="last") == whole


class Pairs(dict):
    """A dict with attributes and with keys that are not strings."""

    def __init__(self):
        super().__init__({(0, 1): 1.0, 2: 3.0})


class ModelWithPairs(Model):
    def __init__(self):
        super().__init__()
        self.pairs, self.nested = Pairs(), {(1, 2): 0, "a": Pairs()}

    def on_train_batch_start(self, *args):
        self.nested[1, 2] += 1


@pytest.mark.filterwarnings("ignore:checkpoint. the attribute 'nested' .* contains unsupported values .Pairs.")
@pytest.mark.parametrize("kind", SAVES)
def test_a_run_resumes_exactly_if_an_attribute_of_the_model_is_a_dict_with_tuple_keys(tmp_path, kind):
    weights, _ = train(kind, tmp_path / "whole", shuffled(ModelWithPairs))
    with pytest.raises(KilledError):
        train(kind, tmp_path / "killed", shuffled(ModelWithPairs), kill_at=6)
    assert train(kind, tmp_path / "killed", shuffled(ModelWithPairs), resume="last")[0] == weights


class SharesState(LambdaLR):
    """A scheduler whose state contains the same list under two keys."""

    def __init__(self, optimizer):
        self.factors, self.count = [1.0], np.float64(0)
        self.named = {"factors": self.factors}
        super().__init__(optimizer, self.next_factor)

    def next_factor(self, step):
        self.factors[0] *= 0.9
        return self.named["factors"][0]


class HasSharedState(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": SharesState(optimizer), "interval": "step"}]


def test_two_keys_of_a_scheduler_state_still_share_one_list_after_resuming(tmp_path):
    whole = train(FabricLoop, tmp_path / "whole", shuffled(HasSharedState))
    with pytest.raises(KilledError):
        train(FabricLoop, tmp_path / "cut", shuffled(HasSharedState), kill_at=5)
    assert train(FabricLoop, tmp_path / "cut", shuffled(HasSharedState), resume="last") == whole


class KeepsWeights(torch.optim.SGD):
    """An optimizer whose state shares memory with the parameters or contains their ids."""

    names = "weight"

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if self.names == "weight":
                self.state[parameter]["weight"] = [parameter.data.view(-1)]
            else:
                self.param_groups[0].setdefault("steps", {})[id(parameter)] = 1
        return loss


class KeepsIds(KeepsWeights):
    names = "ids"


class Lookahead(torch.optim.SGD):
    """An optimizer with its own state_dict, which contains a dict with ids of parameters as keys."""

    def state_dict(self):
        return {**super().state_dict(), "slow": {id(p): p.detach().clone() for p in self.param_groups[0]["params"]}}


class CountsById(KeepsWeights):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.steps = {}

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.steps[id(parameter)] = self.steps.get(id(parameter), 0) + 1
        return torch.optim.SGD.step(self, closure)


def with_optimizer(kind):
    class HasOptimizer(Model):
        def configure_optimizers(self):
            return kind(self.parameters(), 0.1)

    return shuffled(HasOptimizer)


@pytest.mark.parametrize(("kind", "optimizer"), list(product(SAVES, [KeepsWeights, KeepsIds, Lookahead])))
def test_an_optimizer_state_that_refers_to_parameters_cannot_be_saved(tmp_path, kind, optimizer):
    with pytest.raises(ValueError, match="got a state that contains parameters"):
        train(kind, tmp_path, with_optimizer(optimizer))


@pytest.mark.parametrize("kind", SAVES)
def test_fit_warns_about_parameter_ids_in_optimizer_attributes(tmp_path, kind):
    with pytest.warns(UserWarning, match="steps.* (neither saved|not saved).*ids of"):
        train(kind, tmp_path, with_optimizer(CountsById))
