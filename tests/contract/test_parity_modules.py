"""Kinds of LightningModules under lightning.Trainer and FabricLoop: the same bits, the same hooks in the same order."""

import warnings

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torchmetrics
from modules import Classifier, assert_parity, make_data, make_loader, run_loop, run_trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


class Manual(Classifier):
    """Two optimizers in turn, with schedulers, toggled."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        x, y = batch
        self.toggle_optimizer(body)
        loss = nn.functional.cross_entropy(self.head(self(x)), y)
        body.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(body, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        body.step()
        self.untoggle_optimizer(body)
        loss = nn.functional.cross_entropy(self.head(self(x).detach()), y)
        head.zero_grad()
        self.manual_backward(loss)
        head.step()
        self.log("train_loss", loss, on_epoch=True)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self):
        body = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.Adam(self.head.parameters(), lr=0.01)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (body, head)]
        return [body, head], schedulers


class Overriding(Classifier):
    """Its own optimizer_step, zero_grad, backward, clipping and lr_scheduler_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss):
        (loss * 2).backward()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        scheduler.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Closure(Classifier):
    """LBFGS evaluates its closure several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class WithMetrics(Classifier):
    """torchmetrics objects, one per step and epoch, and a collection."""

    def __init__(self):
        super().__init__()
        words = {"task": "multiclass", "num_classes": 3}
        self.train_accuracy = torchmetrics.Accuracy(**words)
        self.val_metrics = torchmetrics.MetricCollection(
            [torchmetrics.Accuracy(**words), torchmetrics.F1Score(**words, average="macro")], prefix="val_"
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.train_accuracy(logits, y)
        self.log("acc", self.train_accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self(x), y)
        self.log_dict(self.val_metrics)


class Everywhere(Classifier):
    """Logs in every hook that allows it, with every reduction."""

    def on_train_start(self):
        self.log("at_start", 1.0)

    def on_train_epoch_start(self):
        self.log("epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        self.log("batch_start", float(batch_idx), on_epoch=True, reduce_fx="max")

    def on_before_zero_grad(self, optimizer):
        self.log("zero", float(self.global_step), on_step=False, on_epoch=True, reduce_fx="sum")

    def on_after_backward(self):
        self.log("grad", self.net[0].weight.grad.abs().sum(), on_epoch=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("out", outputs["loss"], on_step=True, on_epoch=True, reduce_fx="min", batch_size=2)

    def on_validation_epoch_end(self):
        self.log("val_end", float(self.current_epoch) + 0.5)

    def on_train_epoch_end(self):
        self.log("epoch_end", float(self.global_step))

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_batch_end", float(batch_idx), on_step=True, on_epoch=True)


class Skipping(Classifier):
    """Some steps return None; the rest of an epoch is skipped."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 2 else {"loss": loss, "extra": batch[0].mean()}

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 1 and batch_idx == 6 else None


class Several(Classifier):
    """Two validation loaders; a dict of training loaders."""

    def training_step(self, batch, batch_idx):
        first = super().training_step(batch["a"], batch_idx)
        return first + nn.functional.cross_entropy(self(batch["b"][0]), batch["b"][1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)


class Stepped(Classifier):
    """Asks for the number of steps when it makes its scheduler."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class NoIdx(Classifier):
    def training_step(self, batch):
        return super().training_step(batch, 0)

    def validation_step(self, batch):
        return super().validation_step(batch, 0)


class Frozen(Classifier):
    """A part in evaluation mode stays there."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(8)
        self.bn.eval()

    def forward(self, x):
        return self.net(self.bn(x + 1))


MODULES = {
    c.__name__: c for c in (Manual, Overriding, Closure, WithMetrics, Everywhere, Skipping, Stepped, NoIdx, Frozen)
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("words", [{}, {"val_check_interval": 0.5}], ids=["plain", "val_twice"])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_module(name, words):
    assert_parity(MODULES[name], train, val, max_epochs=3, **words)


@pytest.mark.parametrize("name", ["Overriding", "Everywhere", "Skipping", "Stepped"])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_module_accumulating(name):
    assert_parity(MODULES[name], train, val, max_epochs=3, accumulate_grad_batches=3)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
def test_several_loaders():
    def loaders():
        return {"a": make_loader(40), "b": make_loader(24, batch_size=3, seed=9)}

    assert_parity(Several, loaders, lambda: [val(), make_loader(7, shuffle=False)], max_epochs=2)


class Stream(IterableDataset):
    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        data = make_data(20)
        order = torch.randperm(20) if self.shuffle else range(20)
        return iter([data[int(i)] for i in order])


@pytest.mark.parametrize("words", [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}])
def test_without_length(words):
    def stream(shuffle=True):
        return DataLoader(Stream(shuffle), batch_size=4)

    assert_parity(Classifier, stream, lambda: stream(False), max_epochs=2, **words)


def test_pytorch_lightning():
    """The other package's class has the same shape and gets the same bits."""

    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    pl.seed_everything(1, verbose=False)
    expected = Other()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, max_epochs=2,
        )  # fmt: skip
        trainer.fit(expected, train())
    loop, module = run_loop(Other, train, max_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))
    assert {k: v.item() for k, v in trainer.callback_metrics.items()} == {
        k: v.item() for k, v in loop.callback_metrics.items()
    }


# ---- every hook, in order, with its arguments

HOOKS = [
    "configure_model", "prepare_data", "setup", "configure_optimizers", "on_fit_start", "on_sanity_check_start",
    "on_validation_model_eval", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end", "on_validation_model_train", "on_sanity_check_end",
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "optimizer_zero_grad",
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step",
    "configure_gradient_clipping", "lr_scheduler_step", "on_train_batch_end", "on_validation_model_zero_grad",
    "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_save_checkpoint", "on_load_checkpoint",
    "on_exception", "train_dataloader", "val_dataloader",
]  # fmt: skip


def describe(value):
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return [describe(part) for part in value]
    if isinstance(value, dict):
        return {key: describe(part) for key, part in value.items()}
    if isinstance(value, int | float | str | type(None)):
        return str(value)
    if callable(value):
        return "callable"
    return "optimizer" if isinstance(value, torch.optim.Optimizer) else "object"


def spying(base, calls, who, skip=0):
    """A subclass that notes each hook with its arguments and then does what the base does."""

    def make(name):
        original = getattr(base, name)

        def hook(self, *args, **kwargs):
            calls.append((who, name, describe(args[skip:]), sorted(kwargs)))
            return original(self, *args, **kwargs)

        return hook

    return type(f"Spying{base.__name__}", (base,), {name: make(name) for name in HOOKS if hasattr(base, name)})


class Loaded(Classifier):
    def train_dataloader(self):
        return make_loader(12)

    def val_dataloader(self):
        return make_loader(8, shuffle=False)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    "words", [{}, {"accumulate_grad_batches": 2}, {"num_sanity_val_steps": 0, "gradient_clip_val": 1.0}]
)
def test_hooks_in_order(words):
    def record(run):
        calls = []
        module = spying(Loaded, calls, "module")
        callback = spying(pl.Callback, calls, "callback", skip=2)()
        run(module, lambda: None, None, max_epochs=2, callbacks=[callback], **words)
        return calls

    expected, found = record(run_trainer), record(run_loop)
    assert found == expected
