"""Test that a training step does not wait for the GPU, except to log, to save, or at the end of an epoch."""

import pytest
import torch
from device import ON, Drawing, fused_adam, on_device, shuffled_on_device
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader, quiet, sgd
from runs import val_loader

from fabric_template import FabricLoop, MiniLoop

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


class Refusing(Callback):
    """A callback that turns each synchronization with the GPU into an error, except between epochs."""

    def __init__(self, first=0, last=10**9):
        self.first, self.last, self.batches = first, last, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        is_watched = self.first <= trainer.global_step < self.last
        torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
        self.batches += is_watched

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def default_debug_mode():
    yield
    torch.cuda.set_sync_debug_mode("default")


def fit(module=None, train=make_loader, val=None, first=0, last=10**9, **options):
    """Train, and return the number of batches in which synchronizations were errors."""
    refusing = Refusing(first, last)
    loop = FabricLoop(**{**quiet(), **ON, "max_epochs": 2, "callbacks": [refusing], **options})
    loop.fit(module or Drawing(), train(), val() if val else None)
    return refusing.batches


class Waits(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e9 else None


def test_the_cuda_sync_debug_mode_finds_a_synchronizing_operation():
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        fit(Waits())


LOADERS = {
    "DataLoader": make_loader,
    "pinned": lambda: make_loader(pin_memory=True, num_workers=1, persistent_workers=True),
    "TensorLoader": shuffled_on_device,
    "last batch shorter": lambda: make_loader(39, batch_size=7),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_with_each_kind_of_loader_does_not_wait_for_the_gpu(precision, name):
    assert fit(train=LOADERS[name], precision=precision) in (12, 20)


def test_precision_16_mixed_with_a_fused_optimizer_does_not_wait_for_the_gpu():
    """With other optimizers, GradScaler reads from the GPU in each step whether the gradients are finite."""
    assert fit(Drawing(fused_adam), on_device, precision="16-mixed") == 20
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        fit(Drawing(sgd), on_device, precision="16-mixed")


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}], ids=str)
def test_accumulation_and_clipping_do_not_wait_for_the_gpu(options):
    assert fit(train=on_device, **options) == 20


def test_steps_without_logging_do_not_wait_for_the_gpu(tmp_path):
    """Synchronizations are errors in the eight steps between two logged steps."""
    options = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": True, "enable_model_summary": True}
    options |= {"default_root_dir": str(tmp_path), "monitor": "val_loss", "log_every_n_steps": 10}
    assert fit(train=on_device, val=val_loader, first=1, last=9, max_epochs=1, **options) == 8
    assert len(list(tmp_path.rglob("steps.csv"))) == len(list(tmp_path.rglob("best.ckpt"))) == 1


def test_mini_loop_does_not_wait_for_the_gpu_within_an_epoch():
    """Synchronizations are errors from the second to the second-to-last batch."""

    class Watched(Drawing):
        def on_train_batch_start(self, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if 0 < batch_idx < 9 else "default")

    MiniLoop(**ON, max_epochs=1).fit(Watched(), on_device())
