"""Test evaluation and Lightning's callbacks with step functions and plain objects."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from modules import HAS_PLAIN_SWALR, assert_same_weights, make_data, weight_averaging
from parameters import once
from runs import same, with_files
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop, TensorLoader


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def make_optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def loss_of(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def loss_and_acc(net, batch, batch_idx):
    logits = net(batch[0])
    return cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).float().mean()


def make_loaders():
    train, val = make_data(24), make_data(12, seed=1)
    return TensorLoader(*train.tensors, batch_size=6), TensorLoader(*val.tensors, batch_size=4)


class Steps:
    def training_step(self, batch):
        return loss_of(self.net, batch)

    def validation_step(self, batch, batch_idx):
        return loss_and_acc(self.net, batch, batch_idx)

    def configure_optimizers(self):
        return make_optimizer(self.net)


class Object(Steps):
    def __init__(self):
        self.net = make_net()


class Module(Steps, nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()


class Lit(Steps, pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch)

    def validation_step(self, batch, batch_idx):
        loss, _ = super().validation_step(batch, batch_idx)
        self.log("val_loss", loss)


def fit(kind, resume=None, **options):
    """Train with step functions or an object of class ``kind``.

    Return (loop, model, the model's network).
    """
    loop = FabricLoop(**with_files(**{"max_epochs": 2, "logger": False, **options}))
    model = make_net() if kind == "functions" else kind()
    given = {}
    if kind == "functions":
        given = {"training_step": loss_of, "validation_step": loss_and_acc, "optimizer": make_optimizer(model)}
    loop.fit(model, *make_loaders(), resume=resume, **given)
    return loop, model, getattr(model, "net", model)


LEVELS = ["functions", Object, Module]


def by_hand(net, batches):
    """Return the mean loss and accuracy over all samples, computed in eval mode."""
    net.eval()
    with torch.no_grad():
        values = [torch.stack(loss_and_acc(net, batch, 0)) * len(batch[0]) for batch in batches]
    net.train()
    return (sum(values) / 12).tolist()


def test_validate_test_and_predict_use_the_step_functions_passed_to_fit():
    loop, net, _ = fit("functions", monitor="val_loss", name="stages")
    _, val = make_loaders()
    loss, acc = by_hand(net, val)
    assert loop.validate(net, val, verbose=False) == [pytest.approx({"val_loss": loss, "val_acc": acc})]
    assert loop.test(net, val, verbose=False) == [pytest.approx({"test_loss": loss, "test_acc": acc})]
    x = make_data(12, seed=1).tensors[0]
    with torch.no_grad():
        expected = [net.eval()(part) for part in (x[:5], x[5:])]
    assert same(loop.predict(net, [x[:5], x[5:]]), expected)
    for checkpoint in ("best", "last"):
        (result,) = loop.validate(net, val, load=checkpoint, verbose=False)
        assert result == {name: pytest.approx(v) for name, v in loop.callback_metrics.items() if "val" in name}


def test_evaluation_and_prediction_accept_step_functions_without_an_earlier_fit():
    _, net, _ = fit("functions", name="stages")
    _, val = make_loaders()
    loss, acc = by_hand(net, val)
    fresh = FabricLoop(**with_files(name="stages", logger=False))
    options = {"load": "last", "verbose": False}
    result = fresh.validate(make_net(), val, validation_step=loss_and_acc, **options)
    assert result == [pytest.approx({"val_loss": loss, "val_acc": acc})]
    assert fresh.test(make_net(), val, test_step=loss_of, **options) == [pytest.approx({"test_loss": loss})]
    classes = fresh.predict(net, val, predict_step=lambda net, batch: net(batch[0]).argmax(1))
    assert [len(part) for part in classes] == [4, 4, 4]
    with pytest.raises(ValueError, match=r"test_step: got None, expected .*test_step=fn"):
        fresh.test(make_net(), val)


class RecordsModels(Callback):
    def __init__(self):
        self.seen = []

    def on_fit_start(self, trainer, pl_module):
        self.seen.append(pl_module)

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(trainer.model)


@pytest.mark.parametrize("kind", LEVELS)
def test_a_callback_gets_the_model_that_was_given_to_fit(kind):
    class Plain:
        def on_train_end(self, loop, module):
            callback.seen.append(module)

    callback = RecordsModels()
    _, model, _ = fit(kind, callbacks=[callback, Plain()], enable_checkpointing=False)
    assert len(callback.seen) == 5
    assert all(part is model for part in callback.seen)


class Summary(ModelSummary):
    @staticmethod
    def summarize(summary_data, *args, **kwargs):
        print([(name, values) for name, values in summary_data if name != "Name"], args)


CALLBACKS = {
    "ema": lambda: weight_averaging("EMAWeightAveraging", decay=0.5),
    "average": lambda: weight_averaging(avg_fn=lambda averaged, new, n: averaged + (new - averaged) / (n + 1)),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "scheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "summary": lambda: Summary(max_depth=2),
    "checkpoint": lambda: ModelCheckpoint(monitor="val_loss", filename="best", save_last=True),
}


@pytest.mark.parametrize(("kind", "name"), once(LEVELS, CALLBACKS))
def test_lightning_callbacks_work_the_same_with_and_without_a_lightning_module(kind, name, capsys, tmp_path):
    """Weights, optimizer states and printed output equal those of a run with a LightningModule."""
    expected, _, net = fit(Lit, max_epochs=3, callbacks=[CALLBACKS[name]()], default_root_dir=str(tmp_path / "lit"))
    shown = capsys.readouterr().out
    loop, _, mine = fit(kind, max_epochs=3, callbacks=[CALLBACKS[name]()], default_root_dir=str(tmp_path / "plain"))
    assert_same_weights(net, mine)
    assert loop.global_step == expected.global_step
    states = [one.optimizers[0].state_dict() for one in (expected, loop)]
    assert same(*states)
    if name == "summary":
        table = capsys.readouterr().out
        assert shown.count("Linear") == table.count("Linear") == 2
        # With step functions, the table differs, because the network itself is the root of the summary.
        assert table == shown or kind == "functions"
    last = loop.checkpoint_path("last")
    weights = torch.load(last, weights_only=name != "swa" or HAS_PLAIN_SWALR)["state_dict"]
    assert list(weights) == list((mine if kind == "functions" else nn.ModuleDict({"net": mine})).state_dict())
