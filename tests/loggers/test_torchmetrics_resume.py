"""Every public class of torchmetrics, saved in the middle of an epoch and resumed in a fresh module: the same values.

The classes are taken from the package's own rooms, so that a new one is met here first: it needs inputs, or a reason.
"""

import functools
import importlib
import inspect

import pytest
import torch
import torchmetrics
from runs import loud
from torch import nn
from torchmetrics import aggregation, classification, regression, wrappers

from fabric_template import FabricLoop, TensorLoader

ROOMS = ("aggregation", "audio", "classification", "clustering", "detection", "image", "nominal", "regression", "retrieval",
         "segmentation", "shape", "text")  # fmt: skip
NOT_HERE = {  # class: why it is not tried
    "BaseAggregator": "abstract", "Metric": "abstract", "Running": "among the wrappers",
    "ClusterAccuracy": "needs torch_linear_assignment",
    "PermutationInvariantTraining": "eight seconds, and holds two sums", "RetrievalMetric": "abstract",
    **dict.fromkeys(("DeepImageStructureAndTextureSimilarity", "QualityWithNoReference", "SpatialDistortionIndex"),
                    "needs torchvision"),
    **dict.fromkeys(("MemorizationInformedFrechetInceptionDistance",), "needs torch-fidelity"),
    "ROUGEScore": "needs nltk",
}  # fmt: skip


def boxes(seed):
    corners = torch.rand(2, 4).cumsum(1)
    return {"boxes": corners, "scores": torch.rand(2), "labels": torch.tensor([seed % 2, 1])}


def labels(most, *shape):
    return torch.randint(0, most, shape)


def texts(i):
    return ["the cat sat here now", "a b"][: 1 + i % 2], [["the cat sits here now"], ["a c"]][: 1 + i % 2]


INPUTS = {  # by room: what update may be given, drawn anew for each batch
    "aggregation": [lambda i: (torch.rand(4),)],
    "audio": [lambda i: (torch.rand(2, 900), torch.rand(2, 900)), lambda i: (torch.rand(1, 2, 900), torch.rand(1, 2, 900)),
              lambda i: (torch.rand(1, 4, 5, 2), torch.rand(1, 4, 5, 2)), lambda i: (torch.rand(2, 8000),)],
    "classification": [lambda i: (torch.rand(6), labels(2, 6)), lambda i: (torch.rand(6, 3).softmax(1), labels(3, 6)),
                       lambda i: (torch.rand(6, 3), labels(2, 6, 3)),
                       lambda i: (torch.rand(6), labels(2, 6), torch.arange(6) % 2)],
    "clustering": [lambda i: (labels(3, 8), labels(3, 8)), lambda i: (torch.rand(8, 2), torch.arange(8) % 3)],
    "detection": [lambda i: ([boxes(i)], [boxes(i + 1)]), lambda i: (labels(2, 1, 8, 8, 2), labels(2, 1, 8, 8, 2))],
    "image": [lambda i: (torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)), lambda i: (torch.rand(2, 3, 16, 16),),
              lambda i: (torch.rand(2, 1, 16, 16), torch.rand(2, 1, 16, 16)),
              lambda i: (torch.rand(1, 1, 180, 180), torch.rand(1, 1, 180, 180)),
              lambda i: (torch.rand(2, 4, 32, 32), {"ms": torch.rand(2, 4, 16, 16), "pan": torch.rand(2, 4, 32, 32)})],
    "nominal": [lambda i: (labels(3, 20), labels(3, 20)), lambda i: (torch.tensor([[2, 1], [1, 2], [0, 3]]),)],
    "regression": [lambda i: (torch.rand(6), torch.rand(6)), lambda i: (torch.rand(6, 2), torch.rand(6, 2)),
                   lambda i: (torch.rand(6, 2).softmax(1), torch.rand(6, 2).softmax(1)),
                   lambda i: (torch.rand(6, 2), torch.rand(6))],
    "retrieval": [lambda i: (torch.rand(8), labels(2, 8), torch.arange(8) // 4)],
    "segmentation": [lambda i: (labels(3, 2, 8, 8), labels(3, 2, 8, 8)), lambda i: (labels(2, 2, 3, 8, 8),) * 2],
    "shape": [lambda i: (torch.rand(2, 5, 3), torch.rand(2, 5, 3))],
    "text": [lambda i: (texts(i)[0], [text[0] for text in texts(i)[1]]), texts,
             lambda i: (torch.rand(2, 4, 5), labels(5, 2, 4)),
             lambda i: ([{"prediction_text": "a", "id": "1"}], [{"answers": {"answer_start": [1], "text": ["a"]}, "id": "1"}]),
             ],
}  # fmt: skip
_LIMIT = [{name: 0.5} for name in ("min_recall", "min_precision", "min_sensitivity", "min_specificity", "threshold")]
_KINDS = [{}, {"num_classes": 3}, {"num_labels": 3}, {"task": "binary"}, {"task": "multiclass", "num_classes": 3}]
WORDS = [
    *_KINDS, *[{**limit, **kind} for limit in [{"beta": 2.0}, *_LIMIT] for kind in _KINDS], {"num_groups": 2},
    {"num_classes": 3, "input_format": "index"}, {"p": 2.0}, {"data_range": 1.0}, {"fs": 8000}, {"things": {0}, "stuffs": {1}},
]  # fmt: skip


def draw(make_inputs, i, name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 * i + len(name))
        return make_inputs(i)


def classes_of(room):
    package = importlib.import_module(f"torchmetrics.{room}")
    names = getattr(package, "__all__", None) or [name for name in vars(package) if not name.startswith("_")]
    found = ((name, getattr(package, name, None)) for name in names)
    return {name: kind for name, kind in found if inspect.isclass(kind) and issubclass(kind, torchmetrics.Metric)}


def find_words(name, kind, room):
    """The first words and inputs with which this class counts: (a way to make it, its inputs); None: there are none."""
    for words in WORDS:
        try:
            kind(**words)
        except Exception:
            continue
        for make_inputs in INPUTS[room]:
            try:
                metric = kind(**words)
                metric.update(*draw(make_inputs, 0, name))
                metric.compute()
                metric(*draw(make_inputs, 1, name))
            except Exception:
                continue
            return functools.partial(kind, **words), make_inputs
    return None


def binary():
    return classification.BinaryAccuracy()


def classes(**words):
    return classification.MulticlassAccuracy(num_classes=3, **words)


def collection(**words):
    parts = {
        "a": classes(),
        "p": classification.MulticlassPrecision(num_classes=3),
        "e": classification.MulticlassAUROC(3),
    }
    return torchmetrics.MetricCollection(parts, **words)


def regressors():
    return torchmetrics.MetricCollection([regression.MeanSquaredError(), regression.MeanAbsoluteError()])


class Custom(torchmetrics.Metric):
    """A user's own, with attributes beside its state that count, too."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")
        self.calls, self.words, self.scale = 0, {}, 2.0

    def update(self, preds, target):
        self.seen.append(preds.sum())
        self.calls += 1
        self.words[self.calls] = (float(target.sum()), [self.calls])

    def compute(self):
        return torch.stack(list(self.seen)).sum() * self.scale + sum(
            sum(sums) + first for first, sums in self.words.values()
        )


TWO, THREE, PAIRS = INPUTS["classification"][0], INPUTS["classification"][1], INPUTS["regression"][0]
MATRIX = INPUTS["regression"][1]
WRAPPERS = {
    "MinMaxMetric": (lambda: wrappers.MinMaxMetric(binary()), TWO),
    "BootStrapper": (lambda: wrappers.BootStrapper(classes(), num_bootstraps=3, raw=True), THREE),
    "ClasswiseWrapper": (lambda: wrappers.ClasswiseWrapper(classes(average=None)), THREE),
    "MultioutputWrapper": (lambda: wrappers.MultioutputWrapper(regression.MeanSquaredError(), 2), MATRIX),
    "MultitaskWrapper": (
        lambda: wrappers.MultitaskWrapper({"x": regression.MeanSquaredError(), "y": regressors()}),
        lambda i: [{"x": torch.rand(4), "y": torch.rand(4)} for _ in range(2)],
    ),
    "Running": (lambda: wrappers.Running(aggregation.SumMetric(), window=3), INPUTS["aggregation"][0]),
    "MetricTracker": (lambda: wrappers.MetricTracker(binary()), TWO),
    "LambdaInputTransformer": (lambda: wrappers.LambdaInputTransformer(binary(), lambda p: 1 - p), TWO),
    "BinaryTargetTransformer": (lambda: wrappers.BinaryTargetTransformer(binary(), threshold=0), TWO),
    "MetricCollection": (collection, THREE),
    "MetricCollection, named groups": (lambda: collection(prefix="x/", compute_groups=[["a", "p"], ["e"]]), THREE),
    "MetricCollection, no groups": (lambda: collection(postfix="_y", compute_groups=False), THREE),
    "MetricCollection of collections": (
        lambda: torchmetrics.MetricCollection({"one": regressors(), "two": regression.R2Score()}), PAIRS),
    "MetricTracker of a collection": (lambda: wrappers.MetricTracker(regressors(), maximize=[False, False]), PAIRS),
    "MinMaxMetric in a collection": (lambda: torchmetrics.MetricCollection({"m": wrappers.MinMaxMetric(binary())}), TWO),
    "Running in a tracker": (lambda: wrappers.MetricTracker(wrappers.Running(regression.MeanSquaredError()), False), PAIRS),
    "a composition": (lambda: binary() + 2 * classification.BinaryPrecision(), TWO),
    "a user's own": (Custom, PAIRS),
}  # fmt: skip


class Measures(nn.Module):
    """Feeds all its metrics; what they answered, by batch, and what they computed at the ends of epochs."""

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
            inputs = draw(self.table[name][1], i, name)
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
        if trainer.global_step in (3, 4):  # after the first epoch's last batch, and in the middle of the second one
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


def check(table):
    whole = answers_of(table)
    for file in ("3.ckpt", "4.ckpt"):
        resumed = answers_of(table, resume=file)
        there = {key: value for key, value in whole.items() if key in resumed}
        assert len(there) == {"3.ckpt": 4, "4.ckpt": 3}[file] * len(table)  # of two batches and of epochs
        assert [key for key, value in there.items() if not same_answer(value, resumed[key])] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("room", ROOMS)
def test_every_class_of_a_room_goes_on_where_it_was(room):
    found = {name: find_words(name, kind, room) for name, kind in classes_of(room).items() if name not in NOT_HERE}
    assert [name for name, way in found.items() if way is None] == []
    check(found)


@pytest.mark.filterwarnings("ignore")
def test_every_wrapper_goes_on_where_it_was():
    public = {
        name for name in wrappers.__all__ if name not in ("FeatureShare", "MetricInputTransformer")
    }  # a net; abstract
    assert public <= WRAPPERS.keys()
    check(WRAPPERS)
