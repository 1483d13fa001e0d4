"""Test that loop.log_dict in hooks writes to the epoch's row or to steps.csv."""

import csv
import io

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import make_loader
from runs import Plain, Snapshots, fit, logs_of, val_loader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from fabric_template import FabricLoop, MiniLoop, TensorLoader


class Logs(Callback):
    """A callback that calls log_dict in one hook."""

    def __init__(self, hook, **values):
        def call(loop, module, *_):
            loop.log_dict({name: value(loop) if callable(value) else value for name, value in values.items()})

        setattr(self, hook, call)


def rows(path):
    return list(csv.DictReader(io.StringIO(path.read_text()))) if path.exists() else []


EPOCH = {"epoch": lambda loop: loop.current_epoch, "mine": lambda loop: 10.0 * loop.current_epoch}
HOOKS = ["on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize("hook", HOOKS[::2])
def test_log_dict_with_an_epoch_key_adds_values_to_the_row_of_that_epoch(tmp_path, hook):
    options = {"val": val_loader, "max_epochs": 2, "num_sanity_val_steps": 0, "save_every_n_steps": 1}
    copies = Snapshots(tmp_path / "run", tmp_path / "killed")
    fit(tmp_path / "run", Plain, callbacks=[Logs(hook, **EPOCH), copies], **options)
    found = rows(tmp_path / "run/logs/run/version_0/metrics.csv")
    assert [(row["epoch"], row["step"], row["mine"]) for row in found] == [("0", "10", "0.0"), ("1", "20", "10.0")]
    assert all(all(row.values()) for row in found)
    assert logs_of(tmp_path / "run")[1] is None
    root = tmp_path / "killed/13"
    fit(root, Plain, callbacks=[Logs(hook, **EPOCH)], seed=9, resume="last", **options)
    assert logs_of(root) == logs_of(tmp_path / "run")


@pytest.mark.parametrize("hook", [*HOOKS[1:3], "on_train_start", "on_train_end"])
def test_log_dict_without_an_epoch_key_writes_to_steps_csv(tmp_path, hook):
    """Outside an epoch, even values with the key "epoch" are written to steps.csv."""
    values = {"mine": 3.0} if hook in HOOKS else EPOCH
    fit(tmp_path, Plain, val=val_loader, max_epochs=1, num_sanity_val_steps=0, callbacks=[Logs(hook, **values)])
    (row,) = rows(tmp_path / "logs/run/version_0/metrics.csv")
    assert "mine" not in row
    assert all(row.values())
    found = rows(tmp_path / "logs/run/version_0/steps.csv")
    expected = {
        "on_train_batch_end": [(str(step), "0") for step in range(1, 11)], "on_validation_end": [("10", "0")],
        "on_train_start": [("0", "0")], "on_train_end": [("10", "1")],
    }[hook]  # fmt: skip
    assert [(row["step"], row["epoch"]) for row in found] == expected
    assert all(row["mine"] for row in found)


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("is_logged_in_step", [True, False])
def test_log_dict_writes_a_column_for_each_metric_of_a_metric_collection(tmp_path, loop_class, is_logged_in_step):
    metrics = MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassRecall(3)], prefix="val_")

    class Classifier(torch.nn.Linear):
        def training_step(self, batch):
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch):
            metrics(self(batch[0]), batch[1])
            if is_logged_in_step:
                loop.log_dict(metrics)

        def on_validation_epoch_end(self):
            if not is_logged_in_step:
                loop.log_dict(metrics)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x, y = torch.randn(20, 4), torch.arange(20) % 3
    net = Classifier(4, 3)
    loop = loop_class(max_epochs=1, default_root_dir=tmp_path)
    loop.fit(net, TensorLoader(x, y, batch_size=4), TensorLoader(x, y, batch_size=7))
    expected = metrics.clone()
    expected.reset()
    expected.update(net(x), y)
    (row,) = rows(tmp_path / "logs/run/version_0/metrics.csv")
    found = {name: float(row[name]) for name in expected.compute()}
    assert found == {name: pytest.approx(value.item()) for name, value in expected.compute().items()}


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_the_monitor_option_accepts_a_metric_logged_with_log_dict(tmp_path, loop_class):
    class Net(Plain):
        def on_validation_epoch_end(self):
            loop.log_dict({"val_rank": loop.current_epoch})

        def on_train_epoch_end(self):
            loop.log_dict({"rank": 5})

    loop = loop_class(max_epochs=2, monitor="val_rank", mode="max", default_root_dir=tmp_path, accelerator="cpu")
    loop.fit(Net(), make_loader(), val_loader())
    found = rows(tmp_path / "logs/run/version_0/metrics.csv")
    assert [(float(row["val_rank"]), float(row["rank"])) for row in found] == [(0, 5), (1, 5)]
    assert (tmp_path / "checkpoints/run/version_0/best.ckpt").exists()


def test_log_dict_in_on_predict_epoch_end_raises_no_error(tmp_path):
    """In predict, self.log raises an error, but log_dict writes a row."""
    callback = Logs("on_predict_epoch_end", mine=3.0)
    loop = FabricLoop(default_root_dir=tmp_path, accelerator="cpu", callbacks=[callback])
    predictions = loop.predict(torch.nn.Linear(8, 1), val_loader(), predict_step=lambda net, batch: net(batch[0]))
    assert len(predictions) == len(val_loader())
