"""Test the dtypes in each step, and the gradient scaler."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.plugins import MixedPrecision as TrainerMixedPrecision
from modules import Classifier, assert_same_metrics, assert_same_weights, make_loader, quiet, run_loop, run_trainer
from parameters import sample
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop


def scaled(kind=MixedPrecision, **options):
    """Return the plugin that runs 16-mixed on the CPU."""
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**8, **options})
    return {"plugins": kind("16-mixed", device="cpu", scaler=scaler)}


# Map each precision to (dtype of a Linear layer's output, dtype of the batch, the weights and new tensors).
PRECISIONS = {
    "32-true": (torch.float32, torch.float32),
    "16-mixed": (torch.float16, torch.float32),
    "bf16-mixed": (torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "64-true": (torch.float64, torch.float64),
}


class Look(nn.Module):
    """A module that records the dtypes of the output, the input, the weights and a new tensor in each step."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(8, 3), set()

    def look(self, stage, batch):
        x, y = batch
        output = self.net(x)
        self.seen.add((stage, output.dtype, x.dtype, self.net.weight.dtype, torch.zeros(1).dtype))
        assert y.dtype == torch.int64
        return cross_entropy(output.float(), y)

    def training_step(self, batch, batch_idx):
        return self.look("training", batch)

    def validation_step(self, batch, batch_idx):
        return self.look("validation", batch)

    def test_step(self, batch, batch_idx):
        return self.look("test", batch)

    def predict_step(self, batch, batch_idx):
        return self.look("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitLook(Look, pl.LightningModule):
    pass


def training_step(model, batch):
    return model.look("training", batch)


@pytest.mark.parametrize(("level", "precision"), sample(3, ["functions", "module", "lightning_module"], PRECISIONS))
def test_each_step_runs_in_the_dtypes_that_the_precision_option_selects(level, precision):
    options = scaled() if precision == "16-mixed" else {"precision": precision}
    output, other = PRECISIONS[precision]
    model = LitLook() if level == "lightning_module" else Look()
    given = {"training_step": training_step} if level == "functions" else {}
    loop = FabricLoop(**quiet(max_epochs=1, **options))
    loop.fit(model, make_loader(8), make_loader(8), **given)
    loop.test(model, make_loader(8), verbose=False)
    loop.predict(model, make_loader(8))
    stages = ("training", "validation", "test", "predict")
    assert model.seen == {(stage, output, other, other, other) for stage in stages}
    assert loop.precision == precision
    assert torch.get_default_dtype() == torch.float32


class Overflows(Classifier):
    """A module with infinite gradients in two batches, so that the scaler skips the steps of these batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 * 1e30 if self.global_step in (3, 11) else loss


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "clip_norm", "clip_value"],
)
def test_a_run_with_a_gradient_scaler_gives_the_same_weights_as_with_trainer(options):
    scaler = {"growth_interval": 4}
    trainer, expected = run_trainer(
        Classifier, train, val, max_epochs=3, **options, **scaled(TrainerMixedPrecision, **scaler)
    )
    loop, module = run_loop(Classifier, train, val, max_epochs=3, **options, **scaled(**scaler))
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    assert loop.scaler.state_dict() == trainer.scaler.state_dict()
    # The scale must have grown at least once, so that the comparison covers its growth.
    assert loop.scaler.get_scale() > 2.0**8


def test_the_gradient_scaler_skips_the_same_steps_as_with_trainer():
    trainer, expected = run_trainer(Overflows, train, max_epochs=2, **scaled(TrainerMixedPrecision))
    loop, module = run_loop(Overflows, train, max_epochs=2, **scaled())
    assert_same_weights(expected, module)
    assert loop.scaler.state_dict() == trainer.scaler.state_dict()
    assert loop.scaler.get_scale() == 2.0**8 / 4
    assert all(parameter.isfinite().all() for parameter in module.parameters())


class Gradients(Classifier):
    """A module that records the norms of the gradients in two hooks."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.before_step, self.at_end = [], []

    def norm(self):
        return nn.utils.clip_grad_norm_(self.parameters(), float("inf")).item()

    def on_before_optimizer_step(self, optimizer):
        self.before_step.append(self.norm())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.at_end.append(self.norm())


def test_clipping_with_a_gradient_scaler_clips_unscaled_gradients():
    """A limit of 1 would clip all scaled gradients, because they are 256 times larger."""
    _, module = run_loop(Gradients, train, max_epochs=2, gradient_clip_val=1.0, **scaled())
    limited = [min(norm, 1.0) for norm in module.before_step]
    assert module.at_end == pytest.approx(limited, rel=1e-4)
    # The limit must clip the gradients of some steps, but not of all.
    assert {norm > 1.0 for norm in module.before_step} == {True, False}


def test_resume_restores_the_gradient_scaler(tmp_path):
    """The gradient scaler increases its scale in every seventh step, counted over both runs."""

    def fit(folder, max_epochs, resume=None):
        pl.seed_everything(1, verbose=False)
        options = {"enable_checkpointing": True, "default_root_dir": tmp_path / folder, "max_epochs": max_epochs}
        loop = FabricLoop(**quiet(**options, **scaled(growth_interval=7, init_scale=16.0)))
        module = Classifier()
        loop.fit(module, train(), val(), resume=resume)
        return loop, module

    whole, expected = fit("whole", 4)
    fit("parts", 2)
    loop, module = fit("parts", 4, resume="last")
    assert_same_weights(expected, module)
    assert loop.scaler.state_dict() == whole.scaler.state_dict()
    # In 40 steps, the scale doubles five times, once in every seventh step.
    assert loop.scaler.get_scale() == 16.0 * 2**5
