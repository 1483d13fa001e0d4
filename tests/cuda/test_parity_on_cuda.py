"""Test that a run on a GPU gives the same weights, metrics and random numbers as Trainer."""

import pytest
import torch
from device import DEVICE, ON, PRECISIONS, Drawing, fused_adam, on_device, val_on_device
from modules import Classifier, Gan, assert_parity, by_epoch, by_step, make_loader, run_loop, run_trainer, sgd
from runs import val_loader
from torchmetrics import Accuracy

pytestmark = pytest.mark.gpu

OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.05},
    "mid-epoch validation": {"val_check_interval": 3, "limit_train_batches": 7},
}


def pair(make_module, train, val=val_loader, **options):
    return assert_parity(make_module, train, val, **{**ON, "max_epochs": 2, **options})


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fabric_loop_and_trainer_reach_equal_weights_with_the_same_arguments(precision, name):
    pair(Drawing, make_loader, precision=precision, **OPTIONS[name])


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_precisions_such_as_bf16_true_give_the_same_weights_as_with_trainer(precision):
    pair(Drawing, make_loader, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizers", [sgd, by_epoch, fused_adam])
def test_each_optimizer_gives_the_same_weights_as_with_trainer(optimizers, precision):
    pair(lambda: Drawing(optimizers), make_loader, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tensor_loader_on_the_gpu_gives_the_same_weights_as_with_trainer(precision):
    pair(Drawing, on_device, val_on_device, precision=precision)


def test_fabric_loop_and_trainer_end_with_the_same_weights_if_the_loader_pins_memory():
    pair(Drawing, lambda: make_loader(num_workers=2, pin_memory=True), max_epochs=1)


class GanOnDevice(Gan):
    """A GAN that draws its noise on the GPU."""

    def training_step(self, batch, batch_idx):
        on_cpu, torch.randn = torch.randn, lambda *size: on_cpu(*size, device=self.device)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            torch.randn = on_cpu


# In 16-mixed, the first optimizer steps overflow and are skipped, so torch warns that the scheduler steps first.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_optimization_gives_the_same_weights_as_with_trainer(precision):
    pair(GanOnDevice, make_loader, None, precision=precision)


class Numbers(Classifier):
    """A module that logs a metric, and also numbers and tensors that are not on the GPU."""

    def __init__(self):
        super().__init__(by_step)
        self.accuracy = Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("number", batch_idx / 3, on_step=True, on_epoch=True)
        self.log("whole", torch.tensor(batch_idx), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("half", loss.half(), prog_bar=True, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:You called `self.log.'whole'")
def test_logged_values_are_the_same_as_with_trainer():
    pair(Numbers, lambda: make_loader(39, batch_size=7), max_epochs=3)


def test_a_run_leaves_the_random_generators_in_the_same_state_as_trainer():
    drawn = []
    for run in (run_trainer, run_loop):
        run(Drawing, make_loader, val_loader, **ON, max_epochs=2)
        drawn.append((torch.rand(3, device=DEVICE).tolist(), torch.rand(3).tolist()))
    assert drawn[0] == drawn[1]
