"""Test metrics that have the same name in training and validation."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from modules import quiet
from parameters import sample
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop

BOTH, EPOCH = {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}


class Same(pl.LightningModule):
    """A module that logs "x" with values that rise from 100 in training and fall from 200 in validation."""

    def __init__(self, train, val):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.options, self.val_options = train, val

    def training_step(self, batch, batch_idx):
        self.log("x", 100.0 + self.global_step, **self.options)
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("x", 200.0 - 10 * self.current_epoch + batch_idx, **self.val_options)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def recorder():
    """Return a callback, and the list in which it records the logged metrics."""
    seen = []

    def see(where):
        def hook(trainer, *given):
            views = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
            seen.append((where, *({name: float(value) for name, value in view.items()} for view in views)))

        return hook

    hooks = "on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"
    return LambdaCallback(**{hook: see(hook) for hook in hooks}), seen


def loader(length):
    return DataLoader(torch.ones(length, 1))


TRAIN = [{"prog_bar": True}, BOTH, EPOCH]


@pytest.mark.parametrize(
    ("train", "val", "length", "interval"), sample(5, TRAIN, [{}, {"on_step": True}], [3, 4], [1.0, 2]), ids=str
)
def test_a_metric_logged_in_training_and_validation_has_the_same_values_as_with_trainer(
    tmp_path, train, val, length, interval
):
    seen = []
    for make in (pl.Trainer, FabricLoop):
        stopping = EarlyStopping("x", patience=1, mode="max")
        best = ModelCheckpoint(tmp_path / make.__name__, "{epoch}-{x}", "x", mode="max", save_top_k=2)
        callback, views = recorder()
        options = quiet(callbacks=[stopping, best, callback], enable_checkpointing=True, default_root_dir=tmp_path)
        trainer = make(max_epochs=4, val_check_interval=interval, **options)
        trainer.fit(Same(train, val), loader(length), loader(2))
        files = sorted(path.name for path in (tmp_path / make.__name__).glob("*.ckpt"))
        seen.append((views, stopping.state_dict(), files, trainer.current_epoch, trainer.global_step))
    assert seen[0] == seen[1]


def test_hooks_of_a_resumed_run_read_the_same_metrics_as_in_an_uninterrupted_run(tmp_path):
    """The checkpoint is saved at the end of the validation that follows an epoch's last batch."""
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    (first, whole), (second, resumed) = recorder(), recorder()
    options = quiet(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    FabricLoop(callbacks=[keep, first], **options).fit(Same({}, {}), loader(3), loader(2))
    FabricLoop(callbacks=[second], **options).fit(Same({}, {}), loader(3), loader(2), resume=tmp_path / "epoch=0.ckpt")
    after = [where for where, *_ in whole].index("on_train_epoch_end")
    assert [views[:2] for views in resumed] == [views[:2] for views in whole[after:]]
    assert resumed[0][:2] == ("on_train_epoch_end", {"x": 200.5})


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
def test_monitor_uses_the_validation_value_of_a_metric_that_training_also_logs(tmp_path, make):
    loop = make(max_epochs=2, monitor="x", mode="min", default_root_dir=tmp_path)
    history = loop.fit(Same({}, {}), loader(3), loader(2))
    assert history["x"].tolist() == [200.5, 190.5]
    best = torch.load(next(tmp_path.rglob("best.ckpt")), weights_only=True)
    # Epoch 1 is the best, because its validation value 190.5 is less than the value 200.5 of epoch 0.
    assert best["epoch"] == 1


class Breaks(Same):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


def test_the_last_logged_values_can_be_read_after_an_error(tmp_path):
    found = []
    for make in (pl.Trainer, FabricLoop):
        trainer = make(**quiet(max_epochs=1, default_root_dir=tmp_path))
        with pytest.raises(RuntimeError, match="broken"):
            trainer.fit(Breaks(BOTH | {"prog_bar": True}, {}), loader(3))
        found.append([dict(trainer.callback_metrics), dict(trainer.logged_metrics), trainer.progress_bar_metrics])
    assert found[0] == found[1] == [{"x": 101.0, "x_step": 101.0}, {"x_step": 101.0}, {"x_step": 101.0}]
