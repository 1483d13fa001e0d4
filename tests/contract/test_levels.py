"""Test that levels 1 to 4 end with the same weights on the same problem."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from modules import assert_same_weights, make_data
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop, TensorLoader

EPOCHS = 3
COLUMNS = ["epoch", "step", "train_loss", "val_loss", "val_acc", "lr", "time", "waiting"]


def make_net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def make_optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_loaders():
    train, val = make_data(40), make_data(12, seed=1)
    return TensorLoader(*train.tensors, batch_size=6, shuffle=True), TensorLoader(*val.tensors, batch_size=4)


def make_loop(name, **options):
    return FabricLoop(
        accelerator="cpu",
        max_epochs=EPOCHS,
        enable_progress_bar=False,
        enable_model_summary=False,
        name=name,
        **options,
    )


def loss_of(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def loss_and_acc(net, batch):
    logits = net(batch[0])
    return cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).float().mean()


def by_hand():
    """Train with a hand-written loop."""
    torch.manual_seed(1)
    net = make_net()
    optimizer = make_optimizer(net)
    train, val = make_loaders()
    rows = []
    for _ in range(EPOCHS):
        total = torch.zeros(())
        for batch in train:
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(batch[0])
        with torch.no_grad():
            values = torch.stack([torch.stack(loss_and_acc(net, batch)) * len(batch[0]) for batch in val]).sum(0) / 12
        rows.append([total.item() / 40, *values.tolist()])
    return net, rows


@pytest.fixture(scope="module")
def expected():
    return by_hand()


def assert_history(history, expected_rows):
    assert list(history.columns) == COLUMNS
    assert history["epoch"].tolist() == list(range(EPOCHS))
    assert history["step"].tolist() == [7, 14, 21]
    values = torch.tensor(history[["train_loss", "val_loss", "val_acc"]].to_numpy())
    torch.testing.assert_close(values, torch.tensor(expected_rows, dtype=values.dtype), rtol=1e-6, atol=1e-7)


def test_a_hand_written_loop_can_call_setup_backward_and_log_dict(expected, tmp_path):
    torch.manual_seed(1)
    loop = make_loop("parts")
    bare = make_net()
    train, val = make_loaders()
    net, optimizer, train, val = loop.setup(bare, make_optimizer(bare), train, val)
    for epoch in range(EPOCHS):
        for batch in train:
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            loop.backward(loss)
            optimizer.step()
        with torch.no_grad():
            val_loss = sum(loss_of(net, batch) * len(batch[0]) for batch in val) / 12
        loop.log_dict({"epoch": epoch, "val_loss": val_loss, "val_acc": 0.5}, step=7 * (epoch + 1))
    assert_same_weights(expected[0], bare)

    with Path("logs/parts/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "step", "val_loss", "val_acc"]
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "7"), ("1", "14"), ("2", "21")]
    assert float(rows[-1]["val_loss"]) == pytest.approx(expected[1][-1][1])

    loop.save("mine.ckpt", {"net": net, "optimizer": optimizer, "epoch": 2, "note": "mine"})
    # loop.save must leave no temporary file.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "mine.ckpt"]
    fresh = make_net()
    other = make_loop("other")
    fresh_net, fresh_optimizer = other.setup(fresh, make_optimizer(fresh))
    rest = other.load("mine.ckpt", {"net": fresh_net, "optimizer": fresh_optimizer})
    assert rest == {"epoch": 2, "note": "mine"}
    assert_same_weights(bare, fresh)
    first, second = optimizer.state_dict()["state"], fresh_optimizer.state_dict()["state"]
    assert all(torch.equal(first[i]["momentum_buffer"], second[i]["momentum_buffer"]) for i in first)


def test_log_dict_without_a_step_number_adds_no_step_column():
    loop = make_loop("rows")
    loop.log_dict({"epoch": 0, "loss": torch.tensor(0.5)})
    assert Path("logs/rows/version_0/metrics.csv").read_text().splitlines() == ["epoch,loss", "0,0.5"]
    loop.log_dict({"loss": 0.25}, step=3)
    assert Path("logs/rows/version_0/steps.csv").read_text().splitlines() == ["step,loss", "3,0.25"]


def test_setup_applies_the_precision_option_and_wraps_a_dataloader():
    loop = make_loop("bf16", precision="bf16-mixed", logger=False)
    bare, seen = make_net(), []
    loader = torch.utils.data.DataLoader(make_data(8), batch_size=4)
    net, _, batches = loop.setup(bare, make_optimizer(bare), loader)
    bare[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    net(torch.zeros(2, 8))
    assert seen == [torch.bfloat16]
    assert [len(x) for x, _ in batches] == [4, 4]


@pytest.mark.gpu
def test_setup_moves_the_batches_of_a_tensor_loader_to_the_gpu():
    loop = FabricLoop(accelerator="gpu", devices=1, logger=False)
    net = make_net()
    _, _, batches = loop.setup(net, make_optimizer(net), make_loaders()[0])
    assert next(iter(batches))[0].device == loop.fabric.device


@pytest.mark.parametrize("with_idx", [False, True])
def test_fit_with_a_training_step_function_matches_a_hand_written_loop(expected, with_idx):
    seen = []

    def training_step(net, batch, batch_idx):
        seen.append(batch_idx)
        return loss_of(net, batch)

    torch.manual_seed(1)
    net = make_net()
    history = make_loop("functions").fit(
        net,
        *make_loaders(),
        optimizer=make_optimizer(net),
        training_step=training_step if with_idx else loss_of,
        validation_step=loss_and_acc,
    )
    assert_same_weights(expected[0], net)
    assert_history(history, expected[1])
    assert seen == (list(range(7)) * EPOCHS if with_idx else [])


class PlainObject:
    def __init__(self):
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        return {"loss": loss_of(self.net, batch), "batch_idx": "not a number: left out of the history"}

    def validation_step(self, batch, batch_idx):
        loss, acc = loss_and_acc(self.net, batch)
        return {"loss": loss, "acc": acc}

    def configure_optimizers(self):
        return make_optimizer(self.net)


class PlainModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch):
        return loss_of(self.net, batch)

    def validation_step(self, batch):
        return loss_and_acc(self.net, batch)

    def configure_optimizers(self):
        return make_optimizer(self)


@pytest.mark.parametrize("given", [{}, {"optimizer": make_optimizer}], ids=["configured", "given"])
@pytest.mark.parametrize("cls", [PlainObject, PlainModule])
def test_fit_with_a_training_step_method_matches_a_hand_written_loop(expected, cls, given):
    torch.manual_seed(1)
    model = cls()
    given = {name: make(model.net) for name, make in given.items()}
    history = make_loop("object").fit(model, *make_loaders(), **given)
    assert_same_weights(expected[0], model.net)
    assert_history(history, expected[1])


def test_checkpoint_path_still_returns_last_ckpt_after_validate_has_loaded_best_ckpt():
    model = PlainModule()
    train, val = make_loaders()
    loop = make_loop("known", monitor="val_loss")
    history = loop.fit(model, train, val)
    for _ in range(2):
        (results,) = loop.validate(model, val, load="best", verbose=False)
        assert results["val_loss"] == history["val_loss"].min()
    assert loop.checkpoint_path("last").samefile("checkpoints/known/version_0/last.ckpt")


def make_lightning(package):
    class LitModule(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            loss = loss_of(self.net, batch)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            loss, acc = loss_and_acc(self.net, batch)
            self.log_dict({"val_loss": loss, "val_acc": acc})

        def configure_optimizers(self):
            return make_optimizer(self)

    class LitData(package.LightningDataModule):
        def setup(self, stage):
            self.train, self.val = make_loaders()
            assert stage == "fit"
            assert self.trainer.max_epochs == EPOCHS

        def train_dataloader(self):
            return self.train

        def val_dataloader(self):
            return self.val

    class Epochs(package.Callback):
        def __init__(self):
            self.seen = []

        def on_train_epoch_end(self, trainer, module):
            self.seen.append((trainer.current_epoch, float(trainer.callback_metrics["val_loss"])))

    return LitModule, LitData, Epochs


@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("with_datamodule", [False, True])
def test_fit_with_a_lightning_module_matches_a_hand_written_loop(expected, package, with_datamodule):
    make_module, make_datamodule, make_callback = make_lightning(package)
    torch.manual_seed(1)
    module, callback = make_module(), make_callback()
    loop = make_loop("lightning", callbacks=[callback])
    history = loop.fit(module, datamodule=make_datamodule()) if with_datamodule else loop.fit(module, *make_loaders())
    assert_same_weights(expected[0], module.net)
    assert_history(history, expected[1])
    assert callback.seen == list(enumerate(history["val_loss"]))


def test_validate_uses_the_datamodule_given_to_fit():
    make_module, _, _ = make_lightning(pl)

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return make_loaders()[0]

        def val_dataloader(self):
            return make_loaders()[1]

    loop = make_loop("again", logger=False, enable_checkpointing=False)
    history = loop.fit(make_module(), datamodule=Data())
    (results,) = loop.validate(verbose=False)
    assert results["val_loss"] == history["val_loss"].iloc[-1]
