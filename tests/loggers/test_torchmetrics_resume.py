"""Test that torchmetrics objects which a training feeds itself resume in the middle of an epoch."""

import pytest
import torch
import torchmetrics
from runs import loud
from torch import nn
from torchmetrics import aggregation, classification, regression, retrieval, text, wrappers

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


def classes(**arguments):
    return classification.MulticlassAccuracy(num_classes=3, **arguments)


def collection(**arguments):
    parts = {
        "a": classes(),
        "p": classification.MulticlassPrecision(num_classes=3),
        "e": classification.MulticlassAUROC(3),
    }
    return torchmetrics.MetricCollection(parts, **arguments)


def regressors():
    return torchmetrics.MetricCollection([regression.MeanSquaredError(), regression.MeanAbsoluteError()])


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
    "AUROC": (classification.BinaryAUROC, two),
    "PearsonCorrCoef": (regression.PearsonCorrCoef, pairs),
    "RetrievalMAP": (retrieval.RetrievalMAP, lambda i: (torch.rand(8), labels(2, 8), torch.arange(8) // 4)),
    "WordErrorRate": (text.WordErrorRate, lambda i: (["a b c"], ["a c c"][: 1 + i % 2])),
    "MinMaxMetric": (lambda: wrappers.MinMaxMetric(binary()), two),
    "BootStrapper": (lambda: wrappers.BootStrapper(classes(), num_bootstraps=3, raw=True), three),
    "Running": (lambda: wrappers.Running(aggregation.SumMetric(), window=3), values),
    "MetricTracker": (lambda: wrappers.MetricTracker(binary()), two),
    "MetricCollection": (collection, three),
    "MetricCollection, named groups": (lambda: collection(prefix="x/", compute_groups=[["a", "p"], ["e"]]), three),
    "MetricCollection of collections": (
        lambda: torchmetrics.MetricCollection({"one": regressors(), "two": regression.R2Score()}), pairs),
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
