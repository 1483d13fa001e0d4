"""Test that torchmetrics objects are restored exactly if a run resumes in the middle of an epoch."""

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from modules import quiet
from runs import RecordByKey, same, with_files
from torch import nn
from torchmetrics import aggregation, classification, regression, wrappers

from fabric_template import FabricLoop, MiniLoop, TensorLoader


def inputs_for(kind, i, name):
    """Return the inputs of batch ``i``, which are the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 * i + len(name))
        if kind == "classes":
            return torch.rand(6, 3).softmax(1), torch.randint(3, (6,))
        if kind == "values":
            return (torch.rand(4),)
        return torch.rand(6), torch.randint(2, (6,)) if kind == "labels" else torch.rand(6)


def binary():
    return classification.BinaryAccuracy()


def classes():
    return classification.MulticlassAccuracy(num_classes=3)


def collection():
    parts = {"a": classes(), "p": classification.MulticlassPrecision(3), "e": classification.MulticlassAUROC(3)}
    return torchmetrics.MetricCollection(parts)


class OwnMetric(torchmetrics.Metric):
    """A metric that also keeps values in plain attributes."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")
        self.calls, self.sums = 0, {}

    def update(self, preds, target):
        self.seen.append(preds.sum())
        self.calls += 1
        self.sums[self.calls] = (float(target.sum()), [self.calls])

    def compute(self):
        return torch.stack(list(self.seen)).sum() + sum(value + calls[0] for value, calls in self.sums.values())


METRICS = {
    "MeanMetric": (aggregation.MeanMetric, "values"),
    "PearsonCorrCoef": (regression.PearsonCorrCoef, "pairs"),
    "MinMaxMetric": (lambda: wrappers.MinMaxMetric(binary()), "labels"),
    "BootStrapper": (lambda: wrappers.BootStrapper(classes(), num_bootstraps=3, raw=True), "classes"),
    "Running": (lambda: wrappers.Running(aggregation.SumMetric(), window=3), "values"),
    "MetricTracker": (lambda: wrappers.MetricTracker(binary()), "labels"),
    "MetricCollection": (collection, "classes"),
    "a composition": (lambda: binary() + 2 * classification.BinaryPrecision(), "labels"),
    "a user's own": (OwnMetric, "pairs"),
}  # fmt: skip


class Measures(nn.Module):
    """A module that updates its metrics, and records their results after batches and at the end of epochs."""

    def __init__(self, table):
        super().__init__()
        self.net, self.table, self.answers = nn.Linear(1, 1), table, RecordByKey()
        self.metrics = nn.ModuleDict({str(number): make() for number, (make, _) in enumerate(table.values())})

    def named(self):
        return zip(self.table, self.metrics.values(), strict=True)

    def on_train_epoch_start(self):
        for _, metric in self.named():
            if isinstance(metric, wrappers.MetricTracker):
                metric.increment()

    def training_step(self, batch, batch_idx):
        i = 10 * int(self.trainer.current_epoch) + batch_idx
        for name, metric in self.named():
            inputs = inputs_for(self.table[name][1], i, name)
            answer = metric(*inputs) if batch_idx % 2 else metric.update(*inputs)
            if i >= 11:
                self.answers[name, i] = answer
        return self.net(batch[0]).sum()

    def on_train_epoch_end(self):
        for name, metric in self.named():
            compute = getattr(metric, "compute_all", metric.compute)
            self.answers[name, "epoch", int(self.trainer.current_epoch)] = compute()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Saves:
    def on_train_batch_end(self, trainer, module, *args):
        # Save after the last batch of the first epoch, and in the middle of the second epoch.
        if trainer.global_step in (3, 4):
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")

    def on_validation_batch_end(self, trainer, *args):
        trainer.save_checkpoint("in_evaluation.ckpt")


def answers_of(table, resume=None):
    torch.manual_seed(1)
    module = Measures(table)
    callbacks = [] if resume else [Saves()]
    loop = FabricLoop(**with_files(max_epochs=2, logger=False, save_last=False, callbacks=callbacks))
    module.trainer = loop
    loop.fit(module, TensorLoader(torch.ones(3, 1)), resume=resume)
    return module.answers


@pytest.mark.filterwarnings("ignore")
def test_each_torchmetrics_object_computes_the_same_value_in_a_resumed_run():
    whole = answers_of(METRICS)
    for file, num_answers in (("3.ckpt", 4), ("4.ckpt", 3)):
        resumed = answers_of(METRICS, resume=file)
        compared = {key: value for key, value in whole.items() if key in resumed}
        assert len(compared) == num_answers * len(METRICS)
        assert [key for key, value in compared.items() if not same(value, resumed[key])] == []


class Best(torchmetrics.MeanMetric):
    """A metric that keeps its largest result even when it is reset."""

    best = 0.0

    def compute(self):
        self.best = max(self.best, super().compute().item())
        return torch.tensor(self.best)


class Evaluated(nn.Module):
    """A module that logs a metric in training, and a metric with decreasing values in validation."""

    def __init__(self):
        super().__init__()
        self.net, self.train_mean, self.val_best = nn.Linear(1, 1), torchmetrics.MeanMetric(), Best()

    def training_step(self, batch, batch_idx):
        self.train_mean(batch[0])
        self.log("train_mean", self.train_mean)
        return self.net(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        self.val_best(self.net(batch[0]).exp())
        self.log("val_best", self.val_best)

    configure_optimizers = Measures.configure_optimizers


@pytest.mark.filterwarnings("ignore:save_checkpoint. called during a validation")
def test_a_checkpoint_saved_during_validation_contains_no_state_of_validation_metrics():
    """A run saved during a validation repeats the whole validation when it resumes."""

    def train(max_epochs, resume=None):
        torch.manual_seed(1)
        loop = FabricLoop(**with_files(max_epochs=max_epochs, num_sanity_val_steps=0, callbacks=[Saves()]))
        loaders = TensorLoader(torch.ones(3, 1)), TensorLoader(torch.ones(2, 1))
        return loop.fit(Evaluated(), *loaders, resume=resume)["val_best"].tolist()

    whole = train(3)
    own = torch.load("in_evaluation.ckpt", weights_only=True)["fabric_template"]
    assert set(own["ranks"][0]["results"]["torchmetrics"]) == {"train_mean"}
    train(1)
    assert train(3, resume="last") == whole == whole[:1] * 3


class LogsInSomeEpochs(pl.LightningModule):
    """A module that updates torchmetrics objects in all epochs, but logs them only in even epochs."""

    def __init__(self):
        super().__init__()
        self.net, self.mean = nn.Linear(1, 1), aggregation.MeanMetric()
        parts = {"high": aggregation.MaxMetric(), "low": aggregation.MinMetric()}
        self.parts = torchmetrics.MetricCollection(parts, prefix="val_")
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().sum()
        self.mean.update(loss)
        if self.current_epoch % 2 == 0:
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.parts.update(self.net(batch[0]).sum() * (-1) ** self.current_epoch)

    def on_validation_epoch_end(self):
        self.log("val_epoch", float(self.current_epoch))
        if self.current_epoch % 2 == 0:
            self.log_dict(self.parts)

    def on_train_epoch_end(self):
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.seen.append({name: values[name] for name in ("mean", "val_high", "val_low")})

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_an_epoch_resets_torchmetrics_objects_that_only_earlier_epochs_have_logged(loop_class):
    loader = TensorLoader(torch.arange(3.0).reshape(3, 1))
    torch.manual_seed(1)
    expected = LogsInSomeEpochs()
    pl.Trainer(**quiet(max_epochs=5)).fit(expected, loader, loader)
    for first in (1, 2, 3):
        options = {"accelerator": "cpu", "name": str(first)}
        for epochs in (first, 5):
            torch.manual_seed(1)
            module = LogsInSomeEpochs()
            loop_class(max_epochs=epochs, **options).fit(module, loader, loader, resume="auto")
        # A resumed run restores the list ``seen``, so the list has the values of all five epochs.
        assert module.seen == expected.seen


class Listed(nn.Module):
    """A module that logs a metric from a list in one batch of each epoch, and a metric from a dict in even epochs."""

    def __init__(self):
        super().__init__()
        self.net, self.means, self.highs = nn.Linear(1, 1), [torchmetrics.MeanMetric()], {"a": torchmetrics.MaxMetric()}

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().sum()
        self.means[0].update(loss)
        if batch_idx == 0:
            self.log("mean", self.means[0], on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.highs["a"].update(self.net(batch[0]).sum())
        if self.trainer.current_epoch % 2 == 0:
            self.log("val_high", self.highs["a"])
        return self.net(batch[0]).sum()

    configure_optimizers = Measures.configure_optimizers


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_torchmetrics_objects_in_lists_and_dicts_are_restored_exactly(loop_class):
    loader = TensorLoader(torch.arange(3.0).reshape(3, 1))

    def train(name, resume=None, **options):
        torch.manual_seed(1)
        module = Listed()
        loop = loop_class(accelerator="cpu", name=name, **options)
        module.trainer, module.log = loop, loop.log
        rows = loop.fit(module, loader, loader, resume=resume).reindex(columns=["mean", "val_high"])
        return rows.fillna(-1).to_numpy().tolist()

    expected = train("whole", max_epochs=4)
    for first in (1, 2):
        train(str(first), max_epochs=first)
        assert train(str(first), resume="last", max_epochs=4) == expected
    if loop_class is FabricLoop:
        for stopped in (2, 4, 8):
            train(f"at {stopped}", max_steps=stopped)
            assert train(f"at {stopped}", resume="last", max_epochs=4)[-1] == expected[-1]
