"""Test that torchmetrics objects which a training feeds itself resume in the middle of an epoch."""

import pytest
import torch
import torchmetrics
from runs import loud
from torch import nn
from torchmetrics import aggregation, classification, regression, wrappers

from fabric_template import FabricLoop, TensorLoader


def inputs_for(make_inputs, i, name):
    """Return the inputs of a batch, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 * i + len(name))
        return make_inputs(i)


def labels(most, *shape):
    return torch.randint(0, most, shape)


def binary():
    return classification.BinaryAccuracy()


def classes():
    return classification.MulticlassAccuracy(num_classes=3)


def collection():
    parts = {
        "a": classes(),
        "p": classification.MulticlassPrecision(num_classes=3),
        "e": classification.MulticlassAUROC(3),
    }
    return torchmetrics.MetricCollection(parts)


class OwnMetric(torchmetrics.Metric):
    """A metric that counts in plain attributes, too."""

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


def values(i):
    return (torch.rand(4),)


def two(i):
    return torch.rand(6), labels(2, 6)


def three(i):
    return torch.rand(6, 3).softmax(1), labels(3, 6)


def pairs(i):
    return torch.rand(6), torch.rand(6)


METRICS = {
    "MeanMetric": (aggregation.MeanMetric, values),
    "PearsonCorrCoef": (regression.PearsonCorrCoef, pairs),
    "MinMaxMetric": (lambda: wrappers.MinMaxMetric(binary()), two),
    "BootStrapper": (lambda: wrappers.BootStrapper(classes(), num_bootstraps=3, raw=True), three),
    "Running": (lambda: wrappers.Running(aggregation.SumMetric(), window=3), values),
    "MetricTracker": (lambda: wrappers.MetricTracker(binary()), two),
    "MetricCollection": (collection, three),
    "a composition": (lambda: binary() + 2 * classification.BinaryPrecision(), two),
    "a user's own": (OwnMetric, pairs),
}  # fmt: skip


class Measures(nn.Module):
    """Updates its metrics, and keeps what they return by batch and at the end of epochs."""

    def __init__(self, table):
        super().__init__()
        self.net, self.table, self.answers = nn.Linear(1, 1), table, {}
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
        # After the last batch of the first epoch, and in the middle of the second one.
        if trainer.global_step in (3, 4):
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


def answers_of(table, resume=None):
    torch.manual_seed(1)
    module = Measures(table)
    callbacks = [] if resume else [Saves()]
    loop = FabricLoop(**loud(max_epochs=2, logger=False, save_last=False, callbacks=callbacks))
    module.trainer = loop
    loop.fit(module, TensorLoader(torch.ones(3, 1)), resume=resume)
    return module.answers


def same_answer(one, other):
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and one.dtype == other.dtype
            and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_answer(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_answer, one, other))
    return one == other or one != one


@pytest.mark.filterwarnings("ignore")
def test_every_metric_returns_the_same_after_a_resume():
    whole = answers_of(METRICS)
    for file, num_answers in (("3.ckpt", 4), ("4.ckpt", 3)):
        resumed = answers_of(METRICS, resume=file)
        compared = {key: value for key, value in whole.items() if key in resumed}
        assert len(compared) == num_answers * len(METRICS)
        assert [key for key, value in compared.items() if not same_answer(value, resumed[key])] == []


class Evaluated(nn.Module):
    """Logs one metric in training and one in evaluation."""

    def __init__(self):
        super().__init__()
        self.net, self.train_mean, self.val_mean = nn.Linear(1, 1), torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.train_mean(batch[0])
        self.log("train_mean", self.train_mean)
        return self.net(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        self.val_mean(batch[0])
        self.log("val_mean", self.val_mean)

    configure_optimizers = Measures.configure_optimizers


def test_a_metric_that_only_evaluations_log_is_not_saved(tmp_path):
    loop = FabricLoop(**loud(max_epochs=2, max_steps=4, default_root_dir=tmp_path))
    loop.fit(Evaluated(), TensorLoader(torch.ones(3, 1)), TensorLoader(torch.ones(2, 1)))
    own = torch.load(loop.checkpoint_callback.last_model_path, weights_only=True)["fabric_template"]
    assert set(own["ranks"][0]["results"]["torchmetrics"]) == {"train_mean"}
