"""Nothing in a training step waits for the device, but where something is due to be read: rows, the bar, checkpoints, ends."""

import contextlib

import lightning.pytorch as pl
import pytest
import torch
from device import DEVICE, ON, Drawing, fused_adam, on_device, shuffled_on_device
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader, quiet, sgd
from runs import Plain, val_loader

from fabric_template import FabricLoop, MiniLoop

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


@contextlib.contextmanager
def refusing():
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Refusing(Callback):
    """From the begin of the first batch to the end of an epoch's last one nothing may wait, as far as it is asked for."""

    def __init__(self, first=0, last=10**9):
        self.first, self.last, self.batches = first, last, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.first <= trainer.global_step < self.last:
            torch.cuda.set_sync_debug_mode("error")
            self.batches += 1
        else:
            torch.cuda.set_sync_debug_mode("default")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_last_batch:  # the epoch's means are read now
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def waits_as_found():
    yield
    torch.cuda.set_sync_debug_mode("default")


def fit(module=None, train=make_loader, val=None, first=0, last=10**9, **words):
    """Train under watch; returns how many batches were watched."""
    refuses = Refusing(first, last)
    loop = FabricLoop(**{**quiet(), **ON, "max_epochs": 2, "callbacks": [refuses], **words})
    loop.fit(module or Drawing(), train(), val() if val else None)
    return refuses.batches


LOADERS = {
    "DataLoader": make_loader,
    "pinned": lambda: make_loader(pin_memory=True, num_workers=1, persistent_workers=True),
    "tensors": shuffled_on_device,
    "uneven": lambda: make_loader(39, batch_size=7),
}


def test_it_is_noticed():
    class Waits(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() < 1e9 else None

    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        fit(Waits())


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_plain_epoch(precision, name):
    assert fit(train=LOADERS[name], precision=precision) in (12, 20)


def test_the_scaler_of_16_mixed_with_a_fused_optimizer():
    """With another one torch's GradScaler itself reads in each step whether the gradients are finite, under Trainer, too."""
    assert fit(Drawing(fused_adam), on_device, precision="16-mixed") == 20
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        fit(Drawing(sgd), on_device, precision="16-mixed")


@pytest.mark.parametrize("words", [
    {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
], ids=str)  # fmt: skip
def test_the_ways_of_a_batch(words):
    assert fit(train=on_device, **words) == 20


def test_barebones():
    refuses = Refusing()
    loop = FabricLoop(**ON, max_epochs=2, barebones=True, callbacks=[refuses])
    loop.fit(Plain(), on_device())
    assert refuses.batches == 20


def test_with_everything_on(tmp_path):
    """Logged per step and per epoch, the bar, the CSV, checkpoints: nothing is read between two log points."""
    words = {
        "logger": None, "enable_checkpointing": None, "enable_progress_bar": True, "enable_model_summary": True,
        "default_root_dir": str(tmp_path), "monitor": "val_loss", "log_every_n_steps": 10,
    }  # fmt: skip
    watched = fit(train=on_device, val=val_loader, first=1, last=9, max_epochs=1, **words)
    assert watched == 8
    assert len(list(tmp_path.rglob("steps.csv"))) == len(list(tmp_path.rglob("best.ckpt"))) == 1


def test_what_plain_objects_return(tmp_path):
    """The history's sums stay on the device, and so does the look for a loss that is no number (every 32 steps)."""
    module = Plain()
    watched = fit(module, lambda: on_device(1), first=0, last=38, max_epochs=1, default_root_dir=str(tmp_path))
    assert watched == 38


def test_the_single_file():
    """MiniLoop: from the second batch to the one before the last."""

    class Watched(Drawing):
        def on_train_batch_start(self, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if 0 < batch_idx < 9 else "default")

    pl.seed_everything(1, verbose=False)
    MiniLoop(**ON, max_epochs=1).fit(Watched(), on_device())


def test_a_pass_over_tensors_waits_once():
    """For the order of the samples; not where they are taken as they lie."""
    torch.zeros(1, device=DEVICE)
    for loader, waits in ((on_device(), False), (shuffled_on_device(), True)):
        with refusing():
            if waits:
                with pytest.raises(RuntimeError, match="synchronizing"):
                    next(iter(loader))
            else:
                assert len(list(loader)) == 10
