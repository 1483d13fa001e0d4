"""Build a run from the names in a random configuration, and the points where it can be ended."""

import os
import random
import signal
import warnings
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import search_path  # noqa: F401
import torch
import torchmetrics as tm
from lightning.pytorch import callbacks as lc
from lightning.pytorch.loggers import CSVLogger as LightningCSV
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from modules import make_data
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric_template import TensorLoader

# ---- where a run is ended


class Planned(Exception):
    """Raised where a configuration asks for an error."""


class Points:
    """Counts what a run passes; at the n-th time of one point, it is ended there."""

    def __init__(self):
        self.main, self.counts, self.end = os.getpid(), Counter(), None

    def reach(self, point):
        self.counts[point] += 1
        if self.end is None or (self.end["at"], self.end["n"]) != (point, self.counts[point]):
            return
        kind = self.end["kind"]
        if kind == "exception":
            raise Planned(f"{point} {self.counts[point]}")
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        os.kill(
            self.main,
            {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}[kind],
        )


POINTS = Points()
HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
    "on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end",
)  # fmt: skip


class AtHooks(lc.Callback):
    """Reaches a point in each hook; without it, nobody may be listening there."""


for _name in HOOKS:
    setattr(AtHooks, _name, lambda self, *_, name=_name: POINTS.reach(name))


# ---- data


class Samples(Dataset):
    """Classified points, with noise of the random numbers named; or whole batches of them."""

    def __init__(self, noise=False, num=26, batched=0, seed=0):
        self.x, self.y = make_data(num, seed=seed).tensors
        self.noise, self.batched = noise, batched

    def __len__(self):
        return len(self.x) // (self.batched or 1)

    def __getitem__(self, index):
        POINTS.reach("load")
        part = slice(index * self.batched, (index + 1) * self.batched) if self.batched else index
        return self.x[part] + self.draw(), self.y[part]

    def draw(self):
        return (
            0.1 * (torch.randn(()).item() + random.random() + np.random.rand())
            if self.noise
            else 0.0
        )


class Stream(IterableDataset):
    """An iterable dataset whose samples are shared among the workers."""

    def __init__(self, noise, num):
        self.samples = Samples(noise, num)

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.samples[i] for i in range(first, len(self.samples), step))


class LazyBatches:
    """A batch sampler that draws each batch's indices when it is asked for it."""

    def __init__(self, num, generator=None):
        self.num, self.generator = num, generator

    def __len__(self):
        return 6

    def __iter__(self):
        for _ in range(6):
            yield torch.randint(self.num, (4,), generator=self.generator).tolist()


class Batches:
    """An iterable of batches whose __iter__ is a generator function; it has no length."""

    def __init__(self, noise):
        self.samples = Samples(noise, batched=4)

    def __iter__(self):
        for index in torch.randperm(len(self.samples)).tolist():
            yield self.samples[index]


class Own(Batches):
    """A loader that is its own iterator. ``__iter__`` draws an order, starts over and returns itself."""

    def __iter__(self):
        self.order = iter(torch.randperm(len(self.samples)).tolist())
        return self

    def __next__(self):
        return self.samples[next(self.order)]


class Items:
    """One that has ``__getitem__`` only."""

    def __init__(self, noise):
        self.samples = Samples(noise, batched=4)

    def __getitem__(self, index):
        if index >= len(self.samples):
            raise IndexError(index)
        return self.samples[index]


class AtOnce:
    """A sampler that draws its whole order when it is asked for a pass, from everybody's random numbers."""

    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __iter__(self):
        return iter(torch.randperm(self.num).tolist())


def seeded():
    return torch.Generator().manual_seed(7)


def loader_of(plan, kind=None):
    """One of the kinds of loaders."""
    kind, noise, workers = kind or plan["loader"], plan["noise"], plan["workers"]
    num = (
        26 if plan["ranks"] == 1 else 28
    )  # no last batch of one on a rank, which a BatchNorm refuses
    data, more = Samples(noise, num), {"num_workers": workers}
    if workers:
        more |= {"persistent_workers": plan["persistent"]}
    sizes = {"batch_size": 4, "drop_last": plan["drops"]}
    if kind == "shuffled":
        return DataLoader(data, shuffle=True, **sizes, **more)
    if kind == "generator":
        return DataLoader(data, shuffle=True, generator=seeded(), **sizes, **more)
    if kind == "sampler":
        return DataLoader(
            data, sampler=RandomSampler(data, replacement=True, generator=seeded()), **sizes, **more
        )
    if kind == "batch_sampler":
        return DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data), 4, plan["drops"]), **more
        )
    if kind == "lazy":
        return DataLoader(
            data, batch_sampler=LazyBatches(len(data), seeded() if plan["drops"] else None), **more
        )
    if kind == "weighted":
        generator = seeded() if plan["given"] == "datamodule" else None
        weighted = WeightedRandomSampler(
            torch.arange(len(data)) + 1.0, len(data), generator=generator
        )
        return DataLoader(
            data, sampler=AtOnce(len(data)) if plan["drops"] else weighted, **sizes, **more
        )
    if kind == "unbatched":
        return DataLoader(Samples(noise, batched=4), batch_size=None, shuffle=True, **more)
    if kind == "iterable":
        # no worker has a last batch of one
        return DataLoader(Stream(noise, 28 if workers == 2 else 26), **sizes, **more)
    if kind == "tensors":
        return TensorLoader(
            data.x,
            data.y,
            batch_size=4,
            shuffle=True,
            generator=seeded() if plan["drops"] else None,
        )
    if kind in ("function", "own", "items"):
        return {"function": Batches, "own": Own, "items": Items}[kind](noise)
    if kind == "list":
        return [(data.x[i : i + 4], data.y[i : i + 4]) for i in range(0, 24, 4)]
    if kind == "stateful":
        return StatefulDataLoader(data, shuffle=True, **sizes, **more)
    parts = {
        "a": loader_of(plan, plan["combined"][0]),
        "b": loader_of(plan, plan["combined"][1]),
    }
    return CombinedLoader(
        parts if plan["combined"][2] == "dict" else list(parts.values()), plan["combined"][3]
    )


LOADERS = (
    "shuffled", "generator", "sampler", "batch_sampler", "lazy", "weighted", "unbatched", "iterable", "tensors", "function",
    "list", "stateful", "combined",
)  # fmt: skip


def val_loader_of(kind):
    one = lambda: DataLoader(make_data(10, seed=5), batch_size=4)  # noqa: E731
    if kind == "two":
        return [one(), DataLoader(make_data(6, seed=6), batch_size=4)]
    if kind == "shuffled":
        return DataLoader(make_data(10, seed=5), batch_size=4, shuffle=True, generator=seeded())
    return None if kind == "none" else one()


def pairs_in(batch):
    """Every (x, y) of a batch, of as many loaders as it is of."""
    if isinstance(batch, dict):
        return [pair for part in batch.values() for pair in pairs_in(part)]
    if batch is None:
        return []
    if len(batch) == 2 and isinstance(batch[0], torch.Tensor):
        return [tuple(batch)]
    return [pair for part in batch for pair in pairs_in(part)]


# ---- torchmetrics: name -> (how it is made, what it is updated with); what it computes may be a dict

ACCURACY = lambda: tm.Accuracy("multiclass", num_classes=3)  # noqa: E731
F1 = lambda: tm.F1Score("multiclass", num_classes=3, average="macro")  # noqa: E731
METRICS = {
    "Accuracy": (ACCURACY, "logits"),
    "AUROC": (lambda: tm.AUROC("multiclass", num_classes=3), "logits"),  # keeps lists
    "CalibrationError": (lambda: tm.CalibrationError("multiclass", num_classes=3), "logits"),
    "MeanMetric": (tm.MeanMetric, "loss"),
    "MaxMetric": (tm.MaxMetric, "loss"),
    "SumMetric": (tm.SumMetric, "loss"),
    "RunningMean": (lambda: tm.RunningMean(window=3), "loss"),
    "Running": (lambda: tm.wrappers.Running(tm.SumMetric(), window=3), "loss"),
    "MeanSquaredError": (tm.MeanSquaredError, "values"),
    "PearsonCorrCoef": (tm.PearsonCorrCoef, "values"),
    "R2Score": (tm.R2Score, "values"),
    "SpearmanCorrCoef": (tm.SpearmanCorrCoef, "values"),
    "CompositionalMetric": (lambda: ACCURACY() + 1, "logits"),
    "MetricCollection": (lambda: tm.MetricCollection({"acc": ACCURACY(), "f1": F1()}), "logits"),
    "ClasswiseWrapper": (
        lambda: tm.wrappers.ClasswiseWrapper(tm.Accuracy("multiclass", num_classes=3, average=None)), "logits"
    ),
    "MinMaxMetric": (lambda: tm.wrappers.MinMaxMetric(ACCURACY()), "logits"),
    "BootStrapper": (lambda: tm.wrappers.BootStrapper(ACCURACY(), num_bootstraps=3), "logits"),
    "MetricTracker": (lambda: tm.wrappers.MetricTracker(ACCURACY()), "logits"),
}  # fmt: skip
DICTS = ("MetricCollection", "ClasswiseWrapper", "MinMaxMetric", "BootStrapper")


# ---- modules


class Nets(nn.Module):
    """The network, with what may have to be put back beside weights."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        middle = [nn.BatchNorm1d(6)] if "batchnorm" in parts else []
        self.backbone = nn.Sequential(nn.Linear(8, 6), *middle, nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.embedding = nn.Embedding(8, 3, sparse=True) if "sparse" in parts else None
        self.dropout = nn.Dropout(0.3 if "dropout" in parts else 0.0)

    def forward(self, x):
        if self.embedding is not None:
            return self.embedding(x.argmax(1))
        x = self.dropout(self.backbone(x))
        if self.training and "libraries" in self.parts:
            x = x * (1 + 0.1 * (random.random() + np.random.rand() + torch.rand(()).item()))
        return self.head(x)


class Steps:
    """Handles a batch for all kinds of modules."""

    automatic_optimization = True

    def build(self, plan):
        self.plan = plan
        self.net = Nets(plan["parts"])
        self.measures = {}
        # a callback that decides by a score is saved with rank zero's: the ranks must have the same
        self.decides = plan["ranks"] > 1 and bool(
            {"keeps_best", "stops", "stops_in_training"} & set(plan["callbacks"])
        )
        if plan["metric"]:
            make, _ = METRICS[plan["metric"]]
            self.train_metric, self.val_metric = make(), make()
        if "backbone" in plan["callbacks"]:
            self.backbone = self.net.backbone

    def loss_of(self, batch):
        logits, labels, loss = [], [], 0.0
        for x, y in pairs_in(batch):
            x = x.to(self.net.head.weight.dtype)
            logits.append(self.net(x))
            labels.append(y)
            loss = loss + nn.functional.cross_entropy(logits[-1], y)
        return loss, torch.cat(logits), torch.cat(labels)

    def training_step(self, batch, batch_idx):
        POINTS.reach("training_step")
        loss, logits, labels = self.loss_of(batch)
        self.note("train", loss, logits, labels)
        if "skips" in self.plan["parts"] and batch_idx % 4 == 3:
            return None
        return {"loss": loss, "size": len(labels)} if self.plan["returns"] == "dict" else loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        POINTS.reach("validation_step")
        loss, logits, labels = self.loss_of(batch)
        if self.plan["logs"] == "nothing":
            return (
                loss
                if self.plan["returns"] == "dict"
                else (loss, (logits.argmax(1) == labels).float().mean())
            )
        if dataloader_idx == 0:
            self.log("val_loss", loss, add_dataloader_idx=False, sync_dist=self.decides)
            self.measure("val", loss, logits, labels)
        else:
            self.log("other", loss, add_dataloader_idx=False)
        return None

    def note(self, stage, loss, logits, labels):
        logs = self.plan["logs"]
        if logs == "nothing":
            return
        when = {"on_step": logs in ("step", "both"), "on_epoch": logs in ("epoch", "both")}
        self.log("train_loss", loss.detach(), prog_bar=True, sync_dist=self.decides, **when)
        if "reduced" in self.plan["parts"]:
            self.log("worst", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
            self.log("fixed", 2.5, on_step=False, on_epoch=True, batch_size=3)
        self.measure(stage, loss.detach(), logits.detach(), labels)

    def measure(self, stage, loss, logits, labels):
        name, how = self.plan["metric"], self.plan["measured"]
        if not name:
            return
        metric = getattr(self, f"{stage}_metric")
        given = {"logits": (logits.float().softmax(1), labels), "loss": (loss.float(),),
                 "values": (logits.float()[:, 0], labels.float())}[METRICS[name][1]]  # fmt: skip
        if name == "MetricTracker":
            if not metric._increment_called:
                metric.increment()
            metric.update(*given)
        elif how == "object":
            metric.update(*given)
            if name == "MetricCollection":
                self.log_dict(metric, on_step=False, on_epoch=True)
            else:
                self.log(f"{stage}_metric", metric, on_step=False, on_epoch=True)
        elif how == "value":
            value = metric(*given)
            value = value if isinstance(value, dict) else {"metric": value}
            self.log_dict(
                {f"{stage}_{key}": part for key, part in value.items()},
                on_step=False,
                on_epoch=True,
            )
        else:
            metric.update(*given)

    def computed(self, stage):
        """At an epoch's end, what was only updated until then."""
        name = self.plan["metric"]
        if not name or self.plan["logs"] == "nothing":
            return
        metric = getattr(self, f"{stage}_metric")
        if name == "MetricTracker":
            if metric._increment_called and metric[-1].update_called:
                self.log(f"{stage}_metric", metric.compute())
                metric.increment()
        elif self.plan["measured"] == "end":
            inner = next(iter(metric.values())) if name == "MetricCollection" else metric
            if getattr(inner, "update_called", True):
                value = metric.compute()
                value = value if isinstance(value, dict) else {"metric": value}
                self.log_dict({f"{stage}_{key}": part for key, part in value.items()})
                metric.reset()

    def on_train_epoch_end(self):
        self.computed("train")

    def on_validation_epoch_end(self):
        self.computed("val")

    def on_train_epoch_start(self):
        if "freezes" in self.plan["parts"]:  # the first epoch trains the head only
            for parameter in self.net.backbone.parameters():
                parameter.requires_grad = self.current_epoch > 0

    def on_train_batch_start(self, batch, batch_idx):
        if "toggles" in self.plan["parts"] and self.global_step == 4:
            self.net.backbone[0].bias.requires_grad = False

    def configure_optimizers(self):
        return optimizers_of(self.plan, self.net)


class Lit(Steps, pl.LightningModule):
    def __init__(self, plan):
        super().__init__()
        if "hparams" in plan["parts"]:
            self.save_hyperparameters({"lr": 0.05, "sizes": [8, 6, 3], "name": "drawn"})
        self.build(plan)


class Mod(Steps, nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.build(plan)


class Obj(Steps):
    def __init__(self, plan):
        self.build(plan)


class Gan(Lit):
    """Two networks, two optimizers, stepped by hand; schedulers, too."""

    def __init__(self, plan):
        super().__init__(plan)
        self.automatic_optimization = False
        self.other = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        POINTS.reach("training_step")
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss, logits, labels = self.loss_of(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.note("train", loss, logits, labels)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(second)
            x = pairs_in(batch)[0][0].to(self.other.weight.dtype)
            other = (self.other(x) - self.net(x).detach()).square().mean()
            if self.plan["logs"] != "nothing":
                self.log("other_loss", other.detach(), on_step=True, on_epoch=True)
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            self.untoggle_optimizer(second)

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        for scheduler in [s for s in [self.lr_schedulers()] if s is not None]:
            for one in scheduler if isinstance(scheduler, list) else [scheduler]:
                one.step()

    def configure_optimizers(self):
        first = OPTIMIZERS[self.plan["optimizer"]](list(self.net.parameters()))
        second = torch.optim.Adam(self.other.parameters(), lr=0.02)
        return [first, second], [lrs.ExponentialLR(second, 0.9)]


class Manual(Lit):
    """One optimizer, stepped by hand every second batch."""

    def __init__(self, plan):
        super().__init__(plan)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        POINTS.reach("training_step")
        optimizer = self.optimizers()
        loss, logits, labels = self.loss_of(batch)
        self.manual_backward(loss / 2)
        self.note("train", loss, logits, labels)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


SHAPES = {
    "lightning": Lit,
    "module": Mod,
    "object": Obj,
    "gan": Gan,
    "manual": Manual,
}


def function_steps(net, plan):
    """Return fit's arguments for a plain network with step functions."""

    def loss_of(net, batch):
        pairs = pairs_in(batch)
        return sum(
            nn.functional.cross_entropy(net(x.to(net.head.weight.dtype)), y) for x, y in pairs
        )

    def training_step(net, batch):
        POINTS.reach("training_step")
        return loss_of(net, batch)

    def validation_step(net, batch):
        POINTS.reach("validation_step")
        return loss_of(net, batch)

    steps = {"training_step": training_step, "optimizer": optimizers_of(plan, net)}
    return {**steps, "validation_step": validation_step} if plan["val"] != "none" else steps


# ---- optimizers and schedulers

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD_nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "Adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "Adam_fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "Adam_foreach": lambda p: torch.optim.Adam(p, lr=0.02, foreach=True),
    "Adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "AdamW_groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.02
    ),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SparseAdam": lambda p: torch.optim.SparseAdam(
        [q for q in p if tuple(q.shape) == (8, 3)], lr=0.02
    ),
}
SCHEDULERS = {
    "none": None,
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.95**step),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.7),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 4, 9], 0.7),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.5, total_iters=5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.05, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.05, total_steps=200, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.2),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.5), lrs.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.5), lrs.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}


def optimizers_of(plan, net):
    """Build the optimizers and schedulers for configure_optimizers."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if "backbone" in plan["callbacks"]:  # which adds the rest
        parameters = list(net.head.parameters())
    optimizer = OPTIMIZERS[plan["optimizer"]](parameters)
    make = SCHEDULERS[plan["scheduler"]]
    if make is None:
        return optimizer
    config = {
        "scheduler": make(optimizer),
        "interval": plan["interval"],
        "frequency": plan["frequency"],
    }
    if plan["scheduler"] == "ReduceLROnPlateau":
        config |= {"monitor": plan["followed"], "strict": False}
    return {"optimizer": optimizer, "lr_scheduler": config}


# ---- callbacks


class Shaking(lc.Callback):
    """Moves a weight by a number that its state counts."""

    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, trainer, module, *_):
        self.calls += 1
        with torch.no_grad():
            module.net.head.bias += 0.001 * self.calls

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Unfreezing(lc.BaseFinetuning):
    """Lets the backbone train from the second epoch on, in another parameter group."""

    def freeze_before_training(self, module):
        self.freeze(module.net.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.backbone, optimizer, lr=0.01)


CALLBACKS = {
    "stops": lambda w: lc.EarlyStopping(w["followed"], patience=1, min_delta=0.3, strict=False),
    "stops_in_training": lambda w: lc.EarlyStopping(
        w["followed"], patience=0, min_delta=0.2, check_on_train_epoch_end=True, strict=False
    ),
    "accumulates": lambda w: lc.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}),
    "swa": lambda w: lc.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2),
    "ema": lambda w: lc.EMAWeightAveraging(decay=0.8),
    "averages": lambda w: lc.WeightAveraging(),
    "backbone": lambda w: lc.BackboneFinetuning(1, verbose=False),
    "unfreezes": lambda w: Unfreezing(),
    "rates": lambda w: lc.LearningRateMonitor("step", log_momentum=True),
    "keeps": lambda w: lc.ModelCheckpoint(every_n_train_steps=2, save_last=True, save_top_k=-1),
    "keeps_best": lambda w: lc.ModelCheckpoint(
        monitor=w["followed"],
        save_top_k=2,
        save_last=True,
        save_on_train_epoch_end=bool(w["number"] % 2),
    ),
    "on_exception": lambda w: lc.OnExceptionCheckpoint(Path(w["root"], "aside")),
    "timer": lambda w: lc.Timer({"hours": 2}),
    "summary": lambda w: lc.ModelSummary(),
    "shakes": lambda w: Shaking(),
}


# ---- the whole


class Data(pl.LightningDataModule):
    """The loaders by methods; without a class of their own."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        if plan["val"] == "none":
            self.val_dataloader = None

    def train_dataloader(self):
        return loader_of(self.plan)

    def val_dataloader(self):
        return val_loader_of(self.plan["val"])


def loggers_of(plan):
    if plan["logger"] == "lightning_csv":
        return LightningCSV(plan["root"], "csv", version=0)
    if plan["logger"] == "tensorboard":
        return TensorBoardLogger(plan["root"], "board", version=0)
    return plan["logger"] == "ours"


def make(plan, root, **loop_words):
    """Return the options of FabricLoop, the model and the arguments of fit, in a folder."""
    warnings.simplefilter("ignore")
    plan = {**plan, "root": str(root)}
    callbacks = [CALLBACKS[name](plan) for name in plan["callbacks"]]
    loop = {
        "accelerator": "cpu", "default_root_dir": str(root), "enable_progress_bar": False, "enable_model_summary": False,
        "log_every_n_steps": 1, "logger": loggers_of(plan), **plan["loop"], **loop_words,
        "callbacks": [*callbacks, *([AtHooks()] if plan["listens"] else [])],
    }  # fmt: skip
    if plan["shape"] == "functions":
        net = Nets(plan["parts"])
        return loop, net, {**data_of(plan), **function_steps(net, plan)}
    return loop, SHAPES[plan["shape"]](plan), data_of(plan)


def data_of(plan):
    if plan["given"] == "datamodule":
        return {"datamodule": Data(plan)}
    return {"train_dataloaders": loader_of(plan), "val_dataloaders": val_loader_of(plan["val"])}
